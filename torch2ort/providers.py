"""Execution providers of onnxruntime: their notation, the available ones, and the packages of others."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

# A name, or a name with its options as pairs, which can be hashed.
Provider = str | tuple[str, tuple[tuple[str, str], ...]]

# Provider -> the package that contains it, to be installed instead of onnxruntime.
_PACKAGES = {
    "AzureExecutionProvider": "onnxruntime",
    "CUDAExecutionProvider": "onnxruntime-gpu",
    "CoreMLExecutionProvider": "onnxruntime for macOS",
    "DmlExecutionProvider": "onnxruntime-directml",
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
    "QNNExecutionProvider": "onnxruntime-qnn",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
}


def written(text: str) -> Any:
    """Return the providers in the text of an environment variable: names separated by commas, or a JSON list.

    Raises:
        ValueError: the text is not valid JSON.
    """
    return json.loads(text) if text.lstrip().startswith("[") else [one.strip() for one in text.split(",")]


def checked(given: Any) -> tuple[Provider, ...]:
    """Check that providers are in the form that onnxruntime takes, and are available; return them as a tuple.

    Args:
        given: a list of names or of (name, options) pairs.

    Raises:
        ValueError: the check failed. The message names the package of a missing provider; it is empty for a
            wrong form.
    """
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError
    providers = tuple(map(_checked, given))
    names = [name_of(one) for one in providers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name!r} twice; name it once")
    refuse_absent(names)
    return providers


def _checked(one: Any) -> Provider:
    if isinstance(one, str) and one:
        return one
    if not isinstance(one, (list, tuple)) or len(one) != 2 or not isinstance(one[0], str):
        raise ValueError
    pairs = tuple(one[1].items()) if isinstance(one[1], Mapping) else one[1]
    if not isinstance(pairs, tuple) or not all(map(_is_option, pairs)):
        raise ValueError
    # onnxruntime converts the values to texts, too.
    return (one[0], tuple((key, str(value)) for key, value in pairs))


def _is_option(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], (str, int, float))


def name_of(one: Any) -> str:
    """Return the name of a provider with or without options."""
    return str(one if isinstance(one, str) else one[0])


def refuse_absent(names: Sequence[str]) -> None:
    """Refuse providers that the installed onnxruntime lacks: it would only print a line, and run on the CPU.

    Raises:
        ValueError: a provider is missing; names the first one, the available ones, and its package.
    """
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError:
        raise ValueError(f"names {names[0]!r}, and no onnxruntime is installed; pip install one") from None
    available = onnxruntime.get_available_providers()
    here = f"onnxruntime {onnxruntime.__version__} has {', '.join(available)} here"
    for name in names:
        if name in available:
            continue
        if name not in _PACKAGES and name not in onnxruntime.get_all_providers():
            raise ValueError(f"names {name!r}, which is not an execution provider; {here}")
        package = _PACKAGES.get(name)
        brings = (
            f"the package {package} contains it, in an environment without another onnxruntime"
            if package
            else "https://onnxruntime.ai/docs/execution-providers says which build of onnxruntime contains it"
        )
        raise ValueError(f"names {name!r}, which is not available: {here}; {brings}")


def session_providers(providers: Sequence[Provider] | None) -> list[Any]:
    """Return providers in the form that a session takes; ``None`` means the CPU.

    Args:
        providers: as :func:`checked` returned them.
    """
    return [one if isinstance(one, str) else (one[0], dict(one[1])) for one in providers or (CPU,)]
