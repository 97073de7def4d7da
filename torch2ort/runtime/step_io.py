"""How values pass through the session of a half: PyTorch's tensors go in and come out, and the rest goes on.

Where onnxruntime shares its environment with the extension, they pass in C++ (``native.Half``), and what goes
from forward to backward is no Python object. Elsewhere they pass by onnxruntime's Python interface.
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
    """What a half is fed with, and what becomes of what it gives.

    Attributes:
        sources: of what is fed behind the values that the other half kept, one an input: the position of one
            of the caller's tensors, or a tensor that is the same in every call.
        varying: how many of the caller's tensors are others in every call. The values of those behind them,
            and of parameters, are made once for as long as they are where they were.
        fetched: positions of the outputs that become tensors.
        kept: what is left for the other half: positions of outputs, or ``~i`` of what was fed as number i.
        donated: positions among these of what the other half owns, and does not get fed with.
    """

    sources: tuple[int | torch.Tensor, ...]
    varying: int
    fetched: tuple[int, ...]
    kept: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()

    @classmethod
    def through(cls, inputs: int, outputs: int) -> Passing:
        """Of a half that gets tensors and gives tensors."""
        return cls(tuple(range(inputs)), inputs, tuple(range(outputs)))

    def without_donations(self) -> Passing:
        """The same where the other half is fed with all of it."""
        return replace(self, donated=())

    @property
    def given_away(self) -> tuple[int, ...]:
        """Positions of the outputs that the other half owns."""
        return tuple(self.kept[i] for i in self.donated)

    @property
    def fed(self) -> tuple[int, ...]:
        """What the other half is fed with, as of ``kept``."""
        return tuple(place for i, place in enumerate(self.kept) if i not in self.donated)


class ByPython:
    """Passes values by onnxruntime's Python interface.

    Args:
        session: of onnxruntime.
        inputs: names of what is fed.
        outputs: names of what is computed.
        passing: what becomes of them.
        bools: positions of the outputs that are of bool.
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
        """See :meth:`torch2ort.runtime.step_session.HalfSession.run`."""
        made = self._feeds.values(tensors)
        given = [made[source] if isinstance(source, int) else source for source in self._sources]
        fed = [*(kept or ()), *given]
        results = self._computed(fed, run)
        if self._fetches_all:
            fetched = to_tensors(results, ())
        else:
            fetched = [to_tensor(results[i]) for i in self._passing.fetched]
        restore_bools(fetched, self._bools)
        return fetched, self._left(results, fed, run)

    def _left(self, results: Any, fed: Sequence[Any], run: native.Run) -> list[Any]:
        """What the other half is fed with; the run gets what it owns."""
        passing, places = self._passing, self._passing.kept
        if passing.donated:
            run.donate([results[i].to_dlpack() for i in passing.given_away])
            places = passing.fed
            # An item of such a vector keeps the vector alive, with all that is in it.
            results = own_items(results, [i for i in places if i >= 0])
        return [results[i] if i >= 0 else fed[~i] for i in places]

    def _computed(self, values: Sequence[Any], run: native.Run) -> Sequence[Any]:
        """One OrtValue an output."""
        failure: BaseException | None = None
        with contexts_in(run, without_grad=True):
            try:
                return self._fetched(values)
            except Exception as error:
                failure = stock.take_error(error)
                if failure is None:
                    failure = EngineError(f"ONNX Runtime failed: {error}")
                    failure.__cause__ = error
        # Outside of the handler, which would make onnxruntime's error the context of the Function's.
        raise failure

    def _fetched(self, values: Sequence[Any]) -> Sequence[Any]:
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
    """A session through which values pass in C++.

    Args:
        model: ONNX whose nodes are bound, or the path of a file.
        inputs: names of what is fed.
        outputs: names of what is computed.
        passing: what becomes of them.
        settings: ``SessionOptions``.
        registered: the same in C++; see ``native.registered_options``.

    Raises:
        EngineError: onnxruntime refuses the model.
    """
    # The C interface has no argument for it.
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
            donated=passing.given_away,
            plain=as_fed,
            weight_type=torch.nn.Parameter,
            options=registered,
        )
    except RuntimeError as error:
        raise EngineError(f"onnxruntime {onnxruntime().__version__} refuses the model: {error}") from error
