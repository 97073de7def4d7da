"""Random programs behave on ORTModule as in eager PyTorch; tests of their generator and their judge."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from tests.random_programs.function_templates import FunctionPlan
from tests.random_programs.generate import FEATURES, features, generate
from tests.random_programs.mutable_attributes import HELD
from tests.random_programs.operators import OF_HELD, OF_NUMBERS, OF_PARTS, OPERATORS, Operator
from tests.random_programs.oracle import Verdict, rounding
from tests.random_programs.program import SHARES, Action, Program, Statement, is_whole
from tests.random_programs.render import render, script
from tests.random_programs.runner import run, run_apart
from tests.random_programs.shrink import same_failure, shrink
from tests.random_programs.submodules import HIDDEN, HOOKED, PARTS

# Programs of about a minute, which contain each form of each variation.
SHORT = (
    *(54, 80, 94, 114, 188, 226, 232, 242, 276, 297, 408, 443, 471, 532, 538, 625, 654, 678, 690, 747, 756),
    *(827, 853, 866, 1026, 1175, 1237, 1350),
)
SEEDS = [*SHORT, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2001, 2301))]
HALF_SEEDS = [*SHORT[:2], *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2001, 2101))]
CALL = Action("call", requires_grad=True)
WRONG = Operator("x", "x", "{o} = {a} * (2 if torch.compiler.is_exporting() else 1)")
BRANCH = Operator("x", "x", "{o} = {a} if {a}.sum() > 0 else -{a}")
RAISES = Operator("x", "x", "{o} = {a}.expand(7, 5, 4)")


def with_operator(name: str, around: int = 0) -> Program:
    """A program of one statement, with irrelevant ones around it."""
    body = [Statement("linear", ("x0",), ("x1",))]
    body += [Statement("tanh", (f"x{i}",), (f"x{i + 1}",)) for i in range(1, 1 + around)]
    body.append(Statement(name, (f"x{1 + around}",), ("x90",)))
    body += [Statement("F0", (f"x{90 + i}",), (f"x{91 + i}",)) for i in range(around)]
    actions = [
        CALL,
        Action("backward"),
        *[Action("eval"), Action("call", 1, rows=2), Action("step")][:around],
    ]
    returns = (f"x{90 + around}", "x1")
    return Program((FunctionPlan(keeps="input"),), tuple(body), returns, "dict", tuple(actions))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_does_what_it_does_in_eager_pytorch_or_is_refused(seed) -> None:
    verdict = run(generate(seed))
    assert verdict.kind != "failed", (
        f"{verdict}\nTo shrink it: python -m tests.random_programs --seed {seed} --programs 1"
    )


@pytest.mark.parametrize("seed", HALF_SEEDS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str
)
def test_a_program_in_half_precision_does_what_it_does_in_eager_pytorch_or_is_refused(seed, dtype) -> None:
    verdict = run(generate(seed), dtype)
    name = str(dtype).removeprefix("torch.")
    assert verdict.kind != "failed", (
        f"{verdict}\nTo shrink it: python -m tests.random_programs --dtype {name} --seed {seed} --programs 1"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", HELD)
def test_what_a_model_holds_is_read_anew_after_a_change_or_refused(name) -> None:
    body = (Statement("F0", ("x0",), ("x1",)), Statement(OF_HELD[name], ("x1",), ("x2",)))
    change = [Action("change held", held=name)] if HELD[name].change else []
    calls = [Action("call", i, requires_grad=True) for i in range(3)]
    actions = (calls[0], Action("backward", 0), calls[1], *change, calls[2], Action("backward", 2))
    verdict = run(Program((FunctionPlan(keeps="input"),), body, ("x2",), "plain", actions))
    assert verdict.kind in (["passed"] if change else ["passed", "refused"]), verdict


def around(*statements: Statement, actions: Sequence[Action] = (), shares: str = "") -> Program:
    """A program of four calls with these statements behind a Function, and steps behind the first call."""
    body = [Statement("linear", ("x0",), ("x1",)), Statement("F0", ("x1",), ("x2",)), *statements]
    calls = [Action("call", i, shares=shares if i else "") for i in range(4)]
    script = [calls[0], Action("backward", 0), *actions, calls[1], Action("backward", 1)]
    script += [Action("eval"), calls[2], Action("train"), calls[3]]
    last = [output for s in body for output in s.outputs][-1]
    return Program((FunctionPlan(keeps="input"),), tuple(body), (last,), "plain", tuple(script))


@pytest.mark.long
@pytest.mark.parametrize("number", OF_NUMBERS)
def test_a_number_near_0_or_1_is_that_number(number) -> None:
    verdict = run(around(Statement(number, ("x2",), ("x3",))))
    assert verdict.kind in ("passed", "unstable"), verdict


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for name, part in PARTS.items() for change in range(len(part.changes))],
)
def test_a_part_does_what_it_does_in_eager_pytorch_after_a_change_or_is_refused(name, change) -> None:
    actions = [Action("change part", held=name, change=change)]
    verdict = run(around(Statement(OF_PARTS[name], ("x2",), ("x3",)), actions=actions))
    assert verdict.kind != "failed", verdict


@pytest.mark.long
@pytest.mark.parametrize("written", ["x0", "y0"])
@pytest.mark.parametrize("shares", SHARES)
def test_a_write_reaches_an_argument_of_the_same_memory_or_is_refused(shares, written) -> None:
    statements = Statement("write_mul", (written,), ()), Statement("add", ("x0", "y0"), ("x3",))
    verdict = run(around(*statements, shares=shares))
    assert verdict.kind != "failed", verdict


def test_a_seed_gives_one_whole_program() -> None:
    for seed in range(300):
        program = generate(seed)
        assert is_whole(program), seed
        assert render(program) == render(generate(seed))
        compile(render(program), "program", "exec")


def test_the_programs_of_the_fixed_seeds_have_each_form_of_each_variation() -> None:
    assert FEATURES - {feature for seed in SHORT for feature in features(generate(seed))} == set()


@pytest.mark.parametrize(
    ("variation", "forms"),
    [
        ("ties", {"tie", "untie", "replace parameter"}),
        ("memory", {f"shares={name}" for name in SHARES}),
        ("hidden", set(HIDDEN)),
        ("hooks", set(HOOKED)),
        ("numbers", {form for form in FEATURES if " a number near " in form}),
    ],
)
def test_a_variation_that_is_excluded_is_not_drawn(variation, forms) -> None:
    assert not any(forms & features(generate(seed, (variation,))) for seed in range(300))


def test_what_is_excluded_is_not_drawn() -> None:
    without = ("sigmoid", "keeps=input", "step", "torch.no_grad()", "if flag:")
    for seed in range(100):
        program = generate(seed, without)
        assert "sigmoid" not in {s.name for s in program.body}
        assert "input" not in {plan.keeps for plan in program.functions}
        assert "step" not in {action.kind for action in program.script}
        assert not {"torch.no_grad()", "if flag:"} & {x.under for x in (*program.body, *program.script)}


def test_a_backward_that_gives_its_workspace_away_runs_once_in_a_pass() -> None:
    programs = [generate(seed) for seed in range(400)]
    runs = [
        sum(1 + s.under.startswith("for") for s in program.body if s.name == f"F{number}")
        for program in programs
        for number, plan in enumerate(program.functions)
        if plan.gradient == "workspace"
    ]
    assert runs
    assert max(runs) == 1


@pytest.mark.long
def test_a_planted_difference_is_found_and_shrunk_to_a_script_that_fails(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(OPERATORS, "planted", WRONG)
    program = with_operator("planted", around=3)
    verdict = run(program)
    assert verdict.kind == "failed"
    assert verdict.reason.startswith("output 0['x93']: values ")
    small = shrink(program, lambda candidate: same_failure(run(candidate), verdict), tries=60)
    assert [s.name for s in small.body] == ["planted"]
    assert [a.kind for a in small.script] == ["call"]
    file = tmp_path / "program.py"
    file.write_text(script(small))
    result = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 1, result.stderr
    assert re.match(r"failed: output [01]: values ", result.stdout)


def test_a_refusal_is_told_from_a_failure_and_quotes_the_program(monkeypatch) -> None:
    monkeypatch.setitem(OPERATORS, "branch", BRANCH)
    verdict = run(with_operator("branch"))
    assert verdict.kind == "refused"
    assert verdict.reason.startswith("ExportError: Model: the model's Python code depends on a value inside")
    assert "(x90 = x1 if x1.sum() > 0 else -x1)" in verdict.reason


def test_an_error_that_both_raise_passes(monkeypatch) -> None:
    monkeypatch.setitem(OPERATORS, "raises", RAISES)
    verdict = run(with_operator("raises"))
    assert verdict.kind == "passed"
    assert verdict.reason.startswith("both raise RuntimeError: The expanded size of the tensor (5)")


def test_a_child_that_dies_is_a_failure(monkeypatch) -> None:
    code = "{o} = {a} * (__import__('os').abort() if torch.compiler.is_exporting() else 1)"
    monkeypatch.setitem(OPERATORS, "dies", Operator("x", "x", code))
    assert run_apart(with_operator("dies")) == Verdict("failed", "the process died of SIGABRT")


def test_a_child_that_ends_without_a_word_is_a_failure(monkeypatch) -> None:
    code = "{o} = {a} * (__import__('os')._exit(3) if torch.compiler.is_exporting() else 1)"
    monkeypatch.setitem(OPERATORS, "ends", Operator("x", "x", code))
    assert run_apart(with_operator("ends")) == Verdict("failed", "the process ended with status 3")


@pytest.mark.parametrize(
    ("found", "expected", "verdict"),
    [(1.0002, 1.0001, "rounding"), (1.01, 1.0001, "wrong"), (1.01, 1.1, "unstable")],
)
def test_rounding_is_measured_by_float64(found, expected, verdict) -> None:
    assert rounding(torch.tensor([found]), torch.tensor([expected]), torch.tensor([1.0]).double()) == verdict
