"""The JSON form of a schema: readable, complete, and harmless to read."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import ModuleType
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from tests.io_schema.nested import Batch, Box, Color, GlobalBox, Point, nested, register, same
from torch2ort import io_schema
from torch2ort.errors import SchemaError

T = torch.ones(1)


def schema_of(data: Any) -> io_schema.Schema:
    return io_schema.flatten(data)[1]


def read_again(data: Any, **arguments: Any) -> io_schema.Schema:
    return io_schema.Schema.from_json(schema_of(data).to_json(), **arguments)


def refusal(text: str) -> str:
    with pytest.raises(SchemaError) as caught:
        io_schema.Schema.from_json(text)
    return str(caught.value)


def document(*nodes: Any) -> str:
    return json.dumps({"format": "torch2ort.io_schema", "version": 1, "nodes": nodes})


TENSOR = {"tensor": "float32", "rank": 1, "name": "0"}


@settings(max_examples=500)
@given(nested)
def test_a_schema_survives_its_json_form(data: Any) -> None:
    assert read_again(data) == schema_of(data)


@settings(max_examples=500)
@given(nested)
def test_the_schema_that_was_read_builds_the_data(data: Any) -> None:
    tensors, _ = io_schema.flatten(data)
    assert same(io_schema.unflatten(tensors, read_again(data)), data, lambda a, b: a is b)


def test_the_form_has_a_line_per_node() -> None:
    data = {"x": T, "past": (torch.ones(2, 2).long(), True, [None, 2.5]), "point": Point(T, "a")}
    assert schema_of(data).to_json() == (
        '{"format": "torch2ort.io_schema", "version": 1, "nodes": [\n'
        '  {"container": "dict", "keys": ["x", "past", "point"]},\n'
        '    {"tensor": "float32", "rank": 1, "name": "x"},\n'
        '    {"container": "tuple", "size": 3},\n'
        '      {"tensor": "int64", "rank": 2, "name": "past_0"},\n'
        '      {"constant": true},\n'
        '      {"container": "list", "size": 2},\n'
        '        {"constant": null},\n'
        '        {"constant": 2.5},\n'
        '    {"container": "namedtuple", "class": "tests.io_schema.nested:Point", "size": 2, '
        '"fields": ["x", "y"]},\n'
        '      {"tensor": "float32", "rank": 1, "name": "point_x"},\n'
        '      {"constant": "a"}\n'
        "]}\n"
    )


def test_the_form_of_version_1_is_still_read() -> None:
    text = """{"format": "torch2ort.io_schema", "version": 1, "nodes": [
      {"container": "ordereddict", "keys": ["a", 1, {"tuple": [null, {"float": "nan"}]}]},
        {"container": "defaultdict", "keys": [{"bytes": "ff"}], "factory": "builtins:list"},
          {"tensor": "bfloat16", "rank": 3, "name": "a_bytes"},
        {"container": "deque", "size": 1, "detail": 4},
          {"constant": {"int": "0x40000000000000000"}},
        {"container": "mapping", "class": "collections:UserDict", "keys": [{"dtype": "int8"}]},
          {"constant": {"float": "-inf"}}
    ]}"""
    inner = defaultdict(list, {b"\xff": torch.ones(1, 1, 1).bfloat16()})
    outer = UserDict({torch.int8: float("-inf")})
    data = OrderedDict({"a": inner, 1: deque([2**66], 4), (None, float("nan")): outer})
    assert io_schema.Schema.from_json(text) == schema_of(data)


@pytest.mark.parametrize(
    "key",
    [
        "a",
        1,
        True,
        None,
        2.5,
        float("nan"),
        -0.0,
        b"\xff",
        ("a", (1,)),
        Color.RED,
        torch.int8,
        2**80,
        "\ud800",
    ],
)
def test_a_key_survives(key: Any) -> None:
    assert read_again({key: T}) == schema_of({key: T})


@pytest.mark.parametrize(
    "constant", [2**53 + 1, -(2**5000), float("nan"), float("-inf"), -0.0, 1e-320, "\ud800\n", ""]
)
def test_a_constant_survives(constant: Any) -> None:
    assert read_again([constant]) == schema_of([constant])


def test_the_depth_of_the_data_does_not_matter() -> None:
    data: Any = T
    for _ in range(900):
        data = (data,)
    assert read_again(data) == schema_of(data)


def test_another_process_reads_it() -> None:
    data = {"out": BaseModelOutput(last_hidden_state=T), "batch": Batch(T, Point(1, 2)), "box": Box([T], "x")}
    script = (
        "import sys, tests.io_schema.nested, transformers.modeling_outputs\n"
        "from torch2ort.io_schema import Schema\n"
        "sys.stdout.write(Schema.from_json(sys.stdin.read()).to_json())"
    )
    text = schema_of(data).to_json()
    done = subprocess.run(
        [sys.executable, "-c", script], input=text, capture_output=True, text=True, check=True
    )
    assert done.stdout == text


# --- classes


def test_nothing_is_imported() -> None:
    name = "xml.dom.minidom"
    assert name not in sys.modules
    message = refusal(document({"container": "dataclass", "class": f"{name}:Element", "keys": []}))
    assert name not in sys.modules
    assert message == (
        "the schema needs the dataclass xml.dom.minidom:Element, which is not imported here. Import its "
        "module before, or pass it: Schema.from_json(text, classes=[...])."
    )


def test_a_module_that_imports_on_access_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert "is not imported here" in refusal(
        document({"container": "dataclass", "class": "lazy:A", "keys": []})
    )


def test_a_local_class_can_be_passed() -> None:
    local = namedtuple("Local", ["x"])
    local.__qualname__ = "somewhere.<locals>.Local"
    assert read_again(local(T), classes=[local]) == schema_of(local(T))


def test_a_class_that_is_found_must_be_what_the_schema_says() -> None:
    assert refusal(document({"container": "dataclass", "class": "subprocess:Popen", "keys": []})) == (
        "the schema needs the dataclass subprocess:Popen, but here that name is something else."
    )


def test_a_function_is_no_class() -> None:
    assert refusal(document({"container": "dataclass", "class": "os:system", "keys": []})) == (
        "the schema needs the dataclass os:system, but here that name is something else."
    )


def test_a_class_that_nobody_registered_is_refused() -> None:
    assert refusal(document({"container": "custom", "class": "decimal:Decimal", "size": 0})) == (
        "the schema needs a class registered with optree, decimal:Decimal, but here that name is something "
        "else."
    )


def test_a_namedtuple_with_other_fields_is_refused() -> None:
    form = {"container": "namedtuple", "class": "tests.io_schema.nested:Point", "size": 1, "fields": ["x"]}
    assert refusal(document(form, TENSOR)) == (
        "the schema needs the namedtuple tests.io_schema.nested:Point with fields ['x'], but here it has "
        "['x', 'y']."
    )


def test_a_dataclass_without_one_of_the_fields_is_refused() -> None:
    form = {"container": "dataclass", "class": "tests.io_schema.nested:Frozen", "keys": ["old"]}
    assert refusal(document(form, {**TENSOR, "name": "old"})) == (
        "the schema needs the dataclass tests.io_schema.nested:Frozen with fields ['old'], but here it has "
        "['value']."
    )


def test_a_factory_that_is_no_builtin_type_must_be_passed() -> None:
    def factory() -> None: ...

    factory.__qualname__ = "factory"
    text = schema_of(defaultdict(factory)).to_json()
    assert refusal(text) == (
        "the schema needs the defaultdict factory tests.io_schema.test_json:factory. Pass it: "
        "Schema.from_json(text, classes=[...])."
    )
    assert io_schema.Schema.from_json(text, classes=[factory]) == schema_of(defaultdict(factory))


def test_a_registered_class_that_takes_itself_apart_in_another_way_is_refused() -> None:
    class Changing(Box):
        pass

    register(Changing, "torch2ort")
    text = schema_of(Changing([T], 1)).to_json()
    Changing.__init__ = lambda self, items, label: Box.__init__(self, [*items, *items], label)
    with pytest.raises(
        SchemaError, match="a class in it takes its instances apart in another way than when it was"
    ):
        io_schema.Schema.from_json(text, classes=[Changing])
    optree.unregister_pytree_node(Changing, namespace="torch2ort")


# --- schemas without a JSON form


class Key:
    pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [{Key(): T}],
            "data[0]: a key or metadata of type tests.io_schema.test_json.Key has no JSON form. Use None, "
            "str, bool, int, float, bytes, torch.dtype, an Enum member, or a tuple, list or dict of them.",
        ),
        (
            {"d": defaultdict(functools.partial(list))},
            "data['d']: a factory of type functools.partial has no name by which a JSON form can refer to "
            "it. Use a class or a function.",
        ),
    ],
)
def test_what_has_no_form_is_named_with_its_path(data: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        schema_of(data).to_json()
    assert str(caught.value) == message


# --- texts that are not a schema


def test_another_version_is_refused() -> None:
    assert refusal('{"format": "torch2ort.io_schema", "version": 2, "nodes": []}') == (
        "the schema is in version 2 of its JSON form, and this torch2ort reads version 1. Write it again "
        "with this torch2ort."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ('{"format": "other"}', "ValueError: its format is 'other'"),
        (document(), "ValueError: not enough values to unpack (expected 1, got 0)"),
        (document(TENSOR, TENSOR), "ValueError: too many values to unpack (expected 1)"),
        (document({"container": "list", "size": 2}, TENSOR), "IndexError: pop from empty list"),
        (document({"container": "list", "size": -1}), "ValueError: -1 is not a count"),
        (document({"container": "list", "size": True}, TENSOR), "ValueError: True is not a count"),
        (document({"container": "set", "size": 0}), "KeyError: 'class'"),
        (document({"constant": {"tuple": []}}), "ValueError: a constant of type tuple"),
        (
            document({"tensor": "Tensor", "rank": 1, "name": ""}),
            "ValueError: 'Tensor' is not a dtype of torch",
        ),
        (
            document({"container": "dict", "keys": [[]]}, TENSOR),
            "ValueError: not enough values to unpack (expected 1, got 0)",
        ),
        (document({**TENSOR, "name": "x"}), "ValueError: the names in it are not those of its tensors"),
    ],
)
def test_a_text_that_is_no_schema_is_refused(text: str, reason: str) -> None:
    assert (
        refusal(text) == f"this is not the JSON form of a schema ({reason}). Write one with Schema.to_json()."
    )


def test_two_equal_keys_are_refused() -> None:
    text = document({"container": "dict", "keys": [1, True]}, TENSOR, TENSOR)
    assert "this is not the JSON form of a schema (" in refusal(text)


_EXAMPLE = schema_of(
    {
        "x": T,
        1: Batch(T, [None, 2.5]),
        "p": Point(deque([T], 3), defaultdict(list, {b"k": 2**70})),
        "b": GlobalBox([T]),
    }
).to_json()
_json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda values: st.one_of(
        st.lists(values, max_size=2), st.dictionaries(st.text(max_size=4), values, max_size=2)
    ),
    max_leaves=4,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [(value, key) for key, _ in items] + [place for _, item in items for place in _places(item)]


@settings(max_examples=500)
@given(st.data())
def test_a_damaged_form_raises_only_schema_error(data: st.DataObject) -> None:
    form = json.loads(_EXAMPLE)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(_places(form)))
        if data.draw(st.booleans()):
            container[key] = data.draw(_json_values)
        else:
            del container[key]
        if not _places(form):
            break
    try:
        schema = io_schema.Schema.from_json(json.dumps(form))
    except SchemaError:
        return
    assert io_schema.Schema.from_json(schema.to_json()) == schema


@settings(max_examples=500)
@given(st.integers(0, len(_EXAMPLE) - 1), st.integers(0, len(_EXAMPLE) - 1))
def test_a_text_with_a_part_missing_raises_only_schema_error(start: int, end: int) -> None:
    text = _EXAMPLE[:start] + _EXAMPLE[end:]
    with contextlib.suppress(SchemaError):  # a few texts are still valid
        assert isinstance(io_schema.Schema.from_json(text), io_schema.Schema)
