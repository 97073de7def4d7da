"""Manifest of an entry of the store: a JSON file that reveals any change to the entry."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = "torch2ort.cache"
VERSION = 1
FILE = "manifest.json"


class DamagedError(Exception):
    """An entry differs from what was written; the message is a clause."""


@dataclass(frozen=True)
class Manifest:
    """Description of one entry.

    Attributes:
        digest: the entry's name: digest of its key.
        kind: kind of the entry: ``"graph"``, ``"gradient graph"``, ``"inference graph"``.
        name: class of the model, for people.
        created: seconds since 1970.
        components: the components of the key.
        data: content for the code that wrote the entry; any JSON object.
        files: name -> sha256 of the content.
    """

    digest: str
    kind: str
    name: str
    created: float
    components: Mapping[str, str]
    data: Mapping[str, Any]
    files: Mapping[str, str]

    def to_bytes(self) -> bytes:
        """Return the file's content: the manifest and its sha256."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        text = json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=0).encode()
        return b"".join((*_frame(text), text, _END))

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """Return the manifest that :meth:`to_bytes` wrote.

        Raises:
            DamagedError: ``content`` differs from what was written, or is of another version.
        """
        text = content[_START : -len(_END)]
        # The digest covers every byte, so no change to the file goes undetected.
        if content != b"".join((*_frame(text), text, _END)):
            raise DamagedError("its manifest was changed")
        try:
            fields = json.loads(text)
            kind = (fields.pop("format"), fields.pop("version"))
            if kind != (FORMAT, VERSION):
                raise DamagedError(f"its manifest is {kind[0]!r} of version {kind[1]!r}")
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"its manifest cannot be read ({type(error).__name__}: {error})") from error


def sha256(content: bytes) -> str:
    """Return the hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def _frame(text: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the prefix of a manifest's text: the start of a JSON object, with the text's digest."""
    return b'{"sha256": "', sha256(text).encode(), b'", "manifest":\n'


_END = b"}\n"
_START = sum(map(len, _frame(b"")))
