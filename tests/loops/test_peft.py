"""peft's adapters train on ONNX Runtime, inside of an ORTModule or around it."""

from __future__ import annotations

import pytest
import torch

from tests.loops.models import decoder, on_onnx_runtime, ran_on_onnx_runtime, token_rows

peft = pytest.importorskip("peft")


def adapted(where: str, cache):
    """A decoder with adapters, and its ORTModule."""
    model = decoder()
    ort = None
    torch.manual_seed(3)
    if where == "around":
        model = ort = on_onnx_runtime(model, cache)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(model, settings)
    if where == "inside":
        model = ort = on_onnx_runtime(model, cache)
    return model, ort


def train(model, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = token_rows()
    losses = []
    torch.manual_seed(5)
    for step in range(steps):
        tokens = torch.stack([row["input_ids"] for row in data[4 * step : 4 * step + 4]])
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def without_adapters_merged_and_saved(model, folder) -> list[float]:
    """Losses with the adapters switched off, on again, merged, unmerged, and read from disk."""
    tokens = torch.stack([row["input_ids"] for row in token_rows()[:4]])
    model.eval()

    def loss(of=model) -> float:
        with torch.no_grad():
            return of(input_ids=tokens, labels=tokens).loss.item()

    found = [loss()]
    with model.disable_adapter():
        found.append(loss())
    found.append(loss())
    model.merge_adapter()
    found.append(loss())
    model.unmerge_adapter()
    found.append(loss())
    model.save_pretrained(folder)
    found.append(loss(peft.PeftModel.from_pretrained(decoder(), folder).eval()))
    found.append(loss(model.merge_and_unload()))
    return found


@pytest.mark.parametrize("where", ["around", pytest.param("inside", marks=pytest.mark.long)])
def test_adapters_train_merge_and_are_switched_off(where, tmp_path):
    eager, _ = adapted("nowhere", tmp_path)
    model, ort = adapted(where, tmp_path / "graphs")
    losses = train(model)
    assert ort.exported.training
    assert any(site.func_name.endswith("Gate") for site in ort.exported.python_ops)
    losses += without_adapters_merged_and_saved(model, tmp_path / "ort")
    expected = train(eager) + without_adapters_merged_and_saved(eager, tmp_path / "eager")
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    # Without the adapters it equals the original model.
    assert abs(losses[7] - losses[6]) > 1e-3


def test_only_adapters_have_gradients(tmp_path):
    model, ort = adapted("inside", tmp_path)
    tokens = torch.stack([row["input_ids"] for row in token_rows()[:2]])
    loss = model(input_ids=tokens, labels=tokens).loss
    assert ran_on_onnx_runtime(loss)
    loss.backward()
    with_gradient = {name for name, p in ort.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in ort.named_parameters() if "lora_" in name}
