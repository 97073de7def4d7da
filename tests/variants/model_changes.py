"""Ways to change a model, or what its code reads, between two calls."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Reads(nn.Module):
    """A layer, and ``compute(self, h)`` of its result."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.compute(self, self.layer(x))


@dataclasses.dataclass(frozen=True)
class Way:
    """One change.

    Attributes:
        name: description of the change.
        make: makes a model, whose input has shape [3, 4].
        change: changes the model.
        restore: restores changed objects outside of the model.
    """

    name: str
    make: Callable[[], nn.Module]
    change: Callable[[Any], None]
    restore: Callable[[], None] = lambda: None

    def __str__(self) -> str:
        return self.name


WAYS: list[Way] = []
# Changes of objects that no call reads: the existing graph remains in use.
IRRELEVANT: list[Way] = []


def way(
    name: str, compute: Any, change: Callable[[Any], Any], restore: Any = None, **attributes: Any
) -> None:
    """Register a change of a :class:`Reads` with these attributes."""
    make = functools.partial(_reads, compute, attributes)
    WAYS.append(Way(name, make, change, restore or (lambda: None)))


def no_matter(
    name: str, compute: Any, change: Callable[[Any], Any], restore: Any = None, **attributes: Any
) -> None:
    """Register a change of a :class:`Reads` that its forward does not read."""
    make = functools.partial(_reads, compute, attributes)
    IRRELEVANT.append(Way(name, make, change, restore or (lambda: None)))


def _reads(compute: Any, attributes: dict[str, Any]) -> nn.Module:
    # A `_Made` value is made for each model.
    made = {n: v() if isinstance(v, _Made) else v for n, v in attributes.items()}
    return Reads(compute, **made)


def _read_only(value: float) -> np.ndarray[Any, Any]:
    values = np.full(1 << 18, value)
    values.flags.writeable = False
    return values


class _Made:
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        return self._make()


def put(**attributes: Any) -> Callable[[Any], None]:
    """Set attributes of the model."""

    def change(model: Any) -> None:
        for name, value in attributes.items():
            setattr(model, name, value)

    return change


# --- attributes: plain values


def times(m, h):
    return h * m.scale


way("float", times, put(scale=3.0), scale=2.0)
way(
    "int to float of the same value",
    lambda m, h: h * (2 if type(m.scale) is int else 3),
    put(scale=2.0),
    scale=2,
)
way("sign of zero", lambda m, h: h * (2 if str(m.scale)[0] == "-" else 3), put(scale=-0.0), scale=0.0)
way("bool to int of the same value", lambda m, h: h * (2 if m.flag is True else 3), put(flag=1), flag=True)
way("bool", lambda m, h: h.relu() if m.flag else h, put(flag=False), flag=True)
way("large int", lambda m, h: h * m.scale, put(scale=100_001), scale=100_000)
way("complex", lambda m, h: h * m.scale.real, put(scale=3 + 1j), scale=2 + 1j)
way("str", lambda m, h: getattr(F, m.kind)(h), put(kind="relu"), kind="silu")
way("None to a number", lambda m, h: h if m.scale is None else h * m.scale, put(scale=2.0), scale=None)
way("bytes", lambda m, h: h * m.scale[0], put(scale=b"\x03"), scale=b"\x02")
way("dtype", lambda m, h: h.to(m.kind).float(), put(kind=torch.float16), kind=torch.float32)
way("tuple", lambda m, h: h * m.scales[0] + m.scales[1], put(scales=(1.0, 3.0)), scales=(1.0, 2.0))
way("torch.Size", lambda m, h: h * m.size[0], put(size=torch.Size([3])), size=torch.Size([2]))
way("slice", lambda m, h: h[:, m.part], put(part=slice(1, 3)), part=slice(0, 2))
way("range", lambda m, h: h * sum(m.steps), put(steps=range(4)), steps=range(3))
way("frozenset", lambda m, h: h * len(m.names), put(names=frozenset("ab")), names=frozenset("a"))


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


way("enum", lambda m, h: h.sum(0) if m.mode is Mode.SUM else h.mean(0), put(mode=Mode.MEAN), mode=Mode.SUM)

# --- attributes: callables and classes


def double(h):
    return h * 2


