"""Rendering of a program as Python source, and as a script that reproduces its failure by itself."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Collection

from tests.random_programs import function_templates, mutable_attributes, oracle, submodules
from tests.random_programs.operators import MEMBERS, NEEDS, OPERATORS, PLACES, UNTRAINED
from tests.random_programs.program import Action, Program, Statement, fallbacks, is_conditional

_IMPORTS = """\
import array
import collections
import configparser
import contextvars
import ctypes
import fractions
import functools
import itertools
import queue
import random
import threading
import types
import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch.autograd.function import once_differentiable
"""
_ARGUMENTS = ("x0", "y0", "k0", "flag", "scale")


def render(program: Program) -> str:
    """Return the source of the Functions, the model, and ``steps(run)``, which runs the script."""
    forward = _forward(program)
    used = [name for name in _ARGUMENTS if re.search(rf"\b{name}\b", forward.replace(".flag", ""))]
    arguments = list(dict.fromkeys(["x0", *used]))
    functions = [function_templates.source(plan, f"F{i}") for i, plan in _used_functions(program)]
    members = _members(forward, program)
    model = [
        "class Model(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(textwrap.indent(line, "        ") for line in members.values()),
        "",
        f"    def forward({', '.join(['self', *arguments])}):",
        textwrap.indent(forward, "        "),
        "",
    ]
    script = ["def steps(run):", "    model = run.model(Model())"]
    trained = bool(members.keys() - UNTRAINED)
    if any(a.kind in ("step", "zero") for a in program.script) and trained:
        script.append(f"    optimizer = torch.optim.{program.optimizer}(model.parameters(), lr=0.05)")
    # ORTModule copies a Function's output that shares its argument's memory, so a write does not reach that.
    copied = any(plan.returns in ("view", "input", "dirty") for _, plan in _used_functions(program))
    for action in program.script:
        if action.kind in ("step", "zero") and not trained:
            continue
        if action.kind == "write output" and copied:
            continue
        if not _is_about(action, forward, members):
            continue
        script += ["    " + line for line in _ACTIONS[action.kind](action, arguments)]
        if action.kind == "call" and not copied:
            script.append(f'    run.see_memory("output {action.call}", out_{action.call}, model)')
    script.append("    run.see_state(model)")
    for name in mutable_attributes.HELD:
        if mutable_attributes.reads(name) in forward:
            script.append(f'    run.see("held {name}", {mutable_attributes.reads(name, "model")})')
    for name in submodules.HIDDEN:
        if submodules.member(name) in members:
            script.append(f'    run.see_hidden("part {name}", {submodules.call(name, "model")})')
    prelude = [submodules.PRELUDE.rstrip()] if "hooked(" in "".join(members.values()) else []
    definitions = [*prelude, *(f.rstrip() for f in functions), "\n".join(model).rstrip()]
    text = "\n\n\n".join([*definitions, "\n".join(script)])
    return f"{_imports_for(text)}\n\n{text}\n"


def script(program: Program, dtype: str = "float32") -> str:
    """Return a script that needs torch and torch2ort alone, and fails if the program does."""
    judge = inspect.getsource(oracle).split("from __future__ import annotations\n", 1)[1].strip()
    imports, _, rest = render(program).partition("\n\n\n")
    main = (
        'if __name__ == "__main__":\n'
        f"    verdict = judge(steps, torch.{dtype})\n"
        "    print(verdict)\n"
        '    raise SystemExit(verdict.kind == "failed")\n'
    )
    rest = rest.strip("\n")
    return f"{judge}\n\n\n# --- the program\n\n{imports}\n\n\n{rest}\n\n\n{main}"


def _is_about(action: Action, forward: str, members: Collection[str]) -> bool:
    """Return True if the model has the object that a step changes."""
    if action.kind == "change held":
        return mutable_attributes.reads(action.held) in forward
    if action.kind == "change part":
        return submodules.member(action.held) in members
    return all(name.split(".")[0] in members for name in action.names)


def _imports_for(text: str) -> str:
    """The imports that the program uses; torch always."""
    lines = []
    for line in _IMPORTS.splitlines():
        name = line.split()[-1]
        if name == "torch" or re.search(rf"(?<![\w.]){name}\b", text):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _used_functions(program: Program) -> list[tuple[int, function_templates.FunctionPlan]]:
    names = {statement.name for statement in program.body}
    return [(i, plan) for i, plan in enumerate(program.functions) if f"F{i}" in names]


def _members(forward: str, program: Program) -> dict[str, str]:
    """Lines that make the model's members that forward and the script use, by name."""
    text = forward
    names = [name for name in MEMBERS if re.search(rf"self\.{name}\b", text)]
    if any(a.kind == "flag" for a in program.script) and "flag" not in names:
        names.append("flag")
    needed = {other for name in names for other in NEEDS.get(name, ())}
    return {name: line for name, line in MEMBERS.items() if name in needed or name in names}


def _forward(program: Program) -> str:
    lines = [line for statement in program.body for line in _statement(program, statement)]
    names = program.returns
    lines.append(
        {
            "plain": f"return {names[0]}",
            "tuple": f"return {', '.join(names)},",
            "dict": "return {" + ", ".join(f'"{n}": {n}' for n in names) + "}",
            "nested": f"return {names[0]}, [{', '.join(names[1:])}], 3",
        }[program.form if len(names) > 1 else "plain"]
    )
    return "\n".join(lines)


