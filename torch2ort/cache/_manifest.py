"""What an entry of the store says about itself: a JSON file that shows any change to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        text = _canonical({"format": FORMAT, "version": VERSION, **asdict(self)})
        return _canonical({"manifest": json.loads(text), "sha256": sha256(text)})

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """The manifest that :meth:`to_bytes` wrote.

        Raises:
            DamagedError: ``content`` differs from what was written, or is of another version.
        """
        try:
            fields = json.loads(content)["manifest"]
            kind = (fields.pop("format"), fields.pop("version"))
            if kind != (FORMAT, VERSION):
                raise DamagedError(f"its manifest is {kind[0]!r} of version {kind[1]!r}")
            manifest = cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"its manifest cannot be read ({type(error).__name__}: {error})") from error
        # Written again it must be the same bytes; so nothing in the file can change unseen.
        if manifest.to_bytes() != content:
            raise DamagedError("its manifest was changed")
        return manifest


def sha256(content: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(content).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, indent=0, ensure_ascii=True).encode()
