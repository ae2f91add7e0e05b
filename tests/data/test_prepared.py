"""Prepared data is what the corpus says, is found again, notices changes, and is whole or absent."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from octavo.config.data import DataConfig
from octavo.data import build, document_store, pieces, prepared
from octavo.data.loader import sequences_of
from octavo.data.prepared import check_vocabulary, folder_of, prepare, prepared_or_none
from octavo.errors import InputError, OctavoError

SPLITS = ("train", "validation")


def _documents(data, split):
    tokens, offsets = data.tokens(split), data.offsets(split).astype(int)
    return [tokens[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def _counts(data, kind):
    return {split: getattr(counts, kind) for split, counts in data.manifest.splits.items()}


def _texts(data, split):
    decoder = Tokenizer.from_file(str(data.tokenizer_folder / "tokenizer.json"))
    return [decoder.decode(ids[:-1], skip_special_tokens=False) for ids in _documents(data, split)]


def _source(path):
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.fixture
def notices():
    return Console(file=io.StringIO(), record=True, width=500)


def test_every_document_is_in_one_split_and_decodes_to_its_text(lines, config):
    data = prepare(config(lines))
    found = {split: _texts(data, split) for split in SPLITS}
    assert _counts(data, "documents") == {"train": 48, "validation": 12}
    assert sorted(found["train"] + found["validation"]) == sorted(_source(lines))
    for split in SPLITS:  # in the order of the corpus
        assert found[split] == [text for text in _source(lines) if text in found[split]]
        assert all(ids[-1] == data.manifest.end_token_id for ids in _documents(data, split))
        assert _counts(data, "tokens")[split] == len(data.tokens(split))
        assert data.tokens(split).dtype == np.dtype("<u2")
    largest = max(int(data.tokens(split).max()) for split in SPLITS)
    assert (data.manifest.max_token_id, data.manifest.vocab_size) == (largest, 350)


def test_the_second_call_finds_what_the_first_made(lines, config, monkeypatch):
    first = prepare(config(lines))
    assert [entry.name for entry in first.folder.parent.iterdir()] == [first.folder.name]  # no scratch is left
    monkeypatch.setattr("octavo.data.prepared.build", None)
    assert prepare(config(lines)) == first
    other = prepare(config(lines, sequence_length=64, packing="documents"))  # tokens are stored unpacked
    assert other == first
    assert prepared_or_none(config(lines)) == first


def test_the_manifest_says_what_is_there(lines, config):
    data = prepare(config(lines))
    manifest = json.loads((data.folder / "manifest.json").read_text())
    (source,) = manifest["sources"]
    assert (source["path"], source["size"]) == (str(lines), lines.stat().st_size)
    assert set(manifest["files"]) == {
        *(f"{split}{end}" for split in SPLITS for end in (".bin", ".offsets.bin")),
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    }
    assert manifest["splits"]["train"] == {"documents": 48, "tokens": _counts(data, "tokens")["train"]}


def test_the_fingerprint_is_of_the_data_alone(tmp_path, lines, config):
    first = prepare(config(lines))
    assert prepare(config(lines, folder=str(tmp_path / "elsewhere"))).manifest.fingerprint == first.manifest.fingerprint
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(lines.read_bytes())
    assert prepare(config(copy)).manifest.fingerprint == first.manifest.fingerprint
    for change in ({"seed": 1}, {"vocab_size": 300}, {"max_documents": 59}, {"validation_fraction": 0.5}):
        assert prepare(config(lines, **change)).manifest.fingerprint != first.manifest.fingerprint


def test_documents_are_taken_by_count_with_a_seed(lines, config):
    def taken(**changes):
        data = prepare(config(lines, max_documents=20, **changes))
        assert _counts(data, "documents") == {"train": 16, "validation": 4}
        return sorted(_texts(data, "train") + _texts(data, "validation"))

    assert taken(seed=1) != taken(seed=2)
    assert set(taken(seed=1)) <= set(_source(lines))
    assert len(set(taken(seed=1))) == 20
    assert _counts(prepare(config(lines, max_documents=1000)), "documents") == {"train": 48, "validation": 12}


def test_documents_are_drawn_with_equal_chance(tmp_path):
    from octavo.data.document_store import DocumentStore, collect
    from octavo.data.readers import Document

    counts = np.zeros(12, int)
    for seed in range(1500):
        documents = [Document(str(i), None, "") for i in range(12)]
        with DocumentStore(tmp_path / "documents") as store:
            numbers = collect(store, documents, count=3, seed=seed, max_bytes=None)
            store.seal()
            chosen = [int(text) for text in store.texts(numbers)]
        assert chosen == sorted(set(chosen))
        counts[chosen] += 1
    assert (np.abs(counts - 375) < 90).all()  # five standard deviations


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_max_tokens_is_shared_by_the_splits(lines, config, fraction, monkeypatch):
    monkeypatch.setattr(build, "_LONGEST_TOKEN", 10**6)
    whole = prepare(config(lines, validation_fraction=fraction))
    data = prepare(config(lines, validation_fraction=fraction, max_tokens=200))
    assert _counts(data, "tokens") == {"train": 160, "validation": 40} if fraction else {"train": 200, "validation": 0}
    for split in SPLITS:
        count = _counts(data, "tokens")[split]
        assert data.tokens(split).tolist() == whole.tokens(split)[:count].tolist()
        assert data.offsets(split)[-1] == count


def test_reading_stops_when_there_is_text_enough_for_max_tokens(lines, config, monkeypatch):
    read = []
    append = build.DocumentStore.append
    monkeypatch.setattr(
        build.DocumentStore, "append", lambda self, document: read.append(document.text) or append(self, document)
    )
    data = prepare(config(lines, max_tokens=100))
    assert sum(_counts(data, "tokens").values()) == 100
    assert sum(len(text.encode()) for text in read[:-1]) < 3200 <= sum(len(text.encode()) for text in read)
    assert read == _source(lines)[: len(read)]


def test_max_tokens_too_small_for_two_splits(lines, config):
    with pytest.raises(InputError, match=r"max_tokens = 3 .*at least 4.*validation_fraction = 0"):
        prepare(config(lines, max_tokens=3))


def test_a_single_document_has_its_tokens_split(tmp_path, config):
    path = tmp_path / "one.txt"
    path.write_text("all there is to learn from. " * 40)
    data = prepare(config(path, validation_fraction=0.25))
    whole = prepare(config(path, validation_fraction=0.0)).tokens("train").tolist()
    parts = [data.tokens(split).tolist() for split in SPLITS]
    assert parts[0] + parts[1] == whole
    assert len(parts[1]) == round(len(whole) * 0.25)
    assert _counts(data, "documents") == {"train": 1, "validation": 1}
    assert not (data.folder / "whole").exists()


@pytest.mark.parametrize("count", [2, 3])
def test_each_side_has_at_least_one_document(tmp_path, config, count):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "some words"}\n' * count)
    assert _counts(prepare(config(path, validation_fraction=0.01)), "documents") == {"train": count - 1, "validation": 1}
    assert _counts(prepare(config(path, validation_fraction=0.99)), "documents") == {"train": 1, "validation": count - 1}


def test_too_little_for_both_splits_is_refused(tmp_path, config):
    (tmp_path / "c.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
    with pytest.raises(InputError, match=r"gives 0 tokens for train.*at least 2.*validation_fraction = 0"):
        prepare(config(tmp_path / "c.jsonl"))
    assert _counts(prepare(config(tmp_path / "c.jsonl", validation_fraction=0.0)), "tokens")["train"] == 3


def test_a_corpus_of_tokens_is_kept_as_it_is(tmp_path, config):
    rows = [[i, i + 1, 70_000] for i in range(10)]
    path = tmp_path / "training.json"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    data = prepare(config(path, validation_fraction=0.0))
    assert _documents(data, "train") == rows  # no token is added
    assert (data.manifest.vocab_size, data.manifest.max_token_id) == (70_001, 70_000)
    assert (data.tokenizer_folder, data.manifest.end_token_id) == (None, None)
    assert data.tokens("train").dtype == np.dtype("<u4")


def test_tokens_beyond_the_named_tokenizer_are_refused(tmp_path, lines, config):
    tokenizer = prepare(config(lines)).tokenizer_folder
    path = tmp_path / "training.json"
    path.write_text('{"input_ids": [1, 349]}\n{"input_ids": [2, 3, 4]}\n')
    data = prepare(config(path, tokenizer=str(tokenizer)))
    assert (data.manifest.vocab_size, data.manifest.max_token_id) == (350, 349)
    path.write_text('{"input_ids": [1, 350]}\n{"input_ids": [2, 3, 4]}\n')
    with pytest.raises(InputError, match=r"token id 350, but data\.tokenizer = .* ends at 349"):
        prepare(config(path, tokenizer=str(tokenizer)))


def test_another_runs_tokenizer_gives_the_same_tokens(lines, config):
    first = prepare(config(lines, validation_fraction=0.0))
    again = prepare(config(lines, validation_fraction=0.0, tokenizer=str(first.tokenizer_folder)))
    assert again.folder != first.folder
    assert again.tokens("train").tolist() == first.tokens("train").tolist()
    assert again.manifest.fingerprint == first.manifest.fingerprint


@pytest.mark.parametrize(
    ("load", "way", "other"),
    [
        (False, "model.config.vocab_size to at least 350", "model.resize"),
        (True, "model.resize = true, which adds 1 rows", "model.config"),
    ],
)
def test_check_vocabulary_names_the_id_the_limit_and_the_keys(lines, config, load, way, other):
    data = prepare(config(lines))
    check_vocabulary(data, 350, load=load)
    with pytest.raises(InputError) as caught:
        check_vocabulary(data, 349, load=load)
    for part in ("up to 349", "ends at 348", way, "data.tokenizer"):
        assert part in str(caught.value)
    assert other not in str(caught.value)


def _edit(path):
    text = path.read_text()
    status = path.stat()
    path.write_text(text.replace("#5", "#6", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def _append(path):
    path.write_text(path.read_text() + '{"text": "one more"}\n')


@pytest.mark.parametrize(("change", "words"), [(_edit, "other content of the same size"), (_append, "bytes and had")])
def test_a_changed_source_is_refused_on_resume_and_prepared_anew_otherwise(lines, config, notices, change, words):
    first = prepare(config(lines))
    change(lines)
    with pytest.raises(InputError, match=rf"data has changed since this run began: {lines} has .*{words}.*train\.output"):
        prepare(config(lines), on_change="error")
    assert prepared_or_none(config(lines)) == first  # refusing destroys nothing
    second = prepare(config(lines), console=notices)
    assert words in notices.export_text()
    assert second.manifest.fingerprint != first.manifest.fingerprint
    assert sorted(_texts(second, "train") + _texts(second, "validation")) == sorted(_source(lines))
    assert prepare(config(lines), on_change="error") == second


def test_a_source_that_was_only_touched_is_unchanged(lines, config):
    first = prepare(config(lines))
    os.utime(lines, ns=(1, 1))
    touched = prepare(config(lines), on_change="error")
    assert touched.manifest.fingerprint == first.manifest.fingerprint
    assert touched.manifest.sources[0].mtime_ns == 1  # the next look is quick again
    assert prepared_or_none(config(lines)).manifest.sources[0].mtime_ns == 1


def test_files_that_come_and_go_are_changes(tmp_path, config):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"text {name} " * 20)
    prepare(config(folder / "*.txt"))
    (folder / "c.txt").write_text("text c " * 20)
    with pytest.raises(InputError, match=r"c\.txt is new"):
        prepare(config(folder / "*.txt"), on_change="error")
    (folder / "c.txt").unlink()
    (folder / "a.txt").unlink()
    with pytest.raises(InputError, match=r"a\.txt is gone"):
        prepare(config(folder / "*.txt"), on_change="error")


def test_a_file_that_cannot_be_examined_counts_as_missing(lines, config, monkeypatch):
    folder = prepare(config(lines)).folder
    stat = Path.stat

    def denied(path, **how):
        if path == folder / "train.bin":
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", denied)
        assert prepared_or_none(config(lines)) is None
    assert prepared_or_none(config(lines)) is not None


def test_damaged_files_are_named_and_made_again(lines, config, notices):
    first = prepare(config(lines))
    tokens = first.tokens("train").tolist()
    with (first.folder / "train.bin").open("r+b") as file:
        file.truncate(10)
    assert prepared_or_none(config(lines)) is None
    second = prepare(config(lines), on_change="error", console=notices)
    assert "train.bin has 10 bytes where its manifest says" in notices.export_text()
    assert second.tokens("train").tolist() == tokens
    (first.folder / "validation.offsets.bin").unlink()
    assert prepare(config(lines), console=notices).manifest.fingerprint == first.manifest.fingerprint
    assert "validation.offsets.bin is missing" in notices.export_text()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"format": 99}'])
def test_a_folder_without_a_good_manifest_is_made_again(lines, config, content):
    first = prepare(config(lines))
    (first.folder / "manifest.json").write_text(content)
    assert prepared_or_none(config(lines)) is None
    assert prepare(config(lines)).manifest.fingerprint == first.manifest.fingerprint


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, lines, config, monkeypatch):
    train = build.tokenizer.train

    def slowly(*args):
        _append(lines)
        return train(*args)

    monkeypatch.setattr(build.tokenizer, "train", slowly)
    with pytest.raises(InputError, match=r"corpus\.jsonl changed while it was read"):
        prepare(config(lines))
    assert not (tmp_path / "prepared").exists()


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path, lines, config, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.DocumentStore, "seal", full)
    with pytest.raises(OctavoError, match=r"no space to prepare data in .*MiB are free.*data\.folder") as caught:
        prepare(config(lines))
    assert not isinstance(caught.value, InputError)
    assert not (tmp_path / "prepared").exists()


def test_a_folder_that_cannot_be_made_is_the_users_to_change(tmp_path, lines, config):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data\.folder = .*Change data\.folder"):
        prepare(config(lines, folder=str(tmp_path / "file" / "below")))


def test_a_tokenizer_learns_from_training_documents_alone(lines, config, monkeypatch):
    learned = []
    train = build.tokenizer.train
    monkeypatch.setattr(build.tokenizer, "train", lambda texts, size: train(learned.extend(texts) or learned, size))
    data = prepare(config(lines))
    assert learned == _texts(data, "train")
    learned.clear()
    monkeypatch.setattr(build.tokenizer, "TRAINING_BYTES", 2000)
    prepare(config(lines, seed=3))
    assert 1000 < sum(len(text.encode()) for text in learned) <= 2000


def test_what_a_named_tokenizer_leaves_out_is_said(tmp_path, lines, config, notices):
    made = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "fox": 70_000}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "t"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}')
    data = prepare(config(lines, tokenizer=str(folder)), console=notices)
    assert (data.manifest.end_token_id, data.manifest.dtype, data.manifest.max_token_id) == (None, "uint32", 70_000)
    said = notices.export_text()
    unknown = int((data.tokens("train") == 0).sum())
    assert f"{unknown:,} of {len(data.tokens('train')):,} tokens are the unknown token" in said
    assert "data.vocab_size = 350 has no effect" in said
    assert "no end token (eos_token)" in said
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InputError, match="the tokenizer has no tokens"):
        prepare(config(lines, tokenizer=str(folder)))


def test_one_long_document_is_sampled_in_pieces_and_the_sample_is_said(tmp_path, config, monkeypatch, notices):
    """Whether it is one file or many, first or last: no piece is larger than the limit, and the sample is spread over all."""
    learned = []
    train = build.tokenizer.train
    monkeypatch.setattr(build.tokenizer, "train", lambda texts, size: train(learned.extend(texts) or learned, size))
    monkeypatch.setattr(pieces, "PIECE", 500)
    monkeypatch.setattr(document_store, "PIECE", 500)
    monkeypatch.setattr(pieces, "_SEPARATOR_BYTES", 100)
    monkeypatch.setattr(build.tokenizer, "TRAINING_BYTES", 20_000)
    long = " ".join(f"{number} ü漢" for number in range(10_000))
    for name, text in (("a", "short one"), ("b", long), ("c", "short two")):
        (tmp_path / f"{name}.txt").write_text(text)
    section = config(tmp_path / "*.txt", validation_fraction=0)
    first = prepare(section, console=notices)
    assert all(len(text.encode()) <= 600 and text in long + "short one short two" for text in learned)
    assert 19_000 < sum(len(text.encode()) for text in learned) <= 20_000
    seen = [int(re.search(r"\d+", text)[0]) for text in learned if "short" not in text]
    assert seen == sorted(seen)
    assert seen[0] < 2500
    assert seen[-1] > 7500
    assert re.search(r"random sample of the text: 0\.0 of 0\.1 MB", notices.export_text())
    again = prepare(config(tmp_path / "*.txt", validation_fraction=0, folder=str(tmp_path / "again")), console=notices)
    assert again.manifest.fingerprint == first.manifest.fingerprint
    learned.clear()
    monkeypatch.setattr(build.tokenizer, "TRAINING_BYTES", 10**6)
    prepare(config(tmp_path / "*.txt", validation_fraction=0, seed=1), console=notices)
    assert "".join(learned) == f"short one{long}short two"  # below the bound all text counts


PREPARE = """
import json, sys, time
from octavo.config.data import DataConfig
from octavo.data import build, document_store, pieces
from octavo.data.prepared import prepare
values = json.loads(sys.argv[1])
if len(sys.argv) > 2:
    whole = build.manifest.prepared_files
    def slow(folder):  # everything is written but the manifest
        print("writing", flush=True)
        time.sleep(float(sys.argv[2]))
        return whole(folder)
    build.manifest.prepared_files = slow
