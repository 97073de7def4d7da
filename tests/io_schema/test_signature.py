"""Arguments by the names of a callable's parameters, and a call that passes them again."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertForSequenceClassification

from tests.io_schema.nested import Batch, same
from torch2ort import io_schema
from torch2ort.errors import SchemaError
from torch2ort.io_schema import CallForm, Signature

T, U, V = torch.ones(1), torch.ones(2), torch.ones(3)


def names_of(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Return the names of the tensors of a call."""
    return [leaf.name for leaf in io_schema.flatten(Signature.of(function).bind(args, kwargs))[1].leaves]


def bind(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return Signature.of(function).bind(args, kwargs)


def call_again(function: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = Signature.of(function)
    return signature.unbind(signature.bind(args, kwargs))


# --- names


def plain(x, y=None, *, z=None): ...


def rest(x, *xs, flag=False): ...


def options(x, /, *xs, scale=1.0, **more): ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "names"),
    [
        (plain, (T, U), {}, ["x", "y"]),
        (plain, (), {"z": V, "y": U, "x": T}, ["x", "y", "z"]),
        (plain, ({"a": [T]},), {"z": (U, None)}, ["x_a_0", "z_0"]),
        (rest, (T, U, V), {}, ["x", "xs_0", "xs_1"]),
        (options, (T, U), {"bias": V, "scale": T}, ["x", "xs_0", "scale", "bias"]),
        (options, (T, U), {"b": V, "a": T}, ["x", "xs_0", "b", "a"]),
        (options, (T, U), {"x": V, "xs": T}, ["x", "xs_0", "more.x", "more.xs"]),
        (options, (T,), {"more": U, "more.x": V}, ["x", "more", "more.more.x"]),
    ],
)
def test_tensors_get_the_names_of_the_arguments(
    function: Any, args: Any, kwargs: Any, names: list[str]
) -> None:
    assert names_of(function, *args, **kwargs) == names


def test_a_parameter_keeps_its_name_beside_a_nested_argument() -> None:
    assert names_of(lambda a, a_0: None, [T], U) == ["a_0_2", "a_0"]


def test_self_is_no_argument() -> None:
    class Model(torch.nn.Module):
        def forward(self, ids, mask=None): ...

    assert names_of(Model().forward, T) == ["ids"]


def test_a_module_stands_for_its_forward() -> None:
    assert names_of(torch.nn.Linear(1, 1), T) == ["input"]


def test_a_wrapper_has_the_signature_of_what_it_wraps() -> None:
    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    assert names_of(wrapper, T) == ["x"]


def test_a_callable_without_a_signature_takes_anything() -> None:
    assert names_of(torch.add, T, out=U) == ["args_0", "out"]


# --- defaults


def test_an_argument_left_at_its_default_counts_as_if_it_was_passed() -> None:
    assert bind(plain, T) == bind(plain, T, None, z=None) == {"x": T, "y": None, "z": None}


@pytest.mark.parametrize("other", [True, 0, None])
def test_a_changed_default_is_another_schema(other: Any) -> None:
    _, left = io_schema.flatten(bind(rest, T))
    _, changed = io_schema.flatten(bind(rest, T, flag=other))
    assert left != changed


def test_how_an_argument_is_passed_makes_no_difference() -> None:
    _, by_position = io_schema.flatten(bind(plain, T, U))
    _, by_keyword = io_schema.flatten(bind(plain, y=U, x=T))
    assert by_position == by_keyword


def test_a_default_that_cannot_be_flattened_is_left_out() -> None:
    def activated(x, act=torch.relu, dtype=torch.float32, scale=2.0): ...

    assert bind(activated, 1) == {"x": 1, "scale": 2.0}


def test_a_default_that_cannot_be_flattened_can_be_replaced() -> None:
    def activated(x, act=torch.relu, scale=2.0): ...

    assert list(bind(activated, 1, "gelu").items()) == [("x", 1), ("act", "gelu"), ("scale", 2.0)]


def test_a_tensor_can_be_a_default() -> None:
    def scaled(x, scale=U): ...

    assert names_of(scaled, T) == ["x", "scale"]


# --- refusals


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, (), {}),
        (plain, (), {"y": 1}),
        (plain, (1, 2, 3), {}),
        (plain, (1,), {"x": 2}),
        (plain, (1,), {"w": 2}),
    ],
)
def test_a_call_that_python_refuses_is_refused(function: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError) as expected:
        inspect.signature(function).bind(*args, **kwargs)
    with pytest.raises(TypeError) as caught:
        bind(function, *args, **kwargs)
    assert str(caught.value) == str(expected.value)


