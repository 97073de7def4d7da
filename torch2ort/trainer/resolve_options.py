"""Translation of the options to an ORTModule's options and a device; errors for unsupported options."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from torch2ort import OptionError, Options
from torch2ort.trainer.optim.lr_scheduler import _WarmupLRScheduler
from torch2ort.trainer.options import ORTTrainerOptions
from torch2ort.trainer.options_schema import PropagateCastOpsStrategy

_logger = logging.getLogger("torch2ort")

_STAGES = "a model is not cut into stages; use distributed.data_parallel_size"
_LAYERS = "put torch.utils.checkpoint.checkpoint around the layers in the model's forward"
_CASTS = "casts are where torch.autocast puts them"
_PIPELINE = "distributed.pipeline_parallel"
_CAST_OPS = "graph_transformer.propagate_cast_ops_config.propagate_cast_ops"
# Options of which only some values are supported -> these values, and the alternative.
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{_PIPELINE}.pipeline_parallel_size": ((1,), _STAGES),
    f"{_PIPELINE}.num_pipeline_micro_batches": ((1,), _STAGES),
    f"{_PIPELINE}.pipeline_cut_info_string": (("",), _STAGES),
    f"{_PIPELINE}.sliced_schema": (({},), _STAGES),
    f"{_PIPELINE}.sliced_axes": (({},), _STAGES),
    f"{_PIPELINE}.sliced_tensor_names": (([],), _STAGES),
    "distributed.horizontal_parallel_size": (
        (1,), "weights are not cut across processes; use distributed.data_parallel_size",
    ),
    "graph_transformer.transformer_layer_recompute": ((False,), _LAYERS),
    "graph_transformer.number_recompute_layers": ((0,), _LAYERS),
    f"{_CAST_OPS}_strategy": (
        (PropagateCastOpsStrategy.FLOOD_FILL, PropagateCastOpsStrategy.NONE), _CASTS,
    ),
    f"{_CAST_OPS}_level": ((1,), _CASTS),
    f"{_CAST_OPS}_allow": (([],), _CASTS),
    "graph_transformer.allow_layer_norm_mod_precision": ((False,), _CASTS),
    "_internal_use.enable_onnx_contrib_ops": ((True,), "a call of a Function is one itself"),
}  # fmt: skip


def module_options(options: ORTTrainerOptions, folder: str | None) -> Options:
    """Return the settings of the ORTModule that runs the model.

    Args:
        options: the trainer's.
        folder: the folder for graphs of every stage; ``None`` for none.
    """
    session: dict[str, Any] = _of_session(options.session_options)
    deterministic = options.debug.deterministic_compute or session.pop("deterministic", False)
    providers = _providers(options.provider_options)
    return Options(deterministic=deterministic, save_onnx_dir=folder, providers=providers, **session)


def check_supported(options: ORTTrainerOptions) -> None:
    """Raise an error for options that are not supported.

    Raises:
        OptionError: there is such an option; the error names it, its value and the alternative.
    """
    for path, (allowed, instead) in _ONLY.items():
        value: Any = options
        for name in path.split("."):
            value = getattr(value, name)
        if value not in allowed:
            raise OptionError(
                f"Option {path} is {value!r}; torch2ort has {' and '.join(map(repr, allowed))} alone: "
                f"{instead}."
            )
    if options._is_given("_internal_use.onnx_opset_version"):
        raise OptionError(
            f"Option _internal_use.onnx_opset_version is {options._internal_use.onnx_opset_version}; "
            f"torch2ort writes a later opset, which ONNX's converter does not take back to that; "
            f"leave the option out."
        )
    if isinstance(options.lr_scheduler, _WarmupLRScheduler):
        options.lr_scheduler._check()
    _providers(options.provider_options)
    _of_session(options.session_options)
    if options.mixed_precision.loss_scaler is not None and not options.mixed_precision.enabled:
        raise OptionError(
            "Option mixed_precision.loss_scaler is set and mixed_precision.enabled is False; enable it, "
            "or leave the "
            "scaler out."
        )


def _providers(given: dict[str, dict[str, Any]]) -> Sequence[Any] | None:
    """Return the field of :class:`Options` for ``provider_options``; both have the first choice first.

    Raises:
        OptionError: the installed onnxruntime lacks a provider.
    """
    if not given:
        return None
    try:
        return Options(providers=list(given.items())).providers
    except OptionError as error:
        own, names, reason = str(error).partition("Option 'providers' names ")
        if names and not own:
            raise OptionError(f"Option provider_options names {reason}") from None
        raise OptionError(
            f"Option provider_options is {given!r}; allowed is a dict of texts and numbers for each "
            f"provider's name."
        ) from None


# Attributes of onnxruntime's SessionOptions that a training session supports -> the option.
_FOLLOWED = {"intra_op_num_threads": "intra_op_threads", "use_deterministic_compute": "deterministic"}


def _of_session(given: Any) -> dict[str, Any]:
    """Return the fields of :class:`Options` for onnxruntime's ``SessionOptions``.

    Raises:
        OptionError: an attribute is set for which a training session has its own value.
    """
    if given is None:
        return {}
    # The class belongs to whichever onnxruntime package is installed.
    plain = type(given)()
    names = [name for name in dir(plain) if not name.startswith("_") and not callable(getattr(plain, name))]
    changed = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(plain, name)}
    other = sorted(changed.keys() - _FOLLOWED.keys())
    if other:
        raise OptionError(
            f"Option session_options has {other[0]} = {changed[other[0]]!r}; a training session follows "
            f"{' and '.join(_FOLLOWED)} alone, and has its own {other[0]}."
        )
    return {_FOLLOWED[name]: value for name, value in changed.items()}


def device_of(options: ORTTrainerOptions) -> torch.device:
    """Return the device to train on.

    ``cuda`` without a number is the GPU of the process's ``local_rank``. Where the user chose no device and
    there is no GPU, it is the CPU.

    Raises:
        OptionError: there is no such device, or its memory cannot be limited.
    """
    name, limit = options.device.id, options.device.mem_limit
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"Option device.id is {name!r}; allowed is 'cpu', 'cuda' or 'cuda:N'.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        if options._is_given("device.id"):
            raise OptionError(
                f"Option device.id is {name!r}, and PyTorch sees no GPU; allowed is 'cpu' here."
            )
        logging.getLogger("torch2ort").info(
            "no device was chosen and PyTorch sees no GPU: training on the CPU"
        )
        device = torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"Option device.id is {name!r}; allowed is 'cpu', 'cuda' or 'cuda:N'.")
    if limit and device.type == "cpu":
        raise OptionError(
            f"Option device.mem_limit is {limit}; the memory of a GPU can be limited, that of {device} "
            f"cannot."
        )
    if device.type == "cuda" and ":" not in name:
        device = torch.device("cuda", options.distributed.local_rank)
    if limit:
        total = torch.cuda.get_device_properties(device).total_memory
        # PyTorch allocates the graphs' tensors and its kernels' memory.
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    return device
