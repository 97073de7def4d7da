"""The matrix of versions: ``nox -s matrix`` and ``nox -s newest``, or one row, ``nox -s 'matrix(NAME)'``.

``-- --keep`` leaves the environments, gigabytes each, for the next run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))
from tests import version_matrix as versions

nox.options.sessions = ["newest"]
nox.options.default_venv_backend = "none"


def _try(session: nox.Session, row: versions.Row) -> None:
    wheels = list((versions.WORK / "wheel").glob("*.whl"))
    wheel = wheels[0] if wheels else versions.build_wheel()
    result = versions.try_row(row, wheel, keep="--keep" in session.posargs)
    versions.remember(row, result)
    if result.outcome.startswith("not tried"):
        session.skip(result.outcome)
    if result.failed:
        session.error(result.outcome)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel that the rows install, and drop the results of earlier runs."""
    versions.forget({*versions.MATRIX, *versions.NEWEST})
    session.log(str(versions.build_wheel()))


@nox.session
@nox.parametrize("row", versions.MATRIX, ids=[row.name for row in versions.MATRIX])
def matrix(session: nox.Session, row: versions.Row) -> None:
    """Test one row of the whole matrix."""
    _try(session, row)


@nox.session
@nox.parametrize("row", versions.NEWEST, ids=[row.name for row in versions.NEWEST])
def newest(session: nox.Session, row: versions.Row) -> None:
    """Test the newest torch, the newest Python with it, and the oldest Python."""
    _try(session, row)


@nox.session
def table(session: nox.Session) -> None:
    """Print the results of the rows."""
    rows = versions.NEWEST if "newest" in session.posargs else versions.MATRIX
    print(versions.table(versions.results(rows)))
