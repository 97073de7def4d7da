"""The reference's schema of options, for Cerberus: their types, bounds and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, ClassVar

import cerberus

from torch2ort.trainer.amp.loss_scaler import LossScaler
from torch2ort.trainer.optim.lr_scheduler import _LRScheduler


class PropagateCastOpsStrategy(IntEnum):
    """Strategies by which ONNX Runtime moves casts; torch2ort keeps casts where autocast inserts them."""

    NONE = -1
    INSERT_AND_REDUCE = 0
    FLOOD_FILL = 1


class OptionsValidator(cerberus.Validator):  # type: ignore[misc]
    """Cerberus with the reference's own types."""

    types_mapping: ClassVar[dict[str, Any]] = {
        **cerberus.Validator.types_mapping,
        # True is an int in Python, but not allowed for an integer option.
        "integer": cerberus.TypeDefinition("integer", (int,), (bool,)),
        "amp.loss_scaler": cerberus.TypeDefinition("amp.loss_scaler", (LossScaler,), ()),
        "optim.lr_scheduler": cerberus.TypeDefinition("optim.lr_scheduler", (_LRScheduler,), ()),
    }


def faults(errors: Mapping[Any, Any], given: Any, path: str = "") -> list[str]:
    """Return each fault that Cerberus found, as ``a.b[0]: <the fault>, and is <the value>``.

    Args:
        errors: Cerberus' errors about `given`.
        given: a dict or list of the document.
        path: its path in the document.
    """
    found = []
    for key, entries in errors.items():
        name = f"{path}[{key}]" if isinstance(key, int) and path else f"{path}.{key}" if path else str(key)
        value = _at(given, key)
        for entry in entries:
            if isinstance(entry, Mapping):
                found += faults(entry, value, name)
            else:
                found.append(f"{name}: {entry}, and is {value!r}")
    return found


def _at(given: Any, key: Any) -> Any:
    """Return the value of `key` in a dict or a list; None if there is none."""
    if isinstance(given, Mapping):
        return given.get(key)
    return given[key] if isinstance(given, (list, tuple)) and isinstance(key, int) else None


def _group(**schema: Any) -> dict[str, Any]:
    """Return the rule of a dict of options, by default a new empty dict, as Cerberus fills it."""
    return {"type": "dict", "required": False, "default_setter": lambda _: {}, "schema": schema}


def _switch(default: bool) -> dict[str, Any]:
    return {"type": "boolean", "default": default}


def _integer(default: int, minimum: int, maximum: int | None = None) -> dict[str, Any]:
    rule = {"type": "integer", "min": minimum, "default": default}
    return rule if maximum is None else {**rule, "max": maximum}


def _text(default: str) -> dict[str, Any]:
    return {"type": "string", "default": default}


def _texts() -> dict[str, Any]:
    return {"type": "list", "schema": {"type": "string"}, "default_setter": lambda _: []}


def _object(allows: Callable[[Any], bool], kind: str) -> dict[str, Any]:
    """Return the rule of an object of a type that Cerberus does not know, or None."""

    def check(field: str, value: Any, error: Callable[[str, str], None]) -> None:
        if value is not None and not allows(value):
            error(field, f"must be {kind} or None")

    return {"check_with": check, "nullable": True, "default": None}


def _is_session_options(value: Any) -> bool:
    # By name: there are several onnxruntime packages, and none is imported to check options.
    return type(value).__name__ == "SessionOptions" and type(value).__module__.startswith("onnxruntime")


def _strategy(value: Any) -> Any:
    """Convert a member of onnxruntime's enumeration to the member of the same name."""
    return PropagateCastOpsStrategy.__members__.get(getattr(value, "name", ""), value)


def _check_strategy(field: str, value: Any, error: Callable[[str, str], None]) -> None:
    if not isinstance(value, PropagateCastOpsStrategy):
        error(field, "must be of onnxruntime.training.PropagateCastOpsStrategy type")


_PIPELINE = _group(
    pipeline_parallel_size=_integer(1, 1),
    num_pipeline_micro_batches=_integer(1, 1),
    pipeline_cut_info_string=_text(""),
    sliced_schema={
        "type": "dict",
        "default_setter": lambda _: {},
        "keysrules": {"type": "string"},
        "valuesrules": {"type": "list", "schema": {"type": "integer"}},
    },
    sliced_axes={
        "type": "dict",
        "default_setter": lambda _: {},
        "keysrules": {"type": "string"},
        "valuesrules": {"type": "integer"},
    },
    sliced_tensor_names=_texts(),
)
_DISTRIBUTED = _group(
    world_rank=_integer(0, 0),
    world_size=_integer(1, 1),
    local_rank=_integer(0, 0),
    data_parallel_size=_integer(1, 1),
    horizontal_parallel_size=_integer(1, 1),
    pipeline_parallel=_PIPELINE,
    allreduce_post_accumulation=_switch(False),
    deepspeed_zero_optimization=_group(stage=_integer(0, 0, 1)),
    enable_adasum=_switch(False),
)
_GRAPH_TRANSFORMER = _group(
    attn_dropout_recompute=_switch(False),
    gelu_recompute=_switch(False),
    transformer_layer_recompute=_switch(False),
    number_recompute_layers=_integer(0, 0),
    propagate_cast_ops_config=_group(
        propagate_cast_ops_strategy={
            "coerce": _strategy,
            "check_with": _check_strategy,
            "default": PropagateCastOpsStrategy.FLOOD_FILL,
        },
        propagate_cast_ops_level={"type": "integer", "default": 1},
        propagate_cast_ops_allow=_texts(),
    ),
    allow_layer_norm_mod_precision=_switch(False),
)
OPTIONS = {
    "batch": _group(gradient_accumulation_steps=_integer(1, 1)),
    "device": _group(id=_text("cuda"), mem_limit=_integer(0, 0)),
    "distributed": _DISTRIBUTED,
    "lr_scheduler": {"type": "optim.lr_scheduler", "nullable": True, "default": None},
    "mixed_precision": _group(
        enabled=_switch(False),
        loss_scaler={"type": "amp.loss_scaler", "nullable": True, "default": None},
    ),
    "graph_transformer": _GRAPH_TRANSFORMER,
    "utils": _group(
        frozen_weights=_texts(),
        grad_norm_clip=_switch(True),
        memory_efficient_gradient=_switch(False),
        run_symbolic_shape_infer=_switch(False),
    ),
    "debug": _group(
        deterministic_compute=_switch(False),
        check_model_export=_switch(False),
        graph_save_paths=_group(
            model_after_graph_transforms_path=_text(""),
            model_with_gradient_graph_path=_text(""),
            model_with_training_graph_path=_text(""),
            model_with_training_graph_after_optimization_path=_text(""),
        ),
    ),
    "_internal_use": _group(
        enable_internal_postprocess=_switch(True),
        extra_postprocess=_object(callable, "callable"),
        onnx_opset_version=_integer(14, 12, 14),
        enable_onnx_contrib_ops=_switch(True),
    ),
    # Names of providers, with their options; the known names depend on the environment.
    "provider_options": {
        "type": "dict",
        "required": False,
        "default_setter": lambda _: {},
        "keysrules": {"type": "string"},
        "valuesrules": {"type": "dict"},
    },
    "session_options": _object(_is_session_options, "onnxruntime.SessionOptions"),
}
