"""Rules of the repository that no other tool checks. A failure lists the files that break one, and how."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from torch2ort.support.versions import TESTED

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "torch2ort").rglob("*.py"))
OTHER_PYTHON = [path for name in ("tests", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py")]
TREES = {path: ast.parse(path.read_text()) for path in PACKAGE}

# Files that read private names of a library -> a version that each names as tested.
PRIVATE_FILES = {
    **{path: "2.15.0" for path in PACKAGE if path.parent.name == "_torch" and path.name != "__init__.py"},
    ROOT / "torch2ort" / "runtime" / "_ort_private.py": "1.19.2",
}
LIBRARIES = ("torch", "onnxruntime")
RUNTIMES = ("training", "training-gpu", "cpu", "gpu")

# A module may import from its own floor and from those below; modules that are not named here are the top.
# An import inside of a function counts like any other.
FLOORS = (
    {"errors", "log", "options", "providers", "support", "_native"},
    {"optim"},
    {"_torch"},
    {"io_schema", "sizes"},
    {"pythonop"},
    {"shape_infer", "cache"},
    {"kernels"},
    {"fusion"},
    {"graph"},
    {"effects"},
    {"capture"},
    {"program"},
    {"symbolics"},
    {"differentiate"},
    {"exports"},
    {"runtime"},
    {"portable"},
    {"autotune"},
    {"training"},
    {"exported_model"},
    {"variants", "dynamo", "hooks", "training_files", "artifacts"},
)

# A participle names no operation and no result. Names in -eed are verbs: need, feed.
PARTICIPLE = re.compile("_?([a-z]*[a-df-z]ed|built|found|held|kept|known|left|made|put|said|seen)")
# Of the public contract, where users read and override them; `exported` is read as an attribute.
PUBLIC_PARTICIPLES = (
    *("ExportedModel.renamed", "ORTModule.exported", "SubscriberBase.attached", "SubscriberBase.detached"),
    *("StatisticsSubscriber.attached", "StatisticsSubscriber.detached"),
)


def broken(rule: dict[Path, Any]) -> dict[str, Any]:
    """Return the faults against a rule by the file's name, without the files that keep it."""
    return {path.relative_to(ROOT).as_posix(): found for path, found in rule.items() if found}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every dotted name that `tree` imports, ``a.b.c`` for ``from a.b import c``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(tree: ast.AST) -> Iterator[str]:
    """Yield every ``name.attribute.attribute`` that `tree` reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", ast.unparse(node)):
            yield ast.unparse(node)


def is_private(dotted: str) -> bool:
    """Return True if `dotted` contains a private name of torch or onnxruntime."""
    library, *names = dotted.split(".")
    return library in LIBRARIES and any(re.match(r"_(?!_)", name) for name in names)


def floor(module: str) -> int:
    """Return the number of the floor of ``torch2ort.<module>``."""
    return next((i for i, names in enumerate(FLOORS) if module in names), len(FLOORS))


def module_of(path: Path) -> str:
    """Return ``x`` for a file of ``torch2ort.x``."""
    return path.relative_to(ROOT / "torch2ort").with_suffix("").parts[0]


def code_lines(function: ast.FunctionDef) -> int:
    """Return the lines from `function`'s first statement to its last, its docstring apart."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0


def methods(tree: ast.AST) -> Iterator[str]:
    """Yield ``Class.method`` for every method in `tree`, properties apart."""
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for one in cls.body:
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = " ".join(map(ast.unparse, one.decorator_list))
                if not re.search(r"property\b|\.setter\b", decorators):
                    yield f"{cls.name}.{one.name}"


def project() -> dict[str, Any]:
    """Return pyproject's ``[project]`` table."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def distribution(requirement: str) -> str:
    """Return the normalized name in a requirement: ``onnx-ir`` for ``onnx_ir>=1.1``."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()


