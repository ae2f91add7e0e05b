"""Sources with weights are parts of the token files; validation text has a source of its own."""

import gzip
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from octavo.data import tokenizer
from octavo.data.loader import BatchLoader, passes, sequences_of
from octavo.data.prepared import folder_of, prepare
from octavo.errors import InputError

SPLITS = ("train", "validation")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _ids(path, first, documents, length=50):
    """Documents of token ids; those of this file begin at `first`."""
    rows = [{"input_ids": list(range(first + i * length, first + (i + 1) * length))} for i in range(documents)]
    return write_lines(path, rows)


@pytest.fixture
def sources(tmp_path):
    """Three files of token ids below 4000, 8000 and 12000: 60, 30 and 3 documents of 50 tokens."""
    return [str(_ids(tmp_path / f"{n}.jsonl", 4000 * n, documents)) for n, documents in enumerate((60, 30, 3))]


def _loader(data, section, split="train", **changes):
    values = {"sequence_length": 10, "packing": section.packing, "seed": section.seed, "global_batch": 8, "micro_batch": 8}
    return BatchLoader(data, split, **{**values, "weights": section.weights, **changes})


def _sources_of(batches):
    """The source of each sequence; no sequence mixes two."""
    ids = torch.cat([batch.input_ids for batch in batches]) // 4000
    assert (ids == ids[:, :1]).all()
    return ids[:, 0]


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_each_source_has_its_share_of_the_tokens_of_any_stretch(sources, config, packing):
    section = config(sources, weights=[0.5, 0.2, 0.3], packing=packing, validation_fraction=0.0, sequence_length=10)
    data = prepare(section)
    loader = _loader(data, section)
    batches = [loader.step(8 * step)[0] for step in range(50)]
    assert torch.bincount(_sources_of(batches)).tolist() == [200, 80, 120]
    assert torch.bincount(_sources_of(batches[:5])).tolist() == [20, 8, 12]
    tokens = torch.bincount(torch.cat([batch.input_ids[batch.labels != -100] for batch in batches]) // 4000)
    assert (tokens / tokens.sum()).tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert loader.source_epochs(50) == [200 / 300, 80 / 150, 120 / 15]
    assert loader.epoch(50) == 400 / 465
    found = passes(data, section, 400)
    assert [(each.source, each.sequences, each.epochs) for each in found] == list(
        zip(sources, (300, 150, 15), loader.source_epochs(50), strict=True)
    )
    assert str(found[2]) == "8.00 of 15 sequences"
    small = [tuple(row) for batch in batches for row in batch.input_ids.tolist() if row[0] >= 8000]
    epochs = [small[at : at + 15] for at in range(0, 120, 15)]
    assert len({frozenset(epoch) for epoch in epochs}) == 1  # each epoch has all sequences of the small source
    assert len(set(map(tuple, epochs))) == 8  # in another order
    assert all(len(set(epoch)) == 15 for epoch in epochs)


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_resumes_the_same_mixture_at_any_sample(sources, config, ranks):
    section = config(sources, weights=[1, 2, 3])
    data = prepare(section)
    reference = [_loader(data, section).step(8 * step)[0].input_ids for step in range(40)]
    loaders = [_loader(data, section, dp_rank=rank, dp_size=ranks, micro_batch=2) for rank in range(ranks)]
    for step in (39, 0, 17, 18):
        found = torch.cat([batch.input_ids for loader in loaders for batch in loader.step(8 * step)])
        assert torch.equal(found, reference[step])


def test_without_weights_the_sources_are_one_stream_as_before(sources, config):
    section = config(sources, validation_fraction=0.0, sequence_length=10)
    data = prepare(section)
    assert data.manifest.parts == {}
    assert set(data.manifest.key) == {
        *("format", "source", "tokenizer", "vocab_size", "text_field", "subset", "split", "max_documents", "max_tokens"),
        *("validation_fraction", "seed"),
    }
    loader = _loader(data, section)
    order = np.random.Generator(np.random.Philox(key=np.array([0, 0], np.uint64))).permutation(465)
    stream = torch.from_numpy(data.tokens("train").astype(np.int64)).view(465, 10)
    assert torch.equal(loader.step(8)[0].input_ids, stream[torch.from_numpy(order[8:16])])
    assert loader.source_epochs(58) == [loader.epoch(58)] == [58 * 8 / 465]
    (whole,) = passes(data, section, 465)
    assert whole.epochs == 1
    assert whole.sequences == 465


def test_other_weights_use_the_same_tokens(sources, config, monkeypatch):
    data = prepare(config(sources, weights=[1, 1, 1]))
    assert folder_of(config(sources)) != data.folder
    monkeypatch.setattr("octavo.data.prepared.build", None)
    assert prepare(config(sources, weights=[0.7, 0.1, 0.2])) == data
    section = config(sources, weights=[1e-9, 1.0, 1.0])
    assert _sources_of(_loader(data, section).step(0)).tolist().count(0) == 0


def test_every_source_is_split_by_itself(tmp_path, sources, config):
    single = _ids(tmp_path / "one.jsonl", 12000, 1, length=100)
    section = config([*sources, str(single)], weights=[1, 1, 1, 1])  # a fifth is held out
    data = prepare(section)
    sizes = {split: [(part.documents, part.tokens) for part in data.manifest.parts[split]] for split in SPLITS}
    assert sizes["train"] == [(48, 2400), (24, 1200), (2, 100), (1, 80)]
    assert sizes["validation"] == [(12, 600), (6, 300), (1, 50), (1, 20)]
    for split in SPLITS:
        ids = data.tokens(split)
        at = 0
        for source, (_, tokens) in enumerate(sizes[split]):
            assert set(ids[at : at + tokens] // 4000) == {source}
            at += tokens
        assert at == len(ids)


def test_validation_is_mixed_by_weight_with_each_sequence_once(sources, config):
    section = config(sources, weights=[0.25, 0.5, 0.25])
    data = prepare(section)
    counts = sequences_of(data, "validation", sequence_length=10, packing="join").of_source
    assert counts == (60, 30, 5)
    loaders = [_loader(data, section, "validation", dp_rank=rank, dp_size=2, micro_batch=4) for rank in range(2)]
    first = _sources_of([batch for loader in loaders for batch in loader.validation(16)])
    assert torch.bincount(first).tolist() == [4, 8, 4]
    everything = _loader(data, section, "validation").validation(10**6)
    rows = [tuple(row) for batch in everything for row in batch.input_ids.tolist()]
    assert len(rows) == 95
    assert len(set(rows)) == 95


def test_the_fingerprint_knows_where_sources_end(tmp_path, config):
    def prepared(name, *documents):
        (tmp_path / name).mkdir()
        paths = []
        for number, rows in enumerate(documents):
            paths.append(str(write_lines(tmp_path / name / f"{number}.jsonl", [{"input_ids": row} for row in rows])))
        return prepare(config(paths, weights=[1, 1], validation_fraction=0.0))

    one, other = prepared("a", [[1, 2], [3, 4]], [[5, 6]]), prepared("b", [[1, 2]], [[3, 4], [5, 6]])
    assert one.tokens("train").tolist() == other.tokens("train").tolist()
    assert one.manifest.fingerprint != other.manifest.fingerprint


def test_limits_are_shared_by_weight(sources, config):
    section = config(sources, weights=[1, 3, 1], max_documents=10, validation_fraction=0.0)
    assert [part.documents for part in prepare(section).manifest.parts["train"]] == [2, 6, 2]
    section = config(sources, weights=[1, 3, 1], max_tokens=500, validation_fraction=0.1)
    parts = prepare(section).manifest.parts
    assert [part.tokens for part in parts["train"]] == [90, 270, 90]
    assert [part.tokens for part in parts["validation"]] == [10, 30, 10]
    with pytest.raises(
        InputError, match=r"max_documents = 2 leaves no document of data\.source '.*2\.jsonl', by its weight of 1"
    ):
        prepare(config(sources, weights=[8, 8, 1], max_documents=2))
    with pytest.raises(InputError, match=r"max_tokens = 20, 1 of them for data\.source '.*2\.jsonl', leaves no two tokens"):
        prepare(config(sources, weights=[8, 8, 1], max_tokens=20))


def test_a_source_without_text_to_train_on_is_named(tmp_path, sources, config):
    empty = write_lines(tmp_path / "empty.jsonl", [{"input_ids": []}])
    with pytest.raises(InputError, match=r"data\.source '.*empty\.jsonl' holds no text"):
        prepare(config([*sources, str(empty)], weights=[1, 1, 1, 1]))
    assert len(prepare(config([*sources, str(empty)])).offsets("train")) > 1  # without weights it adds nothing
    short = write_lines(tmp_path / "short.jsonl", [{"input_ids": [5]}] * 9)
    section = config([*sources, str(short)], weights=[1, 1, 1, 1], packing="documents")
    with pytest.raises(
        InputError, match=r"train split of data\.source '.*short\.jsonl' has 7 tokens in 7 documents, none with 2"
    ):
        _loader(prepare(section), section)
    assert passes(prepare(section), section, 100) == []


def test_validation_text_of_its_own_is_taken_whole_and_trains_no_tokenizer(tmp_path, lines, config, monkeypatch):
    learned = []
    train = tokenizer.train
    monkeypatch.setattr(tokenizer, "train", lambda found, size: train(learned.extend(found) or learned, size))
    held_out = [f"held out text number {i}" for i in range(7)]
    path = tmp_path / "held.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in held_out).encode()))
    section = config(lines, validation_source=str(path), validation_fraction=0.05, max_documents=20)
    data = prepare(section)
    assert {split: counts.documents for split, counts in data.manifest.splits.items()} == {"train": 20, "validation": 7}
    assert len(learned) == 20
    assert not set(learned) & set(held_out)
    encoder = tokenizer.load(str(data.tokenizer_folder))
    expected = [ids.tolist() for ids, _ in encoder.stream(held_out)]
    offsets = data.offsets("validation").astype(int)
    assert [data.tokens("validation")[a:b].tolist() for a, b in itertools.pairwise(offsets)] == expected
    whole = prepare(config(lines, validation_fraction=0.0, max_documents=20))
    assert data.tokens("train").tolist() == whole.tokens("train").tolist()
    assert data.manifest.fingerprint != whole.manifest.fingerprint
    with path.open("ab") as file:
        file.write(gzip.compress(b'{"text": "more"}\n'))
    with pytest.raises(InputError, match=r"data has changed since this run began: .*held\.jsonl\.gz has"):
        prepare(section, on_change="error")
    assert prepare(section, console=Console(quiet=True)).manifest.splits["validation"].documents == 8


def test_validation_text_beside_weights(tmp_path, sources, config):
    path = _ids(tmp_path / "held.jsonl", 20000, 4)
    section = config(sources, weights=[1, 1, 1], validation_source=[str(path)])
    data = prepare(section)
    assert set(data.manifest.parts) == {"train"}
    assert [part.documents for part in data.manifest.parts["train"]] == [60, 30, 3]
    assert set(_sources_of(_loader(data, section, "validation").validation(100)).tolist()) == {5}
    loader = _loader(data, section)
    assert torch.bincount(_sources_of([loader.step(8 * step)[0] for step in range(3)])).tolist() == [8, 8, 8]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"data\.validation_source = .*held\.jsonl' holds no text.*Change data\.validation_source"),
        ([{"input_ids": [1, 2]}], r"data\.source holds text, but data\.validation_source token ids"),
        ([{"body": "text"}], r"held\.jsonl, line 1: there is no 'text', only 'body'"),
    ],
)
def test_faulty_validation_text_is_named(tmp_path, lines, config, content, message):
    path = write_lines(tmp_path / "held.jsonl", content)
    with pytest.raises(InputError, match=message):
        prepare(config(lines, validation_source=str(path)))
    assert not (tmp_path / "prepared").exists()