print(prepare(DataConfig(**values)).manifest.fingerprint, flush=True)
"""


def _start(section, *args):
    command = [sys.executable, "-c", PREPARE, section.model_dump_json(), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_prepare_at_once(lines, config):
    section = config(lines)
    processes = [_start(section, "0.5"), _start(section, "0.5")]
    outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] == prepared_or_none(section).manifest.fingerprint
    assert sum(output.count("writing") for output in outputs) == 1  # the second waited and found it
    assert [entry.name for entry in folder_of(section).parent.iterdir()] == [folder_of(section).name]


def test_a_kill_leaves_nothing_that_is_taken_for_whole(lines, config, monkeypatch):
    section = config(lines)
    process = _start(section, "600")
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert prepared_or_none(section) is None
    monkeypatch.setattr(prepared, "_WAIT_SECONDS", 0.0)  # the lock died with its holder
    data = prepare(section)
    assert data == prepared_or_none(section)
    assert [entry.name for entry in data.folder.parent.iterdir()] == [data.folder.name]


def test_docstrings_prepare_end_to_end(tmp_path):
    section = DataConfig(
        source="python:docstrings", vocab_size=600, max_documents=1000, seed=42, validation_fraction=0.2,
        sequence_length=64, folder=str(tmp_path),
    )  # fmt: skip
    data = prepare(section, console=Console(file=io.StringIO(), force_terminal=True))
    assert _counts(data, "documents") == {"train": 800, "validation": 200}
    assert data.manifest.vocab_size == 600
    packed = sequences_of(data, "train", sequence_length=64, packing="documents")
    assert packed.packing.length_P.sum() > 0.99 * len(packed) * 64