def test_a_keyword_is_no_positional_only_argument() -> None:
    # The inspect.Signature of Python 3.13.0 itself accepts it.
    with pytest.raises(TypeError) as caught:
        bind(options, x=1)
    assert str(caught.value) == "'x' parameter is positional only, but was passed as a keyword"


def test_unbind_needs_what_has_no_default() -> None:
    with pytest.raises(SchemaError) as caught:
        Signature.of(plain).unbind({"y": T}, CallForm(2, ()))
    assert str(caught.value) == "unbind: expected an entry 'x', got 'y'. Pass a mapping that bind returned."


# --- the way back


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "again"),
    [
        (plain, (1, 2), {"z": 3}, ((1, 2), {"z": 3})),
        (plain, (1,), {"y": 2}, ((1, 2), {})),
        (plain, (1,), {"y": None, "z": 4}, ((1,), {"z": 4})),
        (plain, (), {"x": 1}, ((1,), {})),
        (rest, (1,), {"flag": False}, ((1,), {})),
        (rest, (1, 2, 3), {"flag": True}, ((1, 2, 3), {"flag": True})),
        (
            options,
            (1, 2),
            {"x": 3, "xs": 4, "more.x": 5, "a": 6},
            ((1, 2), {"x": 3, "xs": 4, "more.x": 5, "a": 6}),
        ),
        (lambda a=1, b=2, c=3: None, (), {"c": 4}, ((), {"c": 4})),
        (lambda a=1, /, b=2, *c: None, (1, 2, 3), {}, ((1, 2, 3), {})),
        (lambda a=(1, 2.0), b={"k": [1]}: None, ((1, 2.0), {"k": [1]}), {}, ((), {})),
        (lambda a=(1, 2.0): None, ((1, 2),), {}, (((1, 2),), {})),
        (eval("lambda a=1, b=2, /, c=3: None"), (1, 5), {}, ((1, 5), {})),
    ],
)
def test_unbind_passes_what_is_not_at_its_default(function: Any, args: Any, kwargs: Any, again: Any) -> None:
    assert call_again(function, *args, **kwargs) == again


def test_a_default_that_is_left_out_is_filled_in_where_a_position_needs_it() -> None:
    def activated(x, act=torch.relu, *rest): ...

    bound = bind(activated, 1)
    assert Signature.of(activated).unbind({**bound, "rest": (2,)}) == ((1, torch.relu, 2), {})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {"y": 2}),
        ((), {"x": 1, "y": 2}),
        ((), {"y": 2, "x": 1, "z": None}),
        ((1, 2), {}),
        ((1, None), {"z": 3}),
    ],
)
def test_unbind_can_pass_each_argument_as_it_was_passed(args: Any, kwargs: Any) -> None:
    signature = Signature.of(plain)
    again = signature.unbind(signature.bind(args, kwargs), CallForm.of(args, kwargs))
    assert again == (args, kwargs)
    assert list(again[1]) == list(kwargs)


def test_arguments_that_a_form_does_not_mention_are_passed_by_keyword() -> None:
    signature = Signature.of(plain)
    assert signature.unbind(signature.bind((1, 2), {"z": 3}), CallForm(1, ())) == ((1,), {"y": 2, "z": 3})


def test_options_are_passed_as_a_form_says() -> None:
    signature = Signature.of(options)
    args, kwargs = (1,), {"b": 2, "x": 3, "scale": 1.0}
    assert signature.unbind(signature.bind(args, kwargs), CallForm.of(args, kwargs)) == (args, kwargs)


def _source(draw: st.DrawFn) -> str:
    """Return a lambda with arbitrary parameters that returns what they are bound to."""
    positional = draw(st.lists(st.sampled_from("abc"), max_size=3, unique=True))
    needed = draw(st.integers(0, len(positional)))
    parts = [name if index < needed else f"{name}={index}.5" for index, name in enumerate(positional)]
    slash = draw(st.integers(0, len(parts)))
    if slash:
        parts.insert(slash, "/")
    keyword_only = draw(st.lists(st.sampled_from("xyz"), max_size=2, unique=True))
    if draw(st.booleans()):
        parts.append("*rest")
    elif keyword_only:
        parts.append("*")
    parts += [name if draw(st.booleans()) else f"{name}=None" for name in keyword_only]
    if draw(st.booleans()):
        parts.append("**more")
    return f"lambda {', '.join(parts)}: locals()"