def triple(h):
    return h * 3


class Doubler:
    factor = 2.0

    def __call__(self, h):
        return h * self.factor


class Tripler(Doubler):
    factor = 3.0


way("function", lambda m, h: m.act(h), put(act=triple), act=double)
way("builtin function", lambda m, h: m.act(h), put(act=torch.sigmoid), act=torch.tanh)
way("lambda", lambda m, h: m.act(h), put(act=lambda h: h * 3), act=lambda h: h * 2)
way(
    "partial",
    lambda m, h: m.act(h),
    put(act=functools.partial(F.leaky_relu, negative_slope=0.5)),
    act=functools.partial(F.leaky_relu, negative_slope=0.1),
)
way("callable object", lambda m, h: m.act(h), put(act=Tripler()), act=_Made(Doubler))
way("class", lambda m, h: m.kind()(h), put(kind=Tripler), kind=Doubler)
way(
    "attribute of a callable object",
    lambda m, h: m.act(h),
    lambda m: setattr(m.act, "factor", 5.0),
    act=_Made(Doubler),
)
way(
    "class of an object",
    lambda m, h: m.act(h),
    lambda m: setattr(m.act, "__class__", Tripler),
    act=_Made(Doubler),
)
way("bound method", lambda m, h: m.act(h), put(act=Tripler().__call__), act=_Made(lambda: Doubler().__call__))

# --- attributes: containers, replaced and written to

way("list, replaced", lambda m, h: h * m.l[0], put(l=[3.0]), l=_Made(lambda: [2.0]))
way("item of a list", lambda m, h: h * m.l[0], lambda m: m.l.__setitem__(0, 3.0), l=_Made(lambda: [2.0]))
way("longer list", lambda m, h: h * sum(m.l), lambda m: m.l.append(3.0), l=_Made(lambda: [2.0]))
way("shorter list", lambda m, h: h * sum(m.l), lambda m: m.l.pop(), l=_Made(lambda: [2.0, 3.0]))
way("reversed list", lambda m, h: h * m.l[0], lambda m: m.l.reverse(), l=_Made(lambda: [2.0, 3.0]))
way("nested list", lambda m, h: h * m.l[0][0], lambda m: m.l[0].__setitem__(0, 3.0), l=_Made(lambda: [[2.0]]))
way(
    "list of functions",
    lambda m, h: m.l[0](h),
    lambda m: m.l.__setitem__(0, triple),
    l=_Made(lambda: [double]),
)
way(
    "list in a tuple",
    lambda m, h: h * m.t[0][0],
    lambda m: m.t[0].append(1) or m.t[0].reverse(),
    t=_Made(lambda: ([2.0],)),
)
way("dict, replaced", lambda m, h: h * m.d["a"], put(d={"a": 3.0}), d=_Made(lambda: {"a": 2.0}))
way("value of a dict", lambda m, h: h * m.d["a"], lambda m: m.d.update(a=3.0), d=_Made(lambda: {"a": 2.0}))
way("new key of a dict", lambda m, h: h * len(m.d), lambda m: m.d.update(b=3.0), d=_Made(lambda: {"a": 2.0}))
way(
    "key gone from a dict",
    lambda m, h: h * len(m.d),
    lambda m: m.d.pop("a"),
    d=_Made(lambda: {"a": 2.0, "b": 1.0}),
)
way(
    "order of a dict",
    lambda m, h: h * next(iter(m.d.values())),
    lambda m: m.d.update(a=m.d.pop("a")),
    d=_Made(lambda: {"a": 2.0, "b": 1.0}),
)
way(
    "key of another type",
    lambda m, h: h * len(str(next(iter(m.d)))),
    lambda m: (m.d.clear(), m.d.update({1.0: 1})),
    d=_Made(lambda: {1: 1}),
)
way(
    "ordered dict",
    lambda m, h: h * next(iter(m.d.values())),
    lambda m: m.d.move_to_end("a"),
    d=_Made(lambda: collections.OrderedDict(a=2.0, b=3.0)),
)
way(
    "default dict",
    lambda m, h: h * m.d["a"],
    lambda m: m.d.update(a=3.0),
    d=_Made(lambda: collections.defaultdict(float, a=2.0)),
)
way("set", lambda m, h: h * len(m.s), lambda m: m.s.add(2), s=_Made(lambda: {1}))
way(
    "deque", lambda m, h: h * m.q[0], lambda m: m.q.appendleft(3.0), q=_Made(lambda: collections.deque([2.0]))
)
way(
    "bytearray", lambda m, h: h * m.b[0], lambda m: m.b.__setitem__(0, 3), b=_Made(lambda: bytearray(b"\x02"))
)
way(
    "array",
    lambda m, h: h * m.b[0],
    lambda m: m.b.__setitem__(0, 3.0),
    b=_Made(lambda: array.array("d", [2.0])),
)
way(
    "counter", lambda m, h: h * m.c["a"], lambda m: m.c.update("a"), c=_Made(lambda: collections.Counter("a"))
)
way(
    "namespace",
    lambda m, h: h * m.n.scale,
    lambda m: setattr(m.n, "scale", 3.0),
    n=_Made(lambda: types.SimpleNamespace(scale=2.0)),
)


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    inner: dict[str, float] = dataclasses.field(default_factory=lambda: {"a": 2.0})


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Chosen(dict):
    """A dictionary of a class of its own."""