def test_validation_ids_beyond_the_tokenizer_are_refused(tmp_path, lines, config):
    named = str(prepare(config(lines)).tokenizer_folder)
    train, held_out = _ids(tmp_path / "train.jsonl", 0, 1, length=99), _ids(tmp_path / "held.jsonl", 1000, 1)
    with pytest.raises(InputError, match=r"data\.validation_source holds token id 1049, but data\.tokenizer = .* ends at 349"):
        prepare(config(train, validation_source=str(held_out), tokenizer=named))


def test_training_text_is_no_validation_text(tmp_path, lines, config):
    with pytest.raises(InputError, match=r"data\.validation_source = .* both read .*corpus\.jsonl'.*trained on its validation"):
        prepare(config(lines, validation_source=str(tmp_path / "*.jsonl")))
    with pytest.raises(InputError, match=r"data\.validation_source = .*nowhere\.txt': there is no such file"):
        prepare(config(lines, validation_source=str(tmp_path / "nowhere.txt")))
    with pytest.raises(InputError, match=r"data\.validation_source = \[\]: give at least one"):
        prepare(config(lines, validation_source=[]))


def test_the_text_of_another_file_is_compared_by_its_documents(tmp_path, lines, config):
    (tmp_path / "one.txt").write_text("the same text " * 40)
    (tmp_path / "one.txt.gz").write_bytes(gzip.compress((tmp_path / "one.txt").read_bytes()))
    whole = r"data\.validation_source = .*: all of its documents \({}\) are also in data\.source.*validation_fraction"
    with pytest.raises(InputError, match=whole.format(1)):
        prepare(config(tmp_path / "one.txt", validation_source=str(tmp_path / "one.txt.gz")))
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    held = write_lines(tmp_path / "held.jsonl", rows[:5])
    with pytest.raises(InputError, match=whole.format(5)):
        prepare(config([str(tmp_path / "one.txt"), str(lines)], weights=[1, 1], validation_source=str(held)))
    ids = [_ids(tmp_path / f"{name}.jsonl", 0, 3) for name in ("a", "b")]
    with pytest.raises(InputError, match=whole.format(3)):
        prepare(config(ids[0], validation_source=str(ids[1])))
    write_lines(held, [*rows[:5], {"text": "text of its own"}])
    console = Console(file=io.StringIO(), width=500)
    prepare(config(lines, validation_source=str(held)), console=console)
    assert "held.jsonl': 5 of its 6 documents are also in the training data (data.source)." in console.file.getvalue()
    write_lines(held, [{"text": "text of its own"}])
    console = Console(file=io.StringIO(), width=500)
    prepare(config(lines, validation_source=str(held)), console=console)
    assert console.file.getvalue().count("documents are also") == 0