_values = st.sampled_from([None, True, 0.5, 1.5, 2, (1, 0.5), [T], Batch(T, 1), U])


def _call(draw: st.DrawFn, function: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments that `function` accepts."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_position = True
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args += draw(st.lists(_values, max_size=2)) if by_position else []
        elif parameter.kind is parameter.VAR_KEYWORD:
            names = st.sampled_from(["a", "x", "rest", "more", "more.a", "new"])
            kwargs |= {
                key: item
                for key, item in draw(st.dictionaries(names, _values)).items()
                if key not in taken(function)
            }
        elif parameter.default is not parameter.empty and draw(st.booleans()):
            by_position = False  # left at its default, and so are the next ones unless they go by keyword
        elif parameter.kind is parameter.KEYWORD_ONLY or (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (not by_position or draw(st.booleans()))
        ):
            by_position = False
            kwargs[name] = draw(_values)
        elif by_position:
            args.append(draw(_values))
    return tuple(args), dict(draw(st.permutations(list(kwargs.items()))))


def taken(function: Any) -> set[str]:
    """Return the names that a keyword argument of `function` reaches as a parameter."""
    reachable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, p in inspect.signature(function).parameters.items() if p.kind in reachable}


@settings(max_examples=500)
@given(st.data())
def test_a_rebuilt_call_binds_what_the_call_bound(data: st.DataObject) -> None:
    function = eval(_source(data.draw))
    args, kwargs = _call(data.draw, function)
    signature = Signature.of(function)
    tensors, schema = io_schema.flatten(signature.bind(args, kwargs))
    form = data.draw(st.sampled_from([None, CallForm.of(args, kwargs)]))
    args_again, kwargs_again = signature.unbind(io_schema.unflatten(tensors, schema), form)
    expected = function(*args, **kwargs)
    assert same(function(*args_again, **kwargs_again), expected, lambda a, b: a is b)


@settings(max_examples=500)
@given(st.data())
def test_bind_refuses_exactly_what_python_refuses(data: st.DataObject) -> None:
    function = eval(_source(data.draw))
    args = tuple(data.draw(st.lists(st.integers(), max_size=4)))
    kwargs = data.draw(
        st.dictionaries(st.sampled_from("abcxyz") | st.just("rest"), st.integers(), max_size=4)
    )
    outcomes = []
    for call in (lambda: function(*args, **kwargs), lambda: bind(function, *args, **kwargs)):
        try:
            call()
            outcomes.append("taken")
        except TypeError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]


# --- JSON


@pytest.mark.parametrize(
    "function",
    [
        plain,
        rest,
        options,
        torch.nn.Linear(1, 1),
        BertForSequenceClassification.forward,
        lambda x, y=((1, 2.5), [None]): None,
    ],
)
def test_a_signature_survives_its_json_form(function: Any) -> None:
    signature = Signature.of(function)
    again = Signature.from_json(signature.to_json())
    assert again.to_json() == signature.to_json()


def test_a_signature_that_was_read_binds_alike() -> None:
    def everything(a, b=(1, 2.5), /, c=float("nan"), *d, e, f="f", **g): ...

    signature = Signature.of(everything)
    call = ((T, (1, 3.5), 2.0, U), {"e": V, "h": T})
    again = Signature.from_json(signature.to_json()).bind(*call)
    assert io_schema.flatten(again)[1] == io_schema.flatten(signature.bind(*call))[1]


def test_a_default_that_cannot_be_written_is_left_out_when_it_is_read() -> None:
    def scaled(x, act=torch.relu, scale=U): ...

    again = Signature.from_json(Signature.of(scaled).to_json())
    assert again.bind((1,), {}) == {"x": 1}


def document(**content: Any) -> str:
    return json.dumps({"format": "torch2ort.io_schema.Signature", "version": 1, **content})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (document(format="a"), "ValueError: it is 'a' of version 1"),
        (document(version=2), "ValueError: it is 'torch2ort.io_schema.Signature' of version 2"),
        (document(), "KeyError: 'parameters'"),
        (document(parameters=[{"name": "a", "kind": "b"}]), "KeyError: 'b'"),
        (
            document(parameters=[{"name": "a b", "kind": "KEYWORD_ONLY"}]),
            "ValueError: 'a b' is not a valid parameter name",
        ),
    ],
)
def test_a_text_that_is_no_signature_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Signature.from_json(text)
    assert str(caught.value) == (
        f"this is not the JSON form of a signature ({reason}). Write one with Signature.to_json()."
    )
