"""Lookup of the registrations that apply to one call of a Function."""

from __future__ import annotations

from torch2ort.pythonop.registry._table import Registration, Table, Value
from torch2ort.pythonop.registry.exporters import Exporter, exporters
from torch2ort.pythonop.registry.inferers import Inferer, inferers
from torch2ort.pythonop.registry.inline import inlined
from torch2ort.pythonop.registry.inplace import InplaceMap, inplace_maps
from torch2ort.pythonop.registry.ortmodule import own_inferer, own_inplace_map
from torch2ort.pythonop.site import Site


def exporter_of(site: Site) -> Exporter | None:
    """Return the exporter for a site, or ``None``."""
    entry = _find(exporters, site.func_name, site.function)
    return None if entry is None else entry.value


def inferer_of(func_name: str, function: type | None) -> Inferer | None:
    """Return the shape inferer for a call: a registered one, or the class's own ``infer_shape``.

    Args:
        func_name: the site's name of the Function.
        function: its class; ``None`` if a graph contains only the name.
    """
    entry = _find(inferers, func_name, function)
    return own_inferer(function) if entry is None else entry.value


def inplace_map_of(site: Site) -> InplaceMap | None:
    """Return the in-place map for a site: a registered one, or the class's own ``alias_input``."""
    entry = _find(inplace_maps, site.func_name, site.function)
    return own_inplace_map(site) if entry is None else entry.value


def is_inlined(site: Site) -> bool:
    """Return True if training replaces a site's Function by the Function's operators."""
    return _find(inlined, site.func_name, site.function) is not None


def _find(table: Table[Value], func_name: str, function: type | None) -> Registration[Value] | None:
    name, _, number = func_name.partition("#")
    entry = table.find(name, function)
    if entry is not None and function is None and number and entry.function is not None:
        return None  # registered for one of several classes, and the site's class is unknown
    return entry
