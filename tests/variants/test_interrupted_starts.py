"""A start that Ctrl-C interrupts in any phase leaves nothing behind, and the next call starts again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch2ort
from tests.support.comparison import assert_same
from tests.support.functions import Square
from tests.support.sweeps import sample_cases
from torch2ort.cache.key.export_lock import exclusive
from torch2ort.cache.store.store import Store

# A function of each phase: the start is interrupted when it returns.
PHASES = {
    "look-up": "torch2ort.cache.key.key:named_tensors",
    "trace": "torch2ort.capture.trace:_described",
    "checks": "torch2ort.symbolics.preparation:_refuse_guessed_sizes",
    "differentiation": "torch2ort._torch.aot:joint_graph",
    "decomposition": "torch2ort.symbolics.preparation:_decomposed",
    "translation": "torch2ort.symbolics.onnx_translation:cleanup",
    "writing of an entry": "torch2ort.cache.store.store:Store._write",
    "session": "torch2ort.runtime.step_session:bind_half",
    "first run": "torch2ort.runtime.step_session:HalfSession.run",
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.layer(x)).relu()


def _interrupt(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *names, name = path.split(".")
    for part in names:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def _state() -> list[Any]:
    """The state of torch that an export changes while it runs."""
    return [
        [getattr(SymNode, name) for name in ("_add", "_mul", "_eq")],
        ShapeEnv._get_sloc,
        torch.autograd.Function.apply.__func__,
        torch.fx.traceback.annotate,
        torch.fx._lazy_graph_module._use_lazy_graph_module_flag,
        torch.is_grad_enabled(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        torch.overrides._get_current_function_mode_stack(),
    ]


# Each phase is interrupted in one kind of start; the other one is left to `make test-long`.
STARTS = [
    case for i, phase in enumerate(PHASES) for case in sample_cases([(phase, False), (phase, True)], 2, i % 2)
]


@pytest.mark.parametrize(("phase", "sizes_vary"), STARTS)
def test_an_interrupted_start_leaves_nothing_behind(
    phase: str, sizes_vary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH2ORT_CACHE_DIR", str(tmp_path))
    model = Model()
    module = torch2ort.ORTModule(model)
    if sizes_vary:
        module(torch.randn(2, 4)).sum().backward()
    x = torch.randn(3, 4)
    before = _state()
    with monkeypatch.context() as interrupted:
        _interrupt(interrupted, PHASES[phase])
        with pytest.raises(KeyboardInterrupt):
            module(x).sum().backward()
    assert _state() == before
    assert exclusive.idle is not None, "an export is still noted as running"
    assert all(Store(tmp_path).read(e.manifest.digest) for e in Store(tmp_path).list_entries())
    assert not list(tmp_path.rglob("*.tmp*"))

    model.zero_grad()
    module(x).sum().backward()
    actual = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for gradient, parameter in zip(actual, model.parameters(), strict=True):
        assert_same(gradient, parameter.grad, "gradient after the interrupt")
