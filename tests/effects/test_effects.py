"""Side effects of forward occur in each call as in eager PyTorch, or are refused by name."""

from __future__ import annotations

import collections
import contextvars
import copy
import inspect
import itertools
import random
import sys
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from tests.support.sweeps import sample_cases
from torch2ort import io_schema

nn = torch.nn
BODIES: dict[str, Any] = {}
REFUSED: dict[str, Any] = {}
X = torch.arange(12.0).reshape(3, 4) / 7


class Model(nn.Module):
    def __init__(self, body: Any, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.body(self, torch.tanh(self.layer(x)))


def body(exports: int = 1, **attributes: Any) -> Any:
    """Register a forward, its model's attributes, and the number of graphs that four equal calls need."""

    def register(function: Any) -> Any:
        BODIES[function.__name__] = (function, attributes, exports)
        return function

    return register


def made(name: str) -> nn.Module:
    """The model of a body, with the same initial weights each time."""
    function, attributes, _ = BODIES[name]
    torch.manual_seed(0)
    return Model(function, **copy.deepcopy(attributes))


# --- effects that a call leaves


@body()
def sets_an_attribute(m, h):
    m.aux = h.square().mean()
    return h * 2


@body()
def sets_a_detached_attribute(m, h):
    m.seen = h.detach()
    return h * 2


@body(log=[])
def appends_to_a_list(m, h):
    m.log.append(h.sum())
    return h * 2


@body(log=[])
def extends_a_list(m, h):
    m.log.extend([h.sum(), h.std()])
    return h * 2


@body(log=[])
def appends_numbers_too(m, h):
    m.log.append((h.mean(), h.shape[0], "mean"))
    return h * 2


@body(log=[torch.zeros(())])
def clears_a_list(m, h):
    m.log.clear()
    m.log.append(h.mean())
    return h * 2


@body(log=[torch.zeros(())])
def replaces_what_is_in_a_list(m, h):
    m.log[:] = [h.mean(), h.std()]
    return h * 2


@body()
def makes_a_list(m, h):
    m.losses = []
    m.losses.append(h.mean())
    m.losses += [h.std()]
    return h * 2 + m.losses[0]


@body(recent=collections.deque(maxlen=2))
def appends_to_a_deque(m, h):
    m.recent.append(h.detach())
    return h * 2


@body(stats={"of": "another"})
def sets_a_key(m, h):
    m.stats["loss"] = h.mean()
    m.stats["size"] = h.shape[0]
    return h * 2


@body(stats={})
def updates_a_dict(m, h):
    m.stats.update(mean=h.mean(), parts={"std": h.std(), "all": [h, None]})
    return h * 2


@body(exports=2, stats=collections.defaultdict(list))
def fills_a_defaultdict(m, h):
    m.stats["loss"].append(h.mean())
    return h * 2


@body(stats={"old": 1})
def makes_a_dict(m, h):
    m.stats = {"loss": h.mean()}
    return h * 2


@body(held=types.SimpleNamespace(stats={}))
def writes_to_what_an_object_holds(m, h):
    m.held.stats["loss"] = h.mean()
    return h * 2


class Box:
    loss: Any = None


@body(box=Box())
def sets_an_attribute_of_an_object(m, h):
    m.box.loss = h.mean()
    return h * 2


@body()
def sets_plain_values(m, h):
    m.size, m.called, m.name, m.shape = h.shape[0], True, "last", h.shape
    return h * 2


@body(exports=2, h=None)
def carries_a_hidden_state(m, h):
    if m.h is not None:
        h = h + m.h
    m.h = h.detach()
    return h


@body(exports=2, ready=False)
def initialises_itself_from_its_data(m, h):
    if not m.ready:
        m.scale, m.ready = h.detach().abs().max(), True
    return h / m.scale


@body(exports=2, tables={})
def keeps_a_table(m, h):
    size = h.shape[1]
    if size not in m.tables:
        m.tables[size] = torch.arange(float(size))
    return h * m.tables[size]


@body(exports=2)
def makes_a_buffer(m, h):
    if not hasattr(m, "mask"):
        m.register_buffer("mask", torch.ones(4))
    return h * m.mask


@body(gone=1)
def deletes_an_attribute_that_it_makes(m, h):
    m.between = h.mean()
    h = h * m.between
    del m.between
    return h


@body(exports=2, names=set())
def adds_to_a_set(m, h):
    m.names.add("a name")
    return h * 2


@body()
def shares_a_list(m, h):
    m.first = m.second = [h.mean()]
    return h * 2


@body()
def leaves_its_input_and_its_weight(m, h):
    m.seen = (m.layer.weight.detach(), h)
    return h


def state(model: nn.Module) -> dict[str, Any]:
    """The attributes that the body set on its model."""
    own = {"training", "body", "layer"}
    found = {
        name: vars(value) if isinstance(value, (Box, types.SimpleNamespace)) else value
        for name, value in vars(model).items()
        if name not in own and not name.startswith("_")
    }
    names = found.pop("names", None)
    return {**found, "buffers": dict(model.named_buffers()), "names": names and sorted(names)}


def loss_of(output: torch.Tensor, left: list[torch.Tensor]) -> torch.Tensor:
    """A loss of the output and of all tensors that this call left."""
    return output.sum() + sum(3 * t.square().sum() for t in left if t.requires_grad)


def step(model: nn.Module, number: int, left_before: list[torch.Tensor]) -> dict[str, Any]:
    """The results of a training step that are compared."""
    torch.manual_seed(number)
    model.zero_grad()
    output = model(torch.randn(3, 4))
    tensors, schema = io_schema.flatten(state(model))
    new = [t for t in tensors if all(t is not other for other in left_before)]
    left_before.extend(tensors)
    loss_of(output, new).backward()
    return {
        "output": output.detach(),
        "left": [t.detach() for t in tensors],
        "structure": schema.to_json(),
        "requires_grad": [t.requires_grad for t in tensors],
        "gradients": [p.grad for p in model.parameters()],
    }


@pytest.mark.parametrize("name", sample_cases(BODIES, 2))
def test_what_forward_leaves_is_eagers(name: str):
    eager, wrapped = made(name), torch2ort.ORTModule(made(name))
    known: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    graphs = []
    for number in range(4):
        expected, actual = (step(m, number, k) for m, k in zip((eager, wrapped), known, strict=True))
        for part in ("output", "left", "gradients"):
            assert_same(actual[part], expected[part], f"call {number}: {part}")
        assert actual["structure"] == expected["structure"]
        assert actual["requires_grad"] == expected["requires_grad"]
        if wrapped.exported not in graphs:
            graphs.append(wrapped.exported)
    assert len(graphs) == BODIES[name][2]


@pytest.mark.parametrize("name", ["appends_to_a_list", "sets_a_key", "appends_to_a_deque", "clears_a_list"])
def test_a_container_stays_the_same_object(name: str):
    model = made(name)
    (held,) = (
        v for v in vars(model).values() if isinstance(v, (list, collections.deque)) or v == {"of": "another"}
    )
    wrapped = torch2ort.ORTModule(model)
    for _ in range(3):
        wrapped(X)
    assert any(value is held for value in vars(model).values())
    assert (
        len(held)
        == {"appends_to_a_list": 3, "sets_a_key": 3, "appends_to_a_deque": 2, "clears_a_list": 1}[name]
    )


def test_a_number_among_the_arguments_is_left_as_it_is():
    model = nn.Linear(4, 4)

    def forward(x, scale):
        model.scale = scale
        return nn.functional.linear(x, model.weight) * scale

    model.forward = forward
    wrapped = torch2ort.ORTModule(model)
    for scale in (1.0, 2.0, 3.0):
        wrapped(X, scale)
        assert type(model.scale) is float
        assert model.scale == scale


def test_one_list_in_two_places_is_one_list():
    model = made("shares_a_list")
    torch2ort.ORTModule(model)(X)
    assert model.first is model.second


def test_an_argument_that_is_left_is_that_very_tensor():
    model = Model(None)

    def forward(x):
        model.seen = [x, model.layer.weight]
        return model.layer(x)

    model.forward = forward
    torch2ort.ORTModule(model)(X)
    assert model.seen[0] is X
    assert model.seen[1] is model.layer.weight


def test_an_output_that_is_left_is_that_very_tensor():
    def leaves(m, h):
        m.last = h
        return h

    model = Model(leaves)
    assert torch2ort.ORTModule(model)(X) is model.last


def test_a_list_of_the_programs_gets_what_hooks_collect():
    results = []
    for wrap in (lambda m: m, torch2ort.ORTModule):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), []
        model[1].register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output.square().mean())
        )
        called = wrap(model)
        for _ in range(3):
            (called(X).sum() + seen[-1]).backward()
        results.append([torch.stack(seen), model[0].weight.grad])
    assert_same(*results, "collected")


