"""Train a character transformer in eager PyTorch and on ONNX Runtime, side by side from the same weights.

The text is the Python standard library's own sources; ``char_model.py`` has the model, with two Functions.
Run it with ``python examples/char_transformer.py`` (settings: ``--help``). It prints a table of losses, then:

    Median step: eager 129.0 ms, ORT 129.8 ms, ratio 1.01. ORT's first step, with export and build: 9.6 s.
    Functions found in char_transformer.onnx:
      entmax.activations.Entmax15Function, 3 calls
      char_model.SwiGLU, 3 calls
    Reloaded and run on three batch sizes: largest difference of a logit 4.8e-06.
    Served by a plain onnxruntime session: largest difference of a logit 4.8e-06.
    Loss plot: char_transformer.png
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from char_model import CharTransformer, SwiGLU
from char_training import train_side_by_side
from entmax.activations import Entmax15Function
from shared import batches, save_plot, settings, standard_library_text
from torch import Tensor, nn

import torch2ort


@torch.no_grad()
def compare(title: str, run: Callable[[Tensor], Tensor], model: nn.Module, *samples: Tensor) -> None:
    """Print the largest difference of a logit of `run` from `model`'s; raise an error if it is too large."""
    pairs = [(run(tokens), model(tokens)) for tokens in samples]
    for given, expected in pairs:
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    worst = max((given - expected).abs().max().item() for given, expected in pairs)
    print(f"{title}: largest difference of a logit {worst:.1e}.")


def serve(path: Path) -> Callable[[Tensor], Tensor]:
    """Return the model in a plain onnxruntime session, as a server runs it."""
    torch2ort.register_function(SwiGLU)
    torch2ort.register_function(Entmax15Function)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(torch2ort.custom_ops_library_path())
    session = onnxruntime.InferenceSession(str(path), options)
    return lambda tokens: torch.from_numpy(session.run(None, {"tokens": tokens.numpy()})[0])


def main(arguments: Namespace) -> None:
    """Train, compare, export, reload, serve, plot."""
    torch.set_num_threads(1)  # ORTModule uses as many threads as PyTorch
    torch.manual_seed(1)
    text = standard_library_text(1_000_000)
    kinds = len(set(text))
    eager = CharTransformer(kinds, arguments.context, arguments.width, arguments.layers, arguments.heads)
    count = sum(p.numel() for p in eager.parameters())
    print(f"{count:,} parameters, {len(text):,} characters of {kinds} kinds")
    model = copy.deepcopy(eager)
    work = list(batches(text, arguments.batch, arguments.context + 1, arguments.steps))
    sides = train_side_by_side(eager, torch2ort.ORTModule(model), work, autocast=arguments.autocast)
    path, tokens = arguments.output / "char_transformer.onnx", work[0][:, :-1]
    torch2ort.export(model.eval(), tokens, dynamic_shapes={"tokens": {0: "batch"}}).save(path)
    reloaded = torch2ort.load(path, functions=[SwiGLU, Entmax15Function])
    print(f"Functions found in {path}:")
    for name, calls in Counter(site.func_name for site in reloaded.python_ops).items():
        print(f"  {name}, {calls} calls")
    compare("Reloaded and run on three batch sizes", reloaded, model, tokens[:1], tokens[:3], tokens)
    compare("Served by a plain onnxruntime session", serve(path), model, tokens)
    save_plot(path.with_suffix(".png"), *(side.losses for side in sides))


if __name__ == "__main__":
    sizes = {"steps": 600, "batch": 16, "context": 64, "width": 128, "layers": 3, "heads": 4}
    main(settings(__doc__, **sizes, autocast=False, output=Path()))
