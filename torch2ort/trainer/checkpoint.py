"""A trainer's state in a file, and the files of several processes as one state."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch2ort import TrainerError
from torch2ort.trainer.state_layout import COUNT, FULL, MODEL, OPTIMIZER, OPTIONS, PARTITION

_FORMAT, _VERSION = "torch2ort trainer", 1
# The key of a NumPy array's form in a file, which contains tensors and plain values alone.
_ARRAY = "__array__"


def save(path: Any, state: Mapping[str, Any], user_dict: Mapping[str, Any]) -> None:
    """Write a state and the user's values.

    Args:
        path: path of a file that does not exist, or a binary file object.
        state: the trainer's.
        user_dict: tensors, NumPy arrays, plain values, and containers of them.

    Raises:
        FileExistsError: the file exists.
        TrainerError: `user_dict` contains an object of another type.
    """
    content = {"format": _FORMAT, "version": _VERSION, "state": _plain(state, "state")}
    content["user_dict"] = _plain(user_dict, "user_dict")
    if not isinstance(path, (str, os.PathLike)):
        torch.save(content, path)
        return
    # Exclusive creation: otherwise two processes with the same path would leave the state of one.
    with Path(path).open("xb") as file:
        torch.save(content, file)


def load(path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a state and the user's values; no code in the file is run.

    Raises:
        TrainerError: the file is no checkpoint of a trainer, or damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise TrainerError(f"{path}: no checkpoint of a trainer, or damaged: {error}") from error
    if (
        not isinstance(content, dict)
        or content.get("format") != _FORMAT
        or content.get("version") != _VERSION
        or "world_rank" not in content.get("state", {}).get(OPTIONS, {})
    ):
        raise TrainerError(
            f"{path}: expected a checkpoint that ORTTrainer.save_checkpoint wrote, version {_VERSION}"
        )
    return _restored(content["state"]), _restored(content["user_dict"])


def joined(
    states: Sequence[Mapping[str, Any]], names: Sequence[str], trained: Collection[str]
) -> dict[str, Any]:
    """Join the states of several processes into the state of one.

    Args:
        states: one of each process.
        names: the names of the files, for errors.
        trained: the weights whose values are the same in all processes. Running statistics differ between
            processes; those of the first process are used.

    Raises:
        TrainerError: the states are not of one training, or the state of a process is missing.
    """
    ranks = [state[OPTIONS]["world_rank"] for state in states]
    order = sorted(range(len(states)), key=ranks.__getitem__)
    if len(set(ranks)) < len(ranks):
        raise TrainerError(
            f"The checkpoints are of ranks {ranks}; expected one file of each rank: {', '.join(names)}"
        )
    first = states[order[0]]
    for i in order[1:]:
        _check_same(first, states[i], names[order[0]], names[i], trained)
    sharded = PARTITION in first
    size = first[OPTIONS]["world_size"]
    if sharded and len(states) < size:
        raise TrainerError(
            f"The checkpoints are of ranks {sorted(ranks)} of {size}, each with a part of the "
            f"optimizer's state; give "
            f"load_checkpoint the files of all ranks."
        )
    whole = {key: value for key, value in first.items() if key != PARTITION}
    if OPTIMIZER in first:
        whole[OPTIMIZER] = {k: v for i in reversed(order) for k, v in states[i].get(OPTIMIZER, {}).items()}
    whole[OPTIONS] = {
        **first[OPTIONS],
        "zero_stage": 0,
        "world_rank": 0,
        "world_size": 1,
        "data_parallel_size": 1,
    }
    return whole


def _check_same(
    first: Mapping[str, Any], other: Mapping[str, Any], one: str, two: str, trained: Collection[str]
) -> None:
    """Raise an error for states of two trainings, or of two steps of one training."""
    for key in ("mixed_precision", "optimizer_name", "world_size", "zero_stage"):
        if first[OPTIONS][key] != other[OPTIONS][key]:
            raise TrainerError(
                f"{two}: {key} is {other[OPTIONS][key]!r}, and {first[OPTIONS][key]!r} in {one}"
            )
    weights, others = first[MODEL][FULL], other[MODEL][FULL]
    if weights.keys() != others.keys():
        raise TrainerError(f"{two}: has other weights than {one}; expected the files of one training")
    for name, value in weights.items():
        same = np.array_equal(value, others[name], equal_nan=value.dtype.kind == "f")
        if name in trained and not same:
            raise TrainerError(f"{two}: {name!r} has other values than in {one}; expected files of one step")
    counts = [{int(v[COUNT][0]) for v in s.get(OPTIMIZER, {}).values() if COUNT in v} for s in (first, other)]
    if counts[0] and counts[1] and counts[0] != counts[1]:
        raise TrainerError(
            f"{two}: counts {counts[1]} updates, and {one} {counts[0]}; expected files of one step"
        )


def _plain(value: Any, path: str) -> Any:
    """Convert a value to the types of a file, which are read back without running code."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(np.array(value))}
    if isinstance(value, torch.Tensor) or value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if (
        type(value) is dict
        and all(type(key) in (str, int, float, bool) for key in value)
        and _ARRAY not in value
    ):
        return {key: _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{path}[{index}]") for index, item in enumerate(value))
    raise TrainerError(
        f"{path} is a {type(value).__name__}; a checkpoint holds tensors, arrays of numbers, numbers, "
        f"texts, and dicts, "
        f"lists and tuples of them"
    )


def _restored(value: Any) -> Any:
    """Convert a value back to the one that was passed to :func:`_plain`."""
    if type(value) is dict:
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _restored(item) for key, item in value.items()}
    return type(value)(map(_restored, value)) if type(value) in (list, tuple) else value
