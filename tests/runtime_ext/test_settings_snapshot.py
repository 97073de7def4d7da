"""Settings are read in one call, and described again where one has changed."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from torch2ort._native import Switches


def test_what_has_not_changed_is_the_same_object():
    reads = ((torch.is_grad_enabled, ()), (torch.get_autocast_dtype, ("cpu",)))
    switches = Switches(reads, lambda *values: [*values])
    first = switches.now()
    assert first == [True, torch.bfloat16]
    assert switches.now() is first


def test_a_change_and_the_change_back_are_seen():
    switches = Switches(((torch.is_grad_enabled, ()),), lambda recording: [recording])
    assert switches.now() == [True]
    with torch.no_grad():
        assert switches.now() == [False]
    assert switches.now() == [True]


def test_an_object_that_is_only_equal_is_a_change():
    values = iter([[1], [1]])
    switches = Switches(((next, (values,)),), lambda value: (value,))
    first = switches.now()
    assert switches.now() is not first


def test_no_switch_is_always_the_same():
    switches = Switches((), list)
    assert switches.now() is switches.now()


def test_an_error_of_a_read_is_raised_and_what_was_made_is_kept():
    entries = {"a": 1}
    switches = Switches(((entries.__getitem__, ("a",)),), lambda value: [value])
    first = switches.now()
    del entries["a"]
    with pytest.raises(KeyError):
        switches.now()
    entries["a"] = 1
    assert switches.now() is first


def test_what_could_not_be_made_is_tried_again():
    entries = {"a": 0}
    switches = Switches(((entries.__getitem__, ("a",)),), lambda value: [1 // value])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            switches.now()
    entries["a"] = 1
    assert switches.now() == [1]


def test_each_thread_is_told_its_own():
    switches = Switches(((torch.is_grad_enabled, ()),), lambda recording: [recording])
    found: list[list[bool]] = []

    def without() -> None:
        with torch.no_grad():
            for _ in range(200):
                found.append(switches.now())

    thread = threading.Thread(target=without)
    thread.start()
    assert all(switches.now() == [True] for _ in range(200))
    thread.join()
    assert found == [[False]] * 200


def test_a_circle_through_it_is_freed():
    class Reader:
        def read(self) -> bool:
            return True

    reader = Reader()
    reader.switches = Switches(((reader.read, ()),), lambda value: [value])
    reader.switches.now()
    gone = weakref.ref(reader)
    del reader
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "reads", [(1,), ((len,),), ((len, "a"),)], ids=["a number", "no arguments", "a text as arguments"]
)
def test_what_is_no_read_is_refused(reads):
    with pytest.raises(TypeError, match=r"^Switches: item 0 is no tuple \(callable, arguments\)$"):
        Switches(reads, list)
