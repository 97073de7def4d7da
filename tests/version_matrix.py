"""The combinations of versions on which torch2ort is tested, and a run of one of them.

``noxfile.py`` runs these; ``make test-matrix`` all of them, ``make test-newest`` the ends of the range. The
wheel is installed into an empty environment per row, and the tests run in a folder without the package's
sources.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "matrix"

# Limits in seconds, so that a registry or a test that hangs does not block the run.
INSTALL_LIMIT, SUITE_LIMIT = 1500, 7200

# Tests of the whole matrix: all but the families of models, which take as long as all others, training loops
# of libraries, and tests of the checkout.
SUITE = ("tests", "--ignore=tests/models", "--ignore=tests/loops", "--ignore=tests/test_repository.py")

# Tests of the parts that a new version breaks first: torch's calls of Functions, Python's bytecode and
# dictionaries, calls of a runtime and its loading of the operator. They take minutes per row.
FIRST = (
    "tests/pythonop/test_interception.py",
    "tests/test_versions.py",
    "tests/test_export.py",
    "tests/test_exported_model.py",
    "tests/test_module.py",
    "tests/cache/key/test_bytecode_names.py",
    "tests/runtime_ext/test_guards.py",
    "tests/stock/test_sessions.py",
    "tests/stock/test_optimizers_keep_calls.py",
    "tests/portable/test_portable.py",
    "tests/training/test_engine.py",
)

# Packages whose version is a row's, and not that of constraints.txt.
VARYING = ("torch", "onnxruntime")
NEEDED_BY_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
SIDE_BY_SIDE = ("--numprocesses", "2", "--dist", "loadfile")


@dataclass(frozen=True)
class Row:
    """One combination. A version is a specifier of pip: ``==2.13.0``, or nothing for the newest.

    Attributes:
        python: such as ``3.11``.
        torch: the version of torch.
        runtime: name and version of the package with ONNX Runtime.
        whole: whether all tests run that can, not only ``FIRST``.
    """

    python: str
    torch: str
    runtime: str
    whole: bool = True

    @property
    def name(self) -> str:
        """The row's name on the command line."""
        torch = self.torch.removeprefix("==") or "newest"
        first = "" if self.whole else "-first"
        return f"py{self.python}-torch{torch}-{re.sub('[=]+', '', self.runtime)}{first}"

    @property
    def suite(self) -> tuple[str, ...]:
        """The row's tests, as arguments of pytest."""
        return SUITE if self.whole else FIRST


@dataclass(frozen=True)
class Result:
    """The result of a row: the installed versions, and a sentence."""

    python: str
    torch: str
    runtime: str
    outcome: str

    @property
    def failed(self) -> bool:
        """True if the row failed; a row that this machine cannot test has not failed."""
        well = re.fullmatch(r"\d+ passed(, \d+ skipped)?|not tried.*", self.outcome)
        return well is None


PINNED = "==2.13.0"
OTHER_PYTHONS = ("3.10", "3.12", "3.13", "3.14")
# The last release of onnxruntime-training, which has no build for Pythons after 3.11.
TRAINING = "onnxruntime-training-cpu==1.19.2"
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
RUNTIMES = ("onnxruntime==1.20.1", "onnxruntime==1.22.1", "onnxruntime==1.24.4", TRAINING)

MATRIX = (
    *(Row("3.11", f"=={torch}", "onnxruntime==1.31.1") for torch in TORCHES),
    *(Row("3.11", PINNED, runtime) for runtime in RUNTIMES),
    *(Row(python, torch, "onnxruntime") for python in OTHER_PYTHONS for torch in (PINNED, "")),
)
# The newest versions, and the oldest Python and the oldest runtime.
NEWEST = (
    Row("3.13", "", "onnxruntime", whole=False),
    Row("3.10", PINNED, "onnxruntime", whole=False),
    Row("3.11", PINNED, TRAINING, whole=False),
)