def test_a_hook_of_all_modules_collects():
    results = []
    for wrap in (lambda m: m, torch2ort.ORTModule):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
        called = wrap(model)

        def collect(module, args, output, seen=seen, parts=tuple(model)):
            if module in parts:
                seen.append(output.sum())

        handle = nn.modules.module.register_module_forward_hook(collect)
        try:
            for _ in range(2):
                called(X)
        finally:
            handle.remove()
        results.append(torch.stack(seen))
    assert_same(*results, "collected")


def test_hooks_that_change_the_output_are_part_of_the_graph():
    results = []
    for wrap in (lambda m: m, torch2ort.ORTModule):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model[0].register_forward_hook(lambda module, args, output: output * 3)
        results.append(wrap(model)(X))
    assert_same(*results, "output")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.aux, self.load = nn.Linear(4, 3), None, {}

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        self.aux = (scores.mean(0) ** 2).sum()
        self.load["mean"] = scores.mean(0).detach()
        return x * scores.sum(-1, keepdim=True)


def test_auxiliary_losses_of_submodules_train():
    results = []
    for wrap in (lambda m: m, torch2ort.ORTModule):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Tanh(), Experts())
        called = wrap(model)
        optimizer = torch.optim.SGD(called.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = called(X).square().mean()
            (loss + 5 * sum(m.aux for m in model if isinstance(m, Experts))).backward()
            optimizer.step()
        results.append(
            [model[1].router.weight, model[3].aux, model[3].load["mean"], model[1].router.weight.grad]
        )
    assert_same(*results, "trained")


def test_calls_without_gradients_leave_what_needs_none():
    model = made("sets_an_attribute")
    wrapped = torch2ort.ORTModule(model)
    with torch.no_grad():
        wrapped(X)
    assert not model.aux.requires_grad
    without = model.aux
    wrapped(X)
    assert model.aux.requires_grad
    assert_same(model.aux.detach(), without, "aux")


def test_each_graph_leaves_its_own():
    def leaves(m, h):
        if m.training:
            m.aux = h.mean()
        else:
            m.seen = h.detach()
        return h * 2

    eager, model = Model(leaves), Model(leaves)
    model.load_state_dict(eager.state_dict())
    wrapped = torch2ort.ORTModule(model)
    for training, size in itertools.product((True, False), (3, 2, 3, 5)):
        for called in (eager, wrapped):
            called.train(training)
            called(X.repeat(2, 1)[:size])
        names = {"aux", "seen"}
        assert vars(model).keys() & names == vars(eager).keys() & names
        for name in vars(eager).keys() & names:
            assert_same(getattr(model, name), getattr(eager, name), name)


def test_a_call_that_fails_leaves_nothing():
    class Fails(torch.autograd.Function):
        wanted = False

        @staticmethod
        def forward(ctx, x):
            if Fails.wanted:
                raise ValueError("not today")
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def leaves(m, h):
        m.log.append(h.mean())
        return Fails.apply(h)

    model = Model(leaves, log=[])
    wrapped = torch2ort.ORTModule(model)
    wrapped(X)
    Fails.wanted = True
    with pytest.raises(ValueError, match=r"^not today$"):
        wrapped(X)
    assert len(model.log) == 1


def test_verify_compares_what_is_left(monkeypatch):
    seen: list[torch.Tensor] = []

    def leaves(m, h):
        m.aux = h.square().mean()
        seen.append(h.mean())
        return h * 2

    model = Model(leaves)
    wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(verify=True))
    (wrapped(X).sum() + model.aux).backward()
    assert len(seen) == 1


