"""The key changes with everything that the graph depends on, and with nothing else."""

from __future__ import annotations

import ast
import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch2ort
from tests.cache.model_source import SOURCE, changed, imported, key_of, key_of_source
from torch2ort.cache.key import key
from torch2ort.cache.key.key import Unkeyable

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("h = helper(self.first(x))", "h = 2 * helper(self.first(x))", id="forward"),
        pytest.param("self.gain = 0.75", "self.gain = 0.5", id="attribute that repr does not show"),
        pytest.param("self.gain = 0.75", "self.gain = torch.tensor(0.75)", id="type of an attribute"),
        pytest.param("return x * x * bias()", "return x * x * x * bias()", id="forward of a Function"),
        pytest.param("return 2.0 * x * grad", "return 3.0 * x * grad", id="backward of a Function"),
        pytest.param("factor = 1.0", "factor = 2.0", id="class attribute of a Function"),
        pytest.param("return 1.0\n", "return 1.5\n", id="helper of a Function"),
        pytest.param("return deeper(x) * by", "return deeper(x) + by", id="helper"),
        pytest.param("return x + 1.5", "return x + 1.25", id="helper of a helper"),
        pytest.param("by=3.0", "by=4.0", id="default argument"),
        pytest.param("SCALE = 2.0", "SCALE = 2.5", id="global"),
        pytest.param("SCALE = 2.0", "SCALE = 2", id="type of a global"),
        pytest.param('"a": [1, 2]', '"a": [3, 2]', id="inside a global"),
        pytest.param('"b": F.relu', '"b": F.gelu', id="function inside a global"),
        pytest.param("made(0.25)", "made(0.5)", id="closure value"),
        pytest.param("return x + offset", "return x - offset", id="code of a closure"),
        pytest.param("max=8.0", "max=9.0", id="argument of a partial"),
        pytest.param("[torch.tanh,", "[torch.sigmoid,", id="function in a list"),
        pytest.param("* 1.25", "* 1.5", id="decorator"),
        pytest.param("return x - 0.5", "return x - 0.75", id="decorated function"),
        pytest.param("limit = 4", "limit = 5", id="class attribute of an object"),
        pytest.param("Options(width=6)", "Options(width=7)", id="attribute of an object"),
        pytest.param(
            "return self.width * self.limit", "return self.width + self.limit", id="method of an object"
        ),
        pytest.param("power = 2", "power = 3", id="class attribute"),
        pytest.param("return 0.125", "return 0.25", id="property"),
        pytest.param("x.flip(-1)", "x.flip(0)", id="static method"),
        pytest.param("return x * 7.0", "return x * 8.0", id="method read by getattr"),
        pytest.param("Kind.SOFT\n", "Kind.HARD\n", id="enum member"),
        pytest.param("np.array([1.0, 2.0])", "np.array([1.0, 3.0])", id="array"),
        pytest.param(
            "np.array([1.0, 2.0])", "np.array([1.0, 2.0], dtype=np.float32)", id="dtype of an array"
        ),
        pytest.param("3.0, 4.0])", "3.0, 5.0])", id="value of a tensor attribute"),
        pytest.param('{"x", "y", "z"}', '{"w", "y", "z"}', id="set"),
        pytest.param("torch.ones(4))", "torch.ones(1))", id="shape of a buffer"),
        pytest.param("torch.ones(4))", "torch.ones(4, dtype=torch.float64))", id="dtype of a buffer"),
        pytest.param("torch.nn.Linear(4, 4)", "torch.nn.Linear(4, 4, bias=False)", id="a parameter"),
        pytest.param(
            "torch.nn.Linear(4, 2)",
            "torch.nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2)",
            id="class of a layer",
        ),
        pytest.param("flag=True", "flag=False", id="default of forward"),
    ],
)
def test_a_change_in_the_source_changes_the_key(before, after):
    assert key_of_source(SOURCE).digest != key_of_source(changed(before, after)).digest


def numbers_in(source: str) -> list[ast.Constant]:
    """Every number that forward reaches in ``source``."""
    tree = ast.parse(source)
    skipped = {id(n) for f in ast.walk(tree) if getattr(f, "name", "") == "make" for n in ast.walk(f)}
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and id(node) not in skipped
    ]


