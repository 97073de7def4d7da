"""Arguments that a trainer's constructor refuses, and options that it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.trainer.models import DESCRIPTION, Net, batches, cross_entropy, options, started, trainer
from torch2ort.errors import OptionError
from torch2ort.trainer import (
    IODescription,
    ModelDescription,
    ORTTrainer,
    ORTTrainerOptions,
    PropagateCastOpsStrategy,
    amp,
    optim,
)
from torch2ort.trainer.model_desc import ModelDesc

LOSS = [("loss", [], True)]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            {},
            "Invalid model_desc: inputs: required field, and is None; outputs: required field, and is None.",
        ),
        ({"inputs": [], "outputs": LOSS}, "Invalid model_desc: inputs: min length is 1, and is []."),
        (
            {"inputs": [("x", [True])], "outputs": LOSS},
            "Invalid model_desc: inputs[0]: must have integers of at least 0, and names, as sizes, and "
            "is ('x', "
            "[True]).",
        ),
        (
            {"inputs": [("x", [])], "outputs": [("loss", [], None)]},
            "Invalid model_desc: outputs[0]: must have True or False as is_loss, and is ('loss', [], None).",
        ),
        (
            {"inputs": [(3, [])], "outputs": LOSS},
            "Invalid model_desc: inputs[0]: must have a name, a text, in front, and is (3, []).",
        ),
        (
            {"inputs": [("x", None)], "outputs": LOSS},
            "Invalid model_desc: inputs[0]: must have a list as shape, and is ('x', None).",
        ),
        (
            {"inputs": [("x", [], True)], "outputs": LOSS},
            "Invalid model_desc: inputs[0]: must be a tuple (name, shape), and is ('x', [], True).",
        ),
        (
            {"inputs": [("x", [])], "outputs": LOSS, "outputz": 3},
            "Invalid model_desc: outputz: unknown field, and is 3.",
        ),
        (
            {"inputs": [("x", [])], "outputs": [*LOSS, ("more", [], True)]},
            "Invalid model_desc: outputs[1]: is a second loss; set is_loss of one output alone.",
        ),
        (
            {"inputs": [("x", []), ("x", [])], "outputs": LOSS},
            "Invalid model_desc: inputs[1]: the name 'x' is there twice; name each once.",
        ),
        ([], "model_desc is a list; allowed is a dict of 'inputs' and 'outputs'."),
    ],
)
def test_a_description_that_is_none_is_refused(description: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        ORTTrainer(Net(), description, optim.SGDConfig())
    assert str(caught.value) == message


def test_a_description_reads_as_named_tuples() -> None:
    desc = ModelDesc(DESCRIPTION)
    assert [(one.name, one.shape) for one in desc.inputs] == DESCRIPTION["inputs"]
    assert [(one.name, one.is_loss) for one in desc.outputs] == [("loss", True), ("logits", False)]


def test_the_older_description_is_the_same() -> None:
    older = ModelDescription(
        [IODescription("x", ["batch", 4], torch.float32), IODescription("label", ["batch"], num_classes=3)],
        [IODescription("loss", []), IODescription("logits", ["batch", 3])],
    )
    x, y = next(batches(1))
    one = ORTTrainer(started(), older, optim.SGDConfig(), cross_entropy, options())
    other = trainer()
    assert torch.equal(one.eval_step(x, y)[0], other.eval_step(x, y)[0])
    with pytest.raises(
        TypeError, match=r"^input 'x' has dtype torch.float64; model_desc says torch.float32.$"
    ):
        one.eval_step(x.double(), y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model is a int; allowed is a torch.nn.Module or an onnx.ModelProto."),
        (
            {"optim_config": torch.optim.SGD},
            "optim_config is a type; allowed is an AdamConfig, LambConfig or SGDConfig.",
        ),
        ({"loss_fn": 3}, "loss_fn is a int; allowed is a function of two arguments, or None."),
        (
            {"loss_fn": lambda a: a},
            "loss_fn takes (a); allowed is a function of two arguments, what the model returns and the "
            "label.",
        ),
        ({"options": {}}, "options is a dict; allowed is an ORTTrainerOptions, or None."),
        (
            {"model": onnx.ModelProto()},
            "loss_fn is given with an ONNX model; allowed is None, as the model has its loss as an output.",
        ),
        (
            {"model_desc": {**DESCRIPTION, "outputs": [("loss", []), ("logits", [])]}},
            "model_desc names no loss; write its output as (name, shape, True), with an empty list for the "
            "shape.",
        ),
        (
            {"model_desc": {**DESCRIPTION, "outputs": [("logits", []), ("loss", [], True)]}},
            "model_desc says that output 1, 'loss', is the loss; with a loss_fn, the loss is the first "
            "output.",
        ),
        (
            {"model_desc": {**DESCRIPTION, "inputs": [("input", []), ("label", [])]}},
            "model_desc describes as inputs of Net.forward 'input', which it does not take; its "
            "arguments are "
            "(x). Name the inputs as forward does, and the label of a loss_fn last.",
        ),
        (
            {"model_desc": {**DESCRIPTION, "inputs": [("label", [])]}},
            "model_desc describes the input 'label' alone; with a loss_fn, its label is the last input.",
        ),
        (
            {"optim_config": optim.AdamConfig([{"params": ["weight"], "alpha": 0.1}])},
            "optim_config names the weight 'weight', which is not trained; allowed is one of first.weight, "
            "first.bias, last.weight, last.bias.",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {
        "model": Net(), "model_desc": DESCRIPTION, "optim_config": optim.SGDConfig(),
        "loss_fn": cross_entropy, "options": options(), **arguments,
    }  # fmt: skip
    with pytest.raises(OptionError) as caught:
        ORTTrainer(**given)
    assert str(caught.value) == message


def _settings(**values: Any) -> Any:
    settings = onnxruntime.SessionOptions()
    for name, value in values.items():
        setattr(settings, name, value)
    return settings


STAGES = "a model is not cut into stages; use distributed.data_parallel_size"
LAYERS = "put torch.utils.checkpoint.checkpoint around the layers in the model's forward"
CASTS = "casts are where torch.autocast puts them"
CAST_OPS = "graph_transformer.propagate_cast_ops_config"
STRATEGY = PropagateCastOpsStrategy
KEPT = f"{STRATEGY.FLOOD_FILL!r} and {STRATEGY.NONE!r}"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            {"distributed": {"pipeline_parallel": {"pipeline_parallel_size": 2}}},
            f"Option distributed.pipeline_parallel.pipeline_parallel_size is 2; torch2ort has 1 alone: "
            f"{STAGES}.",
        ),
        (
            {"distributed": {"pipeline_parallel": {"pipeline_cut_info_string": "a"}}},
            "Option distributed.pipeline_parallel.pipeline_cut_info_string is 'a'; torch2ort has '' alone: "
            f"{STAGES}.",
        ),
        (
            {"distributed": {"horizontal_parallel_size": 2}},
            "Option distributed.horizontal_parallel_size is 2; torch2ort has 1 alone: weights are not "
            "cut across "
            "processes; use distributed.data_parallel_size.",
        ),
        (
            {"distributed": {"world_size": 2}},
            "Option distributed.world_size is 2, and torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first.",
        ),
        (
            {"distributed": {"world_rank": 1}},
            "Option distributed.world_rank is 1; allowed is less than world_size, 1.",
        ),
        (
            {"distributed": {"data_parallel_size": 2}},
            "Option distributed.data_parallel_size is 2; allowed is world_size, 1, as there is no other "
            "parallelism.",
        ),
        (
            {"graph_transformer": {"transformer_layer_recompute": True}},
            f"Option graph_transformer.transformer_layer_recompute is True; torch2ort has False alone: "
            f"{LAYERS}.",
        ),
        (
            {"graph_transformer": {"number_recompute_layers": 2}},
            f"Option graph_transformer.number_recompute_layers is 2; torch2ort has 0 alone: {LAYERS}.",
        ),
        (
            {"graph_transformer": {"propagate_cast_ops_config": {"propagate_cast_ops_level": 2}}},
            "Option graph_transformer.propagate_cast_ops_config.propagate_cast_ops_level is 2; torch2ort "
            "has 1 "
            f"alone: {CASTS}.",
        ),
        (
            {"graph_transformer": {"allow_layer_norm_mod_precision": True}},
            "Option graph_transformer.allow_layer_norm_mod_precision is True; torch2ort has False alone: "
            f"{CASTS}.",
        ),
        (
            {"lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler()},
            "LinearWarmupLRScheduler has no total_steps; give it the number of updates of weights in the "
            "whole training.",
        ),
        (
            {"mixed_precision": {"loss_scaler": amp.LossScaler(2)}},
            "Option mixed_precision.loss_scaler is set and mixed_precision.enabled is False; enable it, or "
            "leave the scaler out.",
        ),
        (
            {"device": {"id": "tpu"}},
            "Option device.id is 'tpu'; allowed is 'cpu', 'cuda' or 'cuda:N'.",
        ),
        (
            {"device": {"id": "cpu", "mem_limit": 8}},
            "Option device.mem_limit is 8; the memory of a GPU can be limited, that of cpu cannot.",
        ),
        (
            {"utils": {"frozen_weights": ["weight"]}},
            "Option utils.frozen_weights names 'weight', which is no weight; allowed is some of "
            "first.weight, "
            "first.bias, last.weight, last.bias.",
        ),
        (
            {"utils": {"frozen_weights": [name for name, _ in Net().named_parameters()]}},
            "All weights of the model are frozen; leave some to train.",
        ),
        (
            {"provider_options": {"EP1": {"key1": "val1"}}},
            f"Option provider_options names 'EP1', which is not an execution provider; onnxruntime "
            f"{onnxruntime.__version__} has {', '.join(onnxruntime.get_available_providers())} here.",
        ),
        (
            {"provider_options": {"CPUExecutionProvider": {"a": None}}},
            "Option provider_options is {'CPUExecutionProvider': {'a': None}}; allowed is a dict of texts "
            "and numbers for each provider's name.",
        ),
        (
            {"session_options": _settings(inter_op_num_threads=3)},
            "Option session_options has inter_op_num_threads = 3; a training session follows "
            "intra_op_num_threads and use_deterministic_compute alone, and has its own inter_op_num_threads.",
        ),
        (
            {"_internal_use": {"onnx_opset_version": 14}},
            "Option _internal_use.onnx_opset_version is 14; torch2ort writes a later opset, which "
            "ONNX's converter does not take back to that; leave the option out.",
        ),
        (
            {"_internal_use": {"enable_onnx_contrib_ops": False}},
            "Option _internal_use.enable_onnx_contrib_ops is False; torch2ort has True alone: a call of a "
            "Function is one itself.",
        ),
        (
            {"debug": {"graph_save_paths": {"model_with_gradient_graph_path": "/no/such/a.onnx"}}},
            "Option debug.graph_save_paths.model_with_gradient_graph_path is '/no/such/a.onnx'; allowed is a "
            "file in a folder that exists.",
        ),
    ],
)
def test_an_option_that_cannot_be_followed_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        trainer(**groups)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("group", "name", "value", "only", "instead"),
    [
        ("distributed.pipeline_parallel", "num_pipeline_micro_batches", 2, "1", STAGES),
        ("distributed.pipeline_parallel", "sliced_schema", {"x": [1]}, "{}", STAGES),
        ("distributed.pipeline_parallel", "sliced_axes", {"x": 1}, "{}", STAGES),
        ("distributed.pipeline_parallel", "sliced_tensor_names", ["x"], "[]", STAGES),
        (CAST_OPS, "propagate_cast_ops_strategy", STRATEGY.INSERT_AND_REDUCE, KEPT, CASTS),
        (CAST_OPS, "propagate_cast_ops_allow", ["Add"], "[]", CASTS),
    ],
)
def test_a_stage_and_a_cast_of_one_s_own_are_refused(
    group: str, name: str, value: Any, only: str, instead: str
) -> None:
    outer, inner = group.split(".")
    with pytest.raises(OptionError) as caught:
        trainer(**{outer: {inner: {name: value}}})
    assert str(caught.value) == f"Option {group}.{name} is {value!r}; torch2ort has {only} alone: {instead}."


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_gpu_that_there_is_not_is_refused_if_somebody_asked_for_it() -> None:
    with pytest.raises(OptionError) as caught:
        trainer(device={"id": "cuda"})
    assert str(caught.value) == "Option device.id is 'cuda', and PyTorch sees no GPU; allowed is 'cpu' here."
    assert ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(), cross_entropy)._device.type == "cpu"


@pytest.mark.parametrize(
    "groups",
    [
        {"graph_transformer": {"attn_dropout_recompute": True, "gelu_recompute": True}},
        {
            "graph_transformer": {
                "propagate_cast_ops_config": {"propagate_cast_ops_strategy": PropagateCastOpsStrategy.NONE}
            }
        },
        {"utils": {"memory_efficient_gradient": True, "run_symbolic_shape_infer": True}},
        {"_internal_use": {"enable_internal_postprocess": False, "enable_onnx_contrib_ops": True}},
        {"provider_options": {}},
    ],
)
def test_an_option_that_changes_no_number_is_taken(groups: dict[str, Any]) -> None:
    assert isinstance(trainer(**groups).options, ORTTrainerOptions)


def test_a_session_s_settings_reach_the_module() -> None:
    settings = _settings(intra_op_num_threads=1, use_deterministic_compute=True)
    runner = type(trainer(session_options=settings)._module)._torch2ort_runner
    assert (runner.options.intra_op_threads, runner.options.deterministic) == (1, True)


def test_options_of_a_provider_reach_the_module() -> None:
    runner = type(trainer(provider_options={"CPUExecutionProvider": {"a": 1}})._module)._torch2ort_runner
    assert runner.options.providers == (("CPUExecutionProvider", (("a", "1"),)),)


def test_deterministic_compute_reaches_the_module() -> None:
    runner = type(trainer(debug={"deterministic_compute": True})._module)._torch2ort_runner
    assert runner.options.deterministic


def test_graphs_are_written_at_the_first_step(tmp_path: Path) -> None:
    names = ("model_after_graph_transforms_path", "model_with_gradient_graph_path")
    paths = {name: str(tmp_path / f"{name}.onnx") for name in names}
    tried = trainer(debug={"graph_save_paths": paths})
    tried.train_step(*next(batches(1)))
    written = {path.stem: onnx.load(path).graph for path in tmp_path.glob("*.onnx")}
    assert set(names) <= written.keys()
    weights = {name for name in ("model.first.weight", "model.last.weight")}
    assert weights <= {value.name for value in written["model_after_graph_transforms_path"].input}
    assert len(written["model_with_gradient_graph_path"].node) > 3


@pytest.mark.parametrize(
    "config",
    [
        optim.SGDConfig(lr=0.1),
        optim.LambConfig([{"params": ["first.weight"], "alpha": 0.5}], lr=0.1, max_norm_clip=0.1),
        optim.AdamConfig(
            lr=0.1, lambda_coef=0.1, weight_decay_mode=optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        ),
    ],
    ids=["sgd", "lamb", "adam"],
)
def test_a_whole_step_is_written_as_one_graph_which_does_that_step(config: Any, tmp_path: Path) -> None:
    prefix = "model_with_training_graph"
    paths = {f"{prefix}_path": "step.onnx", f"{prefix}_after_optimization_path": "optimized.onnx"}
    tried = trainer(
        config=config, debug={"graph_save_paths": {k: str(tmp_path / v) for k, v in paths.items()}}
    )
    before = tried.state_dict(pytorch_format=True)
    x, y = next(batches(1))
    loss = tried.train_step(x, y)[0]
    after = tried.state_dict(pytorch_format=True)
    for name in paths.values():
        session = onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"])
        given = {value.name: np.zeros(value.shape, np.float32) for value in session.get_inputs()[2:]}
        given |= {f"whole.model.{weight}": value.numpy() for weight, value in before.items()}
        given |= {"inputs_0": x.numpy(), "inputs_1": y.numpy(), "learning_rate": np.array(0.1, np.float32)}
        names = [value.name for value in session.get_outputs()]
        found = dict(zip(names, session.run(None, given), strict=True))
        assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-5)
        updated = {weight: torch.from_numpy(found[f"updated.whole.model.{weight}"]) for weight in after}
        torch.testing.assert_close(updated, after, rtol=1e-4, atol=1e-5)
