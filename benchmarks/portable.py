"""Portable files beside files of the same models written without Functions: latency and size.

python benchmarks/portable.py
"""

from __future__ import annotations

import math
import warnings

import torch
from _machine import machine
from _plain_sessions import latency, session
from _portable_models import MODELS, as_functions, as_operators

import torch2ort


def main() -> None:
    """Compare each model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    ratios = []
    for name, (make, sizes) in MODELS.items():
        files = {}
        for way, of, portable in (("ours", as_functions, True), ("theirs", as_operators, False)):
            torch.manual_seed(0)
            model, x = make(of).eval(), torch.randn(sizes)
            files[way] = torch2ort.export(model, x, portable=portable, cache_dir=False).proto
        results = [torch.from_numpy(session(file, x)[1]) for file in files.values()]
        torch.testing.assert_close(*results)
        ratio, seconds = latency(files, x)
        ratios.append(ratio)
        size = files["ours"].ByteSize() / files["theirs"].ByteSize()
        print(f"{name}: latency {ratio:.3f} of {1e6 * seconds:.0f} us without Functions, size {size:.3f}")
    print(f"geometric mean of the latencies {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}")


if __name__ == "__main__":
    main()
