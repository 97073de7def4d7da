"""Symbolic shapes on the exported graph."""

from torch2ort.shape_infer.infer import infer

__all__ = ["infer"]
