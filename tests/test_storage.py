"""Files are whole or absent, and a lock ends with its holder, however that ends."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octavo import storage
from octavo.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from octavo.storage import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(folder):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def _kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_name_is_a_path_or_may_be_an_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    for name in ("gpt2", "other/name", "other/name-v1.5", "Other_1/n.a-m_e", "owner"):
        assert not storage.names_a_path(name)
        assert storage.taken_for_a_path(name) == ""
    for name in (
        "./a",
        "../a",
        ".",
        "/a/b",
        "~/a",
        "~",
        "a/b/c",
        "a b",
        "a/",
        "a.json",
        "other/a.JSONL",
        "a.txt.gz",
        "C:\\a",
        "a*",
    ):
        assert storage.names_a_path(name)
        assert storage.taken_for_a_path(name) == ""
    assert storage.names_a_path("owner/name")
    assert "there is a folder 'owner'" in storage.taken_for_a_path("owner/name")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nothing")
    for name, reason in (
        ("file/x", "('file' is a file)"),
        ("file/x/y", "('file' is a file)"),
        ("loop", "('loop' is a symbolic link to nothing, or to itself)"),
        ("loop/x", "('loop' is a symbolic link to nothing, or to itself)"),
        ("gone", "('gone' is a symbolic link to nothing, or to itself)"),
        ("owner/../file/x", "('owner/../file' is a file)"),
    ):
        assert storage.names_a_path(name)
        assert reason in storage.taken_for_a_path(name)


def test_a_fault_of_a_path_has_the_key_of_the_run_file():
    long = re.escape(f"data.source = '{'x' * 80}…' cannot be used: File name too long. Give a shorter path.")
    with pytest.raises(InputError, match=f"^{long}$"), storage.path_of("data.source", "x" * 300):
        Path("x" * 300).stat()
    unknown = "data.folder = '~nobody-here/x' cannot be used: there is no such user"
    with pytest.raises(InputError, match=unknown), storage.path_of("data.folder", "~nobody-here/x"):
        Path("~nobody-here/x").expanduser()


@pytest.mark.parametrize("data", ["text with ü\n", b"\x00\xff", ""])
def test_write_atomic_replaces_all_of_the_old_content(tmp_path, data):
    path = tmp_path / "file"
    path.write_bytes(b"a much longer old content")
    storage.write_atomic(path, data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_write_atomic_that_fails_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        storage.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_fsync_tree_reaches_every_file_and_folder_children_first(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "deep").write_text("1")
    (tmp_path / "top").write_text("2")
    synced = []
    monkeypatch.setattr(storage.os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    storage.fsync_tree(tmp_path)
    names = [os.path.relpath(path, tmp_path) for path in synced]
    assert sorted(names) == [".", "a", "a/b", "a/b/deep", "top"]
    assert names.index("a/b/deep") < names.index("a/b") < names.index("a") < names.index(".")


def test_sha256_file_is_that_of_the_bytes(tmp_path):
    data = os.urandom(3_000_001)
    (tmp_path / "file").write_bytes(data)
    assert storage.sha256_file(tmp_path / "file") == hashlib.sha256(data).hexdigest()


def test_free_bytes_of_a_folder_that_does_not_exist_yet(tmp_path):
    assert storage.free_bytes(tmp_path / "not" / "yet") == pytest.approx(storage.free_bytes(tmp_path), rel=0.1)


def test_lock_names_its_holder_and_ends_when_it_is_killed(tmp_path):
    folder = tmp_path / "run"
    process = _holder(folder)
    try:
        holder = json.loads((folder / ".lock").read_text())
        assert holder["pid"] == process.pid
        with pytest.raises(InputError) as caught, storage.FolderLock(folder):
            pass
        for part in (str(folder), f"pid {process.pid}", socket.gethostname(), holder["started"]):
            assert part in str(caught.value)
    finally:
        _kill(process)
    with storage.FolderLock(folder):
        assert json.loads((folder / ".lock").read_text())["pid"] == os.getpid()


def test_lock_is_exclusive_within_a_process_and_can_be_taken_again(tmp_path):
    lock = storage.FolderLock(tmp_path)
    for _ in range(2):
        with lock, pytest.raises(InputError, match=f"pid {os.getpid()}"), storage.FolderLock(tmp_path):
            pass


def test_lock_waits_for_its_holder(tmp_path):
    process = _holder(tmp_path)
    begun = time.monotonic()
    with pytest.raises(InputError), storage.FolderLock(tmp_path, wait_seconds=0.3):
        pass
    assert time.monotonic() - begun >= 0.3
    _kill(process)
    with storage.FolderLock(tmp_path, wait_seconds=100):
        pass


def test_lock_whose_folder_was_removed_by_the_holder_is_not_held_twice(tmp_path):
    folder = tmp_path / "scratch"
    with storage.FolderLock(folder):
        (folder / ".lock").unlink()
        folder.rmdir()
        with storage.FolderLock(folder), pytest.raises(InputError), storage.FolderLock(folder):
            pass


def test_lock_waits_for_a_holder_that_removes_the_folder(tmp_path):
    folder, obtained = tmp_path / "scratch", []

    def wait():
        with storage.FolderLock(folder, wait_seconds=100):
            obtained.append(json.loads((folder / ".lock").read_text())["pid"])

    waiting = threading.Thread(target=wait)
    with storage.FolderLock(folder):
        waiting.start()
        waiting.join(0.3)
        assert not obtained
        shutil.rmtree(folder)
        waiting.join(0.3)
    waiting.join()
    assert obtained == [os.getpid()]


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    """The parent forks while it holds the lock and is killed; the child lives on."""
    program = HOLD.replace(
        "print",
        "import os\n    child = os.fork()\n    if child == 0:\n        time.sleep(60)\n    print(child, flush=True)\n    print",
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InputError), storage.FolderLock(tmp_path):
        pass
    _kill(process)
    try:
        with storage.FolderLock(tmp_path, wait_seconds=100):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