def test_a_split_of_a_data_set_validates_another(tmp_path, config, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    for split, count in (("train", 20), ("test", 5)):
        write_lines(folder / f"{split}.jsonl", [{"text": f"{split} {i}"} for i in range(count)])
    section = config(folder, validation_source=str(folder), validation_split="test")
    counts = {split: counts.documents for split, counts in prepare(section).manifest.splits.items()}
    assert counts == {"train": 20, "validation": 5}
    with pytest.raises(InputError, match=r"both read .*set data\.validation_split to another split than data\.split"):
        prepare(config("owner/texts", validation_source="owner/texts"))
    with pytest.raises(InputError, match=r"both read .*test\.jsonl"):
        prepare(config(folder, validation_source=str(folder / "test.jsonl")))


def test_a_fault_while_encoding_leaves_no_file_open(tmp_path, config, monkeypatch):
    (tmp_path / "a.txt").write_text("some words to encode\n" * 20)

    def fails(encoder, texts):
        raise InputError("planted")

    monkeypatch.setattr(tokenizer.Encoder, "stream", fails)
    with pytest.raises(InputError, match="planted") as caught:  # whose traceback holds the writers
        prepare(config(tmp_path / "a.txt", validation_fraction=0.0))
    assert caught.tb is not None
    assert not [path for path in Path("/proc/self/fd").iterdir() if ".preparing" in str(path.resolve())]
