"""``python -m torch2ort cache``, and the log's reason of a miss."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch2ort
from tests.cache.model_source import SOURCE, changed, imported
from torch2ort.__main__ import main
from torch2ort.cache.store.store import Store

X = torch.zeros(3, 4)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two exports, which differ in one number."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    for source in (SOURCE, changed("SCALE = 2.0", "SCALE = 2.5")):
        with imported(source) as module:
            torch2ort.export(module.make(), X, cache_dir=folder)
    return folder


@pytest.fixture
def cache(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the filled cache, which every export uses."""
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(filled, tmp_path / "cache")
    return tmp_path / "cache"


def newest(cache: Path) -> str:
    return max(Store(cache).list_entries(), key=lambda entry: entry.manifest.created).manifest.digest


@pytest.mark.parametrize("action", ["list", "explain", "clear"])
def test_the_folder_stands_before_the_action_or_behind_it(action, capsys, tmp_path):
    codes = [main(["cache", "--dir", str(tmp_path), action]), main(["cache", action, "--dir", str(tmp_path)])]
    assert codes[0] == codes[1]
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        lines = text.splitlines()
        assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_list(cache, capsys):
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(newest(cache)[:12])
    assert lines[0].split()[-2:] == ["graph", "Net"]
    assert lines[2].startswith("2 entries, ")


def test_explain_says_what_differs(cache, capsys):
    assert main(["cache", "explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{newest(cache)}: graph of Net, made ")
    assert lines[1].startswith("It differs from the nearest other one, ")
    assert lines[2:] == ["  global net.SCALE: float 2.0 -> float 2.5"]


def test_explain_says_in_which_components_two_keys_differ(cache, capsys):
    new = newest(cache)
    (old,) = {entry.manifest.digest for entry in Store(cache).list_entries()} - {new}
    assert main(["cache", "explain", old, new[:10]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        f"It differs from the graph of Net, {new[:12]}, in:",
        "  global net.SCALE: float 2.5 -> float 2.0",
    ]


def test_explain_all_shows_every_component(cache, capsys):
    key = newest(cache)
    assert main(["cache", "explain", key[:10], "--all"]) == 0
    entry = next(e for e in Store(cache).list_entries() if e.manifest.digest == key)
    shown = capsys.readouterr().out.splitlines()[1:]
    assert shown == [f"  {name}: {content}" for name, content in entry.manifest.components.items()]


def test_explain_needs_a_key_that_is_there(cache, capsys):
    assert main(["cache", "explain", "zzz"]) == 1
    assert capsys.readouterr().err == (
        "no entry with a key that starts with 'zzz'; `python -m torch2ort cache list` shows the keys\n"
    )


def test_clear(cache, capsys):
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out.startswith("removed 2 entries, ")
    assert Store(cache).list_entries() == []


@pytest.mark.parametrize("action", ["list", "clear", "explain"])
def test_a_folder_is_needed(action, capsys, tmp_path):
    assert main(["cache", action]) == 1
    assert capsys.readouterr().err == (
        "the cache is switched off: pass --dir FOLDER, or unset TORCH2ORT_CACHE_DIR\n"
    )
    assert main(["cache", "--dir", str(tmp_path / "none"), action]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'none'} is not a folder\n"


def test_a_miss_is_explained_at_info_level(cache, caplog):
    with (
        caplog.at_level(logging.INFO, "torch2ort"),
        imported(changed("SCALE = 2.0", "SCALE = 3.0")) as module,
    ):
        key = torch2ort.export(module.make(), X).cache.key
    messages = [record.getMessage() for record in caplog.records]
    (explained,) = (
        m for m in messages if m.startswith(f"the export cache has no entry for this Net ({key})")
    )
    assert explained.endswith(("differs in global net.SCALE: float 2.0 -> float 3.0",
                               "differs in global net.SCALE: float 2.5 -> float 3.0"))  # fmt: skip


def test_a_model_of_which_there_is_no_entry_is_logged(cache, caplog):
    with caplog.at_level(logging.INFO, "torch2ort"):
        key = torch2ort.export(torch.nn.Linear(4, 2), X).cache.key
    assert f"the export cache has no entry for a Linear yet ({key})" in caplog.messages


SCRIPT = """
import sys, torch, torch2ort
x = torch.ones(3, 4)
torch2ort.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), x)
try:
    torch2ort.export(torch.nn.Sequential(torch.nn.Linear(4, int(sys.argv[1]))), x)
except Exception:
    print("caught")
print("the end")
"""


def test_explain_runs_a_script_to_its_first_miss(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def explain(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "torch2ort", "cache", "--dir", str(tmp_path / "cache"), "explain"]
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    subprocess.run(
        [sys.executable, str(script), "2"],
        check=True,
        env={**os.environ, "TORCH2ORT_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert explain(str(script), "2") == [
        "the end",
        f"The export cache had an entry for every export of {script}.",
    ]
    (missed,) = explain(str(script), "5")
    assert missed.startswith("the export cache has no entry for this Sequential (")
    assert missed.endswith("; module 0: out_features = 2 -> 5")