def imported_distributions(trees: Iterable[ast.AST]) -> set[str]:
    """Return the installed distributions of which `trees` import something."""
    names = {name.split(".")[0] for tree in trees for name in imported(tree)} - sys.stdlib_module_names
    installed = metadata.packages_distributions()
    # A distribution may bring a folder `tests` of its own.
    foreign = names - {"torch2ort", "tests"}
    return {distribution(found) for name in foreign for found in installed.get(name, ())}


def assignments(path: Path) -> list[ast.Assign]:
    """Return the assignments of a file of the package, outside of functions and classes."""
    return [node for node in TREES[path].body if isinstance(node, ast.Assign)]


def version(text: str) -> tuple[int, ...]:
    """Return ``(1, 2, 3)`` for ``"1.2.3"``."""
    return tuple(map(int, text.split(".")))


def test_sources_parse_on_the_oldest_python() -> None:
    for path in PACKAGE + OTHER_PYTHON:
        ast.parse(path.read_text(), path, feature_version=(3, 10))


def test_no_function_has_more_than_50_lines_of_code() -> None:
    functions = {
        path: [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for path, tree in TREES.items()
    }
    long = {path: [f.name for f in found if code_lines(f) > 50] for path, found in functions.items()}
    assert broken(long) == {}


def test_no_method_is_named_by_a_bare_participle() -> None:
    named = {
        path: [m for m in methods(tree) if PARTICIPLE.fullmatch(m.partition(".")[2])]
        for path, tree in TREES.items()
    }
    assert broken({p: sorted({*found} - {*PUBLIC_PARTICIPLES}) for p, found in named.items()}) == {}


def test_private_names_of_libraries_stay_in_their_files() -> None:
    names = {path: {*imported(tree), *attribute_chains(tree)} for path, tree in TREES.items()}
    private = {
        path: sorted(filter(is_private, found)) for path, found in names.items() if path not in PRIVATE_FILES
    }
    assert broken(private) == {}


def test_files_of_private_names_say_which_versions_were_tried() -> None:
    assert broken({path: tried not in path.read_text() for path, tried in PRIVATE_FILES.items()}) == {}


def test_imports_point_one_way() -> None:
    upward = {
        path: sorted(
            name
            for name in imported(tree)
            if name.startswith("torch2ort.") and floor(name.split(".")[1]) > floor(module_of(path))
        )
        for path, tree in TREES.items()
    }
    assert broken(upward) == {}


def test_no_two_files_of_a_folder_and_those_below_share_a_name() -> None:
    # Tables and facades of packages have equal names on purpose.
    rooms = {
        path.relative_to(ROOT / "torch2ort").parts[0] for path in PACKAGE if path.parent.name != "torch2ort"
    }
    shared = {}
    for room in rooms - {"trainer", "_commands"}:
        names = [
            path.name
            for path in PACKAGE
            if room in path.parts and path.name not in ("__init__.py", "registry.py")
        ]
        shared[room] = sorted({name for name in names if names.count(name) > 1})
    assert {room: names for room, names in shared.items() if names} == {}


def test_every_room_has_a_floor() -> None:
    rooms = {path.parent.name for path in PACKAGE if path.parent.parent == ROOT / "torch2ort"}
    assert rooms - set().union(*FLOORS) == {"_commands", "trainer"}


def test_private_names_of_onnxruntime_are_read_in_their_own_room_alone() -> None:
    foreign = {
        path: sorted(
            name
            for name in imported(tree)
            if re.search(r"^torch2ort\..*\b_ort_private\b", name) and name.split(".")[1] != module_of(path)
        )
        for path, tree in TREES.items()
    }
    assert broken(foreign) == {}


def test_no_module_imports_the_facade() -> None:
    modules = {"_native"} | {module_of(path) for path in PACKAGE}
    facade = {
        path: [
            name
            for name in imported(tree)
            if name.startswith("torch2ort")
            and name.count(".") < 2
            and name.removeprefix("torch2ort.") not in modules
        ]
        for path, tree in TREES.items()
        if module_of(path) not in ("__init__", "__main__", "trainer")
    }
    assert broken(facade) == {}


def test_the_trainer_imports_public_names_alone() -> None:
    public = {*ast.literal_eval(assignments(ROOT / "torch2ort" / "_public.py")[0].value), "trainer"}
    hidden = {
        path: [n for n in imported(tree) if n.startswith("torch2ort.") and n.split(".")[1] not in public]
        for path, tree in TREES.items()
        if module_of(path) == "trainer"
    }
    assert broken(hidden) == {}


def test_warnings_are_issued_in_one_place() -> None:
    issuing = {
        path: [name for name in attribute_chains(tree) if name.startswith("warnings.warn")]
        for path, tree in TREES.items()
        if path.name != "user_warnings.py"
    }
    assert broken(issuing) == {}


def test_the_decisions_state_the_reason_for_each_dependency() -> None:
    requirements = list(project()["dependencies"])
    for extra in project()["optional-dependencies"].values():
        requirements += extra
    names = {re.match(r"[\w.-]+", requirement).group() for requirement in requirements} - {"torch2ort"}
    decisions = (ROOT / "docs" / "decisions.md").read_text()
    assert {name for name in names if f"`{name}`" not in decisions} == set()


def test_what_the_package_imports_is_declared() -> None:
    # One of the runtimes is installed; a handler runs where its library is installed.
    groups = [project()["optional-dependencies"][name] for name in (*RUNTIMES, "handlers")]
    declared = {distribution(one) for few in [project()["dependencies"], *groups] for one in few}
    assert imported_distributions(TREES.values()) - declared == set()


def test_what_is_required_is_imported() -> None:
    required = {distribution(one) for one in project()["dependencies"]}
    assert required - imported_distributions(TREES.values()) == set()


def test_what_tests_examples_and_benchmarks_import_is_declared() -> None:
    extras = project()["optional-dependencies"].values()
    declared = {distribution(one) for few in [project()["dependencies"], *extras] for one in few}
    trees = [ast.parse(path.read_text()) for path in [*OTHER_PYTHON, ROOT / "noxfile.py"]]
    assert imported_distributions(trees) - declared == set()


def test_the_ranges_that_are_installed_are_those_that_were_tested() -> None:
    needed = {f"{name}{tested.requirement}" for name, tested in TESTED.items()}
    assert needed == {requirement for requirement in project()["dependencies"] if "<" in requirement}


def test_the_readme_names_every_runtime_extra() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [n for n in RUNTIMES if f".[{n}]" not in readme] == []


def test_the_versions_that_make_installs_are_new_enough() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.partition(";")[0].split("==") for line in lines if "==" in line)
    requirements = [re.split(">=|,", requirement) for requirement in project()["dependencies"]]
    minimum = {name: least for name, least, *_ in requirements}
    assert {n for n in minimum.keys() & pinned.keys() if version(pinned[n]) < version(minimum[n])} == set()


def relative_links(page: Path) -> Iterator[Path]:
    """Yield the target of each link of a Markdown page that names a file of the repository."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not re.match(r"[a-z]+:|#", target):
            yield page.parent / target.partition("#")[0]


def test_links_between_pages_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    assert broken({page: [str(f) for f in relative_links(page) if not f.exists()] for page in pages}) == {}


def test_the_readme_fits_into_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_picture_of_the_readme_is_drawn_from_its_text() -> None:
    picture = runpy.run_path(str(ROOT / "tools" / "way_of_the_data.py"))
    assert (ROOT / "docs" / "way_of_the_data.svg").read_text() == picture["drawing"](picture["ROWS"]) + "\n"


def test_the_api_reference_has_every_public_name() -> None:
    public = set(ast.literal_eval(assignments(ROOT / "torch2ort" / "_public.py")[0].value))
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    errors = {n.name for n in TREES[ROOT / "torch2ort" / "errors.py"].body if isinstance(n, ast.ClassDef)}
    packages = {name for name in public if (ROOT / "torch2ort" / name).is_dir()}
    written = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert public - written - errors - packages == set()


def test_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in site] == []
