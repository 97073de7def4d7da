"""Symbolic shapes on the exported graph."""

from torch2ort.shape_infer.infer import infer
from torch2ort.shape_infer.python_op import SITE_META

__all__ = ["SITE_META", "infer"]
