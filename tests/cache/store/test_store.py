"""Entries are complete or absent, whatever is killed, full, truncated or changed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import random
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from torch2ort.cache.key.key import Key
from torch2ort.cache.store import manifest as _manifest
from torch2ort.cache.store.graph_entries import EntryContent, GraphEntries
from torch2ort.cache.store.manifest import Manifest, sha256
from torch2ort.cache.store.store import RefusedError, Store, manifest_of
from torch2ort.errors import Torch2OrtWarning

DIGEST = "a" * 64
CONTENT = {"graph.onnx": bytes(range(256)) * 8, "more.bin": b"x" * 100}


def write(store: Store, digest: str = DIGEST, content: dict[str, bytes] = CONTENT, **data) -> None:
    store.write(manifest_of(digest, "graph", "Net", {"opset": "18"}, data), content)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def entry(store: Store, tmp_path: Path) -> Path:
    write(store)
    return tmp_path / "cache" / "v1" / DIGEST


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_is_read_as_it_was_written(store):
    write(store, inputs=["x"], count=3)
    read = store.read(DIGEST)
    assert read.files == CONTENT
    assert (read.manifest.kind, read.manifest.name) == ("graph", "Net")
    assert read.manifest.components == {"opset": "18"}
    assert read.manifest.data == {"inputs": ["x"], "count": 3}


def test_what_is_not_there_is_none(store):
    assert store.read(DIGEST) is None


def test_the_first_writer_wins(store):
    write(store, writer="first")
    write(store, writer="second")
    assert store.read(DIGEST).manifest.data == {"writer": "first"}


def test_only_the_owner_may_look(store, entry, tmp_path):
    with store.lock(DIGEST):
        paths = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(RefusedError) as caught:
        Store(folder)
    assert str(caught.value) == (
        f"the export cache is not used, because the directory {folder} can be written to by others (mode "
        f"0770), expected 0700; run `chmod go-w` on it."
    )


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(RefusedError) as caught:
        Store(tmp_path / "cache")
    assert str(caught.value) == (
        f"the export cache is not used, because the directory {tmp_path / 'cache'} belongs to user {owner}, "
        f"expected user {owner + 1}."
    )


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RefusedError, match="is not used, because its directory cannot be made: "):
        Store(file / "cache")


def test_a_file_that_others_can_write_to_is_damage(store, entry):
    (entry / "graph.onnx").chmod(0o666)
    with pytest.warns(Torch2OrtWarning, match="the file graph.onnx can be written to by others"):
        assert store.read(DIGEST) is None


def test_a_link_is_damage(store, entry, tmp_path):
    target = tmp_path / "target"
    shutil.move(entry / "graph.onnx", target)
    (entry / "graph.onnx").symlink_to(target)
    with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
        assert store.read(DIGEST) is None


def test_the_warning_says_which_entry_and_what(store, entry):
    (entry / "more.bin").write_bytes(b"y" * 100)
    with pytest.warns(Torch2OrtWarning) as caught:
        assert store.read(DIGEST) is None
    assert str(caught[0].message) == (
        f"the export cache's entry {entry} is damaged and is made again: its file more.bin was changed."
    )


@pytest.mark.parametrize("name", ["manifest.json", *CONTENT])
def test_a_flipped_bit_anywhere_is_damage(store, entry, name):
    original = (entry / name).read_bytes()
    bits = range(8 * len(original))
    for bit in random.Random(1).sample(bits, 25):
        data = bytearray(original)
        data[bit // 8] ^= 1 << (bit % 8)
        (entry / name).write_bytes(data)
        with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
            assert store.read(DIGEST) is None, f"bit {bit} of {name}"
        assert not entry.exists()
        write(store)
        assert store.read(DIGEST).files == CONTENT


@pytest.mark.parametrize("name", ["manifest.json", *CONTENT])
def test_a_truncated_or_missing_file_is_damage(store, entry, name):
    original = (entry / name).read_bytes()
    for length in (None, 0, 1, len(original) // 2, len(original) - 1):
        if length is None:
            (entry / name).unlink()
        else:
            (entry / name).write_bytes(original[:length])
        with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
            assert store.read(DIGEST) is None, f"{name} cut to {length}"
        write(store)


def test_an_entry_under_another_name_is_damage(store, entry):
    other = "b" * 64
    shutil.copytree(entry, entry.with_name(other))
    with pytest.warns(Torch2OrtWarning, match=f"its manifest is that of {DIGEST}"):
        assert store.read(other) is None
    assert store.read(DIGEST).files == CONTENT


def test_the_manifest_is_json(entry):
    document = json.loads((entry / "manifest.json").read_bytes())
    assert document["manifest"]["digest"] == DIGEST


def test_an_entry_of_another_version_is_damage(store, entry, monkeypatch):
    manifest = store.read(DIGEST).manifest
    with monkeypatch.context() as patch:
        patch.setattr(_manifest, "VERSION", 2)
        (entry / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.warns(Torch2OrtWarning, match="its manifest is 'torch2ort.cache' of version 2"):
        assert store.read(DIGEST) is None


def test_a_foreign_folder_is_damage(store, tmp_path):
    (tmp_path / "cache" / "v1" / DIGEST).mkdir(mode=0o700)
    with pytest.warns(Torch2OrtWarning, match="is damaged and is made again"):
        assert store.read(DIGEST) is None


def test_a_manifest_cannot_lead_outside(store, entry, tmp_path):
    (tmp_path / "secret").write_bytes(b"secret")
    manifest = store.read(DIGEST).manifest
    crafted = Manifest(**{**vars(manifest), "files": {"../../../secret": sha256(b"secret")}})
    (entry / "manifest.json").write_bytes(crafted.to_bytes())
    with pytest.warns(Torch2OrtWarning, match=r"its manifest names the file '\.\./\.\./\.\./secret'"):
        assert store.read(DIGEST) is None


# --- the limit


def test_the_entry_that_was_not_used_for_longest_goes_first(tmp_path):
    store = Store(tmp_path, limit=3000)
    for age, letter in enumerate("cba"):
        write(store, letter * 64, {"file": b"x" * 900})
        past = time.time() - 100 * (age + 1)
        os.utime(tmp_path / "v1" / (letter * 64), (past, past))
    assert store.read("a" * 64) is not None  # the oldest entry, but used now
    write(store, "d" * 64, {"file": b"x" * 900})
    assert [entry.manifest.digest[0] for entry in store.list_entries()] == ["d", "a"]


def test_an_entry_over_the_limit_is_not_written(tmp_path):
    store = Store(tmp_path, limit=1000)
    with pytest.raises(RefusedError) as caught:
        write(store, content={"file": b"x" * 1001})
    assert str(caught.value) == (
        "the graph of Net has 1001 bytes, more than the export cache may take (1000); raise cache_limit."
    )
    assert store.list_entries() == []


def test_listed_tells_size_and_last_use(store, entry):
    (listed,) = store.list_entries()
    assert listed.manifest.digest == DIGEST
    assert listed.size == sum(path.stat().st_size for path in entry.iterdir())
    assert abs(listed.used - time.time()) < 60


def test_clear_removes_everything(store, entry, tmp_path):
    size = sum(path.stat().st_size for path in entry.iterdir())
    with store.lock(DIGEST):
        pass
    assert store.clear() == (1, size)
    assert names(tmp_path / "cache" / "v1") == []


# --- one writer


def test_the_lock_is_for_one(store):
    with store.lock(DIGEST) as first, store.lock(DIGEST, seconds=0.05) as second:
        assert (first, second) == (True, False)
    with store.lock(DIGEST, seconds=0.05) as third:
        assert third


def test_an_error_of_the_maker_frees_the_lock(store):
    with pytest.raises(KeyError), store.lock(DIGEST):
        raise KeyError
    with store.lock(DIGEST, seconds=0.05) as locked:
        assert locked


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; returns its id."""
    child = os.fork()
    if child == 0:
        _exit_with(work)
    return child


