"""Options are validated on construction; environment variables override them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from torch2ort.errors import OptionError
from torch2ort.options import Options, with_arguments

FOLDER = "the path of a folder as str or os.PathLike, or None"
BYTES = "an integer of at least 1 (bytes), or None for 1 GiB"
OPSET = "an integer of at least 18, or None for 18"
THREADS = "an integer of at least 1, or None for PyTorch's number of threads"
LEVEL = "one of debug, devinfo, info, warning, error, critical, or None"
CACHE = "the path of a folder as str or os.PathLike, False for no cache, or None for the user's cache folder"
SWITCH = "True or False (in the environment 1/true/yes/on or 0/false/no/off)"


def test_defaults_ask_for_nothing() -> None:
    assert dataclasses.asdict(Options()) == {
        "cache_dir": None,
        "cache_limit": None,
        "log_level": None,
        "opset": None,
        "intra_op_threads": None,
        "save_onnx_dir": None,
        "verify": False,
        "deterministic": False,
        "guards": "complete",
        "providers": None,
        "mode": "default",
        "sparsity": "auto",
        "calibrate": True,
        "fuse": None,
        "inline_functions": None,
        "autotune": None,
    }


@pytest.mark.parametrize("switch", ["fuse", "inline_functions", "autotune"])
def test_a_switch_follows_the_mode_unless_it_is_set(switch: str) -> None:
    found = {
        (mode, value): Options(mode=mode, **{switch: value}).is_on(switch)
        for mode in ("default", "max")
        for value in (None, True, False)
    }
    assert [setting for setting, is_on in found.items() if is_on] == [
        ("default", True),
        ("max", None),
        ("max", True),
    ]


@pytest.mark.parametrize("field", ["cache_dir", "save_onnx_dir"])
@pytest.mark.parametrize("given", ["some/folder", Path("some/folder")])
def test_folders_become_paths(field: str, given: str | Path) -> None:
    assert getattr(Options(**{field: given}), field) == Path("some/folder")


def test_a_folder_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert Options(cache_dir="~/cache").cache_dir == Path("/home/someone/cache")


def test_log_level_has_no_case() -> None:
    assert Options(log_level="DEBUG") == Options(log_level="debug")


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("cache_dir", 3, CACHE),
        ("cache_dir", "", CACHE),
        ("cache_dir", True, CACHE),
        ("cache_dir", b"bytes", CACHE),
        ("save_onnx_dir", True, FOLDER),
        ("cache_limit", 0, BYTES),
        ("cache_limit", "1 GiB", BYTES),
        ("opset", 16, OPSET),
        ("opset", "18", OPSET),
        ("opset", True, OPSET),
        ("intra_op_threads", 0, THREADS),
        ("intra_op_threads", True, THREADS),
        ("intra_op_threads", 2.0, THREADS),
        ("log_level", "loud", LEVEL),
        ("log_level", 10, LEVEL),
        ("verify", 1, SWITCH),
        ("verify", None, SWITCH),
        ("deterministic", "yes", SWITCH),
        ("guards", "loose", "one of complete, trust"),
        ("guards", None, "one of complete, trust"),
        ("mode", "fast", "one of default, max"),
        ("sparsity", "x", "one of auto, off, labels, padding"),
        ("sparsity", None, "one of auto, off, labels, padding"),
        ("calibrate", None, SWITCH),
        ("fuse", "yes", f"{SWITCH}, or None to follow 'mode'"),
    ],
)
def test_an_invalid_value_is_named_with_what_is_allowed(field: str, value: object, allowed: str) -> None:
    message = f"Option {field!r} is {value!r}; allowed is {allowed}."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options(**{field: value})


UNKNOWN = re.escape(
    "Option 'cache' does not exist; the options are cache_dir, cache_limit, log_level, opset, "
    "intra_op_threads, save_onnx_dir, verify, deterministic, guards, providers, mode, sparsity, calibrate, "
    "fuse, inline_functions, autotune."
)


def test_an_unknown_field_is_an_option_error() -> None:
    with pytest.raises(OptionError, match=f"^{UNKNOWN}$"):
        Options(cache="x")  # type: ignore[call-arg]


def test_replace_rejects_an_unknown_field_too() -> None:
    with pytest.raises(OptionError, match=f"^{UNKNOWN}$"):
        dataclasses.replace(Options(), cache="x")  # type: ignore[call-arg]


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().opset = 20  # type: ignore[misc]


def test_options_can_be_copied_and_pickled() -> None:
    options = Options(opset=20, cache_dir="x")
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("TORCH2ORT_CACHE_DIR", "there", "cache_dir", Path("there")),
        ("TORCH2ORT_CACHE_DIR", "", "cache_dir", False),
        ("TORCH2ORT_CACHE_LIMIT", "1000000", "cache_limit", 1000000),
        ("TORCH2ORT_CACHE_LIMIT", "", "cache_limit", None),
        ("TORCH2ORT_LOG_LEVEL", "Info", "log_level", "info"),
        ("TORCH2ORT_OPSET", "21", "opset", 21),
        ("TORCH2ORT_OPSET", "", "opset", None),
        ("TORCH2ORT_INTRA_OP_THREADS", "3", "intra_op_threads", 3),
        ("TORCH2ORT_SAVE_ONNX_DIR", "there", "save_onnx_dir", Path("there")),
        ("TORCH2ORT_VERIFY", "1", "verify", True),
        ("TORCH2ORT_VERIFY", "off", "verify", False),
        ("TORCH2ORT_DETERMINISTIC", "Yes", "deterministic", True),
        ("TORCH2ORT_GUARDS", "trust", "guards", "trust"),
        ("TORCH2ORT_MODE", "max", "mode", "max"),
        ("TORCH2ORT_SPARSITY", "padding", "sparsity", "padding"),
        ("TORCH2ORT_CALIBRATE", "0", "calibrate", False),
        ("TORCH2ORT_FUSE", "1", "fuse", True),
        ("TORCH2ORT_FUSE", "", "fuse", None),
    ],
)
def test_the_environment_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    given = {"cache_dir": "here", "opset": 19, "verify": True}.get(field, getattr(Options, field))
    assert getattr(Options(**{field: given}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "field", "shown", "allowed"),
    [
        ("TORCH2ORT_OPSET", "new", "opset", "'new'", OPSET),
        ("TORCH2ORT_OPSET", "9", "opset", "9", OPSET),
        ("TORCH2ORT_CACHE_LIMIT", "1GiB", "cache_limit", "'1GiB'", BYTES),
        ("TORCH2ORT_INTRA_OP_THREADS", "-1", "intra_op_threads", "-1", THREADS),
        ("TORCH2ORT_LOG_LEVEL", "loud", "log_level", "'loud'", LEVEL),
        ("TORCH2ORT_SPARSITY", "x", "sparsity", "'x'", "one of auto, off, labels, padding"),
        ("TORCH2ORT_VERIFY", "", "verify", "''", SWITCH),
        ("TORCH2ORT_VERIFY", "maybe", "verify", "'maybe'", SWITCH),
    ],
)
def test_an_invalid_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, shown: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, text)
    message = f"Option {field!r} (from the environment variable {variable}) is {shown}; allowed is {allowed}."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options()


@pytest.mark.parametrize("value", ["joint", "ort_training", None])
def test_a_removed_option_is_named(value: object) -> None:
    message = "Option 'engine' was removed, as there is one engine; leave it out."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options(engine=value)


def test_a_variable_of_a_removed_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH2ORT_ENGINE", "joint")
    message = (
        "Environment variable TORCH2ORT_ENGINE names an option that was removed, as there is one engine; "
        "unset it."
    )
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options()


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH2ORT_CACHEDIR", "x")
    message = (
        "Environment variable TORCH2ORT_CACHEDIR is 'x' but names no option; unset it, or use one of "
        "TORCH2ORT_CACHE_DIR, TORCH2ORT_CACHE_LIMIT, TORCH2ORT_LOG_LEVEL, TORCH2ORT_OPSET, "
        "TORCH2ORT_INTRA_OP_THREADS, TORCH2ORT_SAVE_ONNX_DIR, TORCH2ORT_VERIFY, TORCH2ORT_DETERMINISTIC, "
        "TORCH2ORT_GUARDS, TORCH2ORT_PROVIDERS, TORCH2ORT_MODE, TORCH2ORT_SPARSITY, TORCH2ORT_CALIBRATE, "
        "TORCH2ORT_FUSE, TORCH2ORT_INLINE_FUNCTIONS, TORCH2ORT_AUTOTUNE."
    )
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        Options()


def test_the_variable_of_the_test_suite_is_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH2ORT_LONG", "1")
    assert Options() == Options()


def test_arguments_of_a_call_replace_fields() -> None:
    options = with_arguments(Options(opset=19, verify=True), opset=20, cache_dir=None)
    assert options == Options(opset=20, verify=True)


def test_the_environment_wins_over_arguments_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH2ORT_OPSET", "21")
    assert with_arguments(None, opset=20).opset == 21


def test_options_of_another_type_are_refused() -> None:
    message = "options is a dict; allowed is torch2ort.Options, or None for defaults."
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        with_arguments({"opset": 18})  # type: ignore[arg-type]