def test_a_graph_that_leaves_something_is_not_cached(tmp_path):
    for _ in range(2):
        model = made("appends_to_a_list")
        wrapped = torch2ort.ORTModule(model, options=torch2ort.Options(cache_dir=str(tmp_path)))
        wrapped(X)
        assert len(model.log) == 1
        assert wrapped.exported.cache.bypass_reason == "forward changes Model.log, an object of this process."


def test_what_is_left_is_no_output_of_the_exported_model(tmp_path):
    model = made("sets_an_attribute")
    wrapped = torch2ort.ORTModule(model)
    expected = wrapped(X)
    wrapped.exported.save(tmp_path / "model.onnx")
    loaded = torch2ort.load(tmp_path / "model.onnx")
    assert len(wrapped.exported.proto.graph.output) == 1
    assert_same(loaded(X), expected.detach(), "output")
    assert_same(wrapped.exported(X), expected.detach(), "output")


def test_nothing_of_a_step_lives_on_in_the_guards():
    model = made("sets_an_attribute")
    wrapped = torch2ort.ORTModule(model)
    wrapped(X)
    wrapped(X)
    first = weakref.ref(model.aux)
    wrapped(X)
    assert first() is None


# --- effects that are refused


def refused(remedy: str, at: int = 1, **attributes: Any) -> Any:
    """Register a forward that is refused in the line ``at`` behind its first, and the end of the message."""

    def register(function: Any) -> Any:
        REFUSED[function.__name__] = (function, attributes, at, remedy)
        return function

    return register