def _exit_with(work: Callable[[], None]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_eight_processes_make_an_entry_once(store, tmp_path):
    graph_entries = GraphEntries(store, Key.of("Net", {"opset": "18"}))
    made, read = tmp_path / "made", tmp_path / "read"
    read.mkdir()

    def obtain() -> None:
        def make() -> EntryContent:
            time.sleep(0.3)
            with made.open("a") as stream:
                stream.write(f"{os.getpid()}\n")
            return EntryContent({"by": os.getpid()}, CONTENT)

        kept = graph_entries.obtain("gradient graph", {}, make)
        assert kept.files == CONTENT
        (read / str(os.getpid())).write_text(str(kept.data["by"]))

    children = [in_child(obtain) for _ in range(8)]
    assert [exit_code(child) for child in children] == [0] * 8
    assert len(made.read_text().splitlines()) == 1
    assert {path.read_text() for path in read.iterdir()} == {made.read_text().strip()}
    assert len(names(read)) == 8


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(store, tmp_path):
    folder = tmp_path / "cache" / "v1"
    chance = random.Random(1)

    def write_on(first: int, tell: int) -> None:
        for number in itertools.count(first):
            digest = f"{number:064x}"
            with store.lock(digest):
                write(store, digest, {"first": os.urandom(1 << 16), "second": os.urandom(1 << 16)})
            os.write(tell, b".")

    for round_ in range(50):
        ready, tell = os.pipe()
        child = in_child(functools.partial(write_on, round_ << 32, tell))
        os.read(ready, 1)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        os.close(ready)
        os.close(tell)
    written = [path.name for path in folder.iterdir() if len(path.name) == 64]
    assert len(written) >= 50
    assert {entry.manifest.digest for entry in store.list_entries()} == set(written)
    assert all(store.read(digest) is not None for digest in written)
    for leftover in folder.glob(".*.tmp"):
        digest = leftover.name.split(".")[1]
        with store.lock(digest, seconds=5) as locked:  # the kernel freed it
            assert locked
        assert not leftover.exists()


# --- disks that refuse the write


def test_a_full_disk_refuses_the_entry(store, tmp_path):
    def write_on_a_full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with pytest.raises(RefusedError, match="the export cache could not be written"):
            write(store)
        assert store.read(DIGEST) is None

    assert exit_code(in_child(write_on_a_full_disk)) == 0
    assert names(tmp_path / "cache" / "v1") == []


def without_privileges() -> None:
    """Give up every capability of root, so that the mode of files counts."""
    version_3 = 0x20080522
    header, no_capabilities = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, no_capabilities) == 0


def test_a_folder_that_is_only_read_serves_what_is_there(store, entry, tmp_path):
    folder = tmp_path / "cache" / "v1"

    def use() -> None:
        without_privileges()
        reader = Store(tmp_path / "cache")
        assert reader.read(DIGEST).files == CONTENT
        with reader.lock("b" * 64, seconds=1) as locked:
            assert not locked
        with pytest.raises(RefusedError, match="the export cache could not be written"):
            write(reader, "b" * 64)

    folder.chmod(0o500)
    try:
        assert exit_code(in_child(use)) == 0
    finally:
        folder.chmod(0o700)
    assert names(folder) == [DIGEST]


def test_damage_in_a_folder_that_is_only_read_is_a_warning(store, entry, tmp_path):
    (entry / "more.bin").write_bytes(b"")

    def use() -> None:
        without_privileges()
        with pytest.warns(Torch2OrtWarning, match="is damaged"):
            assert Store(tmp_path / "cache").read(DIGEST) is None

    entry.parent.chmod(0o500)
    try:
        assert exit_code(in_child(use)) == 0
    finally:
        entry.parent.chmod(0o700)
