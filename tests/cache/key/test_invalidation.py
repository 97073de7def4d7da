"""Attempts at a wrong hit: changes that an export could show, in places where a key might not look."""

from __future__ import annotations

import builtins
import functools
import importlib.metadata
import math
import operator
import sys
import types
from collections.abc import Callable

import numpy as np
import optree
import pytest
import torch
import torch.backends.opt_einsum
import torch.fx.experimental._config
import transformers
from torch.nn import functional

import torch2ort
from tests.cache.model_source import changed, key_of, key_of_source
from tests.models.test_transformers import bert, bert_batch
from tests.support.functions import Square
from torch2ort.cache.key import packages as packages
from torch2ort.cache.key.key import Unkeyable

NET = """
import collections, dataclasses, enum, functools, math, operator, types
import numpy as np
import torch

{helpers}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        {attributes}

    def forward(self, x):
        x = self.layer(x)
        {forward}

def make():
    return Net()
"""


def source(text: str) -> str:
    """The source of a net's module: helpers, the body of ``__init__``, the body of ``forward``."""
    helpers, _, forward = text.partition("# forward\n")
    helpers, _, attributes = helpers.partition("# __init__\n")
    lines = {"attributes": attributes or "pass", "forward": forward}
    indented = {name: part.strip().replace("\n", "\n        ") for name, part in lines.items()}
    return NET.format(helpers=helpers, **indented)


SOURCES = {
    "method that an installed package may call": """
import transformers
class Mixin:
    def for_the_package(self, x):
        return x * 2.5
class Part(Mixin, torch.nn.Module, transformers.modeling_utils.ModuleUtilsMixin):
    def forward(self, x):
        return x
# __init__
self.part = Part()
# forward
return self.part(x)
""",
    "docstring of a class that is read": """
class O:
    "2.5"
# forward
return x * float(O.__doc__)
""",
    "annotation that is read": """
def f(x: "2.5"):
    return x * float(f.__annotations__["x"])
# forward
return f(x)
""",
    "helper behind a partial": """
def f(x, k):
    return x * k * 2.5
P = functools.partial(f, k=2)
# forward
return P(x)
""",
    "default of a lambda": """
F = lambda x, k=2.5: x * k
# forward
return F(x)
""",
    "keyword default of a lambda": """
# __init__
self.f = lambda x, *, k=2.5: x * k
# forward
return self.f(x)
""",
    "class attribute of a base": """
class A:
    k = 2.5
class B(A):
    pass
# __init__
self.o = B()
# forward
return x * self.o.k
""",
    "closure of a decorator": """
def scaled(factor):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(x):
            return function(x) * factor
        return wrapper
    return decorate

@scaled(2.5)
def helper(x):
    return x + 1
# forward
return helper(x)
""",
    "__call__ of an object": """
class O:
    def __call__(self, x):
        return x * 2.5
# __init__
self.o = O()
# forward
return self.o(x)
""",
    "operator of an object": """
class O:
    def __rmul__(self, x):
        return x * 2.5
# __init__
self.o = O()
# forward
return x * self.o
""",
    "descriptor": """
class D:
    def __get__(self, o, t=None):
        return 2.5
class O:
    k = D()
# __init__
self.o = O()
# forward
return x * self.o.k
""",
    "metaclass": """
class M(type):
    @property
    def k(cls):
        return 2.5
class O(metaclass=M):
    pass
# forward
return x * O.k
""",
    "function chosen by type": """
@functools.singledispatch
def f(x):
    return x
@f.register
def _(x: torch.Tensor):
    return x * 2.5
# forward
return f(x)
""",
    "function behind a cache": """
@functools.lru_cache
def f():
    return 2.5
# forward
return x * f()
""",
    "attribute of a function": """
def f():
    pass
f.k = 2.5
# forward
return x * f.k
""",
    "slot": """
class O:
    __slots__ = ('k',)
    def __init__(self):
        self.k = 2.5
# __init__
self.o = O()
# forward
return x * self.o.k
""",
    "value of an enum's member": """
class E(enum.Enum):
    A = 2.5
# __init__
self.e = E.A
# forward
return x * self.e.value
""",
    "dataclass": """
@dataclasses.dataclass(frozen=True)
class O:
    k: float
# __init__
self.o = O(2.5)
# forward
return x * self.o.k
""",
    "default of a dataclass": """
@dataclasses.dataclass
class O:
    k: float = 2.5
# forward
return x * O().k
""",
    "named tuple": """
O = collections.namedtuple('O', 'k')
# __init__
self.o = O(2.5)
# forward
return x * self.o.k
""",
    "namespace": """
O = types.SimpleNamespace(k=2.5)
# forward
return x * O.k
""",
    "attribute read through vars": """
# __init__
self.k = 2.5
# forward
return x * vars(self)['k']
""",
    "attribute of a pattern's class": (
        """
class O:
    __match_args__ = ('a',)
    a, b = 1.5, 2.5
# __init__
self.o = O()
# forward
match self.o:
    case O(k):
        return x * k
""",
        "('a',)", "('b',)",
    ),
    "method whose name is put together": """
class O:
    def f_a(self, x):
        return x * 2.5
# __init__
self.o = O()
self.n = 'a'
# forward
return getattr(self.o, 'f_' + self.n)(x)
""",
    "bound method": """
class O:
    k = 2.5
    def f(self, x):
        return x * self.k
# __init__
self.f = O().f
# forward
return self.f(x)
""",
    "order of a dict": (
        """
# __init__
self.d = {'a': 1.0, 'b': 2.0}
# forward
for v in self.d.values():
    x = (x + 1) * v
return x
""",
        "{'a': 1.0, 'b': 2.0}", "{'b': 2.0, 'a': 1.0}",
    ),
    "scalar of NumPy for an array": (
        """
# __init__
self.k = np.float32(2.5)
# forward
return x * self.k
""",
        'np.float32(2.5)', 'np.array(2.5, np.float32)',
    ),
    "order of an array in memory": (
        """
# __init__
self.k = np.ascontiguousarray(np.eye(2))
# forward
return x * float(torch.from_numpy(self.k).view(-1)[1])
""",
        'np.ascontiguousarray', 'np.asfortranarray',
    ),
    "values of a tensor in a global": """
K = torch.tensor([2.5])
# forward
return x * K
""",
    "values of a module outside of the model": """
# __init__
m = torch.nn.Linear(4, 4, bias=False)
torch.nn.init.constant_(m.weight, 2.5)
self.f = lambda x: m(x)
# forward
return self.f(x)
""",
    "derivative that a Function inherits": """
class Base(torch.autograd.Function):
    @staticmethod
    def backward(ctx, grad):
        return grad * 2.5

class Scaled(Base):
    @staticmethod
    def forward(ctx, x):
        return x * 2
# forward
return Scaled.apply(x)
""",
    "setup_context of a Function": """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = 2.5

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor
# forward
return Scaled.apply(x)
""",
    "two Functions of one name, swapped": (
        """
def made(factor):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    return Scaled

A, B = made(2), made(3)
# forward
return B.apply(A.apply(x) + 1)
""",
        'made(2), made(3)', 'made(3), made(2)',
    ),
    "class of a parametrization": """
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 2.5
# __init__
torch.nn.utils.parametrize.register_parametrization(self.layer, 'weight', Scaled())
# forward
return x
""",
    "dimension of a weight norm": (
        """
# __init__
torch.nn.utils.parametrizations.weight_norm(self.layer, dim=0)
# forward
return x
""",
        'dim=0', 'dim=1',
    ),
    "compiled function": """
def f(x):
    return x * 2.5
# __init__
self.f = torch.compile(f)
# forward
return self.f(x)
""",
}  # fmt: skip


