"""Drawings of a graph: boxes of modules and of calls of Functions, and the values that flow between them."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx

from torch2ort.graph.graph_traversal import function_of
from torch2ort.graph.node_provenance import Origin

# A drawing with more boxes is folded by module.
_MANY = 80
_WIDTH, _HEIGHT, _GAP, _RISE, _MARGIN = 250, 44, 24, 36, 20
_LETTERS = 36
_OURS = "torch2ort."
_COLORS = {"function": "#ffd9a0", "kernel": "#e4def5", "module": "#dcecfb", "end": "#eeeeee"}


@dataclass
class Box:
    """One box.

    Attributes:
        kind: ``"function"`` for a call of a Function, ``"kernel"`` for one of PyTorch's, ``"module"`` for
            operators of a module, ``"end"`` for an input or output.
        title: the text in the box.
        nodes: the nodes in it.
        level: the distance from the inputs; edges lead from lower to higher levels.
        module: path of the module around it.
        inside: the operators of a Function's body, if the file contains it.
    """

    kind: str
    title: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    level: int = 0
    module: str = ""
    inside: list[str] = field(default_factory=list)

    @property
    def detail(self) -> str:
        """The contents of the box, in one line."""
        if self.kind in ("function", "kernel"):
            calls = sum(bool(function_of(node)) for node in self.nodes)
            return f"in {self.module or 'the model'}" if calls == 1 else f"{calls} calls"
        return operators(self.nodes)


def operators(nodes: Sequence[onnx.NodeProto]) -> str:
    """Return the operators of nodes with their counts, as ``MatMul 2, Add``."""
    counts = Counter(node.op_type for node in nodes)
    return ", ".join(name if count == 1 else f"{name} {count}" for name, count in counts.most_common())


@dataclass(frozen=True)
class Drawing:
    """Boxes, and the pairs of boxes between which a value flows."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


def drawing(
    graph: onnx.GraphProto, many: int = _MANY, functions: Iterable[onnx.FunctionProto] = ()
) -> Drawing:
    """Return the drawing of a graph, folded by module until it has at most ``many`` boxes, if possible.

    Args:
        graph: any graph; the modules of one that torch2ort did not export are unknown.
        many: the number of boxes that one can still read.
        functions: bodies of calls.
    """
    drawn = _folded(graph, many)
    bodies = {(function.domain, function.name): function for function in functions}
    for box in drawn.boxes:
        for key in dict.fromkeys((node.domain, node.op_type) for node in box.nodes):
            if key in bodies:
                box.inside += [f"  {node.op_type} {node.name}" for node in bodies[key].node]
    return drawn


def _folded(graph: onnx.GraphProto, many: int) -> Drawing:
    origins = [Origin.of(node) for node in graph.node]
    deepest = max((_depth(origin.module) for origin in origins), default=0)
    for depth in range(deepest, -1, -1):
        found = _drawn(graph, origins, depth, folded=False)
        if len(found.boxes) <= many:
            return found
    for depth in range(deepest, -1, -1):
        found = _drawn(graph, origins, depth, folded=True)
        if len(found.boxes) <= many:
            return found
    return found


def _depth(module: str) -> int:
    return module.count(".") + 1 if module else 0


def _drawn(graph: onnx.GraphProto, origins: Sequence[Origin], depth: int, *, folded: bool) -> Drawing:
    """Return the drawing with modules of that depth; ``folded`` puts equal calls of a module into one box."""
    boxes: dict[object, Box] = {}
    maker: dict[str, object] = {}
    weights = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        # Weights are left out: there are many of them.
        if value.name not in weights and "." not in value.name:
            boxes["input", value.name] = Box("end", value.name)
            maker[value.name] = ("input", value.name)
    edges: dict[tuple[object, object], None] = {}
    # A node that reads only weights, such as a transposition, is put into the box of the node that reads its
    # result.
    early: dict[str, list[onnx.NodeProto]] = {}
    for number, (node, origin) in enumerate(zip(graph.node, origins, strict=True)):
        group, box = _box_of(node, origin, depth, None if folded else number)
        sources = [maker[name] for name in node.input if name in maker]
        waiting = [one for name in node.input for one in early.pop(name, [])]
        if not sources and box.kind == "module" and number + 1 < len(graph.node):
            early[node.output[0]] = [*waiting, node]
            continue
        levels = [boxes[s].level + (0 if s[0] == group else 1) for s in sources]  # type: ignore[index]
        key = (group, max(levels, default=0))
        found = boxes.setdefault(key, box)
        found.level = key[1]
        found.nodes += [*waiting, node]
        edges.update(dict.fromkeys((source, key) for source in sources if source != key))
        maker.update(dict.fromkeys(filter(None, node.output), key))
    unread = [node for nodes in early.values() for node in nodes]
    if unread:
        boxes["unread",] = Box("module", "constants", unread)
        maker.update((name, ("unread",)) for node in unread for name in node.output)
    for value in graph.output:
        key = ("output", value.name)
        boxes[key] = Box("end", value.name)
        if value.name in maker:
            boxes[key].level = boxes[maker[value.name]].level + 1
            edges[maker[value.name], key] = None
    numbers = {key: i for i, key in enumerate(boxes)}
    return Drawing(tuple(boxes.values()), tuple((numbers[a], numbers[b]) for a, b in edges))


