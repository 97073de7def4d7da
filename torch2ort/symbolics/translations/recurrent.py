"""Recurrent nets, by torch.onnx's translations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch2ort._torch import onnx_exporter as private
from torch2ort.kernels.recurrent import ORIGINALS
from torch2ort.symbolics.translations.registry import translates


def _as(operator: Any) -> Callable[..., Any]:
    """The translation of the operator that is stood for."""

    def translate(*arguments: Any) -> Any:
        translation = private.torchlib_translation(operator)
        if translation is None:
            raise NotImplementedError(f"torch.onnx does not translate {operator}")
        return translation(*arguments)

    return translate


for _stand_in, _operator in ORIGINALS.items():
    translates(_stand_in)(_as(_operator))