@pytest.mark.parametrize("number", range(len(numbers_in(SOURCE))))
def test_every_number_that_forward_reaches_counts(number):
    node = numbers_in(SOURCE)[number]
    lines = SOURCE.splitlines(keepends=True)
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = f"{line[: node.col_offset]}{node.value + 1}{line[node.end_col_offset :]}"
    assert key_of_source("".join(lines)).digest != key_of_source(SOURCE).digest


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("SCALE = 2.0\n", "# a comment\n\n\nSCALE = 2.0\n", id="comment and line numbers"),
        pytest.param("not part of forward", "something else", id="a method that forward does not reach"),
        pytest.param("threading.local()", "threading.Event()", id="an attribute that nothing reads"),
        pytest.param("torch.manual_seed(1)", "torch.manual_seed(2)", id="values of the parameters"),
        pytest.param('{"x", "y", "z"}', '{"z", "y", "x"}', id="order of a set"),
    ],
)
def test_a_change_that_the_graph_does_not_show_keeps_the_key(before, after):
    assert key_of_source(SOURCE).digest == key_of_source(changed(before, after)).digest


@pytest.mark.parametrize("name", ["torch2ort", "torch", "onnx", "onnxscript"])
def test_a_version_of_what_makes_the_graph_counts(monkeypatch, name):
    before = key_of(linear())
    version = key.version
    monkeypatch.setattr(key, "version", lambda package: "0.1" if package == name else version(package))
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", "0.1")
    elif name == "torch2ort":
        monkeypatch.setattr(key, "own_digest", lambda: "0.1")
    after = key_of(linear())
    differing = {n for n, content in before.components.items() if content != after.components[n]}
    assert before.digest != after.digest
    assert differing == {name}


def test_changed_components_say_what_changed():
    before, after = (
        key_of_source(SOURCE).components,
        key_of_source(changed("SCALE = 2.0", "SCALE = 2.5")).components,
    )
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {
        "global net.SCALE": ("float 2.0", "float 2.5")
    }


def linear(**settings) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4, **settings), torch.nn.ReLU(), torch.nn.Linear(4, 4, **settings)
    )


def tied() -> torch.nn.Module:
    model = linear()
    model[2].weight = model[0].weight
    return model


def transposed() -> torch.nn.Module:
    model = linear()
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous().t())
    return model


def frozen() -> torch.nn.Module:
    model = linear()
    model[0].weight.requires_grad_(False)
    return model


def partly_in_eval() -> torch.nn.Module:
    model = linear()
    model[0].eval()
    return model


def double_it(module, args, output):
    return output * 2


def hooked() -> torch.nn.Module:
    model = linear()
    model[1].register_forward_hook(double_it)
    return model


def with_forward_of_its_own() -> torch.nn.Module:
    model = linear()
    model[1].forward = torch.tanh
    return model


@pytest.mark.parametrize(
    "other",
    [tied, transposed, frozen, partly_in_eval, hooked, with_forward_of_its_own,
     functools.partial(linear, dtype=torch.float64), lambda: linear().eval()],
)  # fmt: skip
def test_the_state_of_the_modules_counts(other):
    assert key_of(linear()).digest != key_of(other()).digest


def test_values_of_parameters_and_buffers_do_not_count():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(1)
    assert key_of(model).digest == key_of(other).digest


X = torch.zeros(3, 4)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda m: key_of(m, torch.zeros(5, 4)), id="size"),
        pytest.param(lambda m: key_of(m, torch.zeros(4, 3).t()), id="order in memory"),
        pytest.param(lambda m: key_of(m, torch.zeros(1, 3, 4)), id="rank"),
        pytest.param(lambda m: key_of(m, X.double()), id="dtype"),
        pytest.param(lambda m: key_of(m, X.clone().requires_grad_()), id="requires_grad"),
        pytest.param(lambda m: key_of(m, torch.nn.Parameter(X)), id="class of a tensor"),
        pytest.param(lambda m: key_of(m, [X]), id="structure"),
        pytest.param(lambda m: key_of(m, X, opset=20), id="opset"),
        pytest.param(lambda m: key_of(m, X, mode=True), id="mode"),
    ],
)
def test_the_call_counts(call):
    model = linear()
    assert key_of(model, X).digest != call(model).digest


