"""Targets of translation for the installed onnxruntime, and the engines for the translated graphs."""

from __future__ import annotations

from dataclasses import replace

from torch2ort.autotune.calibration import in_kernels
from torch2ort.errors import OptionError, RuntimeNotFoundError
from torch2ort.options import Options
from torch2ort.program.program import Program
from torch2ort.program.target import GradientRules, GradientSource, Target
from torch2ort.program.traced_program import TracedProgram
from torch2ort.providers import CPU, name_of
from torch2ort.runtime import InferenceEngine, onnxruntime, version
from torch2ort.runtime.cuda.gpu_inference import DeviceInference
from torch2ort.runtime.cuda.sessions import device_of
from torch2ort.runtime.kernel_support import can_run, checked_opset
from torch2ort.support.lazy import Lazy
from torch2ort.training.cuda_engine import DeviceEngine
from torch2ort.training.engine import Engine
from torch2ort.training.row_plans import RowPlans

# The oldest onnxruntime that was tested: onnxruntime-training 1.19.2. Of the others it is 1.20.
_FIRST = (1, 19)
# Providers whose values are in the CPU's memory, as PyTorch's are: Azure's has operators of its own only.
PROVIDERS = (CPU, "AzureExecutionProvider")


def _refuse_untrainable(options: Options) -> None:
    """Refuse options that exclude each other, and an onnxruntime that training was not tested with.

    Raises:
        OptionError: measured decisions are to be equal in every process, and there is no cache to store them.
        RuntimeNotFoundError: no onnxruntime is installed, or an older one.
    """
    if options.is_on("autotune") and options.deterministic and options.cache_dir is False:
        raise OptionError(
            f"Option {options.asker('autotune')}, 'deterministic' is True and 'cache_dir' is False; another "
            f"process may measure and decide differently. Leave out cache_dir=False, as the cache stores "
            f"decisions, or one of the others, or set autotune=False."
        )
    if version() < _FIRST:
        raise RuntimeNotFoundError(
            f"training needs onnxruntime 1.20 or later, or onnxruntime-training 1.19.2, and this is "
            f"{onnxruntime().__version__}; install one (pip install 'torch2ort[cpu]', in an environment "
            f"without another onnxruntime)"
        )


def refuse_providers(options: Options, *besides: str) -> None:
    """Refuse providers that an engine cannot train on.

    Args:
        options: the options with the providers.
        besides: further providers that the caller supports.

    Raises:
        OptionError: names the first of them.
    """
    for name in map(name_of, options.providers or ()):
        if name not in PROVIDERS and name not in besides:
            raise OptionError(
                f"Option 'providers' names {name!r}; ORTModule and torch.compile run on "
                f"{' and '.join(PROVIDERS)} alone so far, as the values that go from forward to backward, "
                f"and to Functions, are in the CPU's memory. A model of torch2ort.export runs on any provider"
            )


def target_of(options: Options) -> Target:
    """Return the target of a graph that runs on the installed onnxruntime.

    Args:
        options: the opset.

    Raises:
        OptionError: the installed onnx or onnxruntime does not support the opset.
    """
    return Target(
        opset=checked_opset(options.opset),
        can_run=can_run,
        inlines_functions=bool(options.inline_functions),
    )


def live_target(options: Options) -> Target:
    """Return the target of a graph that stays in the process, with operators that libraries registered."""
    is_cpu = device_of(options.providers).type == "cpu"
    return replace(
        target_of(options),
        has_libraries=True,
        inlines_functions=options.is_on("inline_functions"),
        in_kernels=in_kernels(options) if is_cpu else frozenset(),
    )


def inference_target(options: Options) -> Target:
    """Return the target of an ORTModule's graph without gradients: it rounds where eager PyTorch does."""
    target = replace(live_target(options), rounds_as_eager=True)
    if device_of(options.providers).type == "cpu":
        return target
    from torch2ort.differentiate.step_target import is_left_to_pytorch  # slow to import

    # As in training. CUDA kernels of ONNX Runtime need not check indices, unlike the CPU's.
    return replace(target, gradients=GradientRules(needs_kernel=is_left_to_pytorch))


def training_target(options: Options) -> Target:
    """Return the target of a graph that an ORTModule trains.

    Raises:
        OptionError: options exclude each other.
        RuntimeNotFoundError: no onnxruntime is installed, or an older one.
    """
    _refuse_untrainable(options)
    return replace(live_target(options), gradients=GradientRules(source=GradientSource.PROGRAM))


def engine_of(program: Program, requires_grad: frozenset[str], options: Options) -> Engine:
    """Return the engine that trains a graph.

    Args:
        program: the program.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: threads, providers and debugging.

    Raises:
        UnsupportedOperatorError: the engine cannot train an operator.
    """
    target = replace(live_target(options), training=program.training)
    engine = Engine if device_of(options.providers).type == "cpu" else DeviceEngine
    return engine(program, requires_grad, options, target)


def row_plans_of(
    name: str,
    program: Program,
    traced: Lazy[TracedProgram],
    requires_grad: frozenset[str],
    options: Options,
) -> RowPlans:
    """Return the choice of the rows that a step computes.

    Args:
        name: name of the model's class.
        program: the program.
        traced: its operators.
        requires_grad: the graph inputs that require gradients.
        options: the choice, and the settings of the engines.
    """
    return RowPlans(
        name,
        program,
        traced,
        requires_grad,
        options,
        lambda packed: engine_of(packed, requires_grad, options),
    )


def inference_engine_of(program: Program, options: Options) -> InferenceEngine:
    """Return the engine that runs a graph of an ORTModule without gradients.

    Args:
        program: the program.
        options: threads and providers.

    Raises:
        EngineError: ONNX Runtime refuses the graph.
    """
    if device_of(options.providers).type == "cpu":
        return InferenceEngine(program.graph, options, program.graph_entries)
    return DeviceInference(program.graph, options)
