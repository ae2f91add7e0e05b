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
import torch

from octavo import storage
from octavo.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from octavo.storage import FolderLock
with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(99)
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
        ("loop", "('loop' is a broken symbolic link)"),
        ("loop/x", "('loop' is a broken symbolic link)"),
        ("gone", "('gone' is a broken symbolic link)"),
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://bucket/run-1", r"an address \(s3:\).*Give a path, such as 'run-1', and copy.*'\./s3://bucket/run-1'\.$"),
        ("S3://bucket/", r"an address \(S3:\).*such as 'bucket'"),
        ("s3:/bucket/run", r"an address \(s3:\)"),  # a pathlib.Path has taken a slash
        ("s3:", r"an address \(s3:\).*such as 'run'"),
        (" s3://bucket", r"an address \(s3:\)"),
        ("gs://b/x", r"an address \(gs:\)"),
        ("az://b/x", r"an address \(az:\)"),
        ("hdfs+x://b/x", r"an address \(hdfs\+x:\)"),
        ("dbfs:/x", r"an address \(dbfs:\)"),
        ("simplecache::s3://b/x", r"an address \(simplecache:\)"),
        ("host-1:/home/x", r"an address \(host-1:\)"),
        ("https://example.com/a/b", r"an address \(https:\)"),
        ("hf://datasets/a/b/c", r"an address \(hf:\)"),
        ("file:///tmp/a%20b", r"write the path itself, '/tmp/a b'"),
        ("file:/tmp/a", r"write the path itself, '/tmp/a'"),
        ("file://localhost/tmp/a", r"write the path itself, '/tmp/a'"),
        ("FILE://data/a", r"write the path itself, 'data/a'"),
        ("file://", r"write the path itself, '\.'"),
        ("C:\\runs", r"a Windows path: .* such as '/mnt/c/…'"),
        ("", "it is empty"),
        (" \t", "it is empty"),
        ("a\0b", "a null byte"),
    ],
)
def test_an_address_is_no_path(text, said):
    assert re.search(said, storage.path_fault(text))
    with pytest.raises(InputError, match=f"(?s)^octavo.save: path = .*{said}"):
        storage.local_path(text, "octavo.save: path")


def test_a_variable_that_no_shell_has_replaced_is_no_path(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("ELSEWHERE", raising=False)
    for text in ("$SCRATCH/run", "${SCRATCH}/run"):
        with pytest.raises(
            InputError, match=re.escape("is a variable, which a shell expands and Octavo does not: write '/scratch/me/run'")
        ):
            storage.local_path(text, "train.output")
    with pytest.raises(
        InputError, match=re.escape("$ELSEWHERE is a variable, which a shell expands and Octavo does not: it is not set")
    ):
        storage.local_path("$ELSEWHERE", "--to")
    for text in ("./$SCRATCH/run", "costs-$5/run", "$5", "a$b"):
        assert storage.local_path(text, "--to") == Path(text)


def test_addresses_of_the_hub_are_ids_where_ids_are_taken():
    for address in (
        "hf://owner/name",
        "hf://datasets/owner/name",
        "https://huggingface.co/owner/name/",
        "https://hf.co/owner/name",
    ):
        assert storage.path_fault(address, hub=True) == "it is an address: write the id itself, 'owner/name'."
        assert "only local file systems" in storage.path_fault(address)
    assert "only local file systems" in storage.path_fault("https://example.com/owner/name", hub=True)


def test_paths_are_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for text in ("runs/a", "/a/b", "./s3:/b", "a:b", "a b", "run-12:30", "/s3:/b", ".", "python:docstrings", "..", "1a://x"):
        assert storage.path_fault(text) == ""
        assert storage.local_path(text, "--to") == Path(text)
    assert storage.local_path("~/x", "--to") == storage.local_path(Path("~/x"), "--to") == tmp_path / "x"
    with pytest.raises(InputError, match="--to '~nobody-here/x' cannot be used"):
        storage.local_path("~nobody-here/x", "--to")
    for other in (None, 3, b"x", ["x"]):
        with pytest.raises(InputError, match=r"octavo\.save: path = .* is not a path\. Give a string or a Path\."):
            storage.local_path(other, "octavo.save: path")


def test_a_file_where_a_folder_is_meant(tmp_path, monkeypatch):
    import octavo
    from octavo.compat.smp import checkpoint

    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    for path in ("file", "file/x"):
        for name, function in (
            ("octavo.save", lambda path: octavo.save(path, torch.nn.Linear(1, 1))),
            ("save", lambda path: checkpoint.save({"a": torch.ones(1)}, checkpoint_id=path)),
            ("save", lambda path: checkpoint.async_save({"a": torch.ones(1)}, checkpoint_id=path)),
        ):
            with pytest.raises(InputError, match=rf"^{name}: .*file.* (is a file|is not a checkpoint)"):
                function(path)
    assert Path("file").read_text() == "x"


@pytest.mark.filterwarnings("ignore:fsync not supported:UserWarning")  # of files in memory
def test_addresses_of_smp_checkpoints_go_through_fsspec(tmp_path, monkeypatch):
    from octavo.compat.smp import checkpoint

    monkeypatch.setenv("HOME", str(tmp_path))
    for place in (f"file://{tmp_path}/a", f"FILE://{tmp_path}/b", "~/c", tmp_path / "d", "memory://e"):
        checkpoint.save({"a": torch.ones(2)}, checkpoint_id=place)
        read = {"a": torch.zeros(2)}
        checkpoint.load(read, checkpoint_id=place)
        assert read["a"].tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]
    with pytest.raises(InputError, match=r"checkpoint_id = 'xyz://b': ValueError: Protocol not known: xyz"):
        checkpoint.save({"a": torch.ones(2)}, checkpoint_id="xyz://b")


