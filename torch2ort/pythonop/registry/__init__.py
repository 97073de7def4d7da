"""Registrations of users for Functions and for operators."""

from torch2ort.pythonop.registry._table import builtin_entries
from torch2ort.pythonop.registry.exporters import Exporter, register_exporter
from torch2ort.pythonop.registry.functions import classes_given, register_function, resolve
from torch2ort.pythonop.registry.inferers import Inferer, register_shape_inferer
from torch2ort.pythonop.registry.inline import register_inline
from torch2ort.pythonop.registry.inplace import InplaceMap, register_inplace_map
from torch2ort.pythonop.registry.listing import Registration, registered, unregister
from torch2ort.pythonop.registry.lookup import exporter_of, inferer_of, inplace_map_of, is_inlined
from torch2ort.pythonop.registry.operators import (
    gradients,
    overloads,
    register_gradient,
    register_symbolic,
    symbolics,
)
from torch2ort.pythonop.registry.unmatched_names import report_unmatched

__all__ = [
    "Exporter",
    "Inferer",
    "InplaceMap",
    "Registration",
    "builtin_entries",
    "classes_given",
    "exporter_of",
    "gradients",
    "inferer_of",
    "inplace_map_of",
    "is_inlined",
    "overloads",
    "register_exporter",
    "register_function",
    "register_gradient",
    "register_inline",
    "register_inplace_map",
    "register_shape_inferer",
    "register_symbolic",
    "registered",
    "report_unmatched",
    "resolve",
    "symbolics",
    "unregister",
]
