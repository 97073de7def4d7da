"""Modules with hooks of torch or of a user, or in plain containers of the model.

Each is called in forward, and the script changes it between calls: its mode, its weights, its hooks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One module, or the container that hides it.

    Attributes:
        made: the expression that makes it.
        module: the expression of the module, with ``{part}``.
        changes: statements of the script, with ``{part}`` and ``{module}``.
    """

    made: str
    module: str = "{part}"
    changes: tuple[str, ...] = ()


_MODES = ("{module}.eval()", "{module}.train()")
_WRITES = (
    "{module}.weight.data.mul_(1.5)",
    "{module}.weight.data = {module}.weight.data * 0.5",
    "{module}.weight = torch.nn.Parameter({module}.weight.detach() * 0.5, requires_grad=False)",
    "{module}.load_state_dict({{k: v * 2 for k, v in {module}.state_dict().items()}})",
    "for weight in {module}.parameters(): weight.data.lerp_(torch.ones_like(weight), 0.25)",
)
_LINEAR = "torch.nn.Linear(4, 4)"
_FROZEN = f"{_LINEAR}.requires_grad_(False)"
_NEW = f"{_FROZEN}.to({{module}}.weight)"

# Modules in plain Python containers of the model, as a teacher that is not trained with it.
HIDDEN = {
    "teacher": Part(f"[{_FROZEN}]", "{part}[0]", (*_WRITES, f"{{part}}[0] = {_NEW}")),
    "named teacher": Part(f'{{"now": {_FROZEN}}}', '{part}["now"]', (*_WRITES, f'{{part}}["now"] = {_NEW}')),
    "teacher in a tuple": Part(f"({_FROZEN},)", "{part}[0]", _WRITES),
    "teacher in an object": Part(
        f"types.SimpleNamespace(net={_FROZEN})", "{part}.net", (*_WRITES, f"{{part}}.net = {_NEW}")
    ),
    "trained in a list": Part(
        f"[{_LINEAR}]", "{part}[0]", (*_WRITES, "{module}.requires_grad_(False)", "{module}.zero_grad()")
    ),
    "norm in a list": Part(
        "[torch.nn.BatchNorm1d(4).requires_grad_(False).eval()]",
        "{part}[0]",
        (*_MODES, *_WRITES[:2], _WRITES[3]),
    ),
    "dropout in a list": Part("[torch.nn.Dropout(0.5)]", "{part}[0]", (*_MODES, "{module}.p = 0.25")),
}
_UTILS = "torch.nn.utils"
_REMOVED = f'{_UTILS}.parametrize.remove_parametrizations({{part}}, "weight")'
_HOOKS = "{part}._forward_pre_hooks"
HOOKED = {
    "spectral norm": Part(
        f"{_UTILS}.spectral_norm({_LINEAR})",
        changes=(*_MODES, f"{_UTILS}.remove_spectral_norm({{part}})", "{part}.weight_orig.data.mul_(0.5)"),
    ),
    "spectral parametrization": Part(
        f"{_UTILS}.parametrizations.spectral_norm({_LINEAR})",
        changes=(*_MODES, _REMOVED, "{part}.weight = torch.eye(4).to({part}.weight)"),
    ),
    "weight norm": Part(
        f"{_UTILS}.weight_norm({_LINEAR})",
        changes=(*_MODES, f"{_UTILS}.remove_weight_norm({{part}})", "{part}.weight_g.data.mul_(0.5)"),
    ),
    "weight parametrization": Part(
        f"{_UTILS}.parametrizations.weight_norm({_LINEAR})",
        changes=(*_MODES, _REMOVED, "{part}.weight = torch.eye(4).to({part}.weight)"),
    ),
    "dropped weights": Part(
        f'{_UTILS}.parametrize.register_parametrization({_LINEAR}, "weight", torch.nn.Dropout(0.5))',
        changes=(*_MODES, _REMOVED, "{part}.parametrizations.weight.eval()"),
    ),
    "positive weights": Part(
        f'{_UTILS}.parametrize.register_parametrization({_LINEAR}, "weight", torch.nn.Softplus())',
        changes=(*_MODES, "{part}.parametrizations.weight.original.data.mul_(0.5)"),
    ),
    "pruning": Part(
        f'{_UTILS}.prune.l1_unstructured({_LINEAR}, "weight", 0.5)',
        changes=(
            *_MODES,
            f'{_UTILS}.prune.remove({{part}}, "weight")',
            f'{_UTILS}.prune.random_unstructured({{part}}, "weight", 0.3)',
            "{part}.weight_mask.fill_(1)",
        ),
    ),
    "hook object": Part(
        f"hooked({_LINEAR}, Scaling())",
        changes=(
            *_MODES,
            f"for hook in {_HOOKS}.values(): hook.scale = 3.0",
            f"{_HOOKS}.clear()",
            "{part}.register_forward_hook(lambda module, inputs, output: output * 0.5)",
        ),
    ),
    "bound hook": Part(
        f"hooked({_LINEAR}, Scaling().scaled)",
        changes=(*_MODES, f"for hook in {_HOOKS}.values(): hook.__self__.scale = 3.0"),
    ),
}
PARTS = {**HIDDEN, **HOOKED}

# Definitions that the `made` expressions of some parts use.
PRELUDE = """\
class Scaling:
    scale = 2.0

    def __call__(self, module, inputs):
        return (inputs[0] * (self.scale if module.training else 0.5),)

    def scaled(self, module, inputs):
        return self(module, inputs)


def hooked(module, hook):
    module.register_forward_pre_hook(hook)
    return module
"""


def member(name: str) -> str:
    """The attribute of the model that holds a part."""
    return "part_" + name.replace(" ", "_")


def call(name: str, owner: str = "self") -> str:
    """The expression of a part's module."""
    return PARTS[name].module.format(part=f"{owner}.{member(name)}")


def change(name: str, number: int) -> str:
    """One of the script's lines that change a part."""
    part = f"model.{member(name)}"
    return PARTS[name].changes[number].format(part=part, module=call(name, "model"))