@pytest.mark.parametrize("attempt", SOURCES.values(), ids=SOURCES.keys())
def test_a_change_is_a_miss(attempt):
    text, before, after = (attempt, "2.5", "3.5") if isinstance(attempt, str) else attempt
    text = source(text)
    assert key_of_source(text).digest == key_of_source(text).digest
    assert key_of_source(text).digest != key_of_source(changed(before, after, text)).digest


BYPASSED = {
    "scripted function": """
@torch.jit.script
def f(x):
    return x * 2.5
# forward
return f(x)
""",
    "scripted module": """
class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * 2.5
# __init__
self.s = torch.jit.trace(Scaled(), torch.ones(1))
# forward
return self.s(x)
""",
    "code in a string": """
# forward
return eval('x * 2.5')
""",
    "table of globals": """
K = 2.5
# forward
return x * globals()['K']
""",
    "state of a generator": """
# __init__
self.g = np.random.default_rng(0)
# forward
return x * self.g.random()
""",
}  # fmt: skip


@pytest.mark.parametrize("text", BYPASSED.values(), ids=BYPASSED.keys())
def test_what_hides_its_code_or_state_is_a_bypass(text):
    with pytest.raises(Unkeyable, match=r"outside of Python|may give another result|is not seen"):
        key_of_source(source(text))


# --- changes while the process runs

NUMBERS = [2.5]
ARRAY = np.array([2.5])