HOLDS = (
    "and a graph holds what one call found. Make it a buffer, a tensor that forward writes to, or change it "
    "outside of forward"
)
DRAWS = (
    "and a graph would repeat the numbers of its export. Draw with torch, as torch.rand(()), or pass the "
    "number as an argument"
)
TAKES = (
    "and a graph would repeat what its export got. Draw with torch, as torch.rand(()), or pass the number as "
    "an argument"
)
GIVES = (
    "and a graph returns only tensors. Put tensors there, or lists, tuples and dicts of them, or return it"
)
SEEDS = "which a graph cannot do. Seed before the call, and leave torch's random state alone in forward"
BEFORE = "which a graph cannot do. Make modules, parameters and hooks before the call"
BACKWARD = (
    "runs a backward, which a graph cannot do inside of forward. Put that part of the model into a "
    "torch.autograd.Function, or run it behind the call"
)
COUNT = 0
LAST: Any = None
CONTEXT: Any = contextvars.ContextVar("context", default=None)


class Counted:
    count = 0


@refused(f"changes Model.n with each call, from 1 to 2, {HOLDS}", n=0)
def counts(m, h):
    m.n += 1
    return h


@refused(f"changes Model.n with each call, from 1.5 to 2.25, {HOLDS}", 2, n=1.0)
def scales_by_a_number_that_grows(m, h):
    h = h * m.n
    m.n = m.n * 1.5
    return h


@refused(f"changes Model.stats['calls'] with each call, from 1 to 2, {HOLDS}", stats={"calls": 0})
def counts_in_a_dict(m, h):
    m.stats["calls"] += 1
    return h


@refused(f"changes Model.odd with each call, from True to False, {HOLDS}", odd=False)
def turns_a_switch_over(m, h):
    m.odd = not m.odd
    return h


@refused(f"changes the global COUNT with each call, from 1 to 2, {HOLDS}", 2)
def counts_in_a_global(m, h):
    global COUNT
    COUNT += 1
    return h


@refused(f"changes the global LAST with each call, {HOLDS}", 2)
def puts_a_tensor_into_a_global(m, h):
    global LAST
    LAST = h
    return h


@refused(f"changes Counted.count with each call, from 1 to 2, {HOLDS}")
def counts_in_a_class(m, h):
    Counted.count += 1
    return h


@refused(f"changes Model.log with each call, {HOLDS}", log=[])
def reads_the_list_that_it_fills(m, h):
    m.log.append(h.detach())
    return h + len(m.log)


@refused(f"changes Model.window with each call, {HOLDS}", window=collections.deque(maxlen=3))
def averages_over_a_window(m, h):
    m.window.append(h.detach())
    return h + torch.stack(list(m.window)).mean(0)


@refused(f"changes Model.past with each call, {HOLDS}", past=None)
def collects_in_one_tensor(m, h):
    m.past = h.detach() if m.past is None else torch.cat([m.past, h.detach()])
    return h + m.past.mean()


@refused(f"changes Model.state['h'] with each call, {HOLDS}", state={"h": torch.zeros(3, 4)})
def carries_a_state_in_a_dict(m, h):
    m.state["h"] = h.detach() + m.state["h"]
    return m.state["h"] * h


@refused(f"draws from Python's random generator, {DRAWS}")
def draws_from_python(m, h):
    return h * 2 if random.random() < 0.5 else h


@refused(f"draws from numpy's random generator, {DRAWS}")
def draws_from_numpy(m, h):
    return h * float(np.random.rand())


@refused(f"draws from Model.rng, a Random, {TAKES}", rng=random.Random(0))
def draws_from_a_generator_of_pythons(m, h):
    return h * m.rng.random()


