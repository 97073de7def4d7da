"""An export changes the process while it runs: no other thread inspects a model meanwhile."""

import copy
import subprocess
import sys
import threading
import types
import unittest.mock

import pytest
import torch

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square
from torch2ort.cache.key.export_lock import ExclusiveExport, exclusive


class Model(torch.nn.Module):
    """A Function behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 5)

    def forward(self, x):
        return Square.apply(self.first(x))


def test_a_call_waits_for_the_export_of_another_thread():
    eager, x, results = Model(), torch.randn(2, 4), []
    ort = torch2ort.ORTModule(copy.deepcopy(eager))
    thread = threading.Thread(target=lambda: results.append(ort(x)))
    with exclusive.exporting():
        thread.start()
        thread.join(1)
        assert not results
    thread.join(60)
    assert_same(results[0], eager(x), "output")


def test_what_other_threads_do_meanwhile_notes_nothing_about_the_exported_nodes():
    failures = []
    optimizer = torch.optim.SGD(Model().parameters())

    def disabled_for_compilers():
        try:
            # torch.export replaces this dictionary for each node.
            with unittest.mock.patch.object(torch.fx.traceback, "current_meta", types.MappingProxyType({})):
                optimizer.zero_grad()
        except Exception as error:
            failures.append(error)

    class Beside(torch.nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=disabled_for_compilers)
            thread.start()
            thread.join()
            return x + 1

    torch2ort.ORTModule(Beside())(torch.ones(2))
    assert failures == []


FIRST = """
import sys, torch, torch2ort
annotate = torch.fx.traceback.annotate
torch2ort.export(torch.nn.Linear(2, 2), torch.ones(1, 2))
module = sys.modules["torch._higher_order_ops.flex_attention"]
assert getattr(module, "annotate", annotate) is annotate  # torch 2.12 has none there
"""


def test_what_torch_imports_for_the_first_export_of_a_process_holds_torchs_own_functions():
    done = subprocess.run([sys.executable, "-c", FIRST], stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_it_tells_whether_an_export_ran_beside_something():
    export = ExclusiveExport()
    before = export.idle
    with export.looking():
        assert export.idle == before
    with export.exporting(), export.exporting():
        assert export.idle is None
    assert export.idle not in (None, before)


def test_a_failed_export_lets_go():
    export = ExclusiveExport()
    with pytest.raises(ValueError, match="export"), export.exporting():
        raise ValueError("export")
    assert export.idle is not None