class Wanted(list):
    """A list of a class of its own."""


way(
    "field of a dataclass",
    lambda m, h: h * m.c.scale,
    lambda m: setattr(m.c, "scale", 3.0),
    c=_Made(Settings),
)
way("dataclass, replaced", lambda m, h: h * m.c.scale, put(c=Settings(3.0)), c=_Made(Settings))
way(
    "dict in a dataclass",
    lambda m, h: h * m.c.inner["a"],
    lambda m: m.c.inner.update(a=3.0),
    c=_Made(Settings),
)
way(
    "attributes of an object, all replaced",
    lambda m, h: h * m.n.scale,
    lambda m: setattr(m.n, "__dict__", {"scale": 3.0}),
    n=_Made(Settings),
)
way(
    "attributes of a function, all replaced",
    lambda m, h: h * m.act.scale,
    lambda m: setattr(m.act, "__dict__", {"scale": 3.0}),
    act=_Made(lambda: _with(lambda h: h, scale=2.0)),
)
way("slot", lambda m, h: h * m.s.scale, lambda m: setattr(m.s, "scale", 3.0), s=_Made(Slotted))
way(
    "dict of a class of its own",
    lambda m, h: h * m.d["a"],
    lambda m: m.d.update(a=3.0),
    d=_Made(lambda: Chosen(a=2.0)),
)
way(
    "list of a class of its own",
    lambda m, h: h * m.l[0],
    lambda m: m.l.__setitem__(0, 3.0),
    l=_Made(lambda: Wanted([2.0])),
)
way(
    "attribute of a list of a class of its own",
    lambda m, h: h * m.l.scale,
    lambda m: setattr(m.l, "scale", 3.0),
    l=_Made(lambda: _with(Wanted([2.0]), scale=2.0)),
)
way(
    "attribute of a function",
    lambda m, h: h * m.act.scale,
    lambda m: setattr(m.act, "scale", 3.0),
    act=_Made(lambda: _with(lambda h: h, scale=2.0)),
)
way("new attribute", lambda m, h: h * getattr(m, "scale", 2.0), put(scale=3.0))
way("attribute gone", lambda m, h: h * getattr(m, "scale", 2.0), lambda m: delattr(m, "scale"), scale=3.0)
way("numpy scalar", lambda m, h: h * float(m.scale), put(scale=np.float64(3.0)), scale=np.float64(2.0))
way(
    "numpy array, replaced",
    lambda m, h: h * float(m.a[0]),
    put(a=np.array([3.0])),
    a=_Made(lambda: np.array([2.0])),
)
way(
    "numpy array, written to",
    lambda m, h: h * float(m.a[0]),
    lambda m: m.a.__setitem__(0, 3.0),
    a=_Made(lambda: np.array([2.0])),
)
way(
    "large numpy array that is read-only, replaced",
    lambda m, h: h * float(m.a[0]),
    put(a=_read_only(3.0)),
    a=_Made(lambda: _read_only(2.0)),
)


