"""transformers.Trainer trains an ORTModule as it trains the model: losses, gradients, checkpoints."""

from __future__ import annotations

import json

import pytest
import torch

from tests.loops.models import decoder, on_onnx_runtime, ran_on_onnx_runtime, token_rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

ROWS = token_rows()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


class Watching(transformers.Trainer):
    """Records whether losses come from ONNX Runtime."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if loss.requires_grad:
            self.on_onnx_runtime = ran_on_onnx_runtime(outputs.logits)
        return (loss, outputs) if return_outputs else loss


def trainer(model, folder, **settings) -> Watching:
    given = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        **settings,
    }
    arguments = transformers.TrainingArguments(**given)
    return Watching(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:8])


def history(run: Watching) -> torch.Tensor:
    """Loss and gradient norm of each step, and losses of evaluations."""
    log = run.state.log_history
    return torch.tensor([row[k] for row in log for k in ("loss", "grad_norm", "eval_loss") if k in row])


def assert_trained_alike(ort: Watching, eager: Watching) -> None:
    assert ort.on_onnx_runtime
    torch.testing.assert_close(history(ort), history(eager), **TOLERANCE)
    torch.testing.assert_close(ort.model.state_dict(), eager.model.state_dict(), **TOLERANCE)


TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"label_smoothing_factor": 0.1}, {}, id="label smoothing"),
        # AdamW divides a gradient by its own magnitude, so that a rounding to bfloat16 becomes a step.
        pytest.param({"bf16": True, "optim": "sgd"}, {"engine": "joint"}, id="bf16", marks=pytest.mark.long),
        pytest.param({"gradient_accumulation_steps": 2}, {}, id="accumulation", marks=pytest.mark.long),
        pytest.param({"gradient_checkpointing": True}, {}, id="checkpointing", marks=pytest.mark.long),
    ],
)
def test_train_evaluate_and_predict(settings, options, tmp_path, cache):
    runs, predictions = [], []
    for model in (decoder(), on_onnx_runtime(decoder(), cache, **options)):
        run = trainer(model, tmp_path, **settings)
        run.train()
        run.evaluate()
        predictions.append(run.predict(ROWS[:4]).predictions[0])
        runs.append(run)
    assert_trained_alike(runs[1], runs[0])
    # Logits under autocast are rounded to bfloat16, of 8 bits.
    rounding = {"rtol": 2**-7, "atol": 2**-10} if settings.get("bf16") else TOLERANCE
    torch.testing.assert_close(*map(torch.from_numpy, predictions), **rounding)
    (site,) = [site for site in runs[1].model.exported.python_ops if site.func_name.endswith("Gate")]
    assert site.function.__name__ == "Gate"


@pytest.mark.long
def test_save_resume_and_load_the_best(tmp_path, cache):
    saving = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
    }
    eager = trainer(decoder(), tmp_path / "eager", **saving)
    eager.train()
    whole = trainer(on_onnx_runtime(decoder(), cache), tmp_path / "whole", **saving)
    whole.train()
    assert_trained_alike(whole, eager)
    best, expected = (run.state.best_model_checkpoint.rpartition("-")[2] for run in (whole, eager))
    assert best == expected
    written = json.loads((tmp_path / "whole" / "checkpoint-2" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    # The wrapper resumes from eager PyTorch's checkpoint, and eager PyTorch from the wrapper's.
    for model, left in (
        (on_onnx_runtime(decoder(seed=7), cache), tmp_path / "eager"),
        (decoder(seed=7), tmp_path / "whole"),
    ):
        resumed = trainer(model, tmp_path / "resumed", **saving)
        resumed.train(resume_from_checkpoint=str(left / "checkpoint-4"))
        torch.testing.assert_close(history(resumed), history(eager), **TOLERANCE)
        torch.testing.assert_close(resumed.model.state_dict(), eager.model.state_dict(), **TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2, "do_sample": True}], ids=["greedy", "beams"])
def test_generate_with_its_cache(settings, cache):
    model = decoder().eval()
    module = on_onnx_runtime(model, cache)
    prompt = torch.randint(1, 32, (2, 5))
    generated = []
    for one in (model, module):
        torch.manual_seed(4)
        generated.append(one.generate(prompt, max_new_tokens=3, **settings))
    assert torch.equal(*generated)
    assert module.exported is not None