def _box_of(node: onnx.NodeProto, origin: Origin, depth: int, number: int | None) -> tuple[object, Box]:
    """Return the key of the group of a node, and a box for that group."""
    module = ".".join(origin.module.split(".")[:depth])
    called = function_of(node)
    if called:
        kind = "kernel" if called.startswith(_OURS) else "function"
        title = called.rpartition(".<locals>.")[2] if ".<locals>." in called else called.rpartition(".")[2]
        title += " (backward)" if node.op_type == "PythonOpGrad" else ""
        return (kind, called, node.op_type, module, number), Box(kind, title, module=module)
    title = module or "the model"
    if module == origin.module and origin.kind:
        title += f" ({origin.kind})"
    return ("module", module), Box("module", title, module=module)


def outline(graph: onnx.GraphProto) -> list[str]:
    """Return the modules of a graph and their operators, as indented lines, in the order of the nodes."""
    tree = _Branch("the model", "")
    for node in graph.node:
        origin = Origin.of(node)
        branch = tree
        for name in origin.module.split(".") if origin.module else ():
            branch = branch.branches.setdefault(name, _Branch(name, ""))
        branch.kind = branch.kind or origin.kind
        branch.nodes.append(node)
    return list(tree.lines(""))


@dataclass
class _Branch:
    name: str
    kind: str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    branches: dict[str, _Branch] = field(default_factory=dict)

    def lines(self, indent: str) -> Iterable[str]:
        """Yield the lines of this module and of those in it."""
        plain = [node for node in self.nodes if not function_of(node)]
        kind = f" ({self.kind})" if self.kind else ""
        yield f"{indent}{self.name}{kind}" + (f": {operators(plain)}" if plain else "")
        calls = Counter((called, node.op_type) for node in self.nodes if (called := function_of(node)))
        for (called, operator), count in calls.items():
            what = "runs PyTorch's" if called.startswith(_OURS) else "calls"
            times = f", {count} times" if count > 1 else ""
            yield f"{indent}  {what} {called}{' backward' if operator == 'PythonOpGrad' else ''}{times}"
        for branch in self.branches.values():
            yield from branch.lines(f"{indent}  ")


def to_dot(drawn: Drawing) -> str:
    """Return the drawing in the DOT language of Graphviz."""
    lines = ["digraph model {", "  rankdir=TB;", '  node [shape=box, style="filled,rounded", fontname=sans];']
    for i, box in enumerate(drawn.boxes):
        label = "\\n".join(filter(None, (box.title, box.detail))).replace('"', '\\"')
        lines.append(f'  n{i} [label="{label}", fillcolor="{_COLORS[box.kind]}"];')
    lines += [f"  n{a} -> n{b};" for a, b in drawn.edges]
    return "\n".join([*lines, "}"]) + "\n"


def to_svg(drawn: Drawing) -> str:
    """Return the drawing as an SVG picture with one row per level."""
    levels = sorted({box.level for box in drawn.boxes})
    rows = [[i for i, box in enumerate(drawn.boxes) if box.level == level] for level in levels]
    widest = max(map(len, rows), default=1)
    width = 2 * _MARGIN + widest * (_WIDTH + _GAP)
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _RISE)
    places = {}
    for row, members in enumerate(rows):
        left = (width - len(members) * (_WIDTH + _GAP) + _GAP) / 2
        for column, i in enumerate(members):
            places[i] = left + column * (_WIDTH + _GAP), _MARGIN + row * (_HEIGHT + _RISE)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts += [_edge(places[a], places[b]) for a, b in drawn.edges]
    parts += [_rectangle(box, *places[i]) for i, box in enumerate(drawn.boxes)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (u, v) = (start[0] + _WIDTH / 2, start[1] + _HEIGHT), (end[0] + _WIDTH / 2, end[1])
    bend = (v - y) / 2
    return (
        f'<path d="M{x:.0f},{y:.0f} C{x:.0f},{y + bend:.0f} {u:.0f},{v - bend:.0f} {u:.0f},{v:.0f}" '
        f'fill="none" stroke="#888"/>'
    )


def _rectangle(box: Box, x: float, y: float) -> str:
    title, detail = (html.escape(_short(text)) for text in (box.title, box.detail))
    whole = html.escape("\n".join(_lines(box)))
    return (
        f'<g><title>{whole}</title><rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'fill="{_COLORS[box.kind]}" stroke="#666"/>'
        f'<text x="{x + 8:.0f}" y="{y + 18:.0f}" font-weight="bold">{title}</text>'
        f'<text x="{x + 8:.0f}" y="{y + 34:.0f}" font-size="10">{detail}</text></g>'
    )


def _lines(box: Box) -> Iterable[str]:
    yield box.title
    for node in box.nodes:
        line = Origin.of(node).line
        yield f"{node.op_type} {node.name}" + (f" ({line})" if line else "")
    yield from box.inside


def _short(text: str) -> str:
    """Return the end of a long text: paths and names differ there."""
    return text if len(text) <= _LETTERS else f"…{text[1 - _LETTERS :]}"


def to_html(drawn: Drawing, name: str) -> str:
    """Return an HTML page with the drawing, and a list of its boxes that can be unfolded."""
    parts = [
        f"<details><summary>{html.escape(box.title)}: {html.escape(box.detail)}</summary><pre>"
        f"{html.escape(chr(10).join(_lines(box)))}</pre></details>"
        for box in drawn.boxes
        if box.nodes
    ]
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(name)}</title></head><body '
        f'style="font-family:sans-serif"><h1>{html.escape(name)}</h1>{to_svg(drawn)}{"".join(parts)}</body></html>\n'
    )
