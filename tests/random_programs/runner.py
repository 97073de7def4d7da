"""Runs programs and judges them, in this process or in a child process that may die."""

from __future__ import annotations

import linecache
import os
import pickle
import selectors
import signal
import sys
import types
from collections.abc import Callable

import torch

from tests.random_programs.oracle import Verdict, judge
from tests.random_programs.program import Program
from tests.random_programs.render import render

SECONDS = 90


def run(program: Program, dtype: torch.dtype = torch.float32) -> Verdict:
    """Render a program, run its source with tensors of a type, and judge it."""
    source = render(program)
    module = types.ModuleType("random_program")
    # torch2ort's errors then name and quote the program's lines.
    file = f"random_program_{id(module)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, file, "exec"), module.__dict__)
        return judge(module.steps, dtype)
    finally:
        del sys.modules[module.__name__], linecache.cache[file]


def run_apart(
    program: Program,
    seconds: float = SECONDS,
    *,
    loud: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    """Do as :func:`run` in a child process: one that dies or hangs is a failure, and leaves nothing behind.

    Args:
        program: the program to run.
        seconds: time limit.
        loud: whether the child's output is shown.
        dtype: dtype of the program's weights and tensors.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        status = 1
        try:
            if not loud:
                _silence()
            verdict = run(program, dtype)
            os.write(sending, pickle.dumps((verdict.kind, verdict.reason[:60_000])))
            status = 0
        except BaseException as error:
            os.write(sending, pickle.dumps(("broken", f"{type(error).__name__}: {error}"[:60_000])))
        finally:
            os._exit(status)
    os.close(sending)
    with selectors.DefaultSelector() as selector, os.fdopen(receiving, "rb") as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(seconds):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Verdict("failed", f"no end within {seconds} seconds")
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Verdict("failed", f"the process died of {signal.Signals(os.WTERMSIG(status)).name}")
    if not text:
        return Verdict("failed", f"the process ended with status {os.waitstatus_to_exitcode(status)}")
    return Verdict(*pickle.loads(text))


def warm_up(judge_one: Callable[[Program], Verdict], program: Program) -> None:
    """Import and build everything that the first export of a process needs, so that children share it."""
    torch.set_num_threads(1)
    judge_one(program)


def _silence() -> None:
    """Keep the runtime's own messages about refused graphs out of the terminal."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
