"""Runs a program in eager PyTorch and on ORTModule, and judges whether they agree; scripts hold a copy.

Two values agree within the ``BOUNDS`` of their type. Where they do not, the program runs once more in eager
PyTorch in float64: if the runtime's error against that is at most ``ROUNDING`` times eager's own, the
difference is rounding. If eager PyTorch's own type and float64 differ by more than the third of the bounds,
the program amplifies rounding (by a sign, a round, a sort) and proves nothing: it is counted separately. So
are programs that eager refuses, and ORTModule does not, because of a write to a tensor that backward reads,
or to a view that a Function returned.
"""

from __future__ import annotations

import types
import warnings
from dataclasses import dataclass

import torch

import torch2ort

# Relative and absolute difference, and the error that eager PyTorch may have in a program that is judged.
BOUNDS = {
    torch.float32: (1e-4, 1e-5, 1e-3),
    torch.float16: (4e-3, 1e-3, 3e-2),
    torch.bfloat16: (3e-2, 1e-2, 2e-1),
}
ROUNDING = 8
LARGE = 1e3
STALE = "has been modified by an inplace operation"
AGAIN = "Trying to backward through the graph a second time"
UNSAVABLE = "An input that has been returned as-is as output is being saved for backward"
FORBIDDEN = "This behavior is forbidden. You can fix this by cloning the output of the custom Function"


@dataclass(frozen=True)
class Verdict:
    """An outcome: ``passed``, ``refused``, ``failed``, ``lenient``, ``unstable`` or ``unsuitable``."""

    kind: str
    reason: str = ""

    def __str__(self):
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


