"""Words of docstrings, comments, messages and documents: openings of sentences and phrases that are not used.

A sentence begins with a noun of the glossary (docs/architecture.md) and takes the field's verb for it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("torch2ort", "tests", "examples", "benchmarks", "tools", "docs")
PYTHON = sorted({*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))})
CPP = sorted(path for end in ("*.cpp", "*.h") for path in (ROOT / "runtime_ext").rglob(end))
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")))
    if "node_modules" not in path.parts
)

# A sentence starts where a text, a paragraph, an item or a cell does, and after a full stop or a colon.
_START = r"(?:\A|\n\s*\n|\n\s*[-*|] ?|[.!?:]\)?\s+|\| )"
_OPENING = re.compile(_START + r"[`*_\"(]*(What|Who|Whose|Whom|Which|Whether|How)\b")
_PHRASE = re.compile(
    r"\b(anew|affair|h[au]ngs?\s+on|(?:has|have|had)\s+(?:a|no)\s+say|(?:stands?|stood)\s+for"
    r"|(?:go|goes|going|went)\s+on|nobody\s+reads)\b",
    re.IGNORECASE,
)


def faults(text: str) -> Iterator[str]:
    """Yield each opening and phrase of `text` that is not used, with what follows it."""
    for pattern in (_OPENING, _PHRASE):
        for found in pattern.finditer(text):
            yield " ".join(text[found.start(1) : found.start(1) + 60].split())


def texts_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, messages and blocks of comments of a Python file, with their lines."""
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            texts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield node.lineno, "".join(texts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.lineno, node.value
    lines = [
        (token.start[0], token.string.lstrip("#! "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from blocks(lines)


def texts_of_cpp(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the blocks of comments and the messages of a C++ file, with their lines."""
    comments = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code, _, comment = line.partition("//")
        if comment:
            comments.append((number, comment.strip("/! ")))
        yield from ((number, text) for text in re.findall(r'"((?:[^"\\]|\\.)*)"', code))
    yield from blocks(comments)


def blocks(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield comments on consecutive lines as one text."""
    start, text, last = 0, "", -1
    for number, line in lines:
        if number == last + 1:
            text += "\n" + line
        else:
            if text:
                yield start, text
            start, text = number, line
        last = number
    if text:
        yield start, text


def texts_of_document(path: Path) -> Iterator[tuple[int, str]]:
    """Yield a Markdown file without its headings and blocks of code."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    yield 1, re.sub(r"^#.*$", "", prose, flags=re.MULTILINE)


def found_in(path: Path) -> list[str]:
    """Return the faults of a file, each with its line."""
    texts = {".py": texts_of_python, ".md": texts_of_document}.get(path.suffix, texts_of_cpp)
    place = path.relative_to(ROOT)
    return [f"{place}:{line}: {fault}" for line, text in texts(path) for fault in faults(text)]


@pytest.mark.parametrize("files", [PYTHON, CPP, DOCUMENTS], ids=["python", "cpp", "documents"])
def test_a_sentence_begins_with_a_noun_and_uses_the_fields_verb(files: list[Path]) -> None:
    assert not [fault for path in files if path != Path(__file__) for fault in found_in(path)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What a step keeps.", "What a step keeps."),
        ("A node. Which one is unused?", "Which one is unused?"),
        ("The sizes depend on it; it hangs\non them.", "hangs on them."),
    ],
)
def test_an_opening_and_a_phrase_are_found(text: str, fault: str) -> None:
    assert list(faults(text)) == [fault]


def test_a_word_inside_of_a_sentence_is_none() -> None:
    assert not list(faults("The node depends on what it reads, and on how often it runs."))


if __name__ == "__main__":  # lists the faults of the files and folders given
    import sys

    for given in sys.argv[1:] or ["."]:
        base = (ROOT / given).resolve()
        for file in (*PYTHON, *CPP, *DOCUMENTS):
            if base in (file, *file.parents) and file != Path(__file__):
                print(*found_in(file), sep="\n", end="\n" if found_in(file) else "")
