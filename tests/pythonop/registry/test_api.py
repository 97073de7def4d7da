"""Registering, listing and unregistering, common to all registries."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

import torch2ort


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


NAME = f"{__name__}.Mine"


def exporter(g, x):
    return None


def inferer(node, shapes, dtypes):
    return shapes, dtypes


def another(*args):
    return None


REGISTER = {
    "register_exporter": lambda function, **options: torch2ort.register_exporter(
        function, exporter, **options
    ),
    "register_shape_inferer": lambda function, **options: torch2ort.register_shape_inferer(
        function, inferer, **options
    ),
    "register_inplace_map": lambda function, **options: torch2ort.register_inplace_map(
        function, forward={0: 0}, **options
    ),
    "register_inline": lambda function, **options: torch2ort.register_inline(function, **options),
}
NOUNS = {
    "register_exporter": "an exporter",
    "register_shape_inferer": "a shape inferer",
    "register_inplace_map": "an in-place map",
    "register_inline": "an entry",
}
REPLACE = {
    "register_exporter": lambda function: torch2ort.register_exporter(function, another, override=True),
    "register_shape_inferer": lambda function: torch2ort.register_shape_inferer(
        function, another, override=True
    ),
    "register_inplace_map": lambda function: torch2ort.register_inplace_map(
        function, backward={0: 0}, override=True
    ),
    "register_inline": lambda function: torch2ort.register_inline(function, override=True),
}
REPLACED = {
    "register_exporter": torch2ort.Registration(name=NAME, exporter=torch2ort.Exporter(another, "engine")),
    "register_shape_inferer": torch2ort.Registration(name=NAME, shape_inferer=another),
    "register_inplace_map": torch2ort.Registration(name=NAME, inplace_map=torch2ort.InplaceMap({}, {0: 0})),
    "register_inline": torch2ort.Registration(name=NAME, inline=True),
}
EVERY = pytest.mark.parametrize("verb", REGISTER)


@EVERY
def test_a_name_and_its_class_are_one_key(verb):
    REGISTER[verb](Mine)
    assert list(torch2ort.registered()).count(NAME) == 1
    torch2ort.unregister(NAME)
    assert NAME not in torch2ort.registered()


@EVERY
def test_a_second_registration_is_refused(verb):
    REGISTER[verb](NAME)
    with pytest.raises(torch2ort.RegistryError) as error:
        REGISTER[verb](Mine)
    assert str(error.value) == (
        f"{verb}: '{NAME}' already has {NOUNS[verb]}; pass override=True to replace it, or call "
        f"torch2ort.unregister('{NAME}') first"
    )


@EVERY
def test_override_replaces(verb):
    REGISTER[verb](NAME)
    REPLACE[verb](Mine)
    assert torch2ort.registered()[NAME] == REPLACED[verb]


@EVERY
def test_what_is_no_function_is_refused(verb):
    with pytest.raises(torch2ort.RegistryError) as error:
        REGISTER[verb](Mine.apply)
    assert str(error.value) == (
        f"{verb}: expected a qualified name or a subclass of torch.autograd.Function, got {Mine.apply!r}; "
        f"pass the "
        f"class itself, not its apply"
    )


@EVERY
def test_a_name_without_a_module_is_refused(verb):
    with pytest.raises(torch2ort.RegistryError) as error:
        REGISTER[verb]("Gelu")
    assert str(error.value) == (
        f"{verb}: 'Gelu' is no qualified name; expected module and class, such as 'mylib.ops.Gelu' "
        f"(f'{{cls.__module__}}.{{cls.__qualname__}}')"
    )


def test_decorators_give_back_what_they_decorate():
    assert torch2ort.register_exporter("mylib.A")(exporter) is exporter
    assert torch2ort.register_shape_inferer("mylib.A")(inferer) is inferer
    assert torch2ort.register_inplace_map(forward={0: 0})(Mine) is Mine
    assert torch2ort.register_function()(Mine) is Mine


def test_what_cannot_be_called_is_refused():
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.register_exporter(Mine, "Gelu")
    assert str(error.value) == "register_exporter: expected an exporter as a callable, got 'Gelu'"


def test_an_unknown_source_of_gradients_is_refused():
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.register_exporter(Mine, exporter, gradient="none")
    assert str(error.value) == (
        f"register_exporter: gradient='none' for '{NAME}'; expected one of 'engine', 'function'"
    )


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({}, "the map is empty; give forward={output: argument}, backward={argument: output} or both"),
        ({"forward": [0]}, "expected forward as a dict of positions such as {0: 0}, got [0]"),
        (
            {"backward": {0: -1}},
            "backward={0: -1} is no map of positions; expected whole numbers from 0 up, such as {0: 0}",
        ),
        (
            {"forward": {0: 0, 1: 0}},
            "forward={0: 0, 1: 0} gives the same memory to two; expected every value once",
        ),
    ],
)
def test_a_malformed_map_is_refused(declared, sentence):
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.register_inplace_map(Mine, **declared)
    assert str(error.value) == f"register_inplace_map: {sentence}"


def test_registered_shows_all_that_a_name_has():
    torch2ort.register_exporter(Mine, exporter, gradient="function")
    torch2ort.register_shape_inferer(NAME, inferer)
    torch2ort.register_inplace_map(Mine, forward={0: 0})
    torch2ort.register_function(Mine)
    found = torch2ort.registered()[NAME]
    assert found == torch2ort.Registration(
        name=NAME,
        exporter=torch2ort.Exporter(exporter, "function"),
        shape_inferer=inferer,
        inplace_map=torch2ort.InplaceMap({0: 0}, {}),
        function=Mine,
    )


def test_entries_are_frozen():
    torch2ort.register_exporter(Mine, exporter)
    torch2ort.register_inplace_map(Mine, forward={0: 0})
    found = torch2ort.registered()[NAME]
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.exporter.gradient = "function"
    with pytest.raises(TypeError):
        found.inplace_map.forward[0] = 1


def test_a_listing_is_a_snapshot():
    listing = torch2ort.registered()
    torch2ort.register_exporter(Mine, exporter)
    assert NAME not in listing


def test_unregister_forgets_every_entry_of_a_name():
    for register in REGISTER.values():
        register(Mine)
    torch2ort.register_function(Mine)
    torch2ort.unregister(Mine)
    assert NAME not in torch2ort.registered()


def test_unregistering_an_unknown_name_offers_the_nearest():
    torch2ort.register_exporter("mylib.ops.Gelu", exporter)
    with pytest.raises(torch2ort.RegistryError) as error:
        torch2ort.unregister("mylib.ops.Geluu")
    assert str(error.value) == (
        "unregister: 'mylib.ops.Geluu' has no entry; did you mean 'mylib.ops.Gelu'?; torch2ort.registered() "
        "lists "
        "them all"
    )


def test_a_users_entry_goes_before_a_built_in_one():
    name = "entmax.activations.SparsemaxFunction"
    before = torch2ort.registered()[name].shape_inferer
    torch2ort.register_shape_inferer(name, inferer)
    assert torch2ort.registered()[name].shape_inferer is inferer
    torch2ort.unregister(name)
    assert name not in torch2ort.registered()
    torch2ort.register_shape_inferer(name, before)


def test_of_many_threads_that_register_a_name_one_succeeds():
    outcomes = []
    gate = threading.Barrier(8)

    def register():
        gate.wait()
        for _ in range(200):
            try:
                torch2ort.register_exporter(Mine, exporter)
                outcomes.append(True)
            except torch2ort.RegistryError:
                outcomes.append(False)

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(True) == 1
    assert len(outcomes) == 8 * 200


def test_a_listing_never_shows_half_of_a_name():
    stop = threading.Event()
    halves = []

    def look():
        while not stop.is_set():
            found = torch2ort.registered().get(NAME)
            if found is not None and found.exporter is None:
                halves.append(found)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(500):
        torch2ort.register_exporter(Mine, exporter)
        torch2ort.register_shape_inferer(Mine, inferer)
        torch2ort.unregister(Mine)
    stop.set()
    thread.join()
    assert halves == []
