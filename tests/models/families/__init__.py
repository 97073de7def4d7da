"""Families of models in tiny configurations of random weights, each with batches of two sizes."""

from __future__ import annotations

import importlib

from tests.models.families.family_registry import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]

# Each module adds its families to the table.
for _name in ("audio", "decoders", "diffusion", "encoders", "custom_models", "vision"):
    importlib.import_module(f"{__name__}.{_name}")