@pytest.mark.parametrize(
    "values", [(True, False), (1, 1.0), (0.0, -0.0), ("a", "b"), (None, False), (1, True)]
)
def test_a_constant_of_the_call_counts(values):
    keys = [key_of_source(SOURCE, torch.zeros(3, 4), value).digest for value in values]
    assert keys[0] != keys[1]


def test_the_default_dtype_counts():
    model = linear()
    before = key_of(model, X).digest
    torch.set_default_dtype(torch.float64)
    try:
        assert before != key_of(model, X).digest
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_and_no_grad_count():
    model = linear()
    with torch.autocast("cpu", torch.bfloat16):
        cast = key_of(model).digest
    with torch.no_grad():
        without_gradient = key_of(model).digest
    assert len({cast, without_gradient, key_of(model).digest}) == 3


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(torch.nn.functional, "softmax", id="function that forward names"),
        pytest.param(torch.nn.functional, "linear", id="function that a layer names"),
        pytest.param(torch.nn.Linear, "forward", id="method of a layer"),
        pytest.param(torch.nn.Linear, "__init__", id="constructor of a layer"),
        pytest.param(torch.nn.Module, "__call__", id="method of every module"),
        pytest.param(torch.Tensor, "flip", id="method of tensors"),
    ],
)
def test_what_somebody_put_into_torch_counts(monkeypatch, owner, name):
    before = key_of_source(SOURCE).digest
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs))
    assert before != key_of_source(SOURCE).digest


def a_shape(node, shapes, dtypes):
    return shapes, dtypes


def an_exporter(g, x):
    return g.op("Mul", x, x)


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda f: torch2ort.register_exporter(f, an_exporter), id="exporter"),
        pytest.param(lambda f: torch2ort.register_shape_inferer(f, a_shape), id="shape inferer"),
        pytest.param(lambda f: torch2ort.register_inplace_map(f, forward={0: 0}), id="in-place map"),
    ],
)
def test_what_is_registered_for_a_function_counts(register):
    before = key_of_source(SOURCE).digest
    register("net.Square")
    try:
        assert before != key_of_source(SOURCE).digest
    finally:
        torch2ort.unregister("net.Square")
    assert before == key_of_source(SOURCE).digest


def test_a_registered_translation_counts():
    before = key_of(linear()).digest
    torch2ort.register_symbolic("aten::relu", an_exporter)
    try:
        assert before != key_of(linear()).digest
    finally:
        torch2ort.unregister("aten::relu")


def test_what_is_registered_for_another_function_does_not_count():
    before = key_of_source(SOURCE).digest
    torch2ort.register_shape_inferer("other.Square", a_shape)
    try:
        assert before == key_of_source(SOURCE).digest
    finally:
        torch2ort.unregister("other.Square")


def test_functions_are_found_wherever_the_code_names_them():
    source = changed("SCALE = 2.0", f"{MADE}\nSCALE = 2.0")
    source = changed('"b": F.relu', '"b": made_function(3.0).apply', source)
    with imported(source) as module:
        key = key_of(module.make())
    assert {name: [f.__name__ for f in found] for name, found in key.functions.items()} == {
        "net.Square": ["Square"],
        "net.made_function.<locals>.Made": ["Made"],
    }


MADE = """
def made_function(factor):
    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    return Made
"""


KEY_IN_A_PROCESS = """
import json
import torch
from tests.cache.model_source import SOURCE, key_of, key_of_source
from tests.models.test_transformers import bert, gpt2

torch.manual_seed(1)
parametrized = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
keys = [key_of_source(SOURCE), *map(key_of, (bert(), gpt2(), torch.nn.LSTM(4, 4), parametrized))]
print(json.dumps([[key.digest, key.components] for key in keys]))
"""


