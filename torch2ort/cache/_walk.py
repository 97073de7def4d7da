"""Named components of a model, written down piece by piece until nothing reachable is left.

A *component* is one thing that can change by itself: the code of a function, a class, a module's
attributes, a global variable. Its content is made of plain values and of references to other components
and objects, none of which holds an address. What is in it is the business of ``_values`` and
``_definitions``; here is the book-keeping.

Reachable is what a component refers to; a method counts once its name is read anywhere, and so does an
attribute that cannot be written down. So the walk covers at least what can run.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch2ort.cache._atoms import atom, form
from torch2ort.cache._packages import Package, package_of_class


class Unkeyable(Exception):  # noqa: N818 - the answer to a question, not an error
    """A model cannot be keyed; the message is the reason, a sentence without an end stop."""


Fill = Callable[[], "str | None"]


@dataclass(slots=True)
class _Job:
    """A component that is still to be written.

    Attributes:
        label: the component's name.
        fill: writes its content, or returns it as a text that says it exactly.
        own: whether it is the user's; of a package's code, only what is read by name counts.
        via: names of attributes, one of which must be read somewhere for it to matter; ``None``: it matters.
        done: whether it was written.
    """

    label: str
    fill: Fill
    own: bool
    via: set[str] | None
    done: bool = False


class Walk:
    """The components found so far, and what is still to be looked at.

    Args:
        weights: id of each parameter and buffer of the model -> its name.
        modules: id of each module of the model -> its path.

    Attributes:
        components: name -> sha256 of its content, or the content itself if a person can read it; in an
            order that depends on the model alone.
        names: every attribute name that reached code reads.
        any_name: whether reached code may read attributes of any name.
        functions: the Functions found, by qualified name, in the order found.
        topics: what the code asks torch about the process it runs in: ``"ranks"``, ``"devices"``.
    """

    def __init__(self, weights: dict[int, str], modules: dict[int, str]) -> None:
        self.weights = weights
        self.modules = modules
        self.components: dict[str, str] = {}
        self.names: set[str] = set()
        self.any_name = False
        self.functions: defaultdict[str, list[type]] = defaultdict(list)
        self.topics: set[str] = set()
        self._out = bytearray()
        self._label = ""
        self._memo: dict[int, bytes] = {}
        self._kept: list[Any] = []
        self._jobs: list[_Job] = []
        self._job_of: dict[Hashable, _Job] = {}
        self._taken: dict[str, int] = {}
        self._unread: list[tuple[str, str]] = []
        self._once: dict[Hashable, None] = {}
        self._packages: dict[int, tuple[type, Package | None]] = {}

    def write(self, data: bytes) -> None:
        """Add bytes to the present component."""
        self._out += data

    def atom(self, value: Any) -> None:
        """Add a plain value to the present component."""
        data = atom(value)
        assert data is not None, f"{value!r} is not plain"
        self._out += data

    def seen(self, value: Any) -> bool:
        """Write a reference to ``value`` if it was met before; else remember where it is now."""
        place = self._memo.get(id(value))
        if place is not None:
            self._out += place
            return True
        self._memo[id(value)] = form(b"@", b"%d %s" % (len(self._out), self._label.encode()))
        self._kept.append(value)  # so that its id stays its own
        return False

    def attempt(self, write_value: Callable[[], None]) -> str | None:
        """Write a value, or nothing and return the reason if that is impossible."""
        written, kept, jobs, once = len(self._out), len(self._kept), len(self._jobs), len(self._once)
        try:
            write_value()
        except Unkeyable as reason:
            del self._out[written:]
            for value in self._kept[kept:]:
                del self._memo[id(value)]
            del self._kept[kept:]
            dropped = set(map(id, self._jobs[jobs:]))
            self._job_of = {key: job for key, job in self._job_of.items() if id(job) not in dropped}
            del self._jobs[jobs:]
            for key in list(self._once)[once:]:
                del self._once[key]
            return str(reason)
        return None

    def attribute(self, name: str, write_value: Callable[[], None]) -> None:
        """Write an attribute's value; if that is impossible, it counts only once something reads ``name``."""
        self.atom(name)
        reason = self.attempt(write_value)
        if reason is not None:
            self.write(b"?")
            self._unread.append((name, f"{self._label}, attribute {name}: {reason}"))

    def refer(
        self, label: str, identity: Hashable, fill: Fill, *, own: bool = True, via: str | None = None
    ) -> None:
        """Write a reference to the component of ``identity``, and see to it that it is written, too.

        Args:
            label: the component's name; ``#2`` is added for a second identity of that name.
            identity: the same for the same thing, for as long as the walk lasts.
            fill: writes the component's content, or returns it as a text that says it exactly.
            own: whether it is the user's own. What is not is only looked through: no reference is written,
                and there is no component if it has nothing to say.
            via: it matters only once an attribute of this name is read; ``None``: it matters.
        """
        job = self._job_of.get(identity)
        if job is None:
            number = self._taken[label] = self._taken.get(label, 0) + 1
            job = _Job(label if number == 1 else f"{label}#{number}", fill, own, set())
            self._job_of[identity] = job
            self._jobs.append(job)
        if via is None:
            job.via = None
        elif job.via is not None:
            job.via.add(via)
        if own:
            self.write(form(b"&", job.label.encode()))

    def once(self, key: Hashable) -> bool:
        """Whether ``key`` is asked about for the first time."""
        first = key not in self._once
        self._once[key] = None
        return first

    def package_of(self, cls: type) -> Package | None:
        """The package of a class, as :func:`package_of_class` tells; asked once a walk."""
        known = self._packages.get(id(cls))
        if known is None:
            known = self._packages[id(cls)] = (cls, package_of_class(cls))
        return known[1]

    def run(self) -> None:
        """Write every component that can be reached.

        Raises:
            Unkeyable: something that is read cannot be written down.
        """
        progress = True
        while progress:
            progress = False
            for job in self._jobs:  # grows while it is worked off
                if not job.done and self._matters(job):
                    job.done = progress = True
                    self._fill(job)
        for name, reason in self._unread:
            if self.any_name or name in self.names:
                raise Unkeyable(reason)

    def _matters(self, job: _Job) -> bool:
        if job.via is None or (job.own and self.any_name):
            return True
        return not self.names.isdisjoint(job.via)

    def _fill(self, job: _Job) -> None:
        self._out, self._label = bytearray(), job.label
        try:
            text = job.fill()
        except RecursionError:
            raise Unkeyable(f"{job.label}: it is nested too deep to be compared") from None
        except Unkeyable as reason:
            raise Unkeyable(f"{job.label}: {reason}") from None
        if job.own or self._out:
            self.components[job.label] = text if text is not None else hashlib.sha256(self._out).hexdigest()