@refused(f"draws from Model.rng, a Generator, {TAKES}", rng=np.random.default_rng(0))
def draws_from_a_generator_of_numpys(m, h):
    return h * m.rng.random()


@refused(f"draws from Model.steps, a count, {TAKES}", steps=itertools.count(1))
def takes_the_next_of_an_iterator(m, h):
    return h * next(m.steps)


if sys.version_info < (3, 14):  # from 3.14 on a cycle does not expose its position

    @refused(f"draws from Model.steps, a cycle, {TAKES}", steps=itertools.cycle([1, 2, 3]))
    def takes_the_next_of_a_cycle(m, h):
        return h * next(m.steps)


@refused("sets the global CONTEXT, a ContextVar, which a graph cannot do. Set it before the call")
def sets_a_context_variable(m, h):
    CONTEXT.set(1)
    return h


@refused(f"sets torch's random state, {SEEDS}")
def seeds(m, h):
    torch.manual_seed(0)
    return h + torch.rand(4)


@refused(f"sets torch's random state, {SEEDS}")
def forks_the_generator(m, h):
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(4)
    return h + noise


@refused("draws from a generator of its own, and a graph draws from torch's. Omit `generator`", 2)
def draws_from_a_generator_of_torchs(m, h):
    generator = torch.Generator()
    return h + torch.rand(4, generator=generator)


@refused(
    "packs what autograd saves (saved_tensors_hooks), which a graph cannot do. Use "
    "torch.utils.checkpoint, or have a torch.autograd.Function pack what it saves"
)
def packs_what_is_saved(m, h):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return torch.sigmoid(h)


@refused(BACKWARD)
def runs_a_backward(m, h):
    h.sum().backward()
    return h


@refused(BACKWARD)
def asks_for_a_gradient(m, h):
    (gradient,) = torch.autograd.grad(h.sum(), m.layer.weight)
    return h + gradient.sum()


@refused("switches the mode of Model, which a graph cannot do. Call train() or eval() before the call")
def switches_the_mode(m, h):
    m.eval()
    return h


@refused(
    "switches the requires_grad of Model.layer.weight, which a graph cannot do. Switch it before the call"
)
def freezes_a_weight(m, h):
    m.layer.weight.requires_grad_(False)
    return h


@refused(
    "switches a setting of torch (default dtype, deterministic algorithms), which a graph cannot do. Switch "
    "it before the call"
)
def asks_for_determinism(m, h):
    torch.use_deterministic_algorithms(True)
    return h


@refused(
    "switches torch's default dtype, which a graph cannot do. Switch it before the call, or name the dtype"
)
def switches_the_default_dtype(m, h):
    torch.set_default_dtype(torch.float64)
    return h


@refused(f"changes Model._modules, {BEFORE}")
def makes_a_module(m, h):
    m.more = nn.Linear(2, 2)
    return h


@refused(f"changes Model._parameters, {BEFORE}")
def makes_a_parameter(m, h):
    m.more = nn.Parameter(torch.ones(2))
    return h


@refused(f"changes Model.layer._forward_hooks, {BEFORE}")
def registers_a_hook(m, h):
    m.layer.register_forward_hook(lambda *args: None)
    return h


@refused(f"puts a function into Model.later, {GIVES}")
def leaves_a_function_over_a_tensor(m, h):
    m.later = lambda: h.sum()
    return h


@refused(f"puts a Box into Model.box, {GIVES}")
def leaves_an_object(m, h):
    m.box = Box()
    return h


@refused(
    "writes to Model.counts, a ndarray, and a graph writes to tensors alone. Make it a buffer",
    counts=np.zeros(2),
)
def writes_to_an_array(m, h):
    m.counts[0] += 1
    return h


@pytest.fixture(autouse=True)
def _globals_as_before():
    global COUNT, LAST
    yield
    COUNT, LAST, Counted.count = 0, None, 0


@pytest.mark.parametrize("name", sample_cases(REFUSED, 2))
def test_what_a_graph_cannot_leave_is_refused(name: str):
    function, attributes, at, remedy = REFUSED[name]
    lines, first = inspect.getsourcelines(function)
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("def "))
    where = f"{__file__}:{first + start + at} in {name} ({lines[start + at].strip()})"
    # Iterators cannot be copied on newer Pythons.
    own = {name: value if name == "steps" else copy.deepcopy(value) for name, value in attributes.items()}
    # Iterators are refused by the guards of an ORTModule.
    run = torch2ort.export if "steps" in attributes else lambda model, x: torch2ort.ORTModule(model)(x)
    with pytest.raises(torch2ort.ExportError) as caught:
        run(Model(function, **own), X)
    assert str(caught.value) == f"Model: {where} {remedy}"


