"""The folder of the export cache: the user's by default."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from torch2ort.cache.store import location
from torch2ort.cache.store.store import RefusedError
from torch2ort.options import Options

USERS_FOLDER = location.users_folder

EXPORTS_AND_TRAINS = """
import json, torch, torch2ort
x, compiled = torch.randn(3, 4), torch.nn.Linear(4, 2)
exported = torch2ort.export(torch.nn.Linear(4, 2), x)
module = torch2ort.ORTModule(torch.nn.Linear(4, 2))
module(x).sum().backward()
torch.compile(compiled, backend="torch2ort")(x).sum().backward()
(graph,) = torch2ort.compile_report().graphs
print(json.dumps([exported.cache.hit, module.exported.cache.hit, all(half.cached for half in graph.halves)]))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and the default cache folder, which other tests run without."""
    monkeypatch.setattr(location, "users_folder", USERS_FOLDER)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_default_is_the_users_cache_folder(home: Path) -> None:
    assert location.cache_folder(Options()) == home / ".cache" / "torch2ort"


@pytest.mark.parametrize(("given", "found"), [("/var/mine", "/var/mine/torch2ort"), ("relative", None)])
def test_xdg_cache_home_names_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert location.cache_folder(Options()) == Path(found or home / ".cache" / "torch2ort")


@pytest.mark.parametrize("options", [{"cache_dir": False}, {}])
def test_false_or_an_empty_variable_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    if not options:
        monkeypatch.setenv("TORCH2ORT_CACHE_DIR", "")
    assert location.opened_store(Options(**options)) is None  # type: ignore[arg-type]


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(RefusedError) as caught:
        location.opened_store(Options())
    assert str(caught.value) == (
        "the export cache is not used, because the user has no home folder; name a folder with cache_dir or "
        "TORCH2ORT_CACHE_DIR."
    )


def test_the_folder_is_the_users_alone(home: Path) -> None:
    location.opened_store(Options())
    assert stat.S_IMODE((home / ".cache" / "torch2ort").stat().st_mode) == 0o700


def test_the_first_use_is_logged_once(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torch2ort"):
        for _ in range(2):
            location.opened_store(Options(cache_limit=5_000_000))
    assert [record.message for record in caplog.records] == [
        f"exports are kept in {home / '.cache' / 'torch2ort'}, 5 MB at most; Options(cache_dir=False) or an "
        f"empty TORCH2ORT_CACHE_DIR keeps none"
    ]


TRAINS = """
import sys, torch, torch2ort
torch2ort.ORTModule(torch.nn.Linear(4, 2))(torch.randn(3, 4)).sum().backward()
print(sorted({"onnx_ir", "onnxscript", "sympy", "torch._dynamo", "torch.onnx"} & set(sys.modules)))
"""


def test_a_warm_start_imports_nothing_that_traces() -> None:
    command = [sys.executable, "-c", TRAINS]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ) for _ in "ab"]
    assert runs[1].stdout == "[]\n"


def test_the_second_start_is_warm() -> None:
    command = [sys.executable, "-c", EXPORTS_AND_TRAINS]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ) for _ in "ab"]
    assert [json.loads(run.stdout) for run in runs] == [[False] * 3, [True] * 3]
