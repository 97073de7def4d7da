"""ORTTrainerOptions: the reference's schema, its defaults, and errors with the path of each fault."""

from __future__ import annotations

import onnxruntime
import pytest

from torch2ort.errors import OptionError
from torch2ort.trainer import ORTTrainerOptions, PropagateCastOpsStrategy, amp, optim

DEFAULTS = {
    "batch.gradient_accumulation_steps": 1,
    "device.id": "cuda",
    "device.mem_limit": 0,
    "distributed.world_rank": 0,
    "distributed.world_size": 1,
    "distributed.local_rank": 0,
    "distributed.data_parallel_size": 1,
    "distributed.horizontal_parallel_size": 1,
    "distributed.pipeline_parallel.pipeline_parallel_size": 1,
    "distributed.pipeline_parallel.num_pipeline_micro_batches": 1,
    "distributed.pipeline_parallel.pipeline_cut_info_string": "",
    "distributed.pipeline_parallel.sliced_schema": {},
    "distributed.pipeline_parallel.sliced_axes": {},
    "distributed.pipeline_parallel.sliced_tensor_names": [],
    "distributed.allreduce_post_accumulation": False,
    "distributed.deepspeed_zero_optimization.stage": 0,
    "distributed.enable_adasum": False,
    "lr_scheduler": None,
    "mixed_precision.enabled": False,
    "mixed_precision.loss_scaler": None,
    "graph_transformer.attn_dropout_recompute": False,
    "graph_transformer.gelu_recompute": False,
    "graph_transformer.transformer_layer_recompute": False,
    "graph_transformer.number_recompute_layers": 0,
    "graph_transformer.propagate_cast_ops_config.propagate_cast_ops_strategy": (
        PropagateCastOpsStrategy.FLOOD_FILL
    ),
    "graph_transformer.propagate_cast_ops_config.propagate_cast_ops_level": 1,
    "graph_transformer.propagate_cast_ops_config.propagate_cast_ops_allow": [],
    "graph_transformer.allow_layer_norm_mod_precision": False,
    "utils.frozen_weights": [],
    "utils.grad_norm_clip": True,
    "utils.memory_efficient_gradient": False,
    "utils.run_symbolic_shape_infer": False,
    "debug.deterministic_compute": False,
    "debug.check_model_export": False,
    "debug.graph_save_paths.model_after_graph_transforms_path": "",
    "debug.graph_save_paths.model_with_gradient_graph_path": "",
    "debug.graph_save_paths.model_with_training_graph_path": "",
    "debug.graph_save_paths.model_with_training_graph_after_optimization_path": "",
    "_internal_use.enable_internal_postprocess": True,
    "_internal_use.extra_postprocess": None,
    "_internal_use.onnx_opset_version": 14,
    "_internal_use.enable_onnx_contrib_ops": True,
    "provider_options": {},
    "session_options": None,
}


def at(options: ORTTrainerOptions, path: str) -> object:
    value = options
    for name in path.split("."):
        value = getattr(value, name)
    return value


def nested(path: str, value: object) -> dict[str, object]:
    *groups, name = path.split(".")
    found = {name: value}
    for group in reversed(groups):
        found = {group: found}
    return found


def leaves(options: object, before: str = "") -> set[str]:
    found = set()
    for name, value in options:
        path = f"{before}{name}"
        found |= leaves(value, f"{path}.") if hasattr(value, "__iter__") and _is_group(value) else {path}
    return found


def _is_group(value: object) -> bool:
    return not isinstance(value, (str, list, dict, tuple))


@pytest.mark.parametrize("path", DEFAULTS)
def test_each_option_has_its_documented_default(path: str) -> None:
    assert at(ORTTrainerOptions(), path) == DEFAULTS[path]


def test_there_are_the_documented_options_alone() -> None:
    assert leaves(ORTTrainerOptions()) == DEFAULTS.keys()


def test_the_reference_s_example_is_taken() -> None:
    scheduler = optim.lr_scheduler.LinearWarmupLRScheduler()
    scaler = amp.LossScaler(loss_scale=float(1 << 16))
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 128},
            "device": {"id": "cuda:0", "mem_limit": 2 * 1024 * 1024 * 1024},
            "lr_scheduler": scheduler,
            "mixed_precision": {"enabled": True, "loss_scaler": scaler},
        }
    )
    given = ("mixed_precision.enabled", "mixed_precision.loss_scaler", "lr_scheduler", "device.id")
    assert [at(options, path) for path in given] == [True, scaler, scheduler, "cuda:0"]


