"""Inference on a GPU: an exported graph runs forward only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch2ort.graph.graph import Graph
from torch2ort.options import Options
from torch2ort.runtime import stock
from torch2ort.runtime.cuda import streams
from torch2ort.runtime.cuda.sessions import DeviceFeeds, DeviceRun, device_of, on_stream
from torch2ort.runtime.inference import InferenceEngine, engine_error
from torch2ort.runtime.ortvalues import to_tensors


class DeviceInference(InferenceEngine):
    """As its base, for tensors on the device of the options' providers.

    Args:
        graph: the exported graph.
        options: threads and providers.
    """

    _in_cpp = False

    def __init__(self, graph: Graph, options: Options) -> None:
        device = device_of(options.providers)
        self._stream = streams.stream_of(device)
        # Its graph is not cached: reading back a graph that was optimised for a GPU is untested.
        super().__init__(graph, options)
        self._on_device = DeviceFeeds(device)
        self._run = DeviceRun(self._session, list(graph.fetches), device)

    def _providers(self, options: Options) -> list[Any]:
        return on_stream(options.providers, self._stream)

    def run(self, feeds: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the graph; see the base class."""
        failure: BaseException | None = None
        with self._stream.make_current():
            values = self._on_device.values(feeds)
            with self._around_functions(feeds):
                try:
                    fetched = self._run(self._graph.feeds, values)
                except Exception as error:
                    failure = stock.take_error(error) or engine_error(error)
            # Outside of the handler, which would make onnxruntime's error the context of the Function's.
            if failure is not None:
                raise failure
            tensors = to_tensors(fetched, self._bools)
        return self._stream.handed_over(tensors)  # type: ignore[return-value]
