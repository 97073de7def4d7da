"""Settings of an export and of the engine that runs it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Self

from torch2ort import providers
from torch2ort.errors import OptionError

DEFAULT_OPSET = 18
MIN_OPSET = 18

_ENV_PREFIX = "TORCH2ORT_"
# A variable of the project's own tests, not a misspelled option.
_RESERVED_ENV = frozenset({"TORCH2ORT_LONG"})
_LOG_LEVELS = ("debug", "devinfo", "info", "warning", "error", "critical")
_GUARDS = ("complete", "trust")
_MODES = ("default", "max")
_SPARSITIES = ("auto", "off", "labels", "padding")
_REMOVED: Mapping[str, str] = {"engine": "as there is one engine"}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of an export and of the engine that runs it.

    The environment takes precedence: a variable ``TORCH2ORT_<FIELD>`` (``TORCH2ORT_CACHE_DIR``)
    that is set while the object is made replaces the field. An empty variable means ``None`` if
    the field allows it, and no cache for ``cache_dir``. A variable with that prefix that names no field is
    an error, like a misspelled argument.

    >>> Options(opset=20).opset
    20
    >>> Options(opset=9)
    Traceback (most recent call last):
    ...
    torch2ort.errors.OptionError: Option 'opset' is 9; allowed is an integer of at least 18, or None for 18.

    Attributes:
        cache_dir: Folder of the export cache. ``None`` means the user's cache folder,
            ``$XDG_CACHE_HOME/torch2ort`` or ``~/.cache/torch2ort``; ``False``, or an empty variable, means no
            cache. Stored as a :class:`pathlib.Path` with ``~`` expanded.
        cache_limit: Bytes on disk above which the export cache deletes the least recently used entries, at
            least 1; ``None`` means 1 GiB.
        log_level: Level of the logger ``torch2ort``: ``"debug"``, ``"devinfo"``, ``"info"``, ``"warning"``,
            ``"error"`` or ``"critical"``, in upper or lower case. ``None`` does not change the logger. In a
            distributed run, only rank 0 logs at ``"info"`` and above.
        opset: ONNX opset of the graph, from 18 to the highest that the installed onnx and onnxruntime both
            support; ``None`` means 18.
        intra_op_threads: Threads that ONNX Runtime uses inside one operator, at least 1. ``None``
            means as many as PyTorch uses.
        save_onnx_dir: Folder into which every graph is written at every stage, for debugging.
            Stored in the same form as ``cache_dir``.
        verify: Compare the outputs and gradients of the first step with eager PyTorch, and raise
            an error if they differ.
        deterministic: Use deterministic kernels of ONNX Runtime.
        guards: Treatment of objects that ``forward`` reads and that :class:`torch2ort.ORTModule` cannot
            compare before each call (``eval``, an iterator, a large NumPy array): ``"complete"`` refuses them
            by name; ``"trust"`` assumes that they are unchanged since the export.
        providers: Execution providers of onnxruntime for each session, in the order of preference: a list of
            names, or of (name, options) pairs. ``None`` means the CPU, and for an
            :class:`torch2ort.ORTModule` the device of the model's tensors. Providers that the installed
            onnxruntime lacks are refused. Stored as a tuple, options as pairs. An
            :class:`torch2ort.ORTModule` and ``torch.compile`` only support providers that compute in the
            CPU's memory; an ORTModule also supports CUDA where it may be tried. In the environment: names
            separated by commas, or the list in JSON.
        mode: ``"default"``, or ``"max"`` for the fastest steps of an :class:`torch2ort.ORTModule`, at the
            cost of a longer start and more memory: `fuse`, `inline_functions` and `autotune` are on, and
            backward recomputes nothing that costs time. Each of the three is ``None`` by default and then
            follows the mode; ``True`` or ``False`` overrides it. Saved files do not depend on the mode.
        sparsity: Rows of a batch that a training step of an :class:`torch2ort.ORTModule` leaves out, because
            no result depends on them: ``"labels"``, rows whose label a loss ignores and tokens that are not
            read; ``"padding"``, tokens that attention does not read either; ``"auto"``, both, where that
            pays at the densities of the last calls; ``"off"``, none. See
            :attr:`torch2ort.ORTModule.density`.
        calibrate: Run each operator of an :class:`torch2ort.ORTModule` in the library that was measured to be
            faster on this machine, ONNX Runtime or PyTorch. The measurement is that of ``python -m torch2ort
            calibrate``, of an earlier start, or of this start, in a tenth of its time. Operators without a
            measurement follow the built-in rule for the processor, as do all operators with ``False``, with
            `deterministic`, and without the export cache.
        fuse: Compile the operators between products, convolutions and Functions by torch's inductor, into one
            kernel per region. This needs a C++ compiler, and takes seconds per region, once per machine:
            compiled regions are stored in the export cache. Without a compiler, operators run one by one,
            with a warning. Results differ by rounding from those without `fuse`.
        inline_functions: Replace the calls of each Function that torch can trace without data by the
            operators of the Function, as :func:`torch2ort.register_inline` does for one Function. Functions
            that cannot be traced or have an exporter are still called; the reason is logged at ``"info"``.
            The graph then depends on the code of the Functions.
        autotune: Run each large operator in the fastest way on this machine: ONNX Runtime's operator,
            PyTorch's kernel, or another form of it. The ways are timed while a model is built, for at most 10
            seconds, and the result is stored in the export cache. Results of steps differ by rounding from
            those without `autotune`. With ``deterministic`` it needs the export cache, so that all processes
            choose the same way.

    Raises:
        OptionError: An unknown field, or a value that is not allowed, in an argument or in the
            environment.
    """

    cache_dir: str | os.PathLike[str] | bool | None = None
    cache_limit: int | None = None
    log_level: str | None = None
    opset: int | None = None
    intra_op_threads: int | None = None
    save_onnx_dir: str | os.PathLike[str] | None = None
    verify: bool = False
    deterministic: bool = False
    guards: str = "complete"
    providers: Sequence[Any] | None = None
    mode: str = "default"
    sparsity: str = "auto"
    calibrate: bool = True
    fuse: bool | None = None
    inline_functions: bool | None = None
    autotune: bool | None = None

    def __new__(cls, *args: object, **fields: object) -> Self:
        """Reject unknown fields, for which the generated ``__init__`` would raise a ``TypeError``."""
        for name in fields:
            refuse_removed(name)
            if name not in _RULES:
                raise OptionError(f"Option {name!r} does not exist; the options are {', '.join(_RULES)}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Validate every field; values of the environment replace the given ones."""
        environment = _environment(os.environ)
        for name, rule in _RULES.items():
            if name in environment:
                value = rule.from_text(name, environment[name])
            else:
                value = rule.check(getattr(self, name), f"Option {name!r}")
            object.__setattr__(self, name, value)

    def is_on(self, switch: str) -> bool:
        """Return True if `fuse`, `inline_functions` or `autotune` is on, by its own value or by the mode.

        Args:
            switch: Name of the field.
        """
        value = getattr(self, switch)
        return self.mode == "max" if value is None else bool(value)

    def asker(self, switch: str) -> str:
        """Return the field and value by which a switch is on, for error messages."""
        return f"{switch!r} is True" if getattr(self, switch) else f"'mode' is {self.mode!r}"


def refuse_removed(name: str) -> None:
    """Refuse an option of earlier versions.

    Raises:
        OptionError: the option was removed; names it.
    """
    if name in _REMOVED:
        raise OptionError(f"Option {name!r} was removed, {_REMOVED[name]}; leave it out.")


def with_arguments(options: Options | None, **arguments: Any) -> Options:
    """Return `options` with its fields replaced by those `arguments` that are not ``None``.

    Args:
        options: The settings to start from; ``None`` means the defaults.
        arguments: Fields of :class:`Options` that are also arguments of a function.

    Raises:
        OptionError: A value is not allowed, or `options` is not an :class:`Options`.
    """
    if options is None:
        options = Options()
    if not isinstance(options, Options):
        raise OptionError(
            f"options is a {type(options).__name__}; allowed is torch2ort.Options, or None for defaults."
        )
    given = {name: value for name, value in arguments.items() if value is not None}
    return dataclasses.replace(options, **given) if given else options


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options in `environ`, by field name."""
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(_ENV_PREFIX) or variable in _RESERVED_ENV:
            continue
        name = variable.removeprefix(_ENV_PREFIX).lower()
        if name in _REMOVED:
            raise OptionError(
                f"Environment variable {variable} names an option that was removed, {_REMOVED[name]}; "
                f"unset it."
            )
        if name not in _RULES:
            known = ", ".join(_ENV_PREFIX + field.upper() for field in _RULES)
            raise OptionError(
                f"Environment variable {variable} is {text!r} but names no option; "
                f"unset it, or use one of {known}."
            )
        values[name] = text
    return values


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The values that one field accepts: `convert` returns the stored value, or raises ``ValueError``.

    The error's text, if it has one, continues a sentence that begins with the field's name. An optional field
    accepts ``None``; an empty variable of the environment sets it to `empty`.
    """

    convert: Callable[[Any], Any]
    parse: Callable[[str], Any]
    allowed: str
    optional: bool
    empty: object = None

    def check(self, value: object, source: str) -> object:
        if value is None and self.optional:
            return None
        try:
            return self.convert(value)
        except ValueError as error:
            reason = str(error) or f"is {value!r}; allowed is {self.allowed}"
            raise OptionError(f"{source} {reason}.") from None

    def from_text(self, name: str, text: str) -> object:
        source = f"Option {name!r} (from the environment variable {_ENV_PREFIX}{name.upper()})"
        if not text and self.optional:
            return self.empty
        try:
            value = self.parse(text)
        except ValueError:
            value = text  # check() rejects it by name
        return self.check(value, source)


def _path(value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError
    path = os.fspath(value)
    if not isinstance(path, str):
        raise ValueError
    return Path(path).expanduser()


def _cache_path(value: Any) -> Path | bool:
    return False if value is False else _path(value)


def _level(value: Any) -> str:
    if not isinstance(value, str) or value.lower() not in _LOG_LEVELS:
        raise ValueError
    return value.lower()


def _one_of(allowed: tuple[str, ...]) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in allowed:
            raise ValueError
        return str(value)

    return convert


def _integer(minimum: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        # bool is a subclass of int, but a bool for a number is a mistake.
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError
        return value

    return convert


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _boolean_text(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError
    return text.lower() in _TRUE


_FOLDER_RULE = _Rule(_path, str, "the path of a folder as str or os.PathLike, or None", optional=True)
_TEXTS = f"(in the environment {'/'.join(_TRUE)} or {'/'.join(_FALSE)})"
_SWITCH_RULE = _Rule(_boolean, _boolean_text, f"True or False {_TEXTS}", optional=False)
_FOLLOWING_RULE = _Rule(
    _boolean, _boolean_text, f"True or False {_TEXTS}, or None to follow 'mode'", optional=True
)
_RULES = {
    "cache_dir": _Rule(
        _cache_path,
        str,
        "the path of a folder as str or os.PathLike, False for no cache, or None for the user's cache folder",
        optional=True,
        empty=False,
    ),
    "cache_limit": _Rule(
        _integer(1), int, "an integer of at least 1 (bytes), or None for 1 GiB", optional=True
    ),
    "log_level": _Rule(_level, str, f"one of {', '.join(_LOG_LEVELS)}, or None", optional=True),
    "opset": _Rule(
        _integer(MIN_OPSET),
        int,
        f"an integer of at least {MIN_OPSET}, or None for {DEFAULT_OPSET}",
        optional=True,
    ),
    "intra_op_threads": _Rule(
        _integer(1), int, "an integer of at least 1, or None for PyTorch's number of threads", optional=True
    ),
    "save_onnx_dir": _FOLDER_RULE,
    "verify": _SWITCH_RULE,
    "deterministic": _SWITCH_RULE,
    "guards": _Rule(_one_of(_GUARDS), str, f"one of {', '.join(_GUARDS)}", optional=False),
    "providers": _Rule(
        providers.checked,
        providers.written,
        "a list of names of execution providers or of (name, options) pairs, or None for the CPU",
        optional=True,
    ),
    "mode": _Rule(_one_of(_MODES), str, f"one of {', '.join(_MODES)}", optional=False),
    "sparsity": _Rule(_one_of(_SPARSITIES), str, f"one of {', '.join(_SPARSITIES)}", optional=False),
    "calibrate": _SWITCH_RULE,
    "fuse": _FOLLOWING_RULE,
    "inline_functions": _FOLLOWING_RULE,
    "autotune": _FOLLOWING_RULE,
}