def test_an_empty_group_has_its_defaults() -> None:
    assert ORTTrainerOptions({"batch": {}, "debug": {"graph_save_paths": {}}}) == ORTTrainerOptions({})


def test_a_group_does_not_keep_what_another_object_was_given() -> None:
    ORTTrainerOptions({"utils": {"frozen_weights": ["weight"]}})
    assert ORTTrainerOptions().utils.frozen_weights == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("batch.gradient_accumulation_steps", 128),
        ("device.id", "cuda:0"),
        ("device.mem_limit", 2 * 1024**3),
        ("lr_scheduler", optim.lr_scheduler.LinearWarmupLRScheduler(10)),
        ("mixed_precision.loss_scaler", amp.LossScaler(loss_scale=float(1 << 16))),
        ("distributed.pipeline_parallel.sliced_schema", {"x": [0, 1]}),
        ("provider_options", {"EP1": {"key1": "val1"}}),
        ("session_options", onnxruntime.SessionOptions()),
        ("_internal_use.extra_postprocess", len),
        ("_internal_use.onnx_opset_version", 12),
    ],
)
def test_what_is_given_is_read_as_an_attribute(path: str, value: object) -> None:
    assert at(ORTTrainerOptions(nested(path, value)), path) == value


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("batch.gradient_accumulation_steps", 0, "min value is 1"),
        ("batch.gradient_accumulation_steps", True, "must be of integer type"),
        ("device.id", 0, "must be of string type"),
        ("device.mem_limit", -1, "min value is 0"),
        ("distributed.world_size", 0, "min value is 1"),
        ("distributed.deepspeed_zero_optimization.stage", 2, "max value is 1"),
        ("distributed.pipeline_parallel.sliced_axes.x", "0", "must be of integer type"),
        ("lr_scheduler", 0.1, "must be of optim.lr_scheduler type"),
        ("mixed_precision.enabled", 1, "must be of boolean type"),
        ("mixed_precision.loss_scaler", 2.0, "must be of amp.loss_scaler type"),
        (
            "graph_transformer.propagate_cast_ops_config.propagate_cast_ops_strategy",
            "NONE",
            "must be of onnxruntime.training.PropagateCastOpsStrategy type",
        ),
        ("utils", 3, "must be of dict type"),
        ("utils.frozen_weights", "weight", "must be of list type"),
        ("debug.graph_save_paths.model_with_gradient_graph_path", 3, "must be of string type"),
        ("_internal_use.extra_postprocess", 3, "must be callable or None"),
        ("_internal_use.onnx_opset_version", 15, "max value is 14"),
        ("_internal_use.onnx_opset_version", 11, "min value is 12"),
        ("provider_options.EP1", 3, "must be of dict type"),
        ("session_options", 3, "must be onnxruntime.SessionOptions or None"),
        ("batchsize", 3, "unknown field"),
        ("batch.steps", 3, "unknown field"),
    ],
)
def test_a_fault_is_told_with_its_path_and_what_was_given(path: str, value: object, fault: str) -> None:
    with pytest.raises(ValueError, match="Invalid options") as caught:
        ORTTrainerOptions(nested(path, value))
    assert str(caught.value) == f"Invalid options: {path}: {fault}, and is {value!r}."


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        ORTTrainerOptions({"utils": {"frozen_weights": ["a", 3]}, "mixed_precision": {"enabled": 1}})
    assert str(caught.value) == (
        "Invalid options: mixed_precision.enabled: must be of boolean type, and is 1; "
        "utils.frozen_weights[1]: must be of string type, and is 3."
    )


def test_options_are_a_dict() -> None:
    with pytest.raises(OptionError, match=r"^options is a list; allowed is a dict of dicts, or None.$"):
        ORTTrainerOptions([])


def test_options_cannot_be_set() -> None:
    with pytest.raises(AttributeError, match=r"^id cannot be set: options are validated once; make new ORT"):
        ORTTrainerOptions().device.id = "cpu"


def test_an_option_that_there_is_not_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"^there is no option 'ids'; there are id, mem_limit$"):
        _ = ORTTrainerOptions().device.ids
