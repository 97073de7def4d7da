"""The options of ``torch.compile(backend="torch2ort", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch2ort.dynamo.opaque_functions import OPTION
from torch2ort.errors import OptionError
from torch2ort.log import apply_level
from torch2ort.options import Options, refuse_removed
from torch2ort.support.user_warnings import warn
from torch2ort.training.ort_targets import refuse_providers

# The options of torch2ort.Options that apply to graphs of torch.compile.
_SHARED = (
    "cache_dir", "cache_limit", "log_level", "opset", "intra_op_threads", "save_onnx_dir",
    "deterministic", "providers", "calibrate",
)  # fmt: skip
_NAMES = (*_SHARED, OPTION)


# Options of ORTModule alone -> the alternative with torch.compile.
_INSTEAD = {
    "fuse": "torch.compile(backend='inductor') fuses by itself.",
    "autotune": "torch.compile(backend='inductor', mode='max-autotune') measures by itself.",
}


@dataclass(frozen=True)
class Settings:
    """The settings of one call of ``torch.compile``.

    Attributes:
        options: the options that it shares with ORTModule.
    """

    options: Options


def settings_of(given: Mapping[str, Any] | None, mode: str | None) -> Settings:
    """Return the settings in the arguments of ``torch.compile``.

    Args:
        given: its ``options``.
        mode: its ``mode``, which is Inductor's.

    Raises:
        OptionError: an option is unknown, or has a value that is not allowed.
    """
    given = dict(given or {})
    for name in given:
        refuse_removed(name)
        if name not in _NAMES:
            raise OptionError(
                f"Option {name!r} does not exist for torch.compile(backend='torch2ort'); the options are "
                f"{', '.join(_NAMES)}."
            )
    if mode is not None:
        warn(
            f"mode={mode!r} chooses among Inductor's settings and is ignored by the backend torch2ort, whose "
            f"settings are options={{...}}"
        )
    keeps = given.pop(OPTION, False)
    if not isinstance(keeps, bool):
        raise OptionError(f"Option {OPTION!r} is {keeps!r}; allowed is True or False.")
    options = Options(**given)
    if options.verify:
        raise OptionError(
            "Option 'verify' is True; it compares an ORTModule with its model, and torch.compile has none. "
            "Compare with torch.compile(backend='eager')."
        )
    for name, instead in _INSTEAD.items():
        if options.is_on(name):
            raise OptionError(f"Option {options.asker(name)}; it is for ORTModule. {instead}")
    refuse_providers(options)
    apply_level(options)
    return Settings(options)
