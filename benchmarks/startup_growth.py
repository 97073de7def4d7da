"""CPU time and memory of a start as models grow: the first step, a second and a third size, beside peers.

Each start is a process of its own; imports and a first small start are not timed. The peers are
``torch.onnx.export`` of the same model's inference and the first step of ``torch.compile``.

    python benchmarks/startup_growth.py                      all models and layers, half an hour
    python benchmarks/startup_growth.py BERT 2,4,8 3         a model, its layers, rounds
    python benchmarks/startup_growth.py --warm               starts in a process that finds both caches filled
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
import transformers as tf
from _machine import machine
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

VOCABULARY, HIDDEN, HEADS = 1000, 256, 4
# Sizes of the first, the second and the third batch; of images the second dimension is their width.
SIZES = ((4, 32), (3, 32), (5, 48))
ROUNDS = 3
Result = dict[str, float]


def _tokens(batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens}


def _classified_tokens(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (batch, length)), "labels": torch.randint(2, (batch,))}


def _images(batch: int, width: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, width, width), "labels": torch.randint(10, (batch,))}


def _square_images(batch: int, _: int) -> dict[str, Tensor]:
    return _images(batch, 32)


def bert(layers: int) -> nn.Module:
    """Return a BERT that classifies sequences."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN}
    heads = {"num_hidden_layers": layers, "num_attention_heads": HEADS}
    return tf.BertForSequenceClassification(tf.BertConfig(**sizes, **heads))


def gpt2(layers: int) -> nn.Module:
    """Return a GPT-2 that predicts the next token."""
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=layers, n_head=HEADS, **ends)
    return _causal(tf.GPT2LMHeadModel(config))


