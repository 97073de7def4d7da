"""Files run in onnxruntime-web under headless Chromium with eager PyTorch's results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import torch2ort
from tests.elsewhere.runtimes import MODELS
from tests.support.browser import EXAMPLE, NEEDS_BROWSER, reported

NAMES = (
    *("perceptron, with Functions", "transformer, with Functions", "ConvNet"),
    *("ResNet", "U-Net", "ViT", "BERT", "Llama", "GPT-2", "LSTM"),
)
# Tolerance relative to the largest number of a result.
BOUND = 1e-4

pytestmark = NEEDS_BROWSER


@pytest.mark.timeout(400)
def test_ten_files_in_chromium_compute_as_eager(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "node_modules").symlink_to(EXAMPLE / "node_modules")
    (site / "browser.html").symlink_to(Path(__file__).parent / "browser.html")
    files, expected = [], {}
    for i, name in enumerate(NAMES):
        torch.manual_seed(1)
        model, x = MODELS[name]()
        torch2ort.export(model.eval(), x, portable=True).save(site / f"{i}.onnx")
        with torch.no_grad():
            expected[name] = model(x).numpy()
        kind = str(x.dtype).removeprefix("torch.")
        files.append(
            {
                "name": name,
                "file": f"{i}.onnx",
                "type": kind,
                "numbers": x.flatten().tolist(),
                "sizes": [*x.shape],
            }
        )
    (site / "files.json").write_text(json.dumps(files))
    results = reported(site, "browser.html", tmp_path / "profile")["results"]
    for name, wanted in expected.items():
        actual = np.array(results[name]["numbers"], np.float32).reshape(results[name]["sizes"])
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(actual / scale, wanted / scale, rtol=0, atol=BOUND, err_msg=name)
