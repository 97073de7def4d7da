"""Which engine runs a graph, and so what the graph is translated for."""

from __future__ import annotations

import re
from dataclasses import replace

from torch2ort.engines.interface import Engine
from torch2ort.engines.ort_training.engine import TrainingEngine
from torch2ort.engines.ort_training.target import GRADIENT_RULES
from torch2ort.errors import OptionError, RuntimeNotFoundError
from torch2ort.exports.built import Built
from torch2ort.options import DEFAULT_OPSET, Options
from torch2ort.providers import CPU, name_of
from torch2ort.runtime import InferenceEngine, has_training, onnxruntime, training_pybind
from torch2ort.runtime.cuda.inference import DeviceInference
from torch2ort.runtime.cuda.sessions import device_of
from torch2ort.runtime.probe import can_run
from torch2ort.symbolics.target import GradientRules, GradientSource, Target

JOINT, ORT_TRAINING = "joint", "ort_training"
# The first stock onnxruntime that the joint engine was tried on. It runs on onnxruntime-training 1.19.2, too.
_FIRST = (1, 20)
# Those whose values are in the CPU's memory, where PyTorch's are: Azure's has operators of its own alone.
PROVIDERS = (CPU, "AzureExecutionProvider")


def engine_name(options: Options) -> str:
    """The engine that trains an ORTModule with these options.

    Raises:
        OptionError: they ask for one, and for fused regions or measured operators, which it has not; or for
            measured operators that are to be the same in every process, and for no cache.
        RuntimeNotFoundError: the one that they ask for is not there.
    """
    _refuse_contradictions(options)
    if has_training():
        return options.engine or (JOINT if options.fuse or options.autotune else ORT_TRAINING)
    if options.engine == ORT_TRAINING:
        training_pybind()  # its error says what is missing
    version = onnxruntime().__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _FIRST:
        raise RuntimeNotFoundError(
            f"engine='joint' needs onnxruntime 1.20 or later, and this is {version}; install one "
            f"(pip install 'torch2ort[cpu]', in an environment without another onnxruntime), or use "
            f"engine='ort_training' with onnxruntime-training"
        )
    return JOINT


def _refuse_contradictions(options: Options) -> None:
    """Refuse options that do not go together.

    Raises:
        OptionError: names them.
    """
    for name, does in (("fuse", "fuses"), ("autotune", "measures")):
        if getattr(options, name) and options.engine == ORT_TRAINING:
            raise OptionError(
                f"Option {name!r} is True and 'engine' is 'ort_training'; only the joint engine {does}. "
                f"Leave engine out, or set it to 'joint'."
            )
    if options.autotune and options.deterministic and options.cache_dir is None:
        raise OptionError(
            "Options 'autotune' and 'deterministic' are True and 'cache_dir' is None; what one process "
            "measures, another may decide otherwise. Set cache_dir, where decisions are kept, or leave one "
            "of the two out."
        )


def refuse_providers(options: Options, *besides: str) -> None:
    """Refuse providers that an engine cannot train on.

    Args:
        options: with the providers.
        besides: others that the caller can.

    Raises:
        OptionError: names the first.
    """
    for name in map(name_of, options.providers or ()):
        if name not in PROVIDERS and name not in besides:
            raise OptionError(
                f"Option 'providers' names {name!r}; ORTModule and torch.compile run on "
                f"{' and '.join(PROVIDERS)} alone so far, as the values that go from forward to backward, "
                f"and to Functions, are in the CPU's memory. What torch2ort.export gives runs on any provider"
            )


def target_of(options: Options, *, differentiate: bool) -> Target:
    """What a graph must be to run on the installed onnxruntime.

    Args:
        options: the opset.
        differentiate: whether gradients are wanted.
    """
    return Target(
        opset=options.opset or DEFAULT_OPSET,
        can_run=can_run,
        gradients=GRADIENT_RULES if differentiate else GradientRules(),
        inlines_functions=options.inline_functions,
    )


def live_target(options: Options, *, differentiate: bool = False) -> Target:
    """The same for a graph that stays with the process, and with what libraries registered in it."""
    return replace(target_of(options, differentiate=differentiate), has_libraries=True)


def inference_target(options: Options) -> Target:
    """What a graph must be that an ORTModule runs without gradients: it rounds where eager rounds."""
    target = replace(live_target(options), rounds_as_eager=True)
    if device_of(options.providers).type == "cpu":
        return target
    from torch2ort.engines.joint.target import is_left_to_pytorch  # see engine_of

    # As in training: CUDA's kernels of onnxruntime need not look at indices, as the CPU's do.
    return replace(target, gradients=GradientRules(needs_kernel=is_left_to_pytorch))


def training_target(options: Options) -> Target:
    """What a graph must be whose gradients an ORTModule wants.

    Raises:
        RuntimeNotFoundError: no onnxruntime is installed that can train.
    """
    if engine_name(options) == ORT_TRAINING:
        return live_target(options, differentiate=True)
    of_program = GradientRules(source=GradientSource.PROGRAM)
    return replace(live_target(options), gradients=of_program)


def engine_of(built: Built, requires_grad: frozenset[str], options: Options) -> Engine:
    """The engine that trains a graph.

    Args:
        built: the graph.
        requires_grad: the graph inputs (model inputs and weights) that require gradients.
        options: which engine, threads and debugging.

    Raises:
        RuntimeNotFoundError: no onnxruntime is installed that can train.
        UnsupportedOperatorError: the engine cannot train an operator.
    """
    if built.program is None:
        return TrainingEngine(built.graph, requires_grad, options, built.shelf)
    from torch2ort.engines.joint.engine import JointEngine  # its private names of torch are fewer versions'

    if device_of(options.providers).type == "cpu":
        return JointEngine(built, requires_grad, options, live_target(options))
    from torch2ort.engines.joint.on_device import DeviceEngine

    return DeviceEngine(built, requires_grad, options, live_target(options))


def inference_engine_of(built: Built, options: Options) -> InferenceEngine:
    """The engine that runs a graph of an ORTModule forward only.

    Args:
        built: the graph.
        options: threads and providers.

    Raises:
        EngineError: onnxruntime refuses it.
    """
    if device_of(options.providers).type == "cpu":
        return InferenceEngine(built.graph, options, built.shelf)
    return DeviceInference(built.graph, options)