def llama(layers: int) -> nn.Module:
    """Return a Llama that predicts the next token."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    config = tf.LlamaConfig(**sizes, **heads, num_hidden_layers=layers, use_cache=False)
    return _causal(tf.LlamaForCausalLM(config))


def t5(layers: int) -> nn.Module:
    """Return a T5 with as many layers in its encoder as in its decoder."""
    sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": HIDDEN // HEADS, "d_ff": 2 * HIDDEN}
    depth = {"num_layers": layers, "num_decoder_layers": layers, "num_heads": HEADS}
    return tf.T5ForConditionalGeneration(
        tf.T5Config(**sizes, **depth, use_cache=False, decoder_start_token_id=0)
    )


def resnet(_: int) -> nn.Module:
    """Return a ResNet-50."""
    return tf.ResNetForImageClassification(tf.ResNetConfig(num_labels=10))


def vit(layers: int) -> nn.Module:
    """Return a vision transformer."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "image_size": 32, "patch_size": 8}
    heads = {"num_hidden_layers": layers, "num_attention_heads": HEADS}
    return tf.ViTForImageClassification(tf.ViTConfig(**sizes, **heads, num_labels=10))


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.layers(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def convnet(_: int) -> nn.Module:
    """Return two convolutions with BatchNorm, and a classifier."""
    return _ConvNet()


def _causal(model: nn.Module) -> nn.Module:
    model.loss_type = "ForCausalLM"
    return model


# Name -> the model, its batch, numbers of layers.
MODELS: dict[
    str, tuple[Callable[[int], nn.Module], Callable[[int, int], dict[str, Tensor]], tuple[int, ...]]
] = {
    "BERT": (bert, _classified_tokens, (2, 4, 8, 16, 32)),
    "GPT-2": (gpt2, _tokens, (2, 4, 8, 16, 32)),
    "Llama": (llama, _tokens, (2, 4, 8, 16, 32)),
    "T5": (t5, _tokens, (4,)),
    "ResNet-50": (resnet, _images, (50,)),
    "ViT": (vit, _square_images, (4, 12)),
    "ConvNet": (convnet, _images, (2,)),
}


class _Inference(nn.Module):
    """A model, called without labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).logits


def peak() -> float:
    """Return the peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, layers: int, way: str, cache: str | None) -> Result:
    """Return the seconds of CPU of a start, and the memory that it added."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    make, batch, _ = MODELS[name]
    start = {"torch.onnx": _export, "torch.compile": _compiled, "torch2ort": _module, "eager": _eager}[way]
    # Imports and one-time initialization of the process are not part of a start.
    list(start(nn.Linear(2, 2), [{"input": torch.randn(3, 2)}], cache))
    model = make(layers).train(way != "torch.onnx")
    batches = [batch(*sizes) for sizes in (SIZES if way == "torch2ort" and cache is None else SIZES[:1])]
    gc.collect()
    before = peak()
    starts = start(model, batches, cache)
    first = next(starts)
    found = {"first": first, "memory": peak() - before}
    further = ("sessions", "hit") if cache else ("second", "third")
    return found | dict(zip(further, starts, strict=False))


def _timed(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _steps(module: nn.Module, batches: list[dict[str, Tensor]]) -> Iterator[float]:
    def step(batch: Mapping[str, Tensor]) -> None:
        result = module(**batch)
        (result if isinstance(result, Tensor) else result.loss).sum().backward()

    for batch in batches:
        yield _timed(lambda b=batch: step(b))


def _eager(model: nn.Module, batches: list[dict[str, Tensor]], _: str | None) -> Iterator[float]:
    return _steps(model, batches)


def _module(model: nn.Module, batches: list[dict[str, Tensor]], cache: str | None) -> Iterator[float]:
    import torch2ort

    options = torch2ort.Options(cache_dir=cache or False, log_level="error")
    module = torch2ort.ORTModule(model, options=options)
    yield from _steps(module, batches)
    if cache:
        yield module.startup["session"]
        yield float(module.exported.cache.hit)


def _compiled(model: nn.Module, batches: list[dict[str, Tensor]], cache: str | None) -> Iterator[float]:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1
    inductor.force_disable_caches = cache is None
    return _steps(torch.compile(model), batches)


def _export(model: nn.Module, batches: list[dict[str, Tensor]], _: str | None) -> Iterator[float]:
    inputs = {name: value for name, value in batches[0].items() if name != "labels"}
    if isinstance(model, tf.T5ForConditionalGeneration):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    module = model if isinstance(model, nn.Linear) else _Inference(model)

    def run() -> None:
        program = torch.onnx.export(module, (), kwargs=inputs, dynamo=True, verbose=False)
        program.save(io.BytesIO())

    with torch.no_grad():
        yield _timed(run)


def measure_in_subprocess(name: str, layers: int, way: str, cache: str = "") -> Result:
    """Return the result of :func:`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", name, str(layers), way, cache]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"} if cache else None
    done = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, layers: int, ways: tuple[str, ...], rounds: int) -> dict[str, Result]:
    """Print one line of medians, and return them."""
    runs: dict[str, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            runs[way].append(measure_in_subprocess(name, layers, way))
    found = _medians(runs)
    own, peer = found["torch2ort"], found["torch.onnx"]
    pairs = zip(runs["torch2ort"], runs["torch.onnx"], strict=True)
    ratio = statistics.median(a["first"] / b["first"] for a, b in pairs)
    compiled = f", torch.compile {found['torch.compile']['first']:.1f}" if "torch.compile" in found else ""
    print(
        f"{name}, {layers} layers: cold {own['first']:.1f} s, second size {own['second']:.1f}, third "
        f"{own['third']:.1f}; torch.onnx.export {peer['first']:.1f}{compiled}; cold {ratio:.2f} of "
        f"torch.onnx.export's, memory {own['memory']:.0f} MB, {own['memory'] / peer['memory']:.2f} of its",
        flush=True,
    )
    return found


def compare_warm(name: str, layers: int, ways: tuple[str, ...], rounds: int) -> None:
    """Print one line of medians of starts for which another process has filled the caches."""
    runs: dict[str, list[Result]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as cache:
        for way in set(ways) & {"torch2ort", "torch.compile"}:
            measure_in_subprocess(name, layers, way, cache)
        for _ in range(rounds):
            for way in ways:
                runs[way].append(measure_in_subprocess(name, layers, way, cache))
    assert all(run["hit"] for run in runs["torch2ort"]), "a start missed its entry"
    found = _medians(runs)
    own, eager, peer = (found[way]["first"] for way in ("torch2ort", "eager", "torch.onnx"))
    compiled = found.get("torch.compile")
    beside = f", torch.compile's warm start {compiled['first']:.2f}" if compiled else ""
    print(
        f"{name}, {layers} layers: warm {own:.2f} s, {own / peer:.2f} of torch.onnx.export's {peer:.1f}"
        f"{beside}; without sessions {(own - found['torch2ort']['sessions']) / eager:.1f} of eager's first "
        f"step ({eager:.2f})",
        flush=True,
    )


def _medians(runs: Mapping[str, list[Result]]) -> dict[str, Result]:
    return {
        way: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for way, results in runs.items()
    }


def exponent(layers: list[int], seconds: list[float]) -> float:
    """Return the exponent by which a start grows with the number of layers, by least squares."""
    x, y = [math.log(n) for n in layers], [math.log(s) for s in seconds]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """Measure the start of the command line, or print a line for each model and depth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", nargs=4, help="model, layers, way, folder of the caches")
    parser.add_argument("--warm", action="store_true", help="find the caches filled")
    parser.add_argument("--without-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("layers", nargs="?", help="numbers of layers, with commas")
    parser.add_argument("rounds", nargs="?", type=int, default=ROUNDS)
    given = parser.parse_args()
    if given.measure:
        name, layers, way, cache = given.measure
        print(json.dumps(measure(name, int(layers), way, cache or None)))
        return
    print(machine())
    ways = ("torch2ort", "torch.onnx", *(() if given.without_compile else ("torch.compile",)))
    for name in [given.model] if given.model else MODELS:
        depths = [int(n) for n in given.layers.split(",")] if given.layers else list(MODELS[name][2])
        if given.warm:
            for n in depths:
                compare_warm(name, n, ("eager", *ways), given.rounds)
            continue
        cold = [compare(name, n, ways, given.rounds)["torch2ort"]["first"] for n in depths]
        if len(depths) > 2:
            print(f"{name}: a cold start grows with layers to the power of {exponent(depths, cold):.2f}")


if __name__ == "__main__":
    main()
