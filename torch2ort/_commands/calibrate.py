"""``python -m torch2ort calibrate``: measure the faster library for operators on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from torch2ort.autotune.calibration import Calibration, calibrated, note
from torch2ort.autotune.hardware_key import machine
from torch2ort.options import Options
from torch2ort.support.processor import processor_name


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser(
        "calibrate",
        help="measure which library computes products, convolutions and others faster here",
        description="Measures typical operators in ONNX Runtime and in PyTorch's kernels for two seconds. "
        "The result is stored in the user's cache folder, and each ORTModule that is built later uses it.",
    )
    parser.add_argument("--show", action="store_true", help="print the last calibration, and measure nothing")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of the modules (default: PyTorch's number)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    options = Options()
    if arguments.show:
        found = calibrated(options)
        if found is None:
            print(
                "error: no calibration is stored for this processor, these versions and threads; measure one "
                "with python -m torch2ort calibrate",
                file=sys.stderr,
            )
            return 1
    else:
        from torch2ort.autotune.typical_operators import ratios

        found = note(options, ratios(options))
        if found is None:
            print(
                "error: the calibration is not stored, as there is no cache folder that can be written to, "
                "or a TORCH2ORT_ variable switches it off; name a folder with XDG_CACHE_HOME",
                file=sys.stderr,
            )
            return 1
    print(_table(found, options))
    return 0


def _table(found: Calibration, options: Options) -> str:
    """Return a line for the machine, and one for each kind of operator."""
    settings = machine(options)
    lines = [
        f"{processor_name()}, torch {settings['torch']}, onnxruntime {settings['onnxruntime'].split()[0]}, "
        f"{torch.get_num_threads()} thread(s), run {found.runs}",
        f"{'operators':<16} {'PyTorch / ONNX Runtime':>22}  library",
    ]
    for kind, ratio in found.ratios.items():
        library = "PyTorch" if kind in found.kinds else "ONNX Runtime"
        lines.append(f"{kind:<16} {ratio:>22.2f}  {library}")
    return "\n".join(lines)
