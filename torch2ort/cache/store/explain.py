"""Explanation of cache misses: the components in which a key differs from the nearest entry's key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch2ort.cache.key.key_builder import NOTE
from torch2ort.cache.store.store import Listed, Store

_SHOWN = 16  # digits of a digest that distinguish two of them at a glance


@dataclass(frozen=True)
class Difference:
    """One component in which two keys differ.

    Attributes:
        component: its name.
        before: its content in the older key; ``None`` if it has no such component.
        after: its content in the newer key; ``None`` if it has no such component.
    """

    component: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.component}: new ({_shown(self.after)})"
        if self.after is None:
            return f"{self.component}: gone (was {_shown(self.before)})"
        notes = _differing_notes(self.before, self.after)
        return f"{self.component}: {notes or f'{_shown(self.before)} -> {_shown(self.after)}'}"


def _differing_notes(before: str, after: str) -> str:
    """Return the plain attributes behind two digests that differ, as ``scale = 2.0 -> 3.0``."""
    old, new = (
        dict(note.split(" = ", 1) for note in text.split(NOTE)[1:] if " = " in note)
        for text in (before, after)
    )
    return ", ".join(
        f"{name} = {old.get(name, 'missing')} -> {new.get(name, 'missing')}"
        for name in dict.fromkeys((*new, *old))
        if old.get(name) != new.get(name)
    )


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[Difference]:
    """Return the components that differ, in the order of ``after`` and then of ``before``.

    >>> [str(d) for d in differences({"opset": "18", "mode": "None"}, {"opset": "20", "mode": "None"})]
    ['opset: 18 -> 20']
    >>> before, after = {"module a": "1f; scale = 2.0; n = 1"}, {"module a": "3c; scale = 3.0; n = 1"}
    >>> [str(d) for d in differences(before, after)]
    ['module a: scale = 2.0 -> 3.0']
    """
    return [
        Difference(name, before.get(name), after.get(name))
        for name in dict.fromkeys((*after, *before))
        if before.get(name) != after.get(name)
    ]


def nearest(kind: str, name: str, components: Mapping[str, str], entries: Iterable[Listed]) -> Listed | None:
    """Return the entry of a model of that name that differs in the fewest components, or ``None``.

    Args:
        kind: kind of the entry.
        name: class of the model.
        components: the components of the key that is looked up; an entry with these is not considered.
        entries: the entries to choose from.
    """
    candidates = [
        entry
        for entry in entries
        if entry.manifest.kind == kind
        and entry.manifest.name == name
        and entry.manifest.components != components
    ]
    return min(
        candidates, key=lambda entry: len(differences(entry.manifest.components, components)), default=None
    )


def sentence_of_miss(kind: str, name: str, digest: str, components: Mapping[str, str], store: Store) -> str:
    """Return why a store has no entry of a key: the components in which the nearest entry differs.

    Args:
        kind: kind of the entry.
        name: class of the model.
        digest: digest of the key.
        components: components of the key.
        store: the store.
    """
    other = nearest(kind, name, components, store.list_entries())
    if other is None:
        return f"the export cache has no entry for a {name} yet ({digest})"
    changes = "; ".join(map(str, differences(other.manifest.components, components)))
    return (
        f"the export cache has no entry for this {name} ({digest}); the nearest one, "
        f"{other.manifest.digest}, differs in {changes}"
    )


# Functions that are called with the sentence of each miss; see ``python -m torch2ort cache explain SCRIPT``.
on_miss: list[Callable[[str], None]] = []


def _shown(content: str | None) -> str:
    text = content or ""
    is_digest = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return f"{text[:_SHOWN]}..." if is_digest else text
