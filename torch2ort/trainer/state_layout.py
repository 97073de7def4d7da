"""Conversion of a trainer's state to the layout of the reference, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from torch2ort import TrainerError
from torch2ort.trainer.optimizer_step import MOMENTS, STEP

MODEL, FULL, OPTIMIZER, OPTIONS = "model", "full_precision", "optimizer", "trainer_options"
PARTITION, INFO, SHARED = "partition_info", "train_step_info", "shared_optimizer_state"
SCALER, ACCUMULATED = "loss_scaler", "accumulated_gradients"
COUNT = "Update_Count"


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a copy as a NumPy array."""
    found: np.ndarray[Any, Any] = tensor.detach().cpu().numpy().copy()
    return found


def optimizer_state(state: Mapping[str, Any], *, counts_by_weight: bool) -> dict[str, dict[str, Any]]:
    """Convert a state of torch2ort.optim to a layout by weights.

    Args:
        state: in the layout of torch2ort.optim.
        counts_by_weight: True if each weight has its number of updates, as with Adam; False if all share
            one, as with LAMB.
    """
    weights: dict[str, dict[str, Any]] = {}
    for key, moment in MOMENTS.items():
        for name, value in state.get(key, {}).items():
            weights.setdefault(name, {})[moment] = array(value)
    if STEP not in state:
        return weights
    count = np.array([int(state[STEP])], dtype=np.int64)
    if not counts_by_weight:
        return {**weights, SHARED: {STEP: count}}
    return {name: {**moments, COUNT: count.copy()} for name, moments in weights.items()}


def into_optimizer_state(
    given: Mapping[str, Mapping[str, Any]], state: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Convert a layout by weights to a state of torch2ort.optim.

    Args:
        given: a result of :func:`optimizer_state`; weights of other processes are ignored.
        state: the present state, of the weights of this process.
        strict: True if every moment is required.

    Raises:
        TrainerError: a value is missing, or has another shape.
    """
    new: dict[str, Any] = {key: dict(value) for key, value in state.items() if key in MOMENTS}
    counts = [int(np.asarray(given[SHARED][STEP]).ravel()[0])] if STEP in given.get(SHARED, {}) else []
    for key, moment in MOMENTS.items():
        for name, present in state.get(key, {}).items():
            value = given.get(name, {}).get(moment)
            if value is not None:
                new[key][name] = fitting(f"optimizer state {moment} of {name!r}", value, present)
            elif strict:
                raise TrainerError(
                    f"The state has no optimizer state {moment} of {name!r}; give a whole one."
                )
    for name in next(iter(new.values()), {}):
        if COUNT in given.get(name, {}):
            counts.append(int(np.asarray(given[name][COUNT]).ravel()[0]))
    if STEP in state:
        if len(set(counts)) > 1:
            raise TrainerError(
                f"The state counts {sorted(set(counts))} updates of different weights; expected one count."
            )
        if strict and not counts and (given or state.get(next(iter(MOMENTS)))):
            raise TrainerError(
                f"The state has no {COUNT} and no {SHARED}; expected how often weights were updated."
            )
        new[STEP] = torch.full_like(state[STEP], counts[0]) if counts else state[STEP]
    return new


def fitting(what: str, value: Any, present: torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor like another one.

    Raises:
        TrainerError: its shape differs, or it is no array.
    """
    try:
        tensor = torch.as_tensor(np.array(value) if isinstance(value, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainerError(
            f"The {what} is a {type(value).__name__}; expected an array of numbers. Load the state of the "
            f"same model."
        ) from error
    if tensor.shape != present.shape:
        raise TrainerError(
            f"The {what} has shape {list(tensor.shape)}; this trainer's has {list(present.shape)}. Load "
            f"the state of "
            f"the same model."
        )
    return tensor.to(device=present.device, dtype=present.dtype, copy=True)


def check_layout(given: Any) -> None:
    """Check that a value has the layout of a trainer's state.

    Raises:
        TrainerError: a part has another type; the error names it.
    """
    _need_dict("state", given)
    if MODEL in given:
        _need_dict(f"state's {MODEL}", given[MODEL])
        if FULL in given[MODEL]:
            _need_dict(f"state's {MODEL}.{FULL}", given[MODEL][FULL])
    for key in (OPTIMIZER, OPTIONS, INFO, SCALER, ACCUMULATED):
        _need_dict(f"state's {key}", given.get(key, {}))
    for name, moments in given.get(OPTIMIZER, {}).items():
        _need_dict(f"state's {OPTIMIZER}.{name}", moments)
    for name, count in given.get(INFO, {}).items():
        if not isinstance(count, (int, np.integer)) or count < 0:
            raise TrainerError(f"The state's {INFO}.{name} is {count!r}; expected an integer of at least 0.")


def _need_dict(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TrainerError(
            f"The {what} is a {type(given).__name__}; expected a dict, as ORTTrainer.state_dict() returns it."
        )


def check_keys(where: str, given: Iterable[str], expected: Iterable[str], *, strict: bool) -> None:
    """Compare the names in a state with this trainer's.

    Raises:
        TrainerError: `strict`, and some are missing or unexpected.
    """
    missing, unexpected = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if strict and (missing or unexpected):
        raise TrainerError(
            f"The state's {where} does not fit this trainer's: missing are {missing}, unexpected "
            f"{unexpected}. Load "
            f"the state of the same model, or pass strict=False."
        )
