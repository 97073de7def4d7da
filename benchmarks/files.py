"""Files of evaluated models beside torch.onnx.export's: nodes, size, export time, latency in a plain session.

Both export the same model at opset 18 in one process; their sessions run in turn, with one thread.

    python benchmarks/files.py              all models
    python benchmarks/files.py LSTM MLP     some
    python benchmarks/files.py --nodes      and the operators that one file has more of than the other
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import torch
from _file_models import MODELS
from _machine import machine
from _plain_sessions import latency, session
from torch import Tensor, nn

import torch2ort

OPSET = 18
# The first opset with all operators that files compose, and the highest that torch.onnx fully supports.
LATER, THEIR_LATER = 24, 23


def operators(model: onnx.ModelProto) -> Counter[str]:
    """Return the number of nodes per operator in a file, functions and bodies included, without Constant."""

    def nodes(graph: Any) -> Iterator[onnx.NodeProto]:
        for node in graph.node:
            yield node
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    yield from nodes(body)

    found = [node for graph in (model.graph, *model.functions) for node in nodes(graph)]
    return Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in found) - Counter(
        {"Constant": len(found)}
    )


def _theirs(model: nn.Module, x: Tensor, opset: int = OPSET) -> onnx.ModelProto:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        program = torch.onnx.export(model, (x,), dynamo=True, opset_version=opset, verbose=False)
    return program.model_proto


def _ours(model: nn.Module, x: Tensor, opset: int = OPSET) -> onnx.ModelProto:
    return torch2ort.export(model, x, opset=opset, cache_dir=False).proto


def compare(name: str, *, shows_nodes: bool) -> dict[str, float]:
    """Print one line, and return the ratios of the two files."""
    torch.manual_seed(1)
    make, sample = MODELS[name]
    model, x = make().eval(), sample()
    files, seconds = {}, {}
    for way, export in {"ours": _ours, "theirs": _theirs}.items():
        begin = time.process_time()
        try:
            files[way] = export(model, x)
        except torch.onnx.OnnxExporterError as error:
            print(f"{name}: torch.onnx refuses it ({type(error).__name__})", flush=True)
            return {}
        seconds[way] = time.process_time() - begin
    counts = {way: operators(file) for way, file in files.items()}
    sizes = {way: file.ByteSize() for way, file in files.items()}
    foreign = sorted(operator for operator in counts["ours"] if "::" in operator)
    nodes = {way: sum(count.values()) for way, count in counts.items()}
    text = f"{name}: nodes {nodes['ours']} (torch.onnx {nodes['theirs']})"
    found = {"nodes": nodes["ours"] / nodes["theirs"], "size": sizes["ours"] / sizes["theirs"]}
    found |= {"export": seconds["ours"], "their export": seconds["theirs"]}
    try:
        sessions = {way: session(file, x) for way, file in files.items()}
    except Exception:  # an exception of ONNX Runtime, which has no class of its own for it
        text += ", no plain session loads it"
    else:
        with torch.no_grad():
            expected = model(x).numpy()
        for _, result in sessions.values():
            np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)
        found["latency"], seconds_of_theirs = latency(files, x)
        text += f", latency {found['latency']:.2f} of its {1e6 * seconds_of_theirs:.0f} us"
    text += f", size {found['size']:.2f}, export {seconds['ours']:.2f} s of its {seconds['theirs']:.2f}"
    print(text + (f"; beside ONNX's own: {', '.join(foreign)}" if foreign else ""), flush=True)
    if shows_nodes:
        print(f"  more: {dict(counts['ours'] - counts['theirs'])}")
        print(f"  fewer: {dict(counts['theirs'] - counts['ours'])}")
    return found


def compare_later(name: str) -> None:
    """Print the numbers of nodes of the two files in later opsets."""
    torch.manual_seed(1)
    make, sample = MODELS[name]
    model, x = make().eval(), sample()
    ours, theirs = (
        sum(operators(file).values()) for file in (_ours(model, x, LATER), _theirs(model, x, THEIR_LATER))
    )
    print(f"{name} at opset {LATER}: nodes {ours} (torch.onnx {theirs} at {THEIR_LATER})", flush=True)


def main() -> None:
    """Compare all models, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", action="store_true", help="print the operators that differ")
    parser.add_argument("model", nargs="*", help=f"of {', '.join(MODELS)}")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    for export in (_ours, _theirs):  # imports and one-time initialization are not part of an export
        export(nn.Linear(2, 2), torch.randn(1, 2))
    found = [compare(name, shows_nodes=given.nodes) for name in given.model or MODELS]
    for name in ("Llama", "GPT-2", "BERT"):
        if name in (given.model or MODELS):
            compare_later(name)
    latencies = [one["latency"] for one in found if "latency" in one]
    mean = math.exp(sum(map(math.log, latencies)) / len(latencies))
    found = [one for one in found if one]
    exports = sum(one["export"] for one in found) / sum(one["their export"] for one in found)
    print(
        f"geometric mean of the latencies {mean:.2f}; all exports {exports:.2f} of torch.onnx.export's time"
    )


if __name__ == "__main__":
    main()
