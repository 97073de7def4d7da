"""What an entry of the store says about itself: a JSON file that shows any change to it."""

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
    """An entry is not as it was written; the message is a clause."""


@dataclass(frozen=True)
class Manifest:
    """Description of one entry.

    Attributes:
        digest: the entry's name: digest of its key.
        kind: what is kept: ``"graph"``, ``"gradient graph"``, ``"inference graph"``.
        name: class of the model, for people.
        created: seconds since 1970.
        components: what the key was made of.
        data: content for those who wrote it; any JSON object.
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
        """The file's content: the manifest, and a sha256 of it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        text = json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=0).encode()
        return b"".join((*_frame(text), text, _END))

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """The manifest that :meth:`to_bytes` wrote.

        Raises:
            DamagedError: ``content`` differs from what was written, or is of another version.
        """
        text = content[_START : -len(_END)]
        # The digest is of the very bytes, so nothing in the file can change unseen.
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
    """Hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def _frame(text: bytes) -> tuple[bytes, bytes, bytes]:
    """What stands in front of a manifest's text: a JSON object with the text's digest."""
    return b'{"sha256": "', sha256(text).encode(), b'", "manifest":\n'


_END = b"}\n"
_START = sum(map(len, _frame(b"")))
