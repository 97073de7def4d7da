"""Draws programs. One seed gives one program, on every machine and in every process."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import fields, replace

from tests.random_programs.habits import HABITS, FunctionPlan
from tests.random_programs.held import HELD
from tests.random_programs.operators import OF_HELD, OPERATORS
from tests.random_programs.program import (
    GIVEN,
    SIZES,
    Action,
    Program,
    Statement,
    fallbacks,
    is_conditional,
)

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
# A Function whose output is a view, an input or written to is rare enough to be drawn less often.
_RARE = {"random", "none", "workspace", "dirty", "input", "view", "outside"}


def generate(seed: int, without: Collection[str] = ()) -> Program:
    """Draw a program.

    Args:
        seed: any number.
        without: operators, ``habit=choice`` pairs, actions and lines in front of a statement that are not
            drawn.
    """
    drawn = _settled(_Generator(random.Random(seed), frozenset(without)).program())
    return _varied(random.Random(f"variations of {seed}"), drawn, without)


def _settled(program: Program) -> Program:
    """The program without a backward that writes over the gradient that it gave before, in one pass.

    Autograd holds the first while it waits for others, so that eager's sum hangs on the order of its nodes.
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
    """The program with what is drawn apart, so that it leaves the rest of a seed's program as it is."""
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
    return _holding(draw, varied, without)


def _holding(draw: random.Random, program: Program, without: Collection[str]) -> Program:
    """The program, some of whose statements read an object that the model holds and the script changes."""
    names = [name for name, operator in OF_HELD.items() if operator not in without]
    plain = [i for i, s in enumerate(program.body) if program.signature(s) == ("x", "x")]
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
        self._operators = [name for name in OPERATORS if name not in {*without, *OF_HELD.values()}]
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
            # Most habits are the simplest, so that what is left of them meets the operators.
            plain = 0.3 if habit in ("body", "keeps", "returns") else 0.6
            choice = choices[0] if draw.random() < plain else draw.choice(choices)
            if choice in _RARE and draw.random() < 0.5:
                choice = choices[0]
            chosen[habit] = choice
        second = draw.choice(("", "", "x", "v"))
        return FunctionPlan(second=second, **chosen)

    def _statement(self, functions: tuple[FunctionPlan, ...], body: list[Statement]) -> list[Statement]:
        """A statement, after those that make what it needs."""
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
        """A variable of a kind: one of the last, or a new one."""
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
        """What is done after some calls: writes, backward passes, a step."""
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
