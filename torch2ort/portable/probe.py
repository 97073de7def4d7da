"""Refusal of a forward that one body cannot represent: it reads data, or branches on the size of a tensor."""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import textwrap
from collections.abc import Sequence

import torch

from torch2ort._torch import symbolic_sample as private
from torch2ort.errors import ExportError
from torch2ort.program.inline_autograd_functions import NotInlinedError, applied
from torch2ort.pythonop import Site
from torch2ort.pythonop.autocast import autocast_context
from torch2ort.support.source_lines import is_users, users_line

INSTEAD = (
    "register an exporter with torch2ort.register_exporter, or export without portable=True, which keeps the "
    "call as a PythonOp"
)
WAY_OUT = f"Write forward without it, {INSTEAD}"


class SizeBranchError(RuntimeError):
    """Raised inside of a forward that branches on the size of a tensor."""


def probe(site: Site, tensors: Sequence[torch.Tensor]) -> None:
    """Run forward on tensors without data and with symbolic sizes.

    Args:
        site: the call.
        tensors: its tensors on the sample.

    Raises:
        ExportError: forward reads data, branches on a size, or fails without data.
    """
    failure: BaseException | None = None
    for any_size in (True, False):
        try:
            with (
                applied(site, counts=True) as call,
                private.symbolic(tensors, any_size=any_size) as fake,
                private.sizes_decide(_refuse_branch),
                autocast_context(site.autocast),
            ):
                call(*fake)
            return
        except NotInlinedError as error:
            failure = error.__cause__
            if failure is None:
                raise ExportError(f"{site.func_name} is not portable: {error}. {WAY_OUT}") from None
            if isinstance(failure, (SizeBranchError, *private.READS_DATA)):
                break
            # An operator that does not support a symbolic size may support that of the sample.
    assert failure is not None
    if isinstance(failure, SizeBranchError):
        reason = f"forward branches on the size of a tensor{users_line(failure)}"
    elif isinstance(failure, private.READS_DATA):
        reason = f"forward reads a value out of a tensor{users_line(failure)}"
    else:
        said = (str(failure).strip() or "no message").splitlines()[0]
        reason = f"forward does not run without data{users_line(failure)} ({type(failure).__name__}: {said})"
    raise ExportError(f"{site.func_name} is not portable: {reason}. {WAY_OUT}") from failure


def _refuse_branch() -> None:
    """Refuse a branch of the user's code on a size, unless it is a check that raises.

    Raises:
        SizeBranchError: the code continues in both cases.
    """
    frame = sys._getframe(2)
    file, line = frame.f_code.co_filename, frame.f_lineno
    if is_users(file) and not _is_check(file, line):
        raise SizeBranchError("forward branches on the size of a tensor")


@functools.lru_cache(maxsize=1024)
def _is_check(file: str, line: int) -> bool:
    """Return True if the statement at a line is a check: an ``assert``, or an ``if`` that only raises."""
    try:
        tree = ast.parse(textwrap.dedent("".join(linecache.getlines(file))))
    except SyntaxError:
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    # The innermost statement comes first.
    for node in sorted(around, key=lambda n: -n.lineno):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.If) and line <= (node.test.end_lineno or node.lineno):
            return not node.orelse and all(isinstance(part, ast.Raise) for part in node.body)
        if not isinstance(node, (ast.If, ast.With, ast.For, ast.While, ast.Try)):
            return False
    return False
