"""Paths of source files in a graph, without the folders of the machine on which the graph was made."""

from __future__ import annotations

import functools
import os
import re
import sys

import onnx

from torch2ort.graph.graph_traversal import graphs_in
from torch2ort.support.install_paths import INSTALLED, STANDARD_LIBRARY, below, folder_of, real_path
from torch2ort.support.source_lines import LIBRARIES

_FILE = re.compile(r'(?<=File ")[^"]+(?=", line \d)')
# The separator of the frames of a stack trace.
_NEXT = re.compile(r'\n\s*(?=File ")')
_OWN = 'File "site-packages/torch2ort/'


def shorten_paths(model: onnx.ModelProto) -> None:
    """Make paths in the nodes' stack traces relative to the project or the installed packages, in place.

    Frames of torch2ort, which occur in each trace of a model, are left out.
    """
    graphs = [*graphs_in(model.graph), *model.functions]
    for prop in (prop for graph in graphs for node in graph.node for prop in node.metadata_props):
        if _FILE.search(prop.value):
            prop.value = _shortened(prop.value)


@functools.lru_cache(maxsize=4096)
def _shortened(trace: str) -> str:
    frames = _NEXT.split(_FILE.sub(lambda found: portable_path(found[0]), trace))
    users = [frame for frame in frames if not frame.startswith(_OWN)]
    return "\n  ".join(users or frames)


@functools.lru_cache(maxsize=4096)
def portable_path(file: str) -> str:
    """Return a file's path relative to the folder that Python imports it from; its name if there is none.

    Args:
        file: the path in a traceback. Text in place of a path (``<stdin>``) is returned unchanged.
    """
    if file.startswith("<"):
        return file
    path = real_path(os.path.abspath(file))
    libraries = [folder for name in LIBRARIES if (folder := folder_of(name)) is not None]
    roots = [
        *((folder, "site-packages") for folder in INSTALLED),
        *((os.path.dirname(folder), "site-packages") for folder in libraries if below(path, folder)),
        *((folder, "python") for folder in STANDARD_LIBRARY),
        *((os.path.realpath(folder), "") for folder in sys.path),
    ]
    found = [(len(root), root, name) for root, name in roots if below(path, root)]
    if not found:
        return os.path.basename(path)
    _, root, name = max(found, key=lambda each: (each[0], bool(each[2])))
    return "/".join([*filter(None, [name]), *os.path.relpath(path, root).split(os.sep)])