@pytest.mark.parametrize(
    "name", ["counts", "draws_from_python", "counts_in_a_global", "reads_the_list_that_it_fills"]
)
def test_a_refusal_leaves_all_as_it_was(name: str):
    function, attributes, _, _ = REFUSED[name]
    model = Model(function, **copy.deepcopy(attributes))
    before = state(model), random.getstate(), torch.get_rng_state()
    with pytest.raises(torch2ort.ExportError):
        torch2ort.ORTModule(model)(X)
    assert state(model) == before[0]
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert COUNT == 0


def test_the_clock_is_refused():
    def stamps(m, h):
        m.at = time.perf_counter()
        return h

    with pytest.raises(
        torch2ort.ExportError, match=r" changes Model\.at with each call, from [\d.]+ to [\d.]+, "
    ):
        torch2ort.ORTModule(Model(stamps))(X)


@pytest.mark.parametrize("write", [lambda b, h: b.copy_(h.sum(0)), lambda b, h: b[1:].add_(h.sum())])
def test_a_gradient_that_is_written_into_a_buffer_is_refused(write):
    def writes(m, h):
        write(m.seen, h)
        return h

    model = Model(writes, seen=nn.Buffer(torch.zeros(4)))
    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(model)(X)
    assert str(caught.value) == (
        "Model: forward writes a value that requires a gradient into Model.seen, which a graph does not "
        "carry from call to call. Write its detach()"
    )
    assert not model.seen.requires_grad


def test_an_attribute_of_a_weight_is_refused():
    def leaves(m, h):
        m.layer.weight.note = h
        return h

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Model(leaves))(X)
    assert str(caught.value) == (
        "Model: forward sets an attribute of the tensor Model.layer.weight, which a graph cannot do. Keep it "
        "in an attribute of the module"
    )


def test_a_write_to_a_tensor_that_is_no_buffer_is_refused():
    def writes(m, h):
        m.sums.add_(1)
        return h

    with pytest.raises(torch2ort.ExportError) as caught:
        torch2ort.ORTModule(Model(writes, sums=torch.zeros(2)))(X)
    assert str(caught.value) == (
        "Model: forward writes to the tensor 'sums', which is no buffer, so a graph would not. Make it "
        "one with register_buffer"
    )


@pytest.mark.parametrize(
    "run", [lambda model: torch2ort.ORTModule(model)(X), lambda model: torch2ort.export(model, X)]
)
def test_a_write_of_a_module_in_a_list_is_refused(run):
    """A batch normalization in training mode counts in a buffer, which is not one of the model's buffers."""

    def normalizes(m, h):
        return m.norms[0](h)

    model = Model(normalizes, norms=[nn.BatchNorm1d(4).requires_grad_(False)])
    with pytest.raises(torch2ort.ExportError) as caught:
        run(model)
    assert str(caught.value) == (
        "Model: forward writes to a tensor that is no attribute of a module of the model, so a graph "
        "would not. Make it a buffer with register_buffer; put a module that is in a list or a dict into "
        "torch.nn.ModuleList or ModuleDict"
    )


def test_tensors_saved_on_the_host_are_the_same_tensors():
    def saves(m, h):
        with torch.autograd.graph.save_on_cpu():
            return torch.sigmoid(h)

    results = []
    for wrap in (lambda m: m, torch2ort.ORTModule):
        torch.manual_seed(0)
        model = Model(saves)
        wrap(model)(X).sum().backward()
        results.append(model.layer.weight.grad)
    assert_same(*results, "gradient")


# --- export


def test_an_export_says_what_its_calls_do_not_leave():
    model = made("appends_to_a_list")
    with pytest.warns(torch2ort.Torch2OrtWarning) as caught:
        exported = torch2ort.export(model, X)
    assert [str(w.message) for w in caught] == [
        "Model: forward changes Model.log, and calls of the exported model do not. Return the new value "
        "from forward instead"
    ]
    assert model.log == []
    assert_same(exported(X), model(X).detach(), "output")


def test_an_export_refuses_random_numbers_of_pythons():
    with pytest.raises(
        torch2ort.ExportError, match="draws from Python's random generator, and a graph would "
    ):
        torch2ort.export(Model(draws_from_python), X)