def test_an_ortmodule_in_reach_of_its_model_counts_by_that_model():
    """Accelerate does so: it wraps an ORTModule's forward in autocast, and with it that of its model."""
    model = linear()
    module = torch2ort.ORTModule(model)
    model.around = lambda: module
    before = key_of(model)
    module(torch.randn(3, 4))
    assert key_of(model) == before
    model[0] = torch.nn.Linear(4, 4, bias=False)
    assert key_of(model).digest != before.digest


def test_the_key_is_the_same_in_each_process_and_on_each_rank():
    keys = []
    for seed, rank in (("0", "0"), ("77", "1")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, "-c", KEY_IN_A_PROCESS]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        keys.append(json.loads(done.stdout))
    assert keys[0] == keys[1]


def test_the_rank_counts_for_those_who_ask_for_it(tmp_path):
    asks = changed("return 1.0\n", "return 1.0 + torch.distributed.is_initialized()\n")
    before = [key_of_source(source).digest for source in (SOURCE, asks)]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        after = [key_of_source(source).digest for source in (SOURCE, asks)]
    finally:
        torch.distributed.destroy_process_group()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]


OUTSIDE = "keeps its state outside of Python, where it cannot be compared between processes"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        pytest.param(
            "h = helper(self.first(x))",
            "h = helper(self.first(x)) if self.unread else 0",
            f"module (the model), attribute unread: a _thread._local {OUTSIDE}",
            id="an object that is read",
        ),
        pytest.param(
            "return 1.0\n",
            "return float(open('/etc/hostname').read())\n",
            f"code net.bias: {open.__module__}.open may give another result in each process",
            id="a file",
        ),
        pytest.param(
            "return 1.0\n",
            "return float(os.environ['BIAS'])\n",
            "global net.os.environ: os._Environ may give another result in each process",
            id="the environment",
        ),
        pytest.param(
            "return 1.0\n",
            "return os.getpid()\n",
            "code net.bias: posix.getpid may give another result in each process",
            id="the process",
        ),
        pytest.param(
            "return 1.0\n",
            "from somewhere import b\n    return b\n",
            "code net.bias: it imports somewhere, which cannot be read before it runs; import it at the top "
            "of the file",
            id="an import inside",
        ),
        pytest.param(
            "return 1.0\n",
            "return helper(torch.ops.mylib).bias()\n",
            "code net.bias: torch.ops.mylib as a whole contains registered operators, and it cannot be seen "
            "which of them are called. Name each, as torch.ops.mylib.name",
            id="a namespace of operators",
        ),
        pytest.param(
            "return 1.0\n",
            "return sys.modules['net'].SCALE\n",
            "code net.bias: sys.modules holds every module of the process",
            id="the table of modules",
        ),
        pytest.param(
            "return 1.0\n",
            "return torch.initial_seed()\n",
            "code net.bias: torch.random.initial_seed may give another result in each process",
            id="the seed",
        ),
        pytest.param(
            '{"x", "y", "z"}',
            '{Options(1), "x"}',
            "module (the model), attribute names: a set of Options objects has another order in each process",
            id="a set of objects",
        ),
        pytest.param(
            "return 1.0\n",
            "return np.random.rand()\n",
            f"global net.np.random.rand: a numpy.random.mtrand.RandomState {OUTSIDE}",
            id="random numbers of NumPy",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_gives_a_reason(before, after, reason):
    source = changed(before, after).replace("import enum", "import enum, os, sys", 1)
    with pytest.raises(Unkeyable) as caught:
        key_of_source(source)
    assert str(caught.value) == reason


def test_a_mode_that_changes_every_operator_gives_a_reason():
    with torch.device("meta"), pytest.raises(Unkeyable) as caught:
        key_of(linear(), torch.zeros(3, 4, device="cpu"))
    assert str(caught.value) == "the mode DeviceContext is active, which may change what every operator does"


class Broken(torch.nn.Module):
    def forward(self, x):
        return x

    def __getattribute__(self, name):
        if name == "__dict__":
            raise RuntimeError("this module shows nothing")
        return super().__getattribute__(name)


def test_an_error_of_the_users_code_is_a_reason():
    with pytest.raises(Unkeyable) as caught:
        key_of(torch.nn.Sequential(Broken()))
    assert str(caught.value) == "looking at the model raised RuntimeError: this module shows nothing"