def _with(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


# --- tensors


def _buffer(model: nn.Module, value: torch.Tensor | None) -> nn.Module:
    model.register_buffer("offset", value)
    return model


way(
    "tensor attribute of another size",
    lambda m, h: h + m.offset,
    put(offset=torch.full((3, 4), 3.0)),
    offset=torch.ones(4),
)
way(
    "tensor in a list, replaced",
    lambda m, h: h + m.l[0],
    lambda m: m.l.__setitem__(0, torch.full((4,), 3.0)),
    l=_Made(lambda: [torch.ones(4)]),
)
way(
    "tensor in a list, written to",
    lambda m, h: h + m.l[0],
    lambda m: m.l[0].add_(2.0),
    l=_Made(lambda: [torch.ones(4)]),
)
way(
    "tensor in a dict, written to",
    lambda m, h: h + m.d["a"],
    lambda m: m.d["a"].add_(2.0),
    d=_Made(lambda: {"a": torch.ones(4)}),
)
way(
    "tensor of an object, written to",
    lambda m, h: h + m.n.t,
    lambda m: m.n.t.add_(2.0),
    n=_Made(lambda: types.SimpleNamespace(t=torch.ones(4))),
)
WAYS.append(
    Way(
        "None buffer gets a tensor",
        lambda: _buffer(Reads(lambda m, h: h if m.offset is None else h + m.offset), None),
        lambda m: setattr(m, "offset", torch.ones(4)),
    )
)
way(
    "None parameter gets a tensor",
    lambda m, h: F.linear(h, torch.eye(4), m.layer.bias),
    lambda m: setattr(m.layer, "bias", None),
)
way(
    "weights tied",
    lambda m, h: m.other(h),
    lambda m: setattr(m.other, "weight", m.layer.weight),
    other=_Made(lambda: nn.Linear(4, 4)),
)
way("parameter frozen", times, lambda m: m.layer.weight.requires_grad_(False), scale=2.0)
way(
    "parameter replaced by one of another size",
    lambda m, h: h,
    lambda m: setattr(m, "layer", nn.Linear(4, 5)),
)
way(
    "parameter's data of another size",
    lambda m, h: h,
    lambda m: (
        setattr(m.layer.weight, "data", torch.ones(5, 4)),
        setattr(m.layer.bias, "data", torch.ones(5)),
    ),
)
way(
    "attribute of a parameter",
    lambda m, h: h * getattr(m.layer.weight, "scale", 2.0),
    lambda m: setattr(m.layer.weight, "scale", 3.0),
)

# --- modules

way("mode", lambda m, h: h * (2 if m.training else 3), lambda m: m.eval())
way(
    "mode of a submodule",
    lambda m, h: m.inner(h),
    lambda m: m.inner.eval(),
    inner=_Made(lambda: nn.BatchNorm1d(4)),
)
way("submodule replaced", lambda m, h: m.inner(h), put(inner=nn.Tanh()), inner=_Made(nn.ReLU))
way(
    "submodule to None",
    lambda m, h: h if m.inner is None else m.inner(h),
    put(inner=None),
    inner=_Made(nn.ReLU),
)
way(
    "layer put into a Sequential",
    lambda m, h: m.inner(h),
    lambda m: m.inner.append(nn.Tanh()),
    inner=_Made(lambda: nn.Sequential(nn.ReLU())),
)
way(
    "ModuleList, reordered",
    lambda m, h: m.inner[1](m.inner[0](h)),
    lambda m: m.inner.insert(0, m.inner.pop(1)),
    inner=_Made(lambda: nn.ModuleList([nn.ReLU(), nn.Tanh()])),
)
way(
    "setting of a submodule",
    lambda m, h: m.inner(h),
    lambda m: setattr(m.inner, "negative_slope", 0.5),
    inner=_Made(lambda: nn.LeakyReLU(0.1)),
)
way(
    "module in a list",
    lambda m, h: m.l[0](h),
    lambda m: m.l.__setitem__(0, nn.Tanh()),
    l=_Made(lambda: [nn.ReLU()]),
)
way(
    "setting of a module in a list",
    lambda m, h: m.l[0](h),
    lambda m: setattr(m.l[0], "negative_slope", 0.5),
    l=_Made(lambda: [nn.LeakyReLU(0.1)]),
)
way("mode of a module in a list", lambda m, h: m.l[0](h), lambda m: m.l[0].eval(), l=_Made(lambda: [Modal()]))
way("module frozen in a list", lambda m, h: m.l[0](h), lambda m: m.l[0].eval(), l=_Made(lambda: (Modal(),)))
way(
    "forward of a submodule's own",
    lambda m, h: m.inner(h),
    lambda m: setattr(m.inner, "forward", triple),
    inner=_Made(nn.ReLU),
)
way(
    "forward hook of a submodule",
    lambda m, h: h,
    lambda m: m.layer.register_forward_hook(lambda *a: a[2] * 2),
)
way(
    "forward pre-hook of a submodule",
    lambda m, h: h,
    lambda m: m.layer.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
)
way(
    "class of a submodule",
    lambda m, h: m.inner(h),
    lambda m: setattr(m.inner, "__class__", nn.Tanh),
    inner=_Made(nn.ReLU),
)
way("spectral norm", lambda m, h: h, lambda m: torch.nn.utils.parametrizations.weight_norm(m.layer))


class Modal(nn.Module):
    def forward(self, h):
        return h * 2 if self.training else h * 3


def _with_hook(put_on: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Reads(lambda m, h: h)
        put_on(model.layer)
        return model

    return make


def _hook_of_old_spectral_norm(model: Any) -> Any:
    return next(iter(model.layer._forward_pre_hooks.values()))


_old_spectral_norm = _with_hook(torch.nn.utils.spectral_norm)


class Hook:
    """A hook that is an object."""

    def __call__(self, module, args):
        return (args[0] * (2 if module.training else 3),)


WAYS.append(Way("mode, read by a hook of torch's", _old_spectral_norm, lambda m: m.layer.eval()))
WAYS.append(
    Way(
        "attribute of a hook of torch's",
        _old_spectral_norm,
        lambda m: setattr(_hook_of_old_spectral_norm(m), "n_power_iterations", 0),
    )
)
WAYS.append(
    Way(
        "mode, read by a hook that is an object",
        _with_hook(lambda layer: layer.register_forward_pre_hook(Hook())),
        lambda m: m.layer.eval(),
    )
)


# --- globals, closures, defaults

SCALE = 2.0
TABLE = {"a": 2.0}
LEVELS = [2.0]
CONFIG = Settings()
ACT = double
OFFSET = torch.ones(4)


def change_global(name: str, value: Any) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Return functions that set a variable of this module, and restore it."""
    before = globals()[name]
    return (lambda model: globals().__setitem__(name, value)), (lambda: globals().__setitem__(name, before))


way("global number", lambda m, h: h * SCALE, *change_global("SCALE", 3.0))
way("global function", lambda m, h: ACT(h), *change_global("ACT", triple))
way("global tensor", lambda m, h: h + OFFSET, *change_global("OFFSET", torch.full((4,), 3.0)))
way(
    "global tensor, written to",
    lambda m, h: h + OFFSET,
    lambda m: OFFSET.add_(2.0),
    lambda: OFFSET.fill_(1.0),
)
way(
    "value of a global dict",
    lambda m, h: h * TABLE["a"],
    lambda m: TABLE.update(a=3.0),
    lambda: TABLE.update(a=2.0),
)
way(
    "item of a global list",
    lambda m, h: h * LEVELS[0],
    lambda m: LEVELS.__setitem__(0, 3.0),
    lambda: LEVELS.__setitem__(0, 2.0),
)
way(
    "field of a global object",
    lambda m, h: h * CONFIG.scale,
    lambda m: setattr(CONFIG, "scale", 3.0),
    lambda: setattr(CONFIG, "scale", 2.0),
)
way("global class, replaced", lambda m, h: Doubler()(h), *change_global("Doubler", Tripler))
way(
    "global that hides a builtin",
    lambda m, h: h * float(abs(-2.0)),
    lambda m: globals().update(abs=lambda v: 3.0),
    lambda: globals().pop("abs"),
)
way(
    "function in torch.nn.functional",
    lambda m, h: F.softsign(h),
    lambda m: setattr(F, "softsign", triple),
    functools.partial(setattr, F, "softsign", F.softsign),
)


def _closure(value: Any) -> Callable[[Any, Any], Any]:
    def compute(m, h):
        return h * value

    def change(to: Any) -> None:
        nonlocal value
        value = to

    compute.change = change
    return compute


def _closed(make: Callable[[], Any]) -> nn.Module:
    return Reads(make())


WAYS.append(Way("closure variable", lambda: Reads(_closure(2.0)), lambda m: m.compute.change(3.0)))


def _default(scale: float = 2.0) -> float:
    return scale


way(
    "default of a function",
    lambda m, h: h * _default(),
    lambda m: setattr(_default, "__defaults__", (3.0,)),
    lambda: setattr(_default, "__defaults__", (2.0,)),
)


def _keyword(*, scale: float = 2.0) -> float:
    return scale


way(
    "keyword default of a function",
    lambda m, h: h * _keyword(),
    lambda m: setattr(_keyword, "__kwdefaults__", {"scale": 3.0}),
    lambda: setattr(_keyword, "__kwdefaults__", {"scale": 2.0}),
)


def _coded() -> float:
    return 2.0


_BEFORE = _coded.__code__
way(
    "code of a function",
    lambda m, h: h * _coded(),
    lambda m: setattr(_coded, "__code__", (lambda: 3.0).__code__),
    lambda: setattr(_coded, "__code__", _BEFORE),
)


class Namespace:
    """A class as a namespace."""

    scale = 2.0
    table: ClassVar[dict[str, float]] = {"a": 2.0}

    @staticmethod
    def act(h):
        return h * 2

    @property
    def factor(self):
        return 2.0


way(
    "attribute of a global class",
    lambda m, h: h * Namespace.scale,
    lambda m: setattr(Namespace, "scale", 3.0),
    lambda: setattr(Namespace, "scale", 2.0),
)
way(
    "dict of a global class",
    lambda m, h: h * Namespace.table["a"],
    lambda m: Namespace.table.update(a=3.0),
    lambda: Namespace.table.update(a=2.0),
)
way(
    "static method",
    lambda m, h: Namespace.act(h),
    lambda m: setattr(Namespace, "act", staticmethod(triple)),
    lambda: setattr(Namespace, "act", staticmethod(double)),
)
way(
    "property of a class",
    lambda m, h: h * m.n.factor,
    lambda m: setattr(Namespace, "factor", property(lambda s: 3.0)),
    lambda: setattr(Namespace, "factor", property(lambda s: 2.0)),
    n=_Made(Namespace),
)


# --- classes and methods of the model


class Methods(nn.Module):
    """A model whose class is changed; defined again for each test."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def act(self, h):
        return h * self.scale

    def forward(self, x):
        return self.act(self.layer(x))


def of_class(name: str, change: Callable[[Any], Any]) -> None:
    """Register a change of the class of a model; each model has a class of its own."""

    def make() -> nn.Module:
        kind = type("Changed", (Methods,), {"act": lambda self, h: h * self.scale, "scale": 2.0})
        return kind()

    WAYS.append(Way(name, make, change))


of_class("class attribute", lambda m: setattr(type(m), "scale", 3.0))
of_class("instance attribute in front of a class attribute", lambda m: setattr(m, "scale", 3.0))
of_class("method of the class", lambda m: setattr(type(m), "act", lambda self, h: h * 3))
WAYS.append(
    Way(
        "method that Python calls",
        lambda: Reads(lambda m, h: m.act(h), act=Doubler()),
        lambda m: setattr(Doubler, "__call__", lambda self, h: h * 3),
        functools.partial(setattr, Doubler, "__call__", Doubler.__call__),
    )
)
of_class("method of the instance", lambda m: setattr(m, "act", triple))
of_class(
    "new method in front of a base's",
    lambda m: setattr(type(m), "forward", lambda self, x: self.layer(x) * 3),
)
of_class("forward of the instance", lambda m: setattr(m, "forward", lambda x: m.layer(x) * 3))

WAYS.append(
    Way(
        "method of a base class",
        Methods,
        lambda m: setattr(Methods, "act", lambda self, h: h * 3),
        functools.partial(setattr, Methods, "act", Methods.act),
    )
)
WAYS.append(
    Way(
        "method of a layer of torch's",
        lambda: Reads(lambda m, h: m.inner(h), inner=nn.Softsign()),
        lambda m: setattr(nn.Softsign, "forward", lambda self, h: h * 3),
        functools.partial(setattr, nn.Softsign, "forward", nn.Softsign.forward),
    )
)


# --- Functions


class Square(torch.autograd.Function):
    power = 2

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**Square.power

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


way("Function class, replaced", lambda m, h: Square.apply(h), *change_global("Square", Cube))
way(
    "forward of a Function",
    lambda m, h: Square.apply(h),
    lambda m: setattr(Square, "forward", Cube.forward),
    functools.partial(setattr, Square, "forward", Square.__dict__["forward"]),
)
way(
    "backward of a Function",
    lambda m, h: Square.apply(h),
    lambda m: setattr(Square, "backward", Cube.backward),
    functools.partial(setattr, Square, "backward", Square.__dict__["backward"]),
)
way(
    "class attribute of a Function",
    lambda m, h: Square.apply(h),
    lambda m: setattr(Square, "power", 3),
    functools.partial(setattr, Square, "power", 2),
)
way("Function as an attribute", lambda m, h: m.function.apply(h), put(function=Cube), function=Square)
way("bound apply as an attribute", lambda m, h: m.act(h), put(act=Cube.apply), act=Square.apply)
way("number for a Function", lambda m, h: Powered.apply(h, m.power), put(power=3), power=2)


class Powered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, power):
        ctx.save_for_backward(x)
        ctx.power = power
        return x**power

    @staticmethod
    def backward(ctx, grad):
        return ctx.power * ctx.saved_tensors[0] ** (ctx.power - 1) * grad, None


# --- torch's settings


def _global_hook(model: Any) -> None:
    model.handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    _HANDLES.append(model.handle)


_HANDLES: list[Any] = []
way("hook of all modules", lambda m, h: h, _global_hook, lambda: _HANDLES.pop().remove())
way(
    "default dtype",
    lambda m, h: h + torch.full((4,), 0.1).double().float(),
    lambda m: torch.set_default_dtype(torch.float64),
    lambda: torch.set_default_dtype(torch.float32),
)


# --- objects that no call reads


class Unread:
    """A class that no forward reads."""

    value = 1


no_matter("unused attribute", times, put(note="new"), scale=2.0, note="old")
no_matter("new, unused attribute", times, put(remark="new"), scale=2.0)
no_matter("the same number again", times, put(scale=float("2.0")), scale=2.0)
no_matter("an equal tuple", lambda m, h: h * m.t[0], put(t=tuple([2.0])), t=(2.0,))
no_matter("values of a parameter", times, lambda m: m.layer.weight.data.add_(1.0), scale=2.0)
no_matter(
    "a parameter's data of the same size",
    times,
    lambda m: setattr(m.layer.weight, "data", torch.ones(4, 4)),
    scale=2.0,
)
no_matter(
    "a parameter replaced by one of its form",
    times,
    lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(4, 4))),
    scale=2.0,
)
no_matter(
    "values of a tensor attribute",
    lambda m, h: h + m.offset,
    lambda m: m.offset.add_(1.0),
    offset=_Made(lambda: torch.ones(4)),
)
no_matter("state_dict hook", times, lambda m: m.register_state_dict_post_hook(lambda *a: None), scale=2.0)
no_matter(
    "method that nobody calls",
    times,
    lambda m: setattr(Reads, "helper", triple),
    lambda: delattr(Reads, "helper"),
    scale=2.0,
)
no_matter("unused global", times, *change_global("CONFIG", Settings(3.0)), scale=2.0)
no_matter(
    "an equal numpy array",
    lambda m, h: h * float(m.a[0]),
    put(a=np.array([2.0])),
    a=_Made(lambda: np.array([2.0])),
)
no_matter("an equal list", lambda m, h: h * m.l[0], put(l=[2.0]), l=_Made(lambda: [2.0]))
no_matter(
    "tensor attribute, replaced by one of its form",
    lambda m, h: h + m.offset,
    put(offset=torch.full((4,), 3.0)),
    offset=torch.ones(4),
)