class Net(torch.nn.Module):
    """Calls and reads a little of everything that the attempts change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.LeakyReLU(), torch.nn.LayerNorm(4)
        )
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = Square.apply(self.layers(x)) * self.weight * NUMBERS[0] * float(ARRAY[0]) * math.sqrt(2)
        factors = [getattr(found, "factor", 1.0) for found in (x, self.weight, self.layers[0])]
        return functional.leaky_relu(sum([x, *factors])) + float(np.sum(np.ones(2)))


def replaced(owner, name: str, value) -> Callable[[pytest.MonkeyPatch, Net], None]:
    return lambda patch, model: patch.setattr(owner, name, value, raising=False)


def called(function: Callable[[Net], object]) -> Callable[[pytest.MonkeyPatch, Net], None]:
    return lambda patch, model: function(model)


def hooked(register) -> Callable[[pytest.MonkeyPatch, Net], None]:
    """A hook of all modules; it is removed when the patches are undone."""

    def change(patch, model):
        handle = register(lambda *args: None)
        table = handle.hooks_dict_ref()
        del table[handle.id]
        patch.setitem(table, handle.id, print)

    return change


def exporter_of(factor: float):
    def exporter(g, x):
        return g.op("Mul", x, g.op("Constant", value_float=factor))

    return exporter


CHANGES = {
    "array in a global": lambda patch, model: patch.setattr(sys.modules[__name__], "ARRAY", np.array([3.5])),
    "attribute of a parameter": called(lambda model: setattr(model.weight, "factor", 2.0)),
    "attribute of a layer's class": replaced(torch.nn.Linear, "factor", 2.5),
    "attribute of tensors": replaced(torch.Tensor, "factor", 2.5),
    "property of tensors": replaced(torch.Tensor, "factor", property(lambda self: 2.5)),
    "method of tensors, by another": replaced(torch.Tensor, "flip", torch.Tensor.roll),
    "tensor on a layer's class": replaced(torch.nn.Linear, "factor", torch.tensor(2.5)),
    "function that a layer calls, by a builtin": replaced(functional, "relu", torch.tanh),
    "function that a layer calls, by another": replaced(functional, "relu", functional.silu),
    "function that a layer calls, by a partial": replaced(
        functional, "relu", functools.partial(functional.leaky_relu, negative_slope=0.5)
    ),
    "method of a layer, by another layer's": replaced(torch.nn.ReLU, "forward", torch.nn.Tanh.forward),
    "method of a layer, by a partial": replaced(
        torch.nn.ReLU, "forward", functools.partialmethod(lambda self, factor, x: x * factor, 2.0)
    ),
    "method of a layer, by a builtin": replaced(torch.nn.ReLU, "forward", staticmethod(torch.tanh)),
    "default of a function": replaced(functional.leaky_relu, "__defaults__", (0.5, False)),
    "function of Python's library": replaced(math, "sqrt", lambda x: 2.5),
    "builtin function": replaced(builtins, "sum", lambda values: functools.reduce(operator.mul, values)),
    "function of NumPy": replaced(np, "sum", lambda values: 2.5),
    "mode of a submodule": called(lambda model: model.layers[1].eval()),
    "hook": called(lambda model: model.layers[1].register_forward_hook(lambda *args: None)),
    "hook before forward": called(
        lambda model: model.layers[1].register_forward_pre_hook(lambda *args: None)
    ),
    "hook of backward": called(
        lambda model: model.layers[1].register_full_backward_hook(lambda *args: None)
    ),
    "hook of all modules": hooked(torch.nn.modules.module.register_module_forward_hook),
    "hook of all modules' backward": hooked(torch.nn.modules.module.register_module_full_backward_hook),
    "parametrization": called(lambda model: torch.nn.utils.parametrizations.weight_norm(model.layers[0])),
    "kernels of attention": replaced(torch.backends.cuda, "cudnn_sdp_enabled", lambda: None),
    "order of an einsum": replaced(torch.backends.opt_einsum, "strategy", "dp"),
    "mkldnn": replaced(torch.backends.mkldnn, "enabled", False),
    "deterministic": replaced(torch, "are_deterministic_algorithms_enabled", lambda: True),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_while_the_process_runs_is_a_miss(monkeypatch, change):
    before = key_of(Net()).digest
    model = Net()
    with monkeypatch.context() as patch:
        change(patch, model)
        after = key_of(model).digest
    assert before != after
    assert before == key_of(Net()).digest


def test_a_setting_of_tracing_counts():
    before = key_of(Net()).digest
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        assert before != key_of(Net()).digest
    assert before == key_of(Net()).digest


def test_a_list_in_a_global_counts():
    before = key_of(Net()).digest
    NUMBERS[0] = 3.5
    try:
        assert before != key_of(Net()).digest
    finally:
        NUMBERS[0] = 2.5


def test_a_helpers_global_of_an_exporter_counts():
    keys = []
    for factor in (2.5, 3.5, 2.5):
        torch2ort.register_exporter(Square, exporter_of(factor))
        try:
            keys.append(key_of(Net()).digest)
        finally:
            torch2ort.unregister(Square)
    assert keys[0] == keys[2] != keys[1]


class Box:
    def __init__(self, a, b) -> None:
        self.a, self.b = a, b


class Boxes(torch.nn.Module):
    def forward(self, x):
        return Box(x, x + 1)


def test_how_an_output_is_taken_apart_counts():
    keys = []
    for order in ("ab", "ba"):
        optree.register_pytree_node(
            Box,
            lambda box, order=order: ([getattr(box, name) for name in order], None),
            lambda _, parts, order=order: Box(**dict(zip(order, parts, strict=True))),
            namespace="torch2ort",
        )
        try:
            keys.append(key_of(Boxes()).digest)
        finally:
            optree.unregister_pytree_node(Box, namespace="torch2ort")
    assert len({*keys, key_of(Boxes()).digest}) == 3


# --- models of transformers


class QuietConfig(transformers.BertConfig):
    """A configuration with the same ``repr`` whatever its values are."""

    def __repr__(self) -> str:
        return "QuietConfig()"

    def to_dict(self):
        return {}


def quiet_bert(**settings) -> torch.nn.Module:
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    return transformers.BertModel(QuietConfig(**sizes, intermediate_size=8, **settings))


def bert_key(model: torch.nn.Module) -> str:
    return key_of(model, bert_batch(2, 8)["input_ids"]).digest


def test_a_config_that_looks_the_same_counts():
    before, after = quiet_bert(), quiet_bert(hidden_act="relu")
    assert repr(before.config) == repr(after.config)
    assert bert_key(before) != bert_key(after)
    # One that no module has taken its own value from.
    late = quiet_bert()
    late.config.use_cache = not late.config.use_cache
    assert bert_key(before) != bert_key(late)


def other(module, *args, **kwargs):
    return args[0], None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda patch: patch.setattr(
                transformers.models.bert.modeling_bert.BertLayer, "feed_forward_chunk", other
            ),
            id="method of a layer",
        ),
        pytest.param(
            lambda patch: patch.setattr(
                transformers.models.bert.modeling_bert, "eager_attention_forward", other
            ),
            id="function of a module",
        ),
        pytest.param(
            lambda patch: patch.setitem(
                transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", other
            ),
            id="table of functions",
        ),
    ],
)
def test_what_somebody_put_into_an_installed_package_counts(monkeypatch, change):
    model = bert()
    before = bert_key(model)
    with monkeypatch.context() as patch:
        change(patch)
        after = bert_key(model)
    assert before != after
    assert before == bert_key(model)


# --- values that tracing makes constants of


class Holds(torch.nn.Module):
    """Stores its parameter where torch.export does not look for it."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(self.layer.weight, value)
        self.held = [self.layer.weight]

    def forward(self, x):
        return self.layer(x) * self.held[0].sum()


