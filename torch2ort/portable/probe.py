"""Refusal of a forward that one body cannot compute: it reads data, or chooses by the sizes of a tensor."""

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
from torch2ort.pythonop.autocast import entered
from torch2ort.support.source_lines import is_users, users_line

INSTEAD = (
    "register an exporter with torch2ort.register_exporter, or export without portable=True, which keeps the "
    "call as a PythonOp"
)
WAY_OUT = f"Write forward without it, {INSTEAD}"


class SizeBranchError(RuntimeError):
    """Raised inside of a forward that chooses by the size of a tensor."""


def probe(site: Site, tensors: Sequence[torch.Tensor]) -> None:
    """Run forward on tensors without data, each size of which stands for any.

    Args:
        site: the call.
        tensors: its tensors on the sample.

    Raises:
        ExportError: forward reads data, chooses by a size, or fails without data.
    """
    failure: BaseException | None = None
    for any_size in (True, False):
        try:
            with (
                applied(site, counts=True) as call,
                private.symbolic(tensors, any_size=any_size) as fake,
                private.sizes_decide(_refuse_branch),
                entered(site.autocast),
            ):
                call(*fake)
            return
        except NotInlinedError as error:
            failure = error.__cause__
            if failure is None:
                raise ExportError(f"{site.func_name} is not portable: {error}. {WAY_OUT}") from None
            if isinstance(failure, (SizeBranchError, *private.READS_DATA)):
                break
            # An operator that cannot compute with any size may compute with that of the sample.
    assert failure is not None
    if isinstance(failure, SizeBranchError):
        reason = f"forward chooses by the size of a tensor{users_line(failure)}"
    elif isinstance(failure, private.READS_DATA):
        reason = f"forward reads a value out of a tensor{users_line(failure)}"
    else:
        said = (str(failure).strip() or "no message").splitlines()[0]
        reason = f"forward does not run without data{users_line(failure)} ({type(failure).__name__}: {said})"
    raise ExportError(f"{site.func_name} is not portable: {reason}. {WAY_OUT}") from failure


def _refuse_branch() -> None:
    """Refuse a choice that the user's code makes by a size, unless it checks it.

    Raises:
        SizeBranchError: the code goes on either way.
    """
    frame = sys._getframe(2)
    file, line = frame.f_code.co_filename, frame.f_lineno
    if is_users(file) and not _is_check(file, line):
        raise SizeBranchError("the size of a tensor decides what forward computes")


@functools.lru_cache(maxsize=1024)
def _is_check(file: str, line: int) -> bool:
    """Whether the statement at a line raises, or does nothing: ``assert``, or an ``if`` that raises."""
    try:
        tree = ast.parse(textwrap.dedent("".join(linecache.getlines(file))))
    except SyntaxError:
        return False
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    # The innermost one in whose test the line is.
    for node in sorted(around, key=lambda n: -n.lineno):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.If) and line <= (node.test.end_lineno or node.lineno):
            return not node.orelse and all(isinstance(part, ast.Raise) for part in node.body)
        if not isinstance(node, (ast.If, ast.With, ast.For, ast.While, ast.Try)):
            return False
    return False
