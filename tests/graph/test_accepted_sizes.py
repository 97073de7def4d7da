"""A call with sizes that a graph does not accept is refused by a message that says what to do."""

from __future__ import annotations

import pytest

from torch2ort.graph.accepted_sizes import Sizes

SIZES = Sizes(
    ["x", "y"],
    [["rows", 4], ["rows", "columns"]],
    {"rows": (2, 64), "columns": (1, None)},
    ["size(1, 1) % 2 == 0", "size(0, 0) // (size(1, 1) - 6) < 9"],
)


def test_sizes_that_it_accepts_are_no_mismatch() -> None:
    assert SIZES.mismatch([(3, 4), (3, 8)]) is None


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ([(3,), (3, 8)], "input 'x': expected a tensor of rank 2, got one of shape [3]"),
        (
            [(3, 5), (3, 8)],
            "input 'x', dimension 1: expected size 4, got 5; export with dynamic_shapes if this size varies",
        ),
        (
            [(1, 4), (1, 8)],
            "input 'x', dimension 0: expected a size (rows) from 2 to 64, got 1; export with other bounds of "
            "that Dim if such sizes occur",
        ),
        (
            [(3, 4), (3, 0)],
            "input 'y', dimension 1: expected a size (columns) at least 1, got 0; export with other bounds "
            "of that Dim if such sizes occur",
        ),
        (
            [(3, 4), (5, 8)],
            "input 'y', dimension 0: expected size 3, the same as input 'x', dimension 0, got 5; export with "
            "a Dim of its own if it varies by itself",
        ),
        (
            [(3, 4), (3, 7)],
            "input sizes [[3, 4], [3, 7]]: expected size(1, 1) % 2 == 0, as it was for the sample; export "
            "with a sample of these sizes",
        ),
        (
            [(3, 4), (3, 6)],
            "input sizes [[3, 4], [3, 6]]: size(0, 0) // (size(1, 1) - 6) < 9 cannot be computed (integer "
            "division or modulo by zero)",
        ),
    ],
)
def test_others_are_refused_with_what_to_do(shapes: list[tuple[int, ...]], sentence: str) -> None:
    assert SIZES.mismatch(shapes) == sentence
