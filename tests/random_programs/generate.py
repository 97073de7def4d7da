"""Draws programs. One seed gives one program, on every machine and in every process."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace

from tests.random_programs.function_templates import HABITS, FunctionPlan
from tests.random_programs.mutable_attributes import HELD
from tests.random_programs.operators import OF_HELD, OF_NUMBERS, OF_PARTS, OPERATORS, TIES, VARIED
from tests.random_programs.program import (
    GIVEN,
    SHARES,
    SIZES,
    Action,
    Program,
    Statement,
    fallbacks,
    is_conditional,
)
from tests.random_programs.submodules import HIDDEN, HOOKED, PARTS

UNDER = (
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(flag):",
    "with torch.set_grad_enabled(self.flag):",
    "if self.training:",
    "if self.flag:",
    "if flag:",
    "if x0.shape[0] > 1:",
    "if torch.is_grad_enabled():",
    "if x0.requires_grad:",
    "for _ in range(2):",
)
INFERENCE = (
    "with torch.inference_mode():",
    "with torch.inference_mode():",
    "with torch.inference_mode(False):",
    "with torch.no_grad(), torch.inference_mode(False):",
)
CALL_MODES = (
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.enable_grad()",
    "torch.set_grad_enabled(False)",
)
# A Function whose output is a view, an input or written to is rare, and so drawn less often.
_RARE = {"random", "none", "workspace", "dirty", "input", "view", "outside"}
_RARE |= {"attribute", "saved buffer", "first kept"}
# Writes to one of two arguments that share memory.
_WRITES = ("write_mul", "write_column", "write_tanh", "write_transposed", "write_detached")


def generate(seed: int, without: Collection[str] = ()) -> Program:
    """Draw a program.

    Args:
        seed: any number.
        without: operators, ``habit=choice`` pairs, actions, lines in front of a statement and names of
            ``VARIATIONS`` that are not drawn.
    """
    drawn = _settled(_Generator(random.Random(seed), frozenset(without)).program())
    return _varied(random.Random(f"variations of {seed}"), drawn, without)


def _settled(program: Program) -> Program:
    """Return the program without a backward that overwrites, in one pass, a gradient that it has returned.

    Autograd holds that gradient while it waits for others, so that eager's sum depends on the nodes' order.
    """
    runs = [s.name for s in program.body for _ in range(2 if s.under.startswith("for") else 1)]
    functions = tuple(
        replace(plan, gradient="plain")
        if plan.gradient == "workspace" and runs.count(f"F{number}") > 1
        else plan
        for number, plan in enumerate(program.functions)
    )
    return replace(program, functions=functions)


def _varied(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """Return the program with features of a separate generator, which leaves the rest of it as it is."""
    script = []
    for action in program.script:
        if action.kind == "call":
            strided, out_of_range = draw.random() < 0.15, draw.random() < 0.04
            script.append(replace(action, strided=strided, high=6 if out_of_range else 4))
        else:
            script.append(action)
    optimizer = draw.choice(("SGD", "SGD", "AdamW"))
    body = tuple(_in_inference_mode(draw, statement, without) for statement in program.body)
    varied = replace(program, body=body, script=tuple(script), optimizer=optimizer)
    varied = _holding(draw, varied, without)
    count = draw.choice((0, 1, 1, 2))
    for name in draw.sample([*VARIATIONS], count):
        if name not in without:
            varied = VARIATIONS[name](draw, varied, without)
    return varied


def _holding(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """Return the program with statements that read an object that the model holds and the script changes."""
    names = [name for name, operator in OF_HELD.items() if operator not in without]
    plain = _maps(program)
    if not names or not plain or draw.random() > 0.25:
        return program
    body, script = list(program.body), list(program.script)
    for _ in range(draw.choice((1, 1, 2))):
        name, place = draw.choice(names), draw.choice(plain)
        body[place] = replace(body[place], name=OF_HELD[name])
        if HELD[name].change and "change held" not in without:
            action = Action("change held", held=name)
            script.insert(draw.randint(0, len(script)), action)
    return replace(program, body=tuple(body), script=tuple(script))


def _maps(program: Program) -> list[int]:
    """Indices of the statements that another one from floats to floats may replace."""
    return [i for i, s in enumerate(program.body) if program.signature(s) == ("x", "x")]


def _with_operators(draw: random.Random, program: Program, names: Sequence[str]) -> Program:
    """Return the program with operators that replace others, if it has statements to replace."""
    body = list(program.body)
    places = _maps(program)
    for place, name in zip(draw.sample(places, min(len(names), len(places))), names, strict=False):
        body[place] = replace(body[place], name=name)
    return replace(program, body=tuple(body))


def _with_steps(
    draw: random.Random, program: Program, steps: Sequence[Action], without: Collection[str]
) -> Program:
    """Return the program with these steps in order, mostly behind a call, and one more call and backward."""
    script = list(program.script)
    first = next((i + 1 for i, action in enumerate(script) if action.kind == "call"), 0)
    start = 0 if draw.random() < 0.2 else first
    places = sorted(draw.randint(start, len(script)) for _ in steps)
    for moved, (place, step) in enumerate(zip(places, steps, strict=True)):
        script.insert(place + moved, step)
    number = 1 + max(program.called(), default=-1)
    script += [Action("call", number, requires_grad=draw.random() < 0.5), Action("backward", number)]
    return replace(program, script=tuple(a for a in script if a.kind not in without))


def _near_numbers(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """Return the program with numbers that are nearly 0 or nearly 1."""
    names = [name for name in OF_NUMBERS if name not in without]
    return _with_operators(draw, program, draw.sample(names, draw.choice((1, 2))))


def _tied(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """Return the program with parameters that are tied, untied or replaced between calls."""
    program = _with_operators(draw, program, draw.sample(("linear", "other", "functional_linear", "tied"), 2))
    code = " ".join(OPERATORS[s.name].code for s in program.body if s.name in OPERATORS)
    members = set(re.findall(r"self\.(\w+)", code))
    known = [[name for name in names if name.split(".")[0] in members] for names in TIES]
    known = [names for names in known if len(names) > 1]
    if not known:
        return program
    names = tuple(draw.sample(draw.choice(known), 2))
    kinds = draw.choice(
        (("tie",), ("tie", "untie"), ("replace parameter",), ("tie", "replace parameter"), ("untie", "tie"))
    )
    return _with_steps(draw, program, [Action(kind, names=names) for kind in kinds], without)


def _sharing(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """Return the program with calls whose tensors share memory, and mostly a write to one of them."""
    readers = [
        (i, place)
        for i, s in enumerate(program.body)
        for place, kind in enumerate(program.signature(s)[0])
        if kind == "x"
    ]
    if not readers:
        return program
    body = list(program.body)
    i, place = draw.choice(readers)
    inputs = list(body[i].inputs)
    inputs[place] = "y0"
    body[i] = replace(body[i], inputs=tuple(inputs))
    if draw.random() < 0.7:
        write = Statement(draw.choice(_WRITES), (draw.choice(("x0", "y0")),), ())
        body.insert(draw.randint(0, len(body)), write)
    script = [
        replace(
            a,
            shares=draw.choice(SHARES) if draw.random() < 0.7 else "",
            # A write to an autograd leaf is an error, which ends the program.
            requires_grad=draw.random() < 0.2,
        )
        if a.kind == "call"
        else a
        for a in _with_steps(draw, program, (), without).script
    ]
    return replace(program, body=tuple(body), script=tuple(script))


def _with_part(names: Collection[str]) -> Variation:
    def vary(draw: random.Random, program: Program, without: Collection[str]) -> Program:
        """Return the program with a module of ``PARTS``, which the script changes."""
        allowed = [name for name in names if OF_PARTS[name] not in without]
        if not allowed or not _maps(program):
            return program
        name = draw.choice(allowed)
        program = _with_operators(draw, program, [OF_PARTS[name]])
        count = len(PARTS[name].changes)
        changes = draw.sample(range(count), min(count, draw.choice((1, 2, 2, 3))))
        steps = [Action("change part", held=name, change=change) for change in changes]
        if draw.random() < 0.5:
            steps.insert(draw.randint(0, len(steps)), Action(draw.choice(("eval", "eval", "train"))))
        return _with_steps(draw, program, steps, without)

    return vary


Variation = Callable[[random.Random, Program, Collection[str]], Program]
VARIATIONS: dict[str, Variation] = {
    "numbers": _near_numbers,
    "ties": _tied,
    "memory": _sharing,
    "hidden": _with_part(HIDDEN),
    "hooks": _with_part(HOOKED),
}


def features(program: Program) -> set[str]:
    """Return the members of ``FEATURES`` that a program has."""
    names = {statement.name for statement in program.body}
    found = {form_of(name) for name in names & OF_NUMBERS.keys()}
    found |= {f"writes={plan.writes}" for i, plan in enumerate(program.functions) if f"F{i}" in names}
    if any("y0" in statement.inputs for statement in program.body):
        found |= {f"shares={action.shares}" for action in program.script}
    found |= {action.kind for action in program.script}
    for action in program.script:
        if OF_PARTS.get(action.held) in names:
            found |= {action.held, f"{action.held}: {PARTS[action.held].changes[action.change]}"}
    return found & FEATURES


def form_of(number: str) -> str:
    """Return an operator of ``OF_NUMBERS`` without its number."""
    form, _, value = number.partition(" ")
    return f"{form} a number near {round(float(value))}"


# Each form of a variation; the programs of a few fixed seeds must have all of them.
FEATURES = {
    *map(form_of, OF_NUMBERS),
    *("tie", "untie", "replace parameter"),
    *(f"shares={name}" for name in SHARES),
    *(f"writes={name}" for name in HABITS["writes"][1:]),
    *PARTS,
    *(f"{name}: {change}" for name in ("teacher", "spectral norm") for change in PARTS[name].changes),
}


def _in_inference_mode(draw: random.Random, statement: Statement, without: Collection[str]) -> Statement:
    drawn, under = draw.random() < 0.04, draw.choice(INFERENCE)
    return (
        replace(statement, under=under)
        if drawn and not statement.under and under not in without
        else statement
    )


class _Generator:
    def __init__(self, source: random.Random, without: frozenset[str]) -> None:
        self._random = source
        self._without = without
        self._operators = [name for name in OPERATORS if name not in {*without, *VARIED}]
        self._known = dict(GIVEN)
        self._next = 1

    def program(self) -> Program:
        draw = self._random
        functions = tuple(self._function() for _ in range(draw.choice((1, 1, 2))))
        body: list[Statement] = []
        if draw.random() < 0.7:
            first = draw.choice(("linear", "other", "layer_norm", "batch_norm", "functional_linear"))
            body.append(Statement(first, (draw.choice(("x0", "x0", "y0")),), (self._new("x"),)))
        for _ in range(draw.randint(2, 9)):
            body += self._statement(functions, body)
        made = [name for name in self._known if name not in GIVEN]
        count = min(draw.choice((1, 1, 2, 3)), len(made))
        # The last value is returned, so that most statements matter.
        floats = [name for name in made if name[0] in "xvrs"]
        returns = [floats[-1] if floats else "x0", *draw.sample(made, count - 1)] if made else ["x0"]
        if draw.random() < 0.05:
            returns.append("x0")
        form = draw.choice(("tuple", "tuple", "dict", "nested"))
        return Program(functions, tuple(body), tuple(dict.fromkeys(returns)), form, self._script())

    def _function(self) -> FunctionPlan:
        draw = self._random
        chosen = {}
        for habit in (field.name for field in fields(FunctionPlan) if field.name in HABITS):
            choices = [c for c in HABITS[habit] if f"{habit}={c}" not in self._without]
            # Most habits are the simplest, so that values of a Function often reach other operators.
            plain = 0.3 if habit in ("body", "keeps", "returns") else 0.6
            choice = choices[0] if draw.random() < plain else draw.choice(choices)
            if choice in _RARE and draw.random() < 0.5:
                choice = choices[0]
            chosen[habit] = choice
        second = draw.choice(("", "", "x", "v"))
        return FunctionPlan(second=second, **chosen)

    def _statement(self, functions: tuple[FunctionPlan, ...], body: list[Statement]) -> list[Statement]:
        """Return a statement, after those that compute its inputs."""
        draw = self._random
        if draw.random() < 0.3:
            number = draw.randrange(len(functions))
            name, plan = f"F{number}", functions[number]
            inputs, outputs = plan.input_kinds, plan.output_kinds
        else:
            name = draw.choice(self._operators)
            inputs, outputs = OPERATORS[name].inputs, OPERATORS[name].outputs
        before: list[Statement] = []
        chosen = tuple(self._variable(kind, before) for kind in inputs)
        under = draw.choice(UNDER) if draw.random() < 0.12 else ""
        if under in self._without:
            under = ""
        made = tuple(self._new(kind) for kind in outputs)
        statement = Statement(name, chosen, made, under)
        if is_conditional(under) and fallbacks(statement) is None:
            statement = Statement(name, chosen, made)
        return [*before, statement]

    def _variable(self, kind: str, before: list[Statement]) -> str:
        """Return a variable of a kind: one of the last, or a new one."""
        found = [name for name, known in self._known.items() if known == kind]
        if found and (kind in "xk" or self._random.random() < 0.7):
            return found[-1] if self._random.random() < 0.5 else self._random.choice(found)
        makers = {
            "m": ("positive",),
            "v": ("parameter", "gain", "mean_columns", "buffer"),
            "r": ("sum_rows", "column", "mean_rows"),
            "s": ("mean_all", "alpha", "cross_entropy"),
        }
        allowed = [name for name in makers[kind] if name not in self._without] or makers[kind]
        name = self._random.choice(allowed)
        inputs = tuple(self._variable(k, before) for k in OPERATORS[name].inputs)
        new = self._new(kind)
        before.append(Statement(name, inputs, (new,)))
        return new

    def _new(self, kind: str) -> str:
        name = f"{kind}{self._next}"
        self._next += 1
        self._known[name] = kind
        return name

    # --- the script

    def _script(self) -> tuple[Action, ...]:
        draw = self._random
        actions: list[Action] = []
        calls = 0
        for _ in range(draw.choice((1, 2, 2, 3, 4))):
            if draw.random() < 0.25:
                actions.append(self._between())
            for _ in range(draw.choice((1, 1, 1, 2))):
                actions.append(self._call(calls))
                calls += 1
            actions += self._after(calls)
        return tuple(a for a in actions if not {a.kind, a.under} & self._without)

    def _call(self, number: int) -> Action:
        draw = self._random
        return Action(
            "call",
            number,
            rows=draw.choice(SIZES) if draw.random() < 0.4 else SIZES[0],
            requires_grad=draw.random() < 0.6,
            under=draw.choice(CALL_MODES) if draw.random() < 0.15 else "",
            flag=draw.random() < 0.5,
        )

    def _between(self) -> Action:
        draw = self._random
        kind = draw.choice(
            ("eval", "train", "flag", "freeze", "thaw", "write parameter", "write buffer", "zero")
        )
        return Action(kind, flag=draw.random() < 0.5)

    def _after(self, calls: int) -> list[Action]:
        """Return the actions after some calls: writes, backward passes, a step."""
        draw = self._random
        number = draw.randrange(calls)
        actions: list[Action] = []
        if draw.random() < 0.1:
            actions.append(Action(draw.choice(("write output", "write input")), number))
        chance = draw.random()
        if chance < 0.1:
            return actions
        if chance < 0.2:
            actions.append(Action("gradient", number, retain=draw.random() < 0.3))
        elif chance < 0.35:
            actions += [Action("backward", number, retain=True), Action("backward", number)]
        elif chance < 0.4:
            actions += [Action("backward", i) for i in range(calls)]
        else:
            actions.append(Action("backward", calls - 1))
        if draw.random() < 0.5:
            actions.append(Action("step"))
            if draw.random() < 0.7:
                actions.append(Action("zero", flag=draw.random() < 0.7))
        return actions
