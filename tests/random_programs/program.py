"""A random program as data: Functions, the statements of a model's forward, and a script that uses the model.

A program is rendered to Python before it runs (``render``), so that the printed source is the one that ran.
Every part is a frozen dataclass, so that the shrinker makes smaller programs with ``dataclasses.replace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.random_programs.function_templates import FunctionPlan
from tests.random_programs.operators import OPERATORS

# Inputs of forward, with their kinds: see `operators` for the kinds.
GIVEN = {"x0": "x", "y0": "x", "k0": "k"}
SIZES = (3, 2, 1, 0, 5)


@dataclass(frozen=True)
class Statement:
    """One statement of forward.

    Attributes:
        name: an operator of ``OPERATORS``, or ``F0``, ``F1``, ... for a Function of the program.
        inputs: names of the variables that it reads.
        outputs: names of those that it makes; the first letter is the kind.
        under: a line in front of it that ends with a colon, as ``with torch.no_grad():``; empty for none.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    under: str = ""


@dataclass(frozen=True)
class Action:
    """One step of the script that uses the model.

    Attributes:
        kind: one of ``ACTIONS``.
        call: number of the call that is made, or to which the step refers.
        rows: size of the call's batch.
        requires_grad: whether the call's inputs require gradients.
        under: the grad mode of the call, as ``torch.no_grad()``; empty for the usual one.
        flag: the call's Python argument ``flag``, or the attribute's new value.
        retain: whether backward keeps its graph.
        strided: whether the call's tensors are in column-major order.
        high: exclusive upper bound of the call's indices; more than 4 is out of range for most operators.
        held: the object of ``held.HELD`` or the part of ``parts.PARTS`` that is changed.
        change: number of the part's change.
        names: names of the model's parameters to which the step refers.
        shares: memory that the call's tensors share; empty for none, or one of ``SHARES``.
    """

    kind: str
    call: int = 0
    rows: int = 3
    requires_grad: bool = False
    under: str = ""
    flag: bool = False
    retain: bool = False
    strided: bool = False
    high: int = 4
    held: str = ""
    change: int = 0
    names: tuple[str, ...] = ()
    shares: str = ""


SHARES = ("same", "alias", "rows", "columns", "expanded", "parameter")
# Actions that refer to a call, and those that do not.
OF_A_CALL = ("call", "backward", "gradient", "write output", "write input")
ACTIONS = (
    *OF_A_CALL,
    *("step", "zero", "eval", "train", "flag", "freeze", "thaw", "write parameter", "write buffer"),
    *("change held", "change part", "tie", "untie", "replace parameter"),
)


@dataclass(frozen=True)
class Program:
    """A model and its use.

    Attributes:
        functions: definitions of F0, F1, ...
        body: the statements of forward.
        returns: names of the variables that forward returns.
        form: how it returns them: ``plain``, ``tuple``, ``dict`` or ``nested``.
        script: the steps that use the model.
        optimizer: name of a class of ``torch.optim``.
    """

    functions: tuple[FunctionPlan, ...]
    body: tuple[Statement, ...]
    returns: tuple[str, ...]
    form: str
    script: tuple[Action, ...]
    optimizer: str = "SGD"

    @property
    def size(self) -> int:
        """Number of statements and steps."""
        return len(self.body) + len(self.script)

    def signature(self, statement: Statement) -> tuple[str, str]:
        """Kinds of a statement's inputs and of its outputs, a letter each."""
        if statement.name in OPERATORS:
            operator = OPERATORS[statement.name]
            return operator.inputs, operator.outputs
        plan = self.functions[int(statement.name[1:])]
        return plan.input_kinds, plan.output_kinds

    def called(self) -> Iterator[int]:
        """Numbers of the calls that the script makes."""
        return (action.call for action in self.script if action.kind == "call")


def is_whole(program: Program) -> bool:
    """Return True if every name is defined, with the right kind, before it is used."""
    known = dict(GIVEN)
    for statement in program.body:
        inputs, outputs = program.signature(statement)
        if "".join(known.get(name, "?") for name in statement.inputs) != inputs:
            return False
        if "".join(name[0] for name in statement.outputs) != outputs:
            return False
        if is_conditional(statement.under) and fallbacks(statement) is None:
            return False
        known.update({name: name[0] for name in statement.outputs})
    calls: set[int] = set()
    for action in program.script:
        if action.kind == "call":
            calls.add(action.call)
        elif action.kind in OF_A_CALL and action.call not in calls:
            return False
    return bool(calls) and bool(program.returns) and all(name in known for name in program.returns)


def is_conditional(under: str) -> bool:
    """Return True if the statement below such a line may not run."""
    return under.startswith("if ")


def fallbacks(statement: Statement) -> list[tuple[str, str]] | None:
    """Return for each output the input that replaces it if the statement does not run, or ``None``."""
    found = []
    for output in statement.outputs:
        same = [name for name in statement.inputs if name[0] == output[0] or GIVEN.get(name) == output[0]]
        if not same:
            return None
        found.append((output, same[0]))
    return found