def test_values_of_a_parameter_in_a_list_count(tmp_path):
    x = torch.ones(3, 4)
    for value in (1.0, 2.0):
        model = Holds(value)
        exported = torch2ort.export(model, x, cache_dir=tmp_path / "cache")
        assert not exported.cache.hit
        torch.testing.assert_close(exported(x), model(x))
    assert torch2ort.export(Holds(2.0), x, cache_dir=tmp_path / "cache").cache.bypass_reason is None


def test_values_of_an_input_that_the_model_holds_count():
    keys = []
    for value in (1.0, 2.0):
        model = torch.nn.Linear(4, 4)
        x = model.held = torch.full((3, 4), value)
        keys.append(key_of(model, x).digest)
    assert keys[0] != keys[1]


def test_values_of_a_recurrent_layer_do_not_count():
    layer = torch.nn.LSTM(4, 4)
    before = key_of(layer).digest
    with torch.no_grad():
        layer.weight_ih_l0.add_(1.0)
    assert before == key_of(layer).digest


@pytest.mark.parametrize("folder", ["mine-1.0.dist-info", "Mine.dist-info"])
def test_a_package_that_is_installed_again_counts(monkeypatch, tmp_path, folder):
    """The version is the same, as that of a user's own package under development."""
    record_file = tmp_path / folder / "RECORD"
    record_file.parent.mkdir()

    def recorded(text: str) -> str:
        packages._content.cache_clear()
        record_file.write_text(text)
        installed = types.SimpleNamespace(
            locate_file=lambda name: tmp_path / name, read_text=lambda name: record_file.read_text()
        )
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: installed)
        monkeypatch.setattr(packages, "version", lambda name: "1.0")
        return packages._content("mine")

    record = "../../bin/mine,sha256={},9\n../../bin/other,sha256=0,9\nmine/a.py,sha256={},9\n"
    try:
        first, same, other_code = (recorded(record.format(*parts)) for parts in ("xy", "wy", "xz"))
    finally:
        packages._content.cache_clear()
    assert first == same != other_code