def python_functions():
    """Every public function with a path, by its name in messages."""
    import octavo
    from octavo.compat.sagemaker.estimator import PyTorch
    from octavo.compat.smp import checkpoint, init, subfolders
    from octavo.config.run import RunConfig
    from octavo.run.sample import sample

    model = torch.nn.Linear(4, 4)
    estimator = {"entry_point": __file__, "instance_type": "local"}
    sections = {"model": {"source": "llama-tiny"}, "train": {"steps": 1, "global_batch": 1}}
    return {
        "octavo.save: path": lambda path: octavo.save(path, model),
        "octavo.load: path": lambda path: octavo.load(path, model),
        "octavo.export: folder": lambda path: octavo.export(model, path),
        "octavo.export: model_or_path": lambda path: octavo.export(path, "x"),
        "octavo.transform: load_from": lambda path: octavo.transform(model, load_from=path),
        "octavo.init: config": octavo.init,
        "run file": lambda path: octavo.Trainer(path),
        "run file ": lambda path: RunConfig.from_file(path),
        "train.output": lambda path: octavo.Trainer(
            **{**sections, "data": DATA, "train": {**sections["train"], "output": path}}
        ),
        "data.folder": lambda path: octavo.Trainer(**sections, data={**DATA, "folder": path}),
        "data.source": lambda path: octavo.Trainer(**sections, data={**DATA, "source": path}),
        "data.source ": lambda path: octavo.Trainer(**sections, data={**DATA, "source": ["a", path]}),
        "data.validation_source": lambda path: octavo.Trainer(**sections, data={**DATA, "validation_source": path}),
        "data.tokenizer": lambda path: octavo.Trainer(**sections, data={**DATA, "tokenizer": path}),
        "model.source": lambda path: octavo.Trainer(**{**sections, "data": DATA, "model": {"source": path}}),
        "RUN": sample,
        "torch.sagemaker.init: config": init.init,
        "limit_num_subdirs: root": lambda path: subfolders.limit_num_subdirs(path, 1),
        "entry_point": lambda path: PyTorch(**{**estimator, "entry_point": path}),
        "output_path": lambda path: PyTorch(**estimator, output_path=Path(path)),
        "dependencies": lambda path: PyTorch(**estimator, dependencies=[path]),
        "checkpoint_id": lambda path: checkpoint.save({"a": torch.ones(1)}, checkpoint_id=Path(path)),
        "checkpoint_id ": lambda path: checkpoint.async_save({"a": torch.ones(1)}, checkpoint_id=Path(path)),
        "checkpoint_id  ": lambda path: checkpoint.load({"a": torch.ones(1)}, checkpoint_id=Path(path)),
    }


DATA = {"source": "python:docstrings", "sequence_length": 8}


def test_no_function_takes_an_address_for_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, function in python_functions().items():
        for address in ("s3://b/run", "gs://b/run", "s3:/b/run", "HDFS://b/run"):
            with pytest.raises(InputError, match=rf"{re.escape(name.strip())} = .*{address[:2]}.*address"):
                function(address)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train", "{}"], "run file"),
        (["train", "RUN", "train.output={}"], "train.output"),
        (["train", "RUN", "--dry-run", "data.folder={}"], "data.folder"),
        (["prepare", "RUN", "--channels", "{}"], "--channels"),
        (["describe", "{}"], "RUN"),
        (["export", "runs", "--to", "{}"], "--to"),
        (["export", "{}", "--to", "x"], "RUN"),
        (["sample", "{}"], "RUN"),
        (["compare", "a", "{}"], "RUN"),
        (["compare", "a", "b", "--plot", "{}"], "--plot"),
        (["bench", "layers", "--output", "{}"], "--output"),
        (["migrate", "{}"], "SCRIPT"),
        (["migrate", "RUN", "--run-file", "{}"], "--run-file"),
    ],
)
@pytest.mark.parametrize("address", ["s3://b/run", "file:///b/run.py", "gs:/b", "", " "])
def test_no_command_takes_an_address_for_a_folder(tmp_path, monkeypatch, capsys, command, name, address):
    from octavo.cli import main

    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run.toml"
    run.write_text(
        'model.source = "llama-tiny"\ndata.source = "x.txt"\ndata.sequence_length = 8\ntrain = {steps = 1, global_batch = 1}'
    )
    assert main([part.replace("{}", address).replace("RUN", str(run)) for part in command]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "empty" in said or "no value" in said if not address.strip() else "address" in said
    assert list(tmp_path.iterdir()) == [run]


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
        "import os\n    child = os.fork()\n    if child == 0:\n        time.sleep(99)\n    print(child, flush=True)\n    print",
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


def test_a_folder_that_its_last_holder_removes_is_locked_without_waiting(tmp_path, monkeypatch):
    lock = storage.FolderLock(tmp_path / "run")
    acquire, faults = lock._lock.acquire, [FileNotFoundError]

    def once(*arguments):
        if faults:
            raise faults.pop()
        return acquire(*arguments)

    monkeypatch.setattr(lock._lock, "acquire", once)
    with lock:
        assert (tmp_path / "run" / ".lock").is_file()
