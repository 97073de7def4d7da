"""Makes a failing program smaller for as long as it fails in the same way.

Delta debugging: steps of the script, statements and returned values are left out in halves, quarters and one
by one; then each habit, grad mode, size and flag is set to its simplest. A candidate that is not a complete
program (a name without a definition) is not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tests.random_programs.function_templates import HABITS, FunctionPlan
from tests.random_programs.oracle import Verdict
from tests.random_programs.program import GIVEN, OF_A_CALL, SIZES, Action, Program, Statement, is_whole

Item = TypeVar("Item")


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 300) -> Program:
    """Return the smallest program found for which ``fails`` holds.

    Args:
        program: a program for which ``fails`` holds.
        fails: runs a program, and returns whether it fails.
        tries: maximum number of calls of ``fails``.
    """
    tried: set[Program] = {program}
    changed = True
    while changed:
        changed = False
        for ways in (_shorter_scripts, _shorter_bodies, _fewer_returns, _simpler):
            progress = True
            while progress:
                progress = False
                for candidate in ways(program):
                    if candidate in tried or not is_whole(candidate):
                        continue
                    if len(tried) > tries:
                        return program
                    tried.add(candidate)
                    if fails(candidate):
                        program, progress, changed = candidate, True, True
                        break
    return program


def same_failure(verdict: Verdict, first: Verdict) -> bool:
    """Return True if a smaller program fails as the first one did: in a value, in an error, or by a crash."""
    return verdict.kind == first.kind and _sort_of(verdict.reason) == _sort_of(first.reason)


def _sort_of(reason: str) -> str:
    """Return the sort of a failure, such as a value, an error or a crash, without its numbers and labels."""
    sorts = ("the process died", "no end within", "requires_grad", "random numbers", "values")
    for sort in (*sorts, "ORTModule: no error"):
        if sort in reason:
            return sort
    error = re.search(r"ORTModule: (\w+)", reason)
    return error.group(1) if error else "other"


def _without(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    """Yield the sequence without one half, one quarter, ... one item of it."""
    length = len(items)
    while length := length // 2:
        for start in range(0, len(items), length):
            yield (*items[:start], *items[start + length :])
    if len(items) == 1:
        yield ()


def _shorter_scripts(program: Program) -> Iterator[Program]:
    for script in _without(program.script):
        calls = {a.call for a in script if a.kind == "call"}
        kept = tuple(a for a in script if a.kind not in OF_A_CALL or a.call in calls)
        yield replace(program, script=kept)


def _shorter_bodies(program: Program) -> Iterator[Program]:
    for body in _without(program.body):
        yield _mended(program, body)


def _mended(program: Program, body: tuple[Statement, ...]) -> Program:
    """Return a program with fewer statements, in which earlier variables replace those that are gone."""
    gone = {o: s for s in program.body if s not in body for o in s.outputs}
    names = dict(GIVEN)
    renamed: dict[str, str] = {}

    def present(name: str) -> str:
        if name not in gone:
            return name
        if name not in renamed:
            # The removed statement's input, if it has the same kind; else the first variable of the kind.
            likely = [present(i) for i in gone[name].inputs if i not in gone or i in renamed]
            same = [n for n in (*likely, *names) if names.get(n) == name[0]]
            renamed[name] = same[0] if same else name
        return renamed[name]

    mended = []
    for statement in program.body:
        if statement in body:
            inputs = tuple(map(present, statement.inputs))
            mended.append(replace(statement, inputs=inputs))
            names.update({o: o[0] for o in statement.outputs})
        else:
            for output in statement.outputs:
                present(output)
    returns = tuple(dict.fromkeys(map(present, program.returns)))
    return replace(program, body=tuple(mended), returns=returns)


def _fewer_returns(program: Program) -> Iterator[Program]:
    for returns in _without(program.returns):
        if returns:
            yield replace(program, returns=returns)
    if program.form != "plain":
        yield replace(program, form="plain", returns=program.returns[:1])
        yield replace(program, form="tuple")
    # Another variable as the only result: statements behind it then matter only where they write.
    for statement in reversed(program.body):
        for output in statement.outputs:
            if output not in program.returns:
                yield replace(program, returns=(output,), form="plain")


def _simpler(program: Program) -> Iterator[Program]:
    if program.optimizer != "SGD":
        yield replace(program, optimizer="SGD")
    for i, statement in enumerate(program.body):
        for simple in _simpler_statements(program, statement):
            yield replace(program, body=(*program.body[:i], simple, *program.body[i + 1 :]))
    used = {int(s.name[1:]) for s in program.body if s.name[0] == "F"}
    for i in used:
        for plan in _simpler_functions(program.functions[i]):
            functions = (*program.functions[:i], plan, *program.functions[i + 1 :])
            yield _with_functions(program, functions)
    for i, action in enumerate(program.script):
        for simple in _simpler_actions(action):
            yield replace(program, script=(*program.script[:i], simple, *program.script[i + 1 :]))


def _simpler_statements(program: Program, statement: Statement) -> Iterator[Statement]:
    if statement.under:
        yield replace(statement, under="")
    kinds, _ = program.signature(statement)
    for i, (name, kind) in enumerate(zip(statement.inputs, kinds, strict=True)):
        for given, known in GIVEN.items():
            if known == kind and name not in GIVEN:
                yield replace(statement, inputs=(*statement.inputs[:i], given, *statement.inputs[i + 1 :]))
        if name == "y0":
            yield replace(statement, inputs=(*statement.inputs[:i], "x0", *statement.inputs[i + 1 :]))


def _simpler_functions(plan: FunctionPlan) -> Iterator[FunctionPlan]:
    if plan.second:
        yield replace(plan, second="")
    for habit, choices in HABITS.items():
        if getattr(plan, habit) != choices[0]:
            yield replace(plan, **{habit: choices[0]})


def _with_functions(program: Program, functions: tuple[FunctionPlan, ...]) -> Program:
    """Return the program with other Functions, and each call with their numbers of inputs and outputs."""
    changed = replace(program, functions=functions)
    body = []
    for statement in program.body:
        inputs, outputs = changed.signature(statement)
        body.append(
            replace(
                statement,
                inputs=statement.inputs[: len(inputs)],
                outputs=statement.outputs[: len(outputs)],
            )
        )
    lost = {
        o for old, new in zip(program.body, body, strict=True) for o in old.outputs if o not in new.outputs
    }
    returns = tuple(name for name in program.returns if name not in lost) or program.returns
    return replace(changed, body=tuple(body), returns=returns)


def _simpler_actions(action: Action) -> Iterator[Action]:
    plain = Action(action.kind, action.call)
    if action.kind == "call" and action.rows != SIZES[0]:
        yield replace(action, rows=SIZES[0])
    for field in ("requires_grad", "under", "flag", "retain", "strided", "high", "shares"):
        if getattr(action, field) != getattr(plain, field):
            yield replace(action, **{field: getattr(plain, field)})
