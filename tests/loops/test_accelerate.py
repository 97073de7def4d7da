"""accelerate trains an ORTModule as it trains the model: accumulation, bfloat16, states on disk."""

from __future__ import annotations

import pytest
import torch

from tests.loops.models import Classifier, on_onnx_runtime, ran_on_onnx_runtime, rows

accelerate = pytest.importorskip("accelerate")


def prepared(model, precision):
    """An accelerator, and the model, optimizer, data and schedule that it has prepared."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    loader = torch.utils.data.DataLoader(rows(), batch_size=4)
    return accelerator, accelerator.prepare(model, optimizer, loader, schedule)


def train(accelerator, parts, batches, losses) -> None:
    model, optimizer, _, schedule = parts
    for x, y in batches:
        with accelerator.accumulate(model):
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append((loss.item(), ran_on_onnx_runtime(output)))


# On a CPU accelerate treats "fp16" as float32, without a scaler; tests/training tests GradScaler.
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_loop_with_accumulation_and_a_state_to_go_back_to(precision, tmp_path):
    found = {}
    for name in ("eager", "ort"):
        torch.manual_seed(1)
        model = Classifier()
        if name == "ort":
            model = on_onnx_runtime(model, tmp_path / "graphs")
        accelerator, parts = prepared(model, precision)
        losses = []
        loader = parts[2]
        train(accelerator, parts, list(loader)[:6], losses)
        accelerator.save_state(tmp_path / name)
        train(accelerator, parts, accelerator.skip_first_batches(loader, 6), losses)
        # The steps since the saved state are trained once more from that state.
        accelerator.load_state(tmp_path / name)
        train(accelerator, parts, accelerator.skip_first_batches(loader, 6), losses)
        assert {where for _, where in losses} == {name == "ort"}
        assert accelerator.unwrap_model(parts[0], keep_fp32_wrapper=False) is model
        accelerator.save_model(model, tmp_path / name / "model")
        found[name] = torch.tensor([loss for loss, _ in losses]), model.state_dict()
    assert len(found["ort"][0]) == 18
    torch.testing.assert_close(found["ort"][0][12:], found["ort"][0][6:12], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["ort"], found["eager"], rtol=1e-4, atol=1e-5)


def test_a_model_that_was_unwrapped_runs_on_onnx_runtime_without_autocast(tmp_path):
    model = on_onnx_runtime(Classifier(), tmp_path)
    accelerator, (given, *_) = prepared(model, "bf16")
    x = torch.randn(2, 4)
    given(x)
    plain = accelerator.unwrap_model(given, keep_fp32_wrapper=False).eval()
    assert ran_on_onnx_runtime(plain(x))
    torch.testing.assert_close(plain(x), plain.module(x))


def test_weights_that_were_saved_load_into_the_model(tmp_path):
    model = on_onnx_runtime(Classifier(), tmp_path / "graphs")
    accelerator, (given, *_) = prepared(model, "no")
    accelerator.save_model(given, tmp_path)
    restored = Classifier()
    accelerate.load_checkpoint_in_model(restored, str(tmp_path))
    torch.testing.assert_close(restored.state_dict(), model.state_dict(), rtol=0, atol=0)
