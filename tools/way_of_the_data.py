"""Drawing of the picture in docs/walkthrough.md from the text in ROWS.

``python tools/way_of_the_data.py > docs/way_of_the_data.svg`` writes it. A line is a row of boxes,
separated by ``|``. A box is ``name: content``; a ``*`` before the name marks the user's own code. An arrow
leads from each box to those directly below it.
"""

from __future__ import annotations

from html import escape

ROWS = """
* your model and a call: its Functions stay as they are
capture: torch.export; each call of a Function is one opaque operator with a site
inference, files: one traced program | training, differentiate: PyTorch's autograd, split into two halves
symbolics: each program becomes ONNX; each call becomes a PythonOp node
file: save, load, serve | inference: one session | training: forward and backward session
ONNX Runtime: any onnxruntime from 1.20 on, or onnxruntime-training 1.19.2
PythonOp, through C++: no copy of its inputs | PythonOpGrad, through C++: the context of its forward
* Function.forward | * Function.backward
"""

# The left edge, the width, and the SVG.
Box = tuple[float, float, str]

WIDTH, MARGIN, GAP = 760, 10, 20
HEIGHT, STEP = 46, 72
FILL = {False: "#eef2f7", True: "#ffe0b2"}


def boxes(row: str, top: int) -> list[Box]:
    """Return left edge, width and SVG text of each box of `row`."""
    parts = [part.strip() for part in row.split("|")]
    width = (WIDTH - 2 * MARGIN - GAP * (len(parts) - 1)) / len(parts)
    found = []
    for number, part in enumerate(parts):
        own = part.startswith("*")
        name, _, rest = part.removeprefix("*").strip().partition(": ")
        left = MARGIN + number * (width + GAP)
        middle = left + width / 2
        lines = [
            f'<rect x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="6" '
            f'fill="{FILL[own]}" stroke="#556"/>',
            f'<text x="{middle:g}" y="{top + (19 if rest else 28)}" font-weight="bold">{escape(name)}</text>',
        ]
        if rest:
            lines.append(f'<text x="{middle:g}" y="{top + 36}" font-size="12">{escape(rest)}</text>')
        found.append((left, width, "\n".join(lines)))
    return found


def arrows(upper: list[Box], lower: list[Box], top: int) -> list[str]:
    """Return an arrow for each pair of boxes of which one is above the other."""
    found = []
    for left, width, _ in upper:
        for below, broad, _ in lower:
            start, end = max(left, below), min(left + width, below + broad)
            if end - start > GAP:
                x = (start + end) / 2
                line = f"M{x:g},{top + HEIGHT} V{top + STEP - 3}"
                found.append(f'<path d="{line}" stroke="#556" marker-end="url(#head)"/>')
    return found


def drawing(text: str) -> str:
    """Return `text` as an SVG."""
    rows = [boxes(row, MARGIN + number * STEP) for number, row in enumerate(text.strip().splitlines())]
    height = 2 * MARGIN + (len(rows) - 1) * STEP + HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14" text-anchor="middle">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#556"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, row in enumerate(rows):
        if number:
            parts += arrows(rows[number - 1], row, MARGIN + (number - 1) * STEP)
        parts += [svg for *_, svg in row]
    return "\n".join([*parts, "</svg>"])


if __name__ == "__main__":
    print(drawing(ROWS))
