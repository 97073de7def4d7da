"""Guards compare with the state at their creation, by identity, and own the objects that they compare."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch

from torch2ort import _native
from torch2ort.cache.key.guards import PLAIN, Kind


class Thing:
    pass


def guards(kind: Kind, owner: Any, name: str | None = None) -> _native.Guards:
    return _native.Guards([(int(kind), owner, PLAIN if kind is Kind.TENSORS else name)])


def test_nothing_changed():
    checks = _native.Guards([(int(Kind.ITEMS), {"a": 1}, None), (int(Kind.SEQUENCE), [1], None)])
    assert len(checks) == 2
    assert checks.first_changed() == -1


def test_all_that_changed_from_a_position_on():
    first, second, third = {"a": 1}, [1], {"b": 1}
    checks = _native.Guards(
        [(int(Kind.ITEMS), first, None), (int(Kind.SEQUENCE), second, None), (int(Kind.ITEMS), third, None)]
    )
    assert checks.all_changed() == []
    first["a"], third["b"] = 2, 2
    assert checks.all_changed() == [0, 2]
    assert checks.all_changed(1) == [2]
    assert checks.all_changed(3) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(a=object()),
        lambda d: d.update(c=1),
        lambda d: d.pop("a"),
        lambda d: d.update(a=d.pop("a")),
    ],
    ids=["another value", "a new key", "a key less", "another order"],
)
def test_the_items_of_a_dictionary(change: Any):
    entries = {"a": object(), "b": object()}
    checks = guards(Kind.ITEMS, entries)
    change(entries)
    assert checks.first_changed() == 0


def test_one_entry_of_a_dictionary_and_no_other():
    entries = {"a": object(), "b": object()}
    checks = guards(Kind.ENTRY, entries, "a")
    entries["b"] = object()
    assert checks.first_changed() == -1
    del entries["a"]
    assert checks.first_changed() == 0


def test_an_entry_that_is_missing_and_comes():
    entries: dict[str, object] = {}
    checks = guards(Kind.ENTRY, entries, "a")
    assert checks.first_changed() == -1
    entries["a"] = None
    assert checks.first_changed() == 0


@pytest.mark.parametrize("change", [lambda v: v.append(1), lambda v: v.reverse(), lambda v: v.clear()])
def test_the_items_of_a_list(change: Any):
    values = [object(), object()]
    checks = guards(Kind.SEQUENCE, values)
    change(values)
    assert checks.first_changed() == 0


def test_the_type_of_an_object():
    thing = Thing()
    checks = guards(Kind.TYPE, thing)
    assert checks.first_changed() == -1
    thing.__class__ = type("Other", (Thing,), {})
    assert checks.first_changed() == 0


def test_what_an_attribute_gives():
    thing = Thing()
    checks = guards(Kind.ATTRIBUTE, thing, "value")
    assert checks.first_changed() == -1
    thing.value = 1
    assert checks.first_changed() == 0


def test_an_error_while_an_attribute_is_read_arrives():
    class Broken:
        broken = False

        @property
        def value(self) -> int:
            if self.broken:
                raise ValueError("out of order")
            return 1

    thing = Broken()
    checks = guards(Kind.ATTRIBUTE, thing, "value")
    thing.broken = True
    with pytest.raises(ValueError, match=r"^out of order$"):
        checks.first_changed()


def test_what_a_callable_gives():
    values = [1]
    checks = guards(Kind.VALUE, lambda: list(values))
    assert checks.first_changed() == -1
    values[0] = 2
    assert checks.first_changed() == 0


def test_the_size_of_a_dictionary():
    entries = {"a": 1}
    checks = guards(Kind.SIZE, entries)
    entries["a"] = 2
    assert checks.first_changed() == -1
    entries["b"] = 2
    assert checks.first_changed() == 0


CHANGED_TENSORS = {
    "requires_grad": lambda t: t["w"].requires_grad_(False),
    "dtype": lambda t: setattr(t["w"], "data", t["w"].data.double()),
    "shape": lambda t: setattr(t["w"], "data", torch.ones(3, 2)),
    "strides": lambda t: setattr(t["w"], "data", torch.ones(3, 2).t()),
    "another tensor": lambda t: t.update(w=torch.nn.Parameter(torch.ones(2, 3))),
    "None": lambda t: t.update(w=None),
    "not None any more": lambda t: t.update(n=torch.ones(1)),
}


@pytest.mark.parametrize("change", CHANGED_TENSORS.values(), ids=CHANGED_TENSORS)
def test_what_a_graph_depends_on_of_tensors(change: Any):
    tensors: dict[str, Any] = {"w": torch.nn.Parameter(torch.ones(2, 3)), "n": None}
    checks = guards(Kind.TENSORS, tensors)
    with torch.no_grad():
        tensors["w"].add_(1)
    assert checks.first_changed() == -1
    change(tensors)
    assert checks.first_changed() == 0


def test_another_tensor_of_the_same_form_is_alike_each_time_it_is_asked_for():
    tensors = {"w": torch.nn.Parameter(torch.ones(2, 3))}
    checks = guards(Kind.TENSORS, tensors)
    tensors["w"] = torch.nn.Parameter(torch.zeros(2, 3))
    for _ in range(2):
        assert checks.is_alike(0)
        assert checks.first_changed() == 0
    checks.rearm(0)
    assert checks.first_changed() == -1
    tensors["w"] = torch.nn.Parameter(torch.zeros(2, 4))
    assert not checks.is_alike(0)
    assert checks.first_changed() == 0


def test_a_plain_tensor_is_as_good_as_a_parameter():
    tensors: dict[str, torch.Tensor] = {"w": torch.nn.Parameter(torch.ones(2, 3))}
    checks = guards(Kind.TENSORS, tensors)
    tensors["w"] = torch.ones(2, 3, requires_grad=True)
    assert checks.is_alike(0)


def test_a_sparse_tensor_is_told_from_a_dense_one():
    tensors = {"w": torch.ones(2, 3).to_sparse()}
    checks = guards(Kind.TENSORS, tensors)
    assert checks.first_changed() == -1
    tensors["w"] = torch.ones(2, 3)
    assert not checks.is_alike(0)


def test_a_check_is_armed_anew():
    entries = {"a": 1000}
    checks = guards(Kind.ITEMS, entries)
    entries["a"] = 2000
    assert checks.expected(0) == ["a", 1000]
    checks.rearm(0)
    assert checks.first_changed() == -1
    assert checks.expected(0) == ["a", 2000]


def test_the_search_goes_on_where_it_is_told():
    lists = [[1], [2], [3]]
    checks = _native.Guards([(int(Kind.SEQUENCE), one, None) for one in lists])
    lists[0].append(1)
    lists[2].append(1)
    assert [checks.first_changed(start) for start in (0, 1, 3)] == [0, 2, -1]


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (1, "a check is a tuple (kind, owner, name), not int"),
        ((0, [], None), "a check of kind 0 cannot be made of a list and a NoneType"),
        ((2, {}, None), "a check of kind 2 cannot be made of a dict and a NoneType"),
        ((6, 1, None), "a check of kind 6 cannot be made of a int and a NoneType"),
        ((99, {}, None), "a check of kind 99 cannot be made of a dict and a NoneType"),
    ],
)
def test_a_check_that_cannot_be_made(check: Any, message: str):
    with pytest.raises(TypeError) as caught:
        _native.Guards([check])
    assert str(caught.value) == message


def test_a_position_without_a_check():
    with pytest.raises(IndexError) as caught:
        guards(Kind.SIZE, {}).rearm(1)
    assert str(caught.value) == "there are 1 checks, and none at 1"


def test_values_live_as_long_as_the_guards_and_tensors_do_not():
    thing, tensors = Thing(), {"w": torch.ones(2)}
    kept, dropped = weakref.ref(thing), weakref.ref(tensors["w"])
    entries = {"a": thing}
    checks = _native.Guards([(int(Kind.ITEMS), entries, None), (int(Kind.TENSORS), tensors, PLAIN)])
    del thing, entries["a"], tensors["w"]
    assert kept() is not None
    assert dropped() is None
    assert checks.first_changed() == 0
    del checks
    assert kept() is None


def test_a_circle_through_guards_is_collected():
    thing = Thing()
    thing.guards = guards(Kind.ITEMS, thing.__dict__)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_references_are_given_back():
    value = object()
    entries = {"a": value}
    before = sys.getrefcount(value)
    for _ in range(100):
        checks = guards(Kind.ITEMS, entries)
        checks.rearm(0)
        checks.expected(0)
        checks.first_changed()
    del checks
    assert sys.getrefcount(value) == before


def set_by_a_hot_loop(thing: Thing) -> None:
    for i in range(300):  # the interpreter specialises what runs often
        thing.a = (i, "of a loop")


WRITES = {
    "an item": lambda d, _: d.__setitem__("a", object()),
    "an item by a statement": lambda d, _: exec("d['a'] = object()", {"d": d}),
    "a global": lambda d, _: exec("a = object()", d),
    "a global in a function": lambda d, _: exec("def f():\n  global a\n  a = object()\nf()", d),
    "a deleted global": lambda d, _: exec("del a", d),
    "update": lambda d, _: d.update(a=object()),
    "or": lambda d, _: exec("d |= {'a': object()}", {"d": d}),
    "pop": lambda d, _: d.pop("a"),
    "clear": lambda d, _: d.clear(),
    "another construction": lambda d, _: d.__init__(a=object()),
    "an attribute": lambda _, thing: setattr(thing, "a", object()),
    "an attribute in a loop": lambda _, thing: set_by_a_hot_loop(thing),
    "a deleted attribute": lambda _, thing: delattr(thing, "a"),
    "an attribute by object's own way": lambda _, thing: object.__setattr__(thing, "a", object()),
}


@pytest.mark.parametrize("kind", [Kind.ITEMS, Kind.ENTRY])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_way_to_write_to_a_dictionary_is_seen_after_it_was_seen_unchanged(kind: Kind, write: Any):
    thing = Thing()
    thing.a = object()
    exec("", vars(thing))  # adds __builtins__, which is not a change later
    checks = guards(kind, vars(thing), "a" if kind is Kind.ENTRY else None)
    assert [checks.first_changed() for _ in range(3)] == [-1, -1, -1]
    write(vars(thing), thing)
    assert checks.first_changed() == 0


@pytest.mark.parametrize("way", ["insert", "pop", "setdefault", "popitem"])
def test_the_size_of_a_dictionary_after_it_was_seen_unchanged(way: str):
    entries = {"a": 1}
    checks = guards(Kind.SIZE, entries)
    assert [checks.first_changed() for _ in range(3)] == [-1, -1, -1]
    exec(
        {"insert": "d['b'] = 1", "setdefault": "d.setdefault('b', 1)"}.get(way, f"d.{way}(*k)"),
        {"d": entries, "k": ("a",) if way == "pop" else ()},
    )
    assert checks.first_changed() == 0


def test_an_attribute_of_a_class_after_it_was_seen_unchanged():
    class Own:
        a = 1

    (entries,) = [d for d in gc.get_referents(Own) if isinstance(d, dict) and "a" in d]
    checks = guards(Kind.ENTRY, entries, "a")
    assert [checks.first_changed() for _ in range(3)] == [-1, -1, -1]
    Own.a = 2
    assert checks.first_changed() == 0


def test_one_check_of_a_dictionary_armed_anew_hides_no_other_of_it():
    entries = {"a": object(), "b": object()}
    checks = _native.Guards([(int(Kind.ENTRY), entries, "a"), (int(Kind.ENTRY), entries, "b")])
    assert [checks.first_changed() for _ in range(2)] == [-1, -1]
    entries.update(a=object(), b=object())
    assert checks.first_changed() == 0
    checks.rearm(0)
    assert checks.first_changed() == 1


def test_a_dictionary_that_changes_at_each_step_hides_no_change_of_it():
    entries = {"step": 0, "a": object()}
    checks = guards(Kind.ENTRY, entries, "a")
    for step in range(3):
        entries["step"] = step
        assert checks.first_changed() == -1
    entries.update(step=3, a=object())
    assert checks.first_changed() == 0


def test_what_a_compared_callable_changes_is_seen_by_the_next_comparison():
    entries = {"a": object()}

    def change() -> int:
        entries["a"] = object()
        return 1

    checks = _native.Guards([(int(Kind.ENTRY), entries, "a"), (int(Kind.VALUE), change, None)])
    checks.rearm(0)
    checks.first_changed()
    assert checks.first_changed() == 0


def test_tensors_that_come_to_a_dictionary_that_had_none_are_seen():
    tensors: dict[str, torch.Tensor] = {}
    checks = guards(Kind.TENSORS, tensors)
    assert [checks.first_changed() for _ in range(2)] == [-1, -1]
    tensors["weight"] = torch.zeros(2)
    assert checks.first_changed() == 0
    checks.rearm(0)
    assert [checks.first_changed() for _ in range(2)] == [-1, -1]
    tensors["weight"].requires_grad_()
    assert checks.first_changed() == 0
