"""onnxruntime-training's table of contexts and callables, kept small."""

from __future__ import annotations

import weakref

import torch

from torch2ort.pythonop.native import native
from torch2ort.runtime import _ort_private as private

# An entry takes about 200 bytes, and lies between the tensors of its run on the heap.
MOST_CONTEXTS = 4096


class Pool:
    """What onnxruntime-training 1.19.2 keeps of every call of a Function until its backward has run.

    A forward whose backward never comes leaves its entries there for good, and onnxruntime has no call to
    drop them singly. So all are dropped when they have become many, and the sites are registered again. A
    state from before cannot be run backward any more: its forward is run again (see ``Boundary``).

    All calls are made under ``python_op_lock``.

    Attributes:
        epoch: number of times that the entries were dropped.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._contexts = 0
        self._sites: weakref.WeakValueDictionary[str, native.Site | native.Chain] = (
            weakref.WeakValueDictionary()
        )

    def register(self, site: native.Site | native.Chain) -> None:
        """Make ``site`` callable by onnxruntime-training's PythonOp kernel under its key, while it lives."""
        self._sites[site.key] = site
        _register(site)

    def tidy(self) -> None:
        """Drop all contexts if they have become many; to be called before a run."""
        if self._contexts < MOST_CONTEXTS:
            return
        private.training_pybind().unregister_python_functions()
        for site in list(self._sites.values()):
            _register(site)
        self._contexts = 0
        self.epoch += 1

    def add(self, contexts: int) -> None:
        """Note that a run left so many contexts, or took them back where the number is negative."""
        self._contexts = max(0, self._contexts + contexts)


def _register(site: native.Site | native.Chain) -> None:
    # onnxruntime insists on a class whose direct base is Function, and reads these two attributes of it:
    # being the native site themselves, they reach the runner without a look-up.
    proxy = type("SiteProxy", (torch.autograd.Function,), {"apply": site, "backward": site})
    private.training_pybind().register_torch_autograd_function(site.key, proxy)


pool = Pool()
