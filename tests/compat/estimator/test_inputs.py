"""Channels: addresses of every form as folders of files, and results that are sent away."""

import fsspec
import pytest

from octavo.compat.sagemaker.inputs import addresses, lay
from octavo.errors import InputError
from octavo.launch import TrainingInput
from octavo.launch.addresses import check_address, local_path, send


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_addresses_of_every_form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    sdk = type("Input", (), {"config": {"DataSource": {"S3DataSource": {"S3Uri": "s3://bucket/train"}}}})()
    found = addresses({"train": "data", "test": TrainingInput("s3://b/c", distribution="FullyReplicated"), "more": sdk})
    assert found == {"train": str(tmp_path / "data"), "test": "s3://b/c", "more": "s3://bucket/train"}
    assert addresses(f"file://{tmp_path}/data") == {"training": f"{tmp_path}/data"}
    assert addresses(tmp_path / "data") == {"training": f"{tmp_path}/data"}
    assert addresses(None) == {}
    assert local_path("file:///a%20b", "x").as_posix() == "/a b"


@pytest.mark.parametrize(
    ("inputs", "part"),
    [
        ("nowhere", "'nowhere' does not exist"),
        ("file:///no/where", "does not exist"),
        ("file://data/train", "names the host 'data'"),
        ({"../train": "."}, "'../train' is not a valid channel name"),
        ({"train": ".", "TRAIN": "."}, "SM_CHANNEL_TRAIN"),
        ({"train": 3}, "inputs['train'] = 3"),
        ({"train": type("FileSystem", (), {"config": {"DataSource": {"FileSystemDataSource": {}}}})()}, "mount it"),
    ],
)
def test_what_is_no_channel_is_refused(inputs, part):
    with pytest.raises(InputError) as refused:
        addresses(inputs)
    assert part in str(refused.value)


@pytest.mark.parametrize("other", [{"s3_data_type": "ManifestFile"}, {"input_mode": "Pipe"}, {"compression": "Gzip"}, {"x": 1}])
def test_another_kind_of_channel_is_refused(other):
    with pytest.raises(InputError):
        TrainingInput("s3://b/c", **other)


def test_local_channels_are_links_and_remote_ones_copies(tmp_path, memory):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text("a")
    laid = tmp_path / "job"
    laid.mkdir()
    assert (lay("train", str(tmp_path / "folder"), laid) / "a.json").read_text() == "a"
    assert [path.name for path in lay("one", str(tmp_path / "folder" / "a.json"), laid).iterdir()] == ["a.json"]
    memory.pipe("/bucket/train/x.json", b"x")
    memory.pipe("/bucket/train/deep/y.json", b"y")
    memory.pipe("/bucket/training/z.json", b"z")
    found = lay("far", "memory://bucket/train", laid)
    assert sorted(path.relative_to(found).as_posix() for path in found.rglob("*.json")) == ["deep/y.json", "x.json"]
    assert (found / "deep" / "y.json").read_bytes() == b"y"
    assert (lay("file", "memory://bucket/train/x.json", laid) / "x.json").read_bytes() == b"x"
    with pytest.raises(InputError, match=r"memory://bucket/none' (holds no file|cannot be read)"):
        lay("none", "memory://bucket/none", laid)


def test_a_file_outside_of_its_channel_is_refused(tmp_path, memory):
    memory.store["/bucket/train/../../up.json"] = memory.open("/bucket/x", "wb")
    memory.find = lambda root: ["/bucket/train/../../up.json"]
    try:
        with pytest.raises(InputError, match="outside of its channel"):
            lay("train", "memory://bucket/train", tmp_path)
    finally:
        del memory.find


def test_results_are_sent(tmp_path, memory):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights").write_bytes(b"w")
    send(tmp_path, "memory://results/job/model")
    assert memory.cat("/results/job/model/deep/weights") == b"w"


def test_an_unknown_kind_of_address_is_refused():
    with pytest.raises(InputError, match="Give a folder, file://"):
        check_address("nonsense://x", "output_path")