class Run:
    """One run of a program: makes its inputs, and records pairs of a label and a value."""

    def __init__(self, wrap, dtype=torch.float32):
        self.wrap, self.dtype = wrap, dtype
        self.seen, self.error, self.inputs, self.wrapped = [], None, {}, None
        self.generator = torch.Generator().manual_seed(5)
        self.weights = torch.Generator().manual_seed(9)

    def model(self, model):
        # Modules in plain containers have the model's dtype, too.
        for _, leaf in leaves(vars(model), ""):
            for value in vars(leaf).values() if isinstance(leaf, types.SimpleNamespace) else [leaf]:
                if isinstance(value, torch.nn.Module):
                    value.to(self.dtype)
        self.wrapped = self.wrap(model.to(self.dtype))
        return self.wrapped

    def tensor(self, *shape, requires_grad=False, strided=False):
        value = torch.randn(shape, generator=self.generator).to(self.dtype)
        if strided:
            value = value.t().contiguous().t()
        return value.requires_grad_(requires_grad)

    def index(self, *shape, high=4):
        return torch.randint(high, shape, generator=self.generator)

    def see(self, label, value, **inputs):
        """Record the tensors and constants of a value, and the state of the random number generator."""
        self.inputs.update(inputs)
        for path, leaf in leaves(value, label):
            if isinstance(leaf, torch.Tensor):
                self.seen.append((path, leaf.detach().clone()))
                self.seen.append((f"{path}.requires_grad", leaf.requires_grad))
            else:
                self.seen.append((path, leaf))
        self.seen.append((f"random numbers after {label}", torch.rand(2)))

    def see_memory(self, label, value, model):
        """Record for each tensor of a value the tensor of the caller's that it is, or is a view of."""
        known = [*self.inputs.items(), *model.named_parameters(), *model.named_buffers()]
        for path, leaf in leaves(value, label):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                memory = leaf.untyped_storage().data_ptr()
                shared = [name for name, t in known if t.untyped_storage().data_ptr() == memory]
                self.seen.append((f"memory of {path}", (shared, leaf.stride() if shared else None)))

    def see_gradients(self, model):
        tensors = [*model.named_parameters(), *self.inputs.items()]
        for name, tensor in tensors:
            if tensor.is_leaf:
                gradient = tensor.grad
                self.seen.append((f"gradient of {name}", None if gradient is None else gradient.clone()))

    def see_state(self, model):
        self.see_gradients(model)
        for name, tensor in [*model.named_parameters(), *model.named_buffers(), *self.inputs.items()]:
            self.seen.append((f"{name} at the end", tensor.detach().clone()))

    def see_hidden(self, label, module):
        """Record the weights and gradients of a module that is not registered in the model."""
        self.see(label, dict(module.state_dict()))
        self.see(f"gradients of {label}", [weight.grad for weight in module.parameters()])

    def backward(self, value, **options):
        """Run backward of a loss of a value; its exception is a value to compare, and the program continues.

        The order of autograd's nodes determines the gradients before an exception, so they are discarded.
        """
        self.attempt("backward", lambda: self.loss(value).backward(**options))
        if self.seen[-1][1] is not None:
            for tensor in [*self.wrapped.parameters(), *self.inputs.values()]:
                tensor.grad = None

    def gradient(self, label, value, tensors, **options):
        """Do the same by ``torch.autograd.grad``."""
        tensors = [t for t in tensors if t.requires_grad] or [torch.zeros(1, requires_grad=True)]
        found = self.attempt(
            label, lambda: torch.autograd.grad(self.loss(value), tensors, allow_unused=True, **options)
        )
        self.see(label, found)

    def attempt(self, label, do):
        try:
            result = do()
        except Exception as error:
            if isinstance(error, torch2ort.Torch2OrtError):
                raise
            self.seen.append((f"error of {label}", error))
            return None
        self.seen.append((f"error of {label}", None))
        return result

    def loss(self, value):
        """Return a scalar that weights every element of a value differently."""
        self.weights.manual_seed(9)
        total = 0 * torch.ones((), dtype=self.dtype, requires_grad=value is None)
        for _, leaf in leaves(value, ""):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                weight = torch.rand(leaf.shape, generator=self.weights).to(leaf)
                total = total + (leaf * weight).sum()
        return total

    def write(self, value):
        """Write to the first tensor of a value."""
        tensor = next(leaf for _, leaf in leaves(value, "") if isinstance(leaf, torch.Tensor))
        self.attempt("write", lambda: tensor.detach().copy_(tensor.detach() // 2))


def leaves(value, path):
    """Pairs of a path and a tensor or constant."""
    if isinstance(value, dict):
        return [pair for key, v in value.items() for pair in leaves(v, f"{path}[{key!r}]")]
    if isinstance(value, (tuple, list)):
        return [pair for i, v in enumerate(value) for pair in leaves(v, f"{path}[{i}]")]
    return [(path, value)]


def observe(steps, wrap, dtype=torch.float32):
    """Run a program, and record its exception, too."""
    torch.manual_seed(1)
    run = Run(wrap, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            steps(run)
        except Exception as error:
            run.error = error
    return run


def judge(steps, dtype=torch.float32):
    """Compare eager PyTorch and ORTModule in ``steps(run)``, with tensors and weights of a dtype."""
    eager = observe(steps, lambda model: model, dtype)
    floats = [v for _, v in eager.seen if isinstance(v, torch.Tensor) and v.numel()]
    if any(v.is_floating_point() and v.nan_to_num().abs().max() > LARGE for v in floats):
        return Verdict("unsuitable", "large values")
    given = observe(steps, torch2ort.ORTModule, dtype)
    for position, ((label, expected), (_, found)) in enumerate(zip(eager.seen, given.seen, strict=False)):
        reason = difference(found, expected)
        if reason is None:
            continue
        if found is None and STALE in str(expected):
            return Verdict("lenient", "eager PyTorch refuses a write to what backward reads")
        if expected is None and AGAIN in str(found):
            return Verdict("refused", f"RuntimeError: {AGAIN}, where eager PyTorch saved nothing")
        if expected is None and STALE in str(found):
            return Verdict("refused", f"RuntimeError: {STALE}, where eager PyTorch saved nothing")
        if isinstance(expected, torch.Tensor) and reason.startswith("values"):
            precise = observe(steps, lambda model: model, torch.float64).seen
            if position >= len(precise):
                return Verdict("unstable", label)
            kind = rounding(found, expected, precise[position][1])
            if kind == "rounding":
                continue
            if kind == "unstable":
                return Verdict("unstable", label)
        return Verdict("failed", f"{label}: {reason}")
    return compare_errors(eager, given)


def compare_errors(eager, given):
    """Return the verdict on two runs whose common values agree."""
    expected, found = eager.error, given.error
    if isinstance(found, torch2ort.Torch2OrtError) and not raw(found):
        return Verdict("refused", f"{type(found).__name__}: {found}")
    if found is None and UNSAVABLE in str(expected):
        return Verdict("lenient", "eager PyTorch saves no argument that is returned in setup_context")
    if found is None and FORBIDDEN in str(expected):
        return Verdict("lenient", "eager PyTorch refuses a write to a view of a Function's output")
    if type(found) is not type(expected) or len(eager.seen) != len(given.seen):
        texts = [
            f"{type(run.error).__name__}: {run.error} (after {len(run.seen)} values)"
            if run.error
            else "no error"
            for run in (eager, given)
        ]
        return Verdict("failed", f"eager: {texts[0]}; ORTModule: {texts[1]}")
    return Verdict("passed", "" if expected is None else f"both raise {type(expected).__name__}: {expected}")


def raw(error):
    """Return True if a message of ONNX Runtime reached the user as it is."""
    return "[ONNXRuntimeError]" in str(error) or "Non-zero status code" in str(error)


def difference(found, expected):
    """Describe how two values differ; None if they do not."""
    if isinstance(expected, Exception) and type(found) is type(expected):
        return None
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = type(found) is type(expected) and (found is expected or found == expected)
        return None if same else f"{describe(found)} instead of {describe(expected)}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{describe(found)} instead of {describe(expected)}"
    relative, absolute, _ = bounds(expected)
    if torch.allclose(found, expected, rtol=relative, atol=absolute, equal_nan=True):
        return None
    return f"values {found.flatten()[:8].tolist()} instead of {expected.flatten()[:8].tolist()}"


def bounds(tensor):
    return BOUNDS.get(tensor.dtype, BOUNDS[torch.float32])


def describe(value):
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    return repr(value)


def rounding(found, expected, precise):
    """Return ``rounding``, ``wrong``, or ``unstable`` if eager PyTorch itself is far from float64."""
    if not isinstance(precise, torch.Tensor) or precise.shape != expected.shape:
        return "unstable"
    _, absolute, unstable = bounds(expected)
    found, expected, precise = (t.double().nan_to_num(nan=1e30) for t in (found, expected, precise))
    own, other = (expected - precise).abs().max(), (found - precise).abs().max()
    if own > unstable * (1 + precise.abs().max()):
        return "unstable"
    return "rounding" if other <= ROUNDING * own + absolute else "wrong"
