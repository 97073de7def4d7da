"""Containers that optree does not open by itself: the parts that are kept, and those that are refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import optree
import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from tests.io_schema.nested import Attributes, Batch, Derived, Frozen, Output, same
from torch2ort import io_schema
from torch2ort.errors import SchemaError

T, U = torch.ones(1), torch.ones(2)
ADVICE = (
    "Pass its tensors in a tuple, list or dict, or register its class: "
    "optree.register_pytree_node(..., namespace='torch2ort')."
)


def not_rebuilt(path: str, name: str, reason: str) -> str:
    return f"{path}: a tests.io_schema.{name} cannot be rebuilt from its items: {reason}. {ADVICE}"


class Fixed(dict):
    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a=a, b=b)


class Shifted(list):
    def __init__(self, items: Any) -> None:
        super().__init__(item + 1 for item in items)


def rebuilt(data: Any) -> Any:
    tensors, schema = io_schema.flatten(data)
    return io_schema.unflatten(tensors, schema)


def refusal(data: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        io_schema.flatten(data)
    return str(caught.value)


# --- dataclasses


def test_a_frozen_dataclass_with_slots_is_rebuilt() -> None:
    assert rebuilt(Frozen(T)).value is T


def test_a_rebuilt_dataclass_has_run_its_post_init() -> None:
    assert rebuilt(Derived(T)).note == "made by __post_init__"


def test_fields_are_kept_even_if_post_init_would_change_them() -> None:
    @dataclasses.dataclass
    class Doubling:
        x: Any

        def __post_init__(self) -> None:
            self.x = self.x * 2

    data = Doubling(T)
    assert rebuilt(data).x is data.x


def test_a_field_that_was_never_set_stays_unset() -> None:
    @dataclasses.dataclass
    class Late:
        x: Any
        y: Any = dataclasses.field(init=False)

    assert not hasattr(rebuilt(Late(T)), "y")


def test_a_dataclass_whose_constructor_takes_something_else_is_rebuilt_without_it() -> None:
    @dataclasses.dataclass
    class Scaled:
        x: Any
        factor: dataclasses.InitVar[float]

        def __post_init__(self, factor: float) -> None:
            self.x = self.x * factor

    data = Scaled(T, 3.0)
    assert rebuilt(data).x is data.x


def test_a_cached_property_does_not_stand_in_the_way() -> None:
    @dataclasses.dataclass
    class Caching:
        x: Any

        @cached_property
        def total(self) -> Any:
            return self.x.sum()

    data = Caching(U)
    data.total  # noqa: B018 - reading it stores it in the instance
    assert rebuilt(data).total == 2


def test_an_attribute_that_a_dataclass_would_lose_is_named() -> None:
    data = Batch(T)
    data.scale = 2
    assert refusal([data]) == not_rebuilt("data[0]", "nested.Batch", "its attribute 'scale' would be lost")


def test_an_attribute_that_the_constructor_would_change_is_named() -> None:
    data = Derived(T)
    data.note = "changed"
    assert refusal(data) == not_rebuilt("data", "nested.Derived", "its attribute 'note' would change")


def test_a_tensor_that_post_init_derives_is_derived_again() -> None:
    @dataclasses.dataclass
    class Masked:
        x: Any

        def __post_init__(self) -> None:
            self.mask = self.x > 0

    assert torch.equal(rebuilt(Masked(T)).mask, T > 0)


def test_a_dataclass_that_is_also_a_list_is_not_reduced_to_its_fields() -> None:
    @dataclasses.dataclass
    class Both(list):
        x: Any = None

    assert "its attribute 'x' would change. " in refusal(Both(T))


# --- Hugging Face


def test_a_model_output_keeps_its_items_and_attributes() -> None:
    output = rebuilt(BaseModelOutput(last_hidden_state=T, hidden_states=(T, U)))
    assert type(output) is BaseModelOutput
    assert output.to_tuple()[0] is output.last_hidden_state is T
    assert output.attentions is None


def test_a_model_output_of_pairs_is_not_taken_for_a_list_of_items() -> None:
    data = Output(logits=(("hidden", T),))
    assert list(rebuilt(data)) == ["hidden"]


def test_a_model_output_keeps_additional_items() -> None:
    data = Output(logits=T)
    data["loss"] = U
    assert rebuilt(data).loss is U


def test_a_model_output_with_an_attribute_apart_from_its_item_is_refused() -> None:
    data = Output(logits=T, hidden=U)
    data.hidden = None  # leaves the item as it is
    assert refusal(data) == not_rebuilt(
        "data", "nested.Output", "its attribute 'hidden' is not its item 'hidden'"
    )


def test_a_model_output_with_a_field_that_is_no_item_is_refused() -> None:
    data = Output(logits=T)
    object.__setattr__(data, "hidden", U)
    assert refusal(data) == not_rebuilt(
        "data", "nested.Output", "its attribute 'hidden' is not its item 'hidden'"
    )


def test_a_batch_encoding_is_rebuilt() -> None:
    data = rebuilt(BatchEncoding({"input_ids": T}))
    assert type(data) is BatchEncoding
    assert data["input_ids"] is T


# --- other mappings and sequences


@pytest.mark.parametrize(
    "data",
    [
        Counter({"a": 2}),
        type("Limited", (deque,), {})([T, 1], maxlen=3),
        type("Filled", (defaultdict,), {})(list, {"a": T}),
    ],
)
def test_a_subclass_of_a_container_keeps_what_its_base_keeps(data: Any) -> None:
    copy = rebuilt(data)
    assert same(copy, data, lambda a, b: a is b)


def test_a_mapping_whose_constructor_takes_no_items_is_refused() -> None:
    assert refusal({"x": Fixed(T, U)}) == not_rebuilt(
        "data['x']",
        "test_containers.Fixed",
        "it raised TypeError: Fixed.__init__() missing 1 required positional argument: 'b'",
    )


def test_a_sequence_that_converts_its_items_is_refused() -> None:
    assert refusal((Shifted([2]),)) == not_rebuilt(
        "data[0]", "test_containers.Shifted", "it has other items then"
    )


def test_an_attribute_that_a_mapping_would_lose_is_named() -> None:
    data = Attributes(a=T)
    data.scale = 2
    assert refusal(data) == not_rebuilt("data", "nested.Attributes", "its attribute 'scale' would be lost")


class Slotted(list):
    __slots__ = ("scale",)


def test_an_attribute_in_a_slot_is_not_lost_unseen() -> None:
    data = Slotted([T])
    data.scale = 2
    assert refusal(data) == not_rebuilt(
        "data", "test_containers.Slotted", "its attribute 'scale' would be lost"
    )


class Scaled(list):
    def __init__(self, items: Any = (), scale: float = 1.0) -> None:
        super().__init__(items)
        self.scale = scale


def test_an_attribute_is_not_reset_to_its_default_unseen() -> None:
    assert rebuilt(Scaled([T])).scale == 1.0
    assert refusal(Scaled([T], 2.0)) == (
        not_rebuilt("data", "test_containers.Scaled", "its attribute 'scale' would change")
    )


def test_match_refuses_what_flatten_refuses() -> None:
    _, schema = io_schema.flatten(Scaled([T]))
    assert schema.match(Scaled([T])) is not None
    assert schema.match(Scaled([T], 2.0)) is None


class Unhashable:
    __hash__ = None

    def __call__(self) -> int:
        return 1


def test_a_factory_that_cannot_be_compared_is_refused() -> None:
    assert refusal(defaultdict(Unhashable())) == (
        "data: its factory or metadata is of type tests.io_schema.test_containers.Unhashable, which is not "
        "hashable and so cannot be compared. Use something hashable."
    )


def test_match_refuses_a_factory_that_cannot_be_compared() -> None:
    _, schema = io_schema.flatten(defaultdict(list))
    assert schema.match(defaultdict(Unhashable())) is None


@pytest.mark.parametrize("data", [b"ab", bytearray(b"ab")])
def test_bytes_are_no_sequence_of_numbers(data: Any) -> None:
    assert refusal(data) == (
        "data: expected a tensor, None, a str, bool, int or float, or a container of them, got a value of "
        f"type {type(data).__name__}. {ADVICE}"
    )


# --- classes registered with optree


class Wrapper:
    def __init__(self, inner: Any, label: Any = None) -> None:
        self.inner = inner
        self.label = label


@pytest.fixture
def _registered():
    optree.register_pytree_node(
        Wrapper,
        lambda wrapper: ((wrapper.inner,), wrapper.label, ("inner",)),
        lambda label, inner: Wrapper(*inner, label),
        path_entry_type=optree.GetAttrEntry,
        namespace="torch2ort",
    )
    yield
    optree.unregister_pytree_node(Wrapper, namespace="torch2ort")


@pytest.mark.usefixtures("_registered")
def test_a_registered_class_uses_its_own_path_entries() -> None:
    _, schema = io_schema.flatten([Wrapper(T)])
    assert schema.leaves[0].name == "0_inner"


@pytest.mark.usefixtures("_registered")
def test_a_registered_class_may_hold_containers_that_optree_does_not_know() -> None:
    assert rebuilt(Wrapper(Batch(Wrapper(T)))).inner.ids.inner is T


@pytest.mark.usefixtures("_registered")
def test_metadata_that_cannot_be_compared_is_refused() -> None:
    assert refusal([Wrapper(T, label={1, 2})]) == (
        "data[0]: its factory or metadata is of type set, which is not hashable and so cannot be compared. "
        "Use something hashable."
    )


@pytest.mark.usefixtures("_registered")
def test_a_tensor_in_the_metadata_equals_only_itself() -> None:
    _, schema = io_schema.flatten(Wrapper(1, label=T))
    assert schema == io_schema.flatten(Wrapper(1, label=T))[1]
    assert schema != io_schema.flatten(Wrapper(1, label=T.clone()))[1]


def test_a_dataclass_can_be_registered_after_it_was_flattened() -> None:
    @dataclasses.dataclass
    class Late:
        x: Any
        config: Any = None

    io_schema.flatten(Late(T))
    optree.register_pytree_node(
        Late, lambda late: ((late.x,), late.config), lambda config, x: Late(*x, config), namespace="torch2ort"
    )
    _, schema = io_schema.flatten(Late(T, config=frozenset({1})))
    assert len(schema.leaves) == 1
    assert schema.match(Late(T, config=frozenset({2}))) is None


def test_an_error_of_a_flatten_function_arrives_as_it_is() -> None:
    error = ValueError("mine")

    class Failing(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise error

        def __iter__(self) -> Any:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    with pytest.raises(ValueError, match="mine") as caught:
        io_schema.flatten(Failing())
    assert caught.value is error


def test_other_namespaces_of_optree_keep_sorting_keys() -> None:
    script = "import optree; from torch2ort import io_schema; print(optree.tree_leaves({'b': 1, 'a': 2}))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert output.stdout == "[2, 1]\n"
