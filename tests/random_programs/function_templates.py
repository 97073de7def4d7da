"""The Functions of random programs: each makes a choice for every habit of authors of Functions.

The first choice of a habit is the simplest, which is what the shrinker tries. The derivatives are wrong on
purpose, so that a Function that was traced through would show.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

HABITS: dict[str, tuple[str, ...]] = {
    # what forward computes
    "body": ("half", "sine", "square", "numpy", "random", "exp", "temporary", "column", "clone"),
    # the argument that is not a tensor, and its position
    "constant": ("none", "float", "int", "string", "tuple", "bool", "None", "first"),
    "keeps": ("nothing", "input", "output", "middle", "view", "all"),
    "where": ("saved", "ctx", "outside"),
    # an additional result, or another one
    "returns": ("one", "rows", "mask", "index", "other float", "constant", "none", "view", "input", "dirty"),
    "gradient": ("plain", "incoming", "none", "numpy", "random", "double", "expand", "workspace", "view"),
    "style": ("forward", "setup_context"),
    "materialize": ("yes", "no"),
    "made": ("class", "closure", "subclass", "bound", "nested"),
    "once": ("no", "yes"),
    "reads": ("nothing", "needs_input_grad", "requires_grad"),
    # the tensor that backward writes to: a buffer, an attribute of ctx or saved; the first saved tensor
    "writes": ("nothing", "attribute", "saved buffer", "first kept"),
}

_BODIES = {
    "half": "{x} * 0.5",
    "sine": "torch.sin({x})",
    "square": "torch.tanh({x}) * {x}",
    "numpy": "torch.from_numpy(np.tanh({x}.detach().numpy()))",
    "random": "{x} * torch.rand({x}.shape).to({x})",
    "exp": "torch.exp(-{x}.abs())",
    "temporary": "{x}.clone().mul_(0.3)",
    "column": "torch.cat([{x}[:, 1:], {x}[:, :1]], 1)",
    "clone": "{x}.clone()",
}
_CONSTANTS = {
    "float": "0.1",
    "int": "3",
    "string": '"mean"',
    "tuple": "(2, 0.5)",
    "bool": "True",
    "None": "None",
    "first": "0.7",
}
_SCALES = {
    "float": "c",
    "int": "c",
    "string": "len(c)",
    "tuple": "c[1]",
    "bool": "float(c)",
    "None": "(1 if c is None else 2)",
    "first": "c",
}
# Kinds of the second result; the first is an x.
_EXTRA_KINDS = {"rows": "r", "mask": "m", "index": "k", "other float": "x"}
_EXTRA = {
    "rows": "{x}.sum(-1)",
    "mask": "{x} > 0",
    "index": "{x}.argmax(-1)",
    "other float": "y * 3",
    "constant": "7",
    "none": "None",
}


@dataclass(frozen=True)
class FunctionPlan:
    """One Function: a second tensor argument or none, and its habits.

    Attributes:
        second: kind of the second tensor argument; empty for none.
    """

    second: str = ""
    body: str = "half"
    constant: str = "none"
    keeps: str = "nothing"
    where: str = "saved"
    returns: str = "one"
    gradient: str = "plain"
    style: str = "forward"
    materialize: str = "yes"
    made: str = "class"
    once: str = "no"
    reads: str = "nothing"
    writes: str = "nothing"

    @property
    def gets_buffer(self) -> bool:
        """True if the last argument is a buffer of the model."""
        return self.writes in ("attribute", "saved buffer")

    @property
    def input_kinds(self) -> str:
        """Kind of each tensor argument, a letter each."""
        return "x" + self.second

    @property
    def output_kinds(self) -> str:
        """Kind of each variable that a call makes."""
        return "x" + _EXTRA_KINDS.get(self.returns, "")


def call_line(plan: FunctionPlan, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> str:
    """Return the statement that calls the Function."""
    arguments = _with_others(plan, list(inputs), _CONSTANTS.get(plan.constant, ""), "self.seen")
    targets = [*outputs, "_"] if plan.returns in ("constant", "none") else outputs
    call = f"apply_{name}" if plan.made == "bound" else f"{name}.apply"
    return f"{', '.join(targets)} = {call}({', '.join(arguments)})"


def source(plan: FunctionPlan, name: str) -> str:
    """Return the lines that define the Function."""
    return {"closure": _closure, "subclass": _subclass, "bound": _bound}.get(plan.made, _plain)(plan, name)


def _plain(plan: FunctionPlan, name: str, base: str = "torch.autograd.Function") -> str:
    methods = [_forward(plan, name), _backward(plan, name)]
    if plan.style == "setup_context":
        methods.insert(1, _setup_context(plan, name))
    body = "\n\n".join(methods)
    text = f"class {name}({base}):\n{textwrap.indent(body, '    ')}\n"
    if plan.where == "outside":
        text = f"kept_{name} = []\n\n\n{text}"
    if plan.gradient == "workspace":
        text = f"workspaces_{name} = {{}}\n\n\n{text}"
    if plan.made == "nested":
        text = _INNER.format(name=name) + "\n\n" + text
    return text


_INNER = """class Inner{name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 7
"""


def _closure(plan: FunctionPlan, name: str) -> str:
    inner = textwrap.indent(_plain(plan, name), "    ")
    return f"def make_{name}(power):\n{inner}\n    return {name}\n\n\n{name} = make_{name}(1.25)\n"


def _subclass(plan: FunctionPlan, name: str) -> str:
    base = "class Base(torch.autograd.Function):\n    power = 1.25\n"
    return f"{base.replace('Base', 'Base' + name)}\n\n{_plain(plan, name, 'Base' + name)}"


def _bound(plan: FunctionPlan, name: str) -> str:
    return f"{_plain(plan, name)}\n\napply_{name} = {name}.apply\n"


def _with_others(plan: FunctionPlan, tensors: list[str], constant: str, buffer: str) -> list[str]:
    """The arguments: tensors, the constant and the buffer, if the Function has them."""
    last = [buffer] if plan.gets_buffer else []
    if plan.constant == "none":
        return [*tensors, *last]
    return [constant, *tensors, *last] if plan.constant == "first" else [*tensors, constant, *last]


def _names(plan: FunctionPlan) -> list[str]:
    return ["a", "b"] if plan.second else ["a"]


def _power(plan: FunctionPlan, name: str) -> str:
    return {"closure": " * power", "subclass": f" * {name}.power"}.get(plan.made, "")


def _forward(plan: FunctionPlan, name: str) -> str:
    """``forward``, with the context's part unless ``setup_context`` has it."""
    context = plan.style != "setup_context"
    lines = []
    if plan.reads == "requires_grad":
        lines += ["assert not torch.is_grad_enabled()"]
    x = "a"
    if plan.made == "nested":
        lines.append(f"n = Inner{name}.apply(a)")
        x = "n"
    if plan.returns == "view":
        lines.append("y = a.view(-1, 4)")
    elif plan.returns == "input":
        lines.append("y = a")
    elif plan.returns == "dirty":
        lines += ["a.mul_(0.5)", "y = a"]
    else:
        second = {"x": " + b * 0.5", "v": " * b"}.get(plan.second, "")
        scale = f" * {_SCALES[plan.constant]}" if plan.constant != "none" else ""
        lines += [f"m = {_BODIES[plan.body].format(x=x)}", f"y = m{scale}{_power(plan, name)}{second}"]
    if plan.returns in _EXTRA:
        lines.append(f"e = {_EXTRA[plan.returns].format(x=x)}")
    if context:
        lines += _context_lines(plan, name, output="y", extra="e")
    lines.append("return y, e" if plan.returns in _EXTRA else "return y")
    first = ["ctx"] if context else []
    arguments = ", ".join([*first, *_with_others(plan, _names(plan), "c", "n")])
    return f"@staticmethod\ndef forward({arguments}):\n{_indented(lines)}"


def _setup_context(plan: FunctionPlan, name: str) -> str:
    names = _with_others(plan, _names(plan), "c", "n")
    lines = [f"{', '.join(names)}{',' if len(names) == 1 else ''} = inputs"]
    lines.append("y, e = output" if plan.returns in _EXTRA else "y = output")
    lines += _context_lines(plan, name, output="y", extra="e")
    return f"@staticmethod\ndef setup_context(ctx, inputs, output):\n{_indented(lines)}"


def kept_of(plan: FunctionPlan) -> list[str]:
    """Return the names, in forward, of the values that the Function keeps for backward."""
    middle = "m" if plan.style != "setup_context" and plan.returns not in ("view", "input", "dirty") else "a"
    kept = {
        "nothing": [],
        "input": _names(plan)[-1:],
        "output": ["y"],
        "middle": [middle],
        "view": ["a.view(-1)"],
        "all": [*_names(plan), "y"],
    }[plan.keeps]
    return [*kept, "n"] if plan.writes == "saved buffer" else kept


def _context_lines(plan: FunctionPlan, name: str, output: str, extra: str) -> list[str]:
    lines = []
    if plan.returns == "dirty":
        lines.append("ctx.mark_dirty(a)")
    if plan.returns in ("mask", "index", "other float"):
        lines.append(f"ctx.mark_non_differentiable({extra})")
    if plan.materialize == "no":
        lines.append("ctx.set_materialize_grads(False)")
    if plan.reads == "needs_input_grad":
        lines.append("ctx.needed = ctx.needs_input_grad")
    if plan.writes == "attribute":
        lines.append("ctx.seen = n")
    kept = kept_of(plan)
    if not kept:
        return lines
    if plan.where == "saved":
        return [*lines, f"ctx.save_for_backward({', '.join(kept)})"]
    listed = f"({', '.join(kept)},)"
    if plan.where == "ctx":
        return [*lines, f"ctx.kept = {listed}"]
    return [*lines, f"ctx.place = len(kept_{name})", f"kept_{name}.append({listed})"]


def _backward(plan: FunctionPlan, name: str) -> str:
    extra = ", *rest" if plan.returns in _EXTRA and plan.returns != "rows" else ""
    arguments = "ctx, g, h" if plan.returns == "rows" else f"ctx, g{extra}"
    lines = []
    kept = kept_of(plan)
    if kept:
        held = {"saved": "ctx.saved_tensors", "ctx": "ctx.kept"}.get(plan.where, f"kept_{name}[ctx.place]")
        lines.append(f"kept = {held}")
    if plan.returns == "rows":
        if plan.materialize == "no":
            lines += ["if g is None and h is None:", f"    return {', '.join(['None'] * _count(plan))}"]
            lines.append("g = (0 if g is None else g) + (0 if h is None else h.unsqueeze(1) * 0.5)")
        else:
            lines.append("g = g + h.unsqueeze(1) * 0.5")
        lines.append("g = g.expand(-1, 4)")
    elif plan.materialize == "no" and plan.returns in _EXTRA:
        lines += ["if g is None:", f"    return {', '.join(['None'] * _count(plan))}"]
    result = "g * 1.5"
    for i, what in enumerate(kept):
        tensor = f"kept[{i}]" + (".view(g.shape)" if what == "a.view(-1)" else "")
        result += f" * (torch.sigmoid({tensor}) + 0.5)"
    lines.append(f"r = {result}")
    lines += _gradient_lines(plan, name)
    second = {"x": "g * 0.25", "v": "(g * 0.25).sum(0)"}.get(plan.second)
    if plan.reads == "needs_input_grad" and second:
        position = 1 + (plan.constant == "first")
        lines.append("assert ctx.needed == ctx.needs_input_grad")
        second = f"{second} if ctx.needs_input_grad[{position}] else None"
    gradients = ["r", second] if second else ["r"]
    lines += _write_lines(plan, kept)
    lines.append(f"return {', '.join(_with_others(plan, gradients, 'None', 'None'))}")
    decorators = "@staticmethod\n" + ("@once_differentiable\n" if plan.once == "yes" else "")
    return f"{decorators}def backward({arguments}):\n{_indented(lines)}"


def _write_lines(plan: FunctionPlan, kept: list[str]) -> list[str]:
    return {
        "attribute": ["ctx.seen.add_(g.abs().sum() * 0.1)"],
        "saved buffer": ["kept[-1].add_(g.abs().sum() * 0.1)"],
        "first kept": ["kept[0].mul_(0.5)"] if kept else [],
    }.get(plan.writes, [])


def _gradient_lines(plan: FunctionPlan, name: str) -> list[str]:
    return {
        "plain": [],
        "incoming": ["r = g"],
        "none": ["r = None"],
        "numpy": ["r = torch.from_numpy(r.numpy() * 2)"],
        "random": ["r = r * torch.rand(r.shape).to(r)"],
        "double": ["r = r.double()"],
        "expand": ["r = r.sum(1, keepdim=True).expand(-1, 4)"],
        "workspace": [
            f"w = workspaces_{name}.setdefault((r.shape, r.dtype), torch.empty_like(r))",
            "w.copy_(r)",
            "r = w",
        ],
        "view": ["r = torch.cat([r, r])[: r.shape[0]]"],
    }[plan.gradient]


def _count(plan: FunctionPlan) -> int:
    return len(plan.input_kinds) + (plan.constant != "none") + plan.gets_buffer


def _indented(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")
