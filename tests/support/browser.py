"""A page in headless Chromium, over a static server, that posts a report."""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_in_browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_BROWSER = [
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: Debian has it as chromium"),
    pytest.mark.skipif(
        not (EXAMPLE / "node_modules" / "onnxruntime-web").exists(),
        reason="no onnxruntime-web: run npm install in examples/train_in_browser",
    ),
]


def reported(site: Path, page: str, profile: Path, seconds: float = 100) -> dict[str, Any]:
    """Return the JSON that a page posts to ``report``.

    Args:
        site: a folder that is served.
        page: a file in it.
        profile: an empty folder for the browser.
        seconds: time limit.
    """
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
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    address = f"http://127.0.0.1:{server.server_port}/{page}"
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        report = found.get(timeout=seconds)
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        thread.join()
        server.server_close()
    assert "error" not in report, report["error"]
    return report
