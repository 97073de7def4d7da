"""``python -m torch2ort show``: a graph's modules and calls of Functions, as text or as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch2ort._commands.load_model import read_model
from torch2ort.errors import ModelLoadError
from torch2ort.graph.drawing import Drawing, drawing, outline, to_dot, to_html, to_svg

_WRITERS: dict[str, Callable[[Drawing, str], str]] = {
    ".svg": lambda drawn, name: to_svg(drawn),
    ".html": to_html,
    ".dot": lambda drawn, name: to_dot(drawn),
}


def add_parser(commands: Any) -> None:
    """Add the subcommand to ``commands``, the result of ``ArgumentParser.add_subparsers``."""
    parser = commands.add_parser("show", help="draw the modules of a graph and its calls of Functions")
    parser.add_argument("model", metavar="model.onnx", help="a saved model, or a graph of save_onnx_dir")
    parser.add_argument("-o", "--output", metavar="FILE", help="the drawing: .svg, .html or .dot (Graphviz)")
    parser.add_argument(
        "--boxes", type=int, default=80, metavar="N", help="fold modules beyond N boxes (default: 80)"
    )
    parser.set_defaults(run=_show)


def _show(arguments: argparse.Namespace) -> int:
    path = Path(arguments.model)
    try:
        model = read_model(path)
        graph = model.graph
    except ModelLoadError as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.output is None:
        print(*outline(graph), sep="\n")
        return 0
    target = Path(arguments.output)
    writer = _WRITERS.get(target.suffix)
    if writer is None:
        known = ", ".join(_WRITERS)
        print(f"-o {target}: the suffix is {target.suffix!r}; expected one of {known}", file=sys.stderr)
        return 1
    drawn = drawing(graph, arguments.boxes, model.functions)
    try:
        target.write_text(writer(drawn, path.name), encoding="utf-8")
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(graph.node)} nodes in {len(drawn.boxes)} boxes drawn in {target}")
    return 0
