"""Execution providers of a call of an ORTModule: those of its tensors' device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from torch2ort.errors import OptionError, RuntimeNotFoundError, UnsupportedOperatorError
from torch2ort.options import Options
from torch2ort.providers import CPU, CUDA, Provider, name_of
from torch2ort.runtime import onnxruntime, stock
from torch2ort.runtime.ortvalues import shares_memory

_OUT = "or move the model and its inputs with .cpu()"
# Setting of CUDA's provider: ONNX Runtime rounds the factors of a product to 10 bits by default, PyTorch does
# not.
_AS_EAGER = {"use_tf32": "0"}


def on_their_device(options: Options, tensors: Iterable[torch.Tensor], name: str) -> Options:
    """Return the options of a graph, with the providers that it runs on.

    Args:
        options: the user's, with the requested providers.
        tensors: those of a call and of its model.
        name: the model's name, for errors.

    Raises:
        OptionError: the options request something that is not available on that device.
        RuntimeNotFoundError: the installed onnxruntime does not support the device.
        UnsupportedOperatorError: the tensors are on several devices, or on a GPU without a call of
            :func:`torch2ort.runtime.stock.try_cuda`.
    """
    # A number on the CPU may be used with tensors of another device, as in PyTorch.
    devices = dict.fromkeys(t.device for t in tensors if t.dim() or not t.is_cpu or t.requires_grad)
    if len(devices) > 1:
        raise UnsupportedOperatorError(
            f"the tensors of {name} and of its call are on {', '.join(map(str, devices))}, and a session "
            f"takes those of one device. Move all of them to one"
        )
    device = next(iter(devices), torch.device("cpu"))
    if device.type != "cuda":
        if device.type == "cpu" and CUDA in map(name_of, options.providers or ()):
            raise OptionError(
                f"Option 'providers' names {CUDA!r}, and the tensors of {name} and of its call are on cpu. "
                f"Move them with .cuda(), or leave providers out, which then follow the tensors"
            )
        return options
    where = f"the tensors of {name} are on {device}"
    _refuse_runtime(options, where)
    _refuse_options(options, where)
    return replace(options, providers=_providers_on(options.providers, device, where))


def refuse_untried(options: Options) -> None:
    """Refuse CUDA among the providers of an ORTModule without a call of ``stock.try_cuda()``.

    Raises:
        OptionError: CUDA is among them.
    """
    if CUDA in map(name_of, options.providers or ()) and not stock.cuda_is_tried():
        raise OptionError(
            f"Option 'providers' names {CUDA!r}; an ORTModule has run there on an emulated device only, not "
            f"on a GPU yet: call torch2ort.runtime.stock.try_cuda() and compare with eager. A model of "
            f"torch2ort.export runs on any provider"
        )


def _refuse_runtime(options: Options, where: str) -> None:
    """Refuse an onnxruntime that does not support CUDA tensors, and one whose support was not enabled.

    Raises:
        RuntimeNotFoundError: it has no provider for CUDA, or is too old.
        UnsupportedOperatorError: the user has not called :func:`torch2ort.runtime.stock.try_cuda`.
    """
    ort = onnxruntime()
    available = ort.get_available_providers()
    if CUDA not in available:
        raise RuntimeNotFoundError(
            f"{where}, and onnxruntime {ort.__version__} has {', '.join(available)} here. Install "
            f"onnxruntime-gpu (pip install 'torch2ort[gpu]', in an environment without another onnxruntime), "
            f"{_OUT}"
        )
    if not shares_memory():
        raise RuntimeNotFoundError(
            f"{where}, and onnxruntime {ort.__version__} takes no memory of PyTorch's. Install "
            f"onnxruntime-gpu 1.22 or later, {_OUT}"
        )
    if not stock.cuda_is_tried():
        raise UnsupportedOperatorError(
            f"{where}, and an ORTModule has run there on an emulated device only, not on a GPU yet. Call "
            f"torch2ort.runtime.stock.try_cuda() and compare with eager, {_OUT}"
        )


def _refuse_options(options: Options, where: str) -> None:
    """Refuse options that are supported on the CPU only.

    Raises:
        OptionError: names the first of them.
    """
    for name in ("fuse", "autotune"):
        if options.is_on(name):
            raise OptionError(
                f"Option {options.asker(name)}, and {where}; it is for the CPU alone. Leave it out, {_OUT}"
            )


def _providers_on(given: Any, device: torch.device, where: str) -> tuple[Provider, ...]:
    """Return the providers for a GPU, with the settings that the user passed.

    Raises:
        OptionError: the providers are for another device, or have a stream of their own.
    """
    number = str(device.index or 0)
    if not given:
        return _cuda({"device_id": number}), CPU
    first = given[0]
    settings = {} if isinstance(first, str) else dict(first[1])
    if name_of(first) != CUDA:
        named = ", ".join(map(name_of, given))
        raise OptionError(
            f"Option 'providers' names {named}, and {where}. Name {CUDA!r} first, or leave providers out, "
            f"which then follow the tensors"
        )
    if settings.get("device_id", number) != number:
        raise OptionError(
            f"Option 'providers' gives {CUDA!r} the device_id {settings['device_id']}, and {where}. Leave it "
            f"out, which then follows the tensors"
        )
    if "user_compute_stream" in settings:
        raise OptionError(
            f"Option 'providers' gives {CUDA!r} a user_compute_stream; the sessions of an ORTModule have one "
            f"stream of their own, in order with PyTorch's. Leave it out"
        )
    return _cuda({"device_id": number, **settings}), *given[1:]


def _cuda(settings: Mapping[str, str]) -> Provider:
    return CUDA, tuple({**_AS_EAGER, **settings}.items())
