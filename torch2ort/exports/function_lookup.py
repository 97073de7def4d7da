"""The places of the classes that a stored graph calls, for their look-up in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch2ort.cache.key.function_locations import locate_function, located_function
from torch2ort.cache.key.key import Key, Unkeyable
from torch2ort.errors import ModelLoadError
from torch2ort.graph.function_classes import bind_classes
from torch2ort.pythonop import Site, UnstoredObject, dump_site, load_site


def places_of(sites: Mapping[str, Site], key: Key) -> dict[str, list[str | int]]:
    """Return the place of each site's class, without those of torch2ort itself.

    Args:
        sites: by name.
        key: the model's key, which was made by a walk through its code.

    Raises:
        Unkeyable: another process could not make one of the calls.
    """
    try:
        bind_classes((site for site in sites.values() if site.internal), has_libraries=True)
    except ModelLoadError as error:
        raise Unkeyable(str(error).rstrip(".")) from error
    return {name: _place_of(site, key) for name, site in sites.items() if not site.internal}


def bind_places(sites: Mapping[str, Site], places: Mapping[str, Sequence[Any]], key: Key) -> None:
    """Set the class of each site, in place.

    Args:
        sites: by name, as they were stored.
        places: as :func:`places_of` returned them.
        key: the model's key in this process.

    Raises:
        ModelLoadError: a site calls a kernel that no file may call, or an operator that is not registered.
        Unkeyable: a class is not at its place.
    """
    bind_classes((site for site in sites.values() if site.internal), has_libraries=True)
    for name, site in sites.items():
        if not site.internal:
            site.function = located_function(places[name], key)


def _place_of(site: Site, key: Key) -> list[str | int]:
    assert site.function is not None
    if site.keeps_state:
        raise Unkeyable(f"{site.func_name}: forward writes to an argument that the model holds")
    text = load_site(site.func_name, dump_site(site))
    for position, value in enumerate((*text.arguments, *text.known_result.outputs)):
        if isinstance(value, UnstoredObject):
            what = f"argument {position}" if position < len(text.arguments) else "an output"
            raise Unkeyable(f"{site.func_name}: {what} is {value!r}, and exists only in this process")
    return locate_function(site.function, key)
