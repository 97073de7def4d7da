"""Sizes: their canonical text, and their values."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from onnx_shape_inference import infer_symbolic_shapes  # noqa: F401 - its parser must read what we write

from torch2ort.sizes import expressions as sizes

VALUES = {"batch": 3, "seq": 7, "a": 5, "b": 11}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("seq + 1", "seq+1"),
        ("2*batch", "2*batch"),
        ("FloorDiv(seq, 2)", "seq//2"),
        ("(seq//2)", "seq//2"),
        ("floor(seq/2)", "seq//2"),
        ("((a*b)//8)", "(a*b)//8"),
        ("3*((seq + 1)//2)", "3*((seq+1)//2)"),
        ("PythonMod(seq, 4)", "seq%4"),
        ("Mod(seq, 4) + 1", "seq%4+1"),
        ("Max(1, seq)", "max(1,seq)"),
        ("ceiling(seq/2)", "-((-seq)//2)"),
        ("CeilDiv(seq, 2)", "-((-seq)//2)"),
        ("batch*seq - seq*batch", "0"),
        ("decoder.input_dim", "decoder.input_dim"),
    ],
)
def test_a_size_is_written_in_one_form(given, written):
    assert sizes.text(sizes.parse(given)) == written


@pytest.mark.parametrize(
    "given", ["", "a b", "batch[0]", "f(batch)", "0.5", "'a'", "lambda: 1", "a if b else 1"]
)
def test_what_is_no_arithmetic_is_refused(given):
    with pytest.raises(ValueError, match="is no arithmetic of names and whole numbers"):
        sizes.parse(given)


def expressions():
    leaves = st.sampled_from([*VALUES, "1", "2", "3"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
            st.tuples(inner, st.sampled_from(["//", "%"]), st.sampled_from("234")).map(
                lambda t: f"(({t[0]}) {t[1]} {t[2]})"
            ),
            st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        ),
        max_leaves=6,
    )


@hypothesis.given(expressions())
def test_a_size_has_the_value_that_python_gives_its_text(text):
    size = sizes.parse(text)
    expected = eval(text, {"max": max, "min": min}, dict(VALUES))
    assert sizes.evaluate(size, VALUES) == expected


@hypothesis.given(expressions())
def test_what_is_written_reads_back_as_the_same_size(text):
    size = sizes.parse(text)
    assert sizes.evaluate(sizes.parse(sizes.text(size)), VALUES) == sizes.evaluate(size, VALUES)
