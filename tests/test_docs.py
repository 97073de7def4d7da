"""Code in the README and the docs runs: Python as doctests, commands here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch2ort
from tests.support.functions import Square
from torch2ort.__main__ import main
from torch2ort.cache.store import location
from torch2ort.hooks import StatisticsSubscriber, subscribe

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(page for page in (ROOT / "examples").rglob("*.md") if "node_modules" not in page.parts),
)
OURS = "python -m torch2ort "


def blocks() -> Iterator[tuple[str, str, str]]:
    """Place, language and text of each block of code."""
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            line = text[: found.start()].count("\n") + 1
            yield f"{page.relative_to(ROOT)}:{line}", found[1], found[2]


def commands() -> list[str]:
    """Shell commands in blocks and texts, without comments."""
    typed = [
        line.partition("  #")[0].split(" # ")[0].strip()
        for _, language, text in blocks()
        if language == "console"
        for line in text.splitlines()
    ]
    prose = [re.sub(r"^```.*?^```", "", p.read_text(), flags=re.DOTALL | re.MULTILINE) for p in PAGES]
    typed += [found for text in prose for found in re.findall(rf"`((?:{OURS}|make )[^`]+)`", text)]
    # Commands that clear a cache come last.
    return sorted({line.split(" [")[0] for line in typed}, key=lambda line: (line.endswith("clear"), line))


def test_a_block_is_a_doctest_a_command_or_what_was_printed() -> None:
    known = {"python": ">>> ", "pycon": ">>> ", "console": "", "text": ""}
    assert [place for place, language, text in blocks() if known.get(language, "no such") not in text] == []


def test_commands_are_tried_here_or_by_their_own_tests() -> None:
    others = {"npm install", "npm start", "python make_step.py"}  # tests/test_train_in_browser.py
    others.add("python examples/portable_kernel/serve.py")  # tests/test_examples.py
    assert [c for c in commands() if not c.startswith((OURS, "make ")) and c not in others] == []


def test_make_has_each_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert named - targets == set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands of the docs read: a model, two runs, an export cache."""
    folder = tmp_path_factory.mktemp("docs")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(self.linear(x))

    (folder / "train.py").write_text(
        "import torch, torch2ort; torch2ort.export(torch.nn.ReLU(), torch.ones(2))"
    )
    model, x = Model(), torch.randn(3, 4)
    exported = torch2ort.export(model, x, dynamic_shapes={"x": {0: "batch"}}, cache_dir=folder / "cache")
    exported.save(folder / "model.onnx")
    for run in ("run_a", "run_b"):
        with subscribe(model, [StatisticsSubscriber(str(folder / run), start_step=0, end_step=9)]):
            model(x).sum().backward()
    return folder


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(OURS)])
def test_a_command_of_the_docs_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr(location, "users_folder", lambda: folder / "users")
    stands_for = {"A": "run_a", "B": "run_b", "SCRIPT": "train.py"}
    arguments = [stands_for.get(word, word) for word in shlex.split(command)]
    if "--version" in arguments:
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["--version"])
    else:
        assert main(arguments[3:]) == 0
