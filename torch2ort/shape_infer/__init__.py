"""Symbolic shapes of the values of an exported graph."""

from torch2ort.shape_infer.infer import infer

__all__ = ["infer"]