def interpreter(version: str) -> str | None:
    """The path of a Python of this version with ``venv``, or ``None``.

    A name on the path may belong to a version manager that has no such Python, so each one is tried.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = [Path(folder, f"python{version}") for folder in folders]
    found += [folder / "bin" / "python" for folder in sorted(pyenv.glob(f"{version}.*"))]
    question = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in found:
        if path.is_file():
            said = _run([str(path), "-c", question], limit=30)
            if said.returncode == 0 and said.stdout.strip() == version:
                return str(path)
    return None


def build_wheel() -> Path:
    """Build the wheel that every row installs."""
    folder = WORK / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    done = _run([*pip, "--wheel-dir", str(folder), str(ROOT)], limit=INSTALL_LIMIT)
    if done.returncode != 0:
        sys.exit(f"the wheel cannot be built:\n{done.stdout}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def try_row(row: Row, wheel: Path, *, keep: bool) -> Result:
    """Install a row's versions into an environment of their own and run its tests there.

    Args:
        row: the versions.
        wheel: the wheel under test.
        keep: leave the environment, which has gigabytes, for the next run, and reuse an existing one.
    """
    path = interpreter(row.python)
    if path is None:
        return Result(row.python, row.torch.strip("="), row.runtime, "not tried: no such Python here")
    environment = WORK / row.name
    if not keep:
        shutil.rmtree(environment, ignore_errors=True)  # the rest of an interrupted run
    try:
        return _in_environment(row, path, environment, wheel)
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)


def _in_environment(row: Row, path: str, environment: Path, wheel: Path) -> Result:
    python = str(environment / "bin" / "python")
    if not Path(python).exists():
        _run([path, "-m", "venv", str(environment)], limit=INSTALL_LIMIT)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(_constraints()))
    wanted = (f"torch{row.torch}", row.runtime, *NEEDED_BY_TESTS)
    pip = [python, "-m", "pip", "install", "--quiet", "--timeout", "60", "--constraint", str(constraints)]
    done = _run([*pip, "--force-reinstall", "--no-deps", str(wheel)], limit=INSTALL_LIMIT)
    if done.returncode == 0:
        extra = "[test]" if row.whole else ""
        done = _run([*pip, f"{wheel}{extra}", *wanted], limit=INSTALL_LIMIT)
    if done.returncode != 0:
        reason = _last_line(done.stdout, "ERROR")
        return Result(row.python, row.torch.strip("="), row.runtime, f"not tried: {reason}")
    torch, runtime = (_installed(python, name) for name in ("torch", row.runtime.partition("=")[0]))
    print(f"{row.name}: torch {torch}, {runtime}", flush=True)
    tests = _copy_of_tests(environment / "suite")
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", *SIDE_BY_SIDE]
    done = _run([*pytest, *row.suite], limit=SUITE_LIMIT, cwd=tests)
    print(done.stdout, flush=True)
    (WORK / f"{row.name}.txt").write_text(done.stdout)
    return Result(row.python, torch, f"{row.runtime.partition('=')[0]} {runtime}", _outcome(done))


def _outcome(done: subprocess.CompletedProcess[str]) -> str:
    """The numbers in pytest's closing line, without the time."""
    # Libraries may print more lines when the process ends.
    closing = [line for line in done.stdout.splitlines() if re.search(r" in [\d.]+s\b", line)]
    last = closing[-1] if closing else _last_line(done.stdout, "")
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last)
    order = ("passed", "failed", "error", "skipped")
    counts.sort(key=lambda count: [count.split()[1].startswith(kind) for kind in order].index(True))
    if done.returncode in (0, 1) and counts:
        return ", ".join(counts)
    return f"broken off with status {done.returncode}: {last}"


def _constraints() -> Iterator[str]:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.partition("==")[0] not in VARYING:
            yield line


def _copy_of_tests(folder: Path) -> Path:
    """The tests in a folder where `import torch2ort` finds the installed package alone."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("tests", "examples", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = ("conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
    for name in (*files, *(page.name for page in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _installed(python: str, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return _run([python, "-c", code], limit=60).stdout.strip()


def _last_line(text: str, start: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(start)]
    return (lines or text.strip().splitlines() or ["no word"])[-1]


def _run(command: list[str], *, limit: int, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without this process's settings for Python, and end it after `limit` seconds."""
    hidden = ("PYTHON", "TORCH2ORT_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=limit, cwd=cwd, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return subprocess.CompletedProcess(command, 124, f"{text}\nERROR: ended after {limit} seconds")


def remember(row: Row, result: Result) -> None:
    """Keep a row's result for the table."""
    WORK.mkdir(parents=True, exist_ok=True)
    (WORK / f"{row.name}.json").write_text(json.dumps(asdict(result)))


def forget(rows: Iterable[Row]) -> None:
    """Drop the results of earlier runs."""
    for row in rows:
        (WORK / f"{row.name}.json").unlink(missing_ok=True)


def results(rows: Iterable[Row]) -> list[Result]:
    """Return the results of the rows that have run."""
    files = [WORK / f"{row.name}.json" for row in rows]
    return [Result(**json.loads(file.read_text())) for file in files if file.exists()]


def table(found: Iterable[Result]) -> str:
    """Return the results as a table in Markdown, without equal rows."""
    lines = ["| Python | torch | ONNX Runtime | tests |", "| --- | --- | --- | --- |"]
    for result in dict.fromkeys(found):
        torch = result.torch or "newest"
        lines.append(f"| {result.python} | {torch} | {result.runtime} | {result.outcome} |")
    return "\n".join(lines)
