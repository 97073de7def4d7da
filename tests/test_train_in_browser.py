"""The page of examples/train_in_browser trains in headless Chromium as eager PyTorch does."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "examples" / "train_in_browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
STEPS = 50

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: Debian has it as chromium"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "onnxruntime-web").exists(),
        reason="no onnxruntime-web: run npm install in examples/train_in_browser",
    ),
]


@pytest.fixture(scope="module")
def example() -> Any:
    """The module that writes the step."""
    spec = importlib.util.spec_from_file_location("make_step", FOLDER / "make_step.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, and a step beside them."""
    root = tmp_path_factory.mktemp("site")
    for path in FOLDER.iterdir():
        if path.name != "step":
            (root / path.name).symlink_to(path)
    example.write(root / "step")
    return root


@pytest.fixture
def reports(site: Path) -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A static server that takes a report, too: its address, and what was reported."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        extensions_map = {  # noqa: RUF012
            **http.server.SimpleHTTPRequestHandler.extensions_map,
            ".mjs": "text/javascript",
            ".wasm": "application/wasm",
        }

        def do_POST(self) -> None:
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def eager_losses(model: torch.nn.Module) -> list[float]:
    """The losses of the steps that test.html makes."""
    number = 1

    def draw() -> int:
        nonlocal number
        number = number * 16807 % 2147483647
        return number

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        x = torch.tensor([draw() / 2147483647 for _ in range(8 * 144)]).reshape(8, 144)
        kinds = torch.tensor([draw() % 3 for _ in range(8)])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), kinds)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_50_steps_in_chromium_have_the_losses_of_torch(reports, example, tmp_path):
    address, found = reports
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", f"{address}/test.html"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        report = found.get(timeout=100)
    finally:
        process.kill()
        process.wait()
    assert "error" not in report, report["error"]
    assert len(report["losses"]) == STEPS
    np.testing.assert_allclose(report["losses"], eager_losses(example.make_model()), rtol=1e-4, atol=1e-5)
