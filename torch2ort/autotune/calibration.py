"""Times of operators that were measured on this machine, for all processes of a user.

They are kept by processor, versions and threads, in a folder of their own beside the user's export cache:
those of kinds of operators, which ``python -m torch2ort calibrate`` measures, and those of single operators,
which a start measures in a part of its own time. What was not measured follows the rule that ships.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch2ort.autotune.hardware_key import machine
from torch2ort.autotune.processor_rule import KINDS, faster_in_kernels
from torch2ort.cache.key.key import Key
from torch2ort.cache.store import location
from torch2ort.cache.store.graph_entries import Kept, keep
from torch2ort.cache.store.store import RefusedError, Store
from torch2ort.log import logger
from torch2ort.options import Options

_FOLDER = "calibration"
_NAME = "kinds of operators"
_KIND = "calibration"
# Of the time of the library that the rule names, what the other one may take at most.
_WINS = 0.97


@dataclass(frozen=True)
class Calibration:
    """What one run of ``calibrate`` measured.

    Attributes:
        runs: how many there were on this machine.
        ratios: the time of PyTorch's kernels by that of ONNX Runtime's, by kind of operator.
    """

    runs: int
    ratios: Mapping[str, float]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of operators that PyTorch's kernels compute."""
        ruled = faster_in_kernels()
        return tuple(
            kind
            for kind, ratio in self.ratios.items()
            if ratio < (1 / _WINS if KINDS[kind] <= ruled else _WINS)
        )


def calibration_store(options: Options) -> Store | None:
    """The folder of this user's measurements; ``None`` where the settings or the system allow none.

    Args:
        options: of the module.
    """
    if not options.calibrate or options.deterministic:
        return None
    try:
        folder = None if location.cache_folder(options) is None else location.users_folder()
        return None if folder is None else Store(folder / _FOLDER)
    except RefusedError as error:
        logger.info("what is measured of this machine is not kept: %s", error)
        return None


def in_kernels(options: Options) -> frozenset[str]:
    """Names of operators that PyTorch's kernels compute, where they are large: as measured, or by the rule.

    Args:
        options: of the module.
    """
    found = calibrated(options)
    return faster_in_kernels() if found is None else frozenset().union(*(KINDS[kind] for kind in found.kinds))


def runs(options: Options) -> int:
    """How often this machine was calibrated.

    Args:
        options: of the module.
    """
    found = calibrated(options)
    return 0 if found is None else found.runs


def calibrated(options: Options) -> Calibration | None:
    """The last calibration of this machine; ``None`` if there is none, or it is not to be read.

    Args:
        options: of the module.
    """
    store = calibration_store(options)
    return None if store is None else _read(store, _key(options))


def note(options: Options, ratios: Mapping[str, float]) -> Calibration | None:
    """Keep a calibration in the place of the last one.

    Args:
        options: of the process that measured.
        ratios: see :class:`Calibration`.

    Returns:
        The calibration; ``None`` if it could not be kept.
    """
    store, key = calibration_store(options), _key(options)
    if store is None:
        return None
    with store.lock(key.digest):
        before = _read(store, key)
        store.remove(key.digest)
        made = Calibration(1 if before is None else before.runs + 1, dict(ratios))
        reason = keep(store, key, _KIND, Kept({"runs": made.runs, "ratios": dict(made.ratios)}, {}))
    return made if reason is None else None


def _key(options: Options) -> Key:
    return Key.of(_NAME, {**machine(options), "measured": _NAME})


def _read(store: Store, key: Key) -> Calibration | None:
    entry = store.read(key.digest)
    if entry is None:
        return None
    data = entry.manifest.data
    return Calibration(int(data["runs"]), {kind: float(data["ratios"][kind]) for kind in KINDS})
