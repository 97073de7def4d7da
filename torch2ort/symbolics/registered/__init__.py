"""Registered exporters and symbolics at work: Functions and torch's operators as graphs."""

from torch2ort.symbolics.registered.builder import GraphBuilder
from torch2ort.symbolics.registered.exporter_calls import map_site
from torch2ort.symbolics.registered.operators import translating, user_operators, user_translations
from torch2ort.symbolics.registered.values import GraphValue

__all__ = [
    "GraphBuilder",
    "GraphValue",
    "map_site",
    "translating",
    "user_operators",
    "user_translations",
]