def _statement(program: Program, statement: Statement) -> list[str]:
    if statement.name in OPERATORS:
        places = dict(zip(PLACES, statement.inputs, strict=False))
        targets = dict(zip("op", statement.outputs, strict=False))
        line = OPERATORS[statement.name].code.format(**places, **targets)
    else:
        plan = program.functions[int(statement.name[1:])]
        line = function_templates.call_line(plan, statement.name, statement.inputs, statement.outputs)
    if not statement.under:
        return [line]
    before = (
        [f"{new} = {old}" for new, old in fallbacks(statement) or ()]
        if is_conditional(statement.under)
        else []
    )
    return [*before, statement.under, "    " + line]


# --- the script's steps

# Lines that make a call's float tensors where they share memory, by the names of `SHARES`.
_SHARED = {
    "": (),
    "same": ("x0_{i} = run.tensor({rows}, 4{how})", "y0_{i} = x0_{i}"),
    "alias": ("x0_{i} = run.tensor({rows}, 4{how})", "y0_{i} = x0_{i}[:]"),
    "rows": ("m0_{i} = run.tensor({more}, 4{how})", "x0_{i}, y0_{i} = m0_{i}[:-1], m0_{i}[1:]"),
    "columns": ("m0_{i} = run.tensor({rows}, 6{how})", "x0_{i}, y0_{i} = m0_{i}[:, :4], m0_{i}[:, 2:]"),
    "expanded": (
        "m0_{i} = run.tensor({rows}, 1{how})",
        "x0_{i} = m0_{i}.repeat(1, 4)",
        "y0_{i} = m0_{i}.expand(-1, 4)",
    ),
    "parameter": (
        "x0_{i} = run.tensor({rows}, 4{how})",
        "y0_{i} = next((p for p in model.parameters() if p.shape == (4, 4)), x0_{i})",
    ),
}


def _call(action: Action, arguments: list[str]) -> list[str]:
    shares = action.shares if "y0" in arguments else ""
    i, rows = action.call, 4 if shares == "parameter" else action.rows
    how = ", requires_grad=True" if action.requires_grad else ""
    how += ", strided=True" if action.strided else ""
    index = f"{rows}" if action.high == 4 else f"{rows}, high={action.high}"
    lines = [line.format(i=i, rows=rows, more=rows + 1, how=how) for line in _SHARED[shares]]
    given = []
    for name in arguments:
        if name in ("x0", "y0"):
            if not shares:
                lines.append(f"{name}_{i} = run.tensor({rows}, 4{how})")
            given.append(f"{name}_{i}")
        elif name == "k0":
            lines.append(f"k0_{i} = run.index({index})")
            given.append(f"k0_{i}")
        else:
            given.append(f"flag={action.flag}" if name == "flag" else f"scale={0.5 + 0.25 * action.flag}")
    tensors = [g for g in given if "=" not in g]
    tensors += [f"m0_{i}"] if lines[0].startswith("m0") else []
    call = f"out_{i} = model({', '.join(given)})"
    lines += [f"with {action.under}:", f"    {call}"] if action.under else [call]
    lines.append(f'run.see("output {i}", out_{i}, {", ".join(f"{t}={t}" for t in tensors)})')
    return lines


def _backward(action: Action, arguments: list[str]) -> list[str]:
    retain = ", retain_graph=True" if action.retain else ""
    return [f"run.backward(out_{action.call}{retain})", "run.see_gradients(model)"]


def _gradient(action: Action, arguments: list[str]) -> list[str]:
    retain = ", retain_graph=True" if action.retain else ""
    wanted = f"[*model.parameters(), x0_{action.call}]"
    return [f'run.gradient("gradients of {action.call}", out_{action.call}, {wanted}{retain})']


_ACTIONS = {
    "call": _call,
    "backward": _backward,
    "gradient": _gradient,
    "write output": lambda action, _: [f"run.write(out_{action.call})"],
    "write input": lambda action, _: ["with torch.no_grad():", f"    x0_{action.call}.mul_(0.5)"],
    "step": lambda action, _: ["optimizer.step()"],
    "zero": lambda action, _: [f"optimizer.zero_grad(set_to_none={action.flag})"],
    "eval": lambda action, _: ["model.eval()"],
    "train": lambda action, _: ["model.train()"],
    "flag": lambda action, _: [f"model.flag = {action.flag}"],
    "freeze": lambda action, _: [
        "for weight in [*model.parameters()][:1]:",
        "    weight.requires_grad_(False)",
    ],
    "thaw": lambda action, _: ["for weight in [*model.parameters()][:1]:", "    weight.requires_grad_(True)"],
    "write parameter": lambda action, _: [
        "for weight in [*model.parameters()][-1:]:",
        "    weight.data.mul_(0.5)",
    ],
    "change held": lambda action, _: [mutable_attributes.change(action.held)],
    "change part": lambda action, _: [submodules.change(action.held, action.change)],
    "tie": lambda action, _: [f"model.{action.names[1]} = model.{action.names[0]}"],
    "untie": lambda action, _: [
        f"model.{action.names[1]} = torch.nn.Parameter(model.{action.names[1]}.detach().clone())"
    ],
    "replace parameter": lambda action, _: [
        f"model.{name} = torch.nn.Parameter(model.{name}.detach() * 0.5)" for name in action.names[:1]
    ],
    "write buffer": lambda action, _: ["for buffer in model.buffers():", "    buffer.fill_(2)"],
}
