"""A hook of MkDocs: pages of the site from outside of docs/, and links to them.

The README is the first page. Each example is a page of its own: its docstring, and its code.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent

# The place of a file of the repository in the site, and the address of files in other folders.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples/index.md",
    "examples/portable_kernel/README.md": "examples/portable_kernel.md",
    "examples/train_in_browser/README.md": "examples/train_in_browser.md",
}
EXAMPLES = "examples"
BENCHMARKS = "benchmarks"


def page_of_example(path: Path) -> str:
    """Return an example as a page."""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    said = re.sub(r":\w+:`([^`]+)`", r"`\1`", said).replace("``", "`")
    title, _, rest = said.partition("\n")
    return f"# {path.stem}\n\n{title}\n\n{rest.strip()}\n\n```python\n{text}```\n"


def examples() -> dict[str, str]:
    """Return the page of each example by its place in the site."""
    return {f"examples/{p.stem}.md": page_of_example(p) for p in sorted((ROOT / EXAMPLES).glob("*.py"))}


def place_in_site(target: str) -> str:
    """Return the place in the site of a file of the repository, whose path is relative to the root."""
    if target in PAGES:
        return PAGES[target]
    if target == EXAMPLES:
        return "examples/index.md"
    if target.startswith(BENCHMARKS):
        return "benchmarks.md"
    if target.startswith(EXAMPLES):
        return target.removesuffix(".py") + ".md"
    return target.removeprefix("docs/")


def links_in_site(text: str, source: str) -> str:
    """Return `text` with its links to files, relative to `source`, replaced by links to pages of the site."""
    here = posixpath.dirname(place_in_site(source))

    def replaced(found: re.Match[str]) -> str:
        path, mark, anchor = found[1].partition("#")
        if re.match(r"[a-z]+:", found[1]) or not path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        return f"]({posixpath.relpath(place_in_site(target), here or '.')}{mark}{anchor})"

    # Code is left unchanged.
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(p if p.startswith("```") else re.sub(r"\]\(([^)\s]+)\)", replaced, p) for p in parts)


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    """Add the examples to the navigation."""
    for entry in config.nav or []:
        if entry.get("Examples") == "EXAMPLES":
            pages = [place for place in PAGES.values() if place.startswith(f"{EXAMPLES}/")]
            entry["Examples"] = [pages[0], *examples(), *pages[1:]]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files from outside of docs/."""
    outside = {place: links_in_site((ROOT / name).read_text(), name) for name, place in PAGES.items()}
    for place, content in {**outside, **examples()}.items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Drop the roles of docstrings, ``:class:`Options```, which Markdown does not support."""
    return re.sub(r":(?:py:)?(?:class|func|meth|mod|attr|data|exc):(?=<code)", "", html)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links of pages in docs/ by links to the added pages."""
    if page.file.generated_by:
        return markdown
    return links_in_site(markdown, f"docs/{page.file.src_uri}")
