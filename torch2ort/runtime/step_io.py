"""The inputs and outputs of a half's session: PyTorch's tensors, and values that pass between the halves.

Where onnxruntime shares its environment with the extension, values pass in C++ (``native.Half``), and those
from forward to backward are no Python objects. Elsewhere they pass by onnxruntime's Python interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch2ort.errors import EngineError
from torch2ort.pythonop.native import native
from torch2ort.runtime import onnxruntime, stock
from torch2ort.runtime.contexts import contexts_in
from torch2ort.runtime.feeds import Feeds, as_fed
from torch2ort.runtime.ortvalues import own_items, plain, restore_bools, to_tensor, to_tensors, to_value
from torch2ort.runtime.workarounds.layernorm_centering import disabled_optimizers


@dataclass(frozen=True)
class Passing:
    """The feeds of a half, and the use of its outputs.

    Attributes:
        sources: for each input after the values that the other half saved: the position of one of the
            caller's tensors, or a tensor that is the same in every call.
        varying: how many of the caller's tensors change in every call. The values of later ones, and of
            parameters, are cached as long as their memory is the same.
        fetched: positions of the outputs that become tensors.
        kept: values for the other half: positions of outputs, or ``~i`` for feed ``i``.
        donated: positions among ``kept`` of values that the other half owns, and does not get as feeds.
    """

    sources: tuple[int | torch.Tensor, ...]
    varying: int
    fetched: tuple[int, ...]
    kept: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()

    @classmethod
    def through(cls, inputs: int, outputs: int) -> Passing:
        """Return the passing of a half whose inputs and outputs are all tensors."""
        return cls(tuple(range(inputs)), inputs, tuple(range(outputs)))

    def without_donations(self) -> Passing:
        """Return the same passing, with all values for the other half as its feeds."""
        return replace(self, donated=())

    @property
    def donated_outputs(self) -> tuple[int, ...]:
        """Positions of the outputs that the other half owns."""
        return tuple(self.kept[i] for i in self.donated)

    @property
    def fed(self) -> tuple[int, ...]:
        """The feeds of the other half, as entries of ``kept``."""
        return tuple(place for i, place in enumerate(self.kept) if i not in self.donated)


class PythonSession:
    """Passing of values by onnxruntime's Python interface.

    Args:
        session: the session.
        inputs: names of the inputs.
        outputs: names of the outputs.
        passing: the use of inputs and outputs.
        bools: positions of the bool outputs.
    """

    def __init__(
        self,
        session: Any,
        inputs: Sequence[str],
        outputs: Sequence[str],
        passing: Passing,
        bools: frozenset[int],
    ) -> None:
        self._session, self._inputs, self._outputs = session, list(inputs), list(outputs)
        self._passing = passing
        self._feeds: Any = Feeds(passing.varying)
        self._sources = [s if isinstance(s, int) else to_value(plain(s)) for s in passing.sources]
        self._fetches_all = passing.fetched == tuple(range(len(outputs)))
        self._bools = [i for i, place in enumerate(passing.fetched) if place in bools]

    def run(
        self, kept: Sequence[Any] | None, tensors: Sequence[torch.Tensor], run: native.Run
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Run the half; see :meth:`torch2ort.runtime.step_session.HalfSession.run`."""
        made = self._feeds.values(tensors)
        given = [made[source] if isinstance(source, int) else source for source in self._sources]
        fed = [*(kept or ()), *given]
        results = self._compute(fed, run)
        if self._fetches_all:
            fetched = to_tensors(results, ())
        else:
            fetched = [to_tensor(results[i]) for i in self._passing.fetched]
        restore_bools(fetched, self._bools)
        return fetched, self._feeds_of_other_half(results, fed, run)

    def _feeds_of_other_half(self, results: Any, fed: Sequence[Any], run: native.Run) -> list[Any]:
        """Return the feeds of the other half; the run gets the values that it owns."""
        passing, places = self._passing, self._passing.kept
        if passing.donated:
            run.donate([results[i].to_dlpack() for i in passing.donated_outputs])
            places = passing.fed
            # An item of the vector would keep the whole vector alive.
            results = own_items(results, [i for i in places if i >= 0])
        return [results[i] if i >= 0 else fed[~i] for i in places]

    def _compute(self, values: Sequence[Any], run: native.Run) -> Sequence[Any]:
        """Return one OrtValue per output."""
        failure: BaseException | None = None
        with contexts_in(run, without_grad=True):
            try:
                return self._fetch(values)
            except Exception as error:
                failure = stock.take_error(error)
                if failure is None:
                    failure = EngineError(f"ONNX Runtime failed: {error}")
                    failure.__cause__ = error
        # Outside of the handler, which would make onnxruntime's error the context of the Function's.
        raise failure

    def _fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        feeds = dict(zip(self._inputs, values, strict=True))
        found: Sequence[Any] = self._session._sess.run_with_ort_values(feeds, self._outputs, None)
        return found


def native_half(
    model: bytes | str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    passing: Passing,
    settings: Any,
    registered: Any,
) -> native.Half:
    """Create a session with values passed in C++.

    Args:
        model: ONNX with bound nodes, or the path of a file.
        inputs: names of the inputs.
        outputs: names of the outputs.
        passing: the use of inputs and outputs.
        settings: ``SessionOptions``.
        registered: the same options in C++; see ``native.registered_options``.

    Raises:
        EngineError: onnxruntime refuses the model.
    """
    # The C interface has no argument for disabled optimisers.
    settings.add_session_config_entry(
        "optimization.disable_specified_optimizers", ";".join(disabled_optimizers(settings))
    )
    try:
        return native.Half(
            model=model,
            inputs=inputs,
            outputs=outputs,
            sources=passing.sources,
            varying=passing.varying,
            fetched=passing.fetched,
            kept=passing.fed,
            donated=passing.donated_outputs,
            plain=as_fed,
            weight_type=torch.nn.Parameter,
            options=registered,
        )
    except RuntimeError as error:
        raise EngineError(f"onnxruntime {onnxruntime().__version__} refuses the model: {error}") from error
