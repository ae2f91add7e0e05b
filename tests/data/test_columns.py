"""Columns beside token ids are used exactly or refused by name; a data set without a target is refused."""

import itertools
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from octavo.data.columns import IGNORED, tokens_of
from octavo.data.corpus import Corpus
from octavo.data.loader import BatchLoader, sequences_of
from octavo.data.prepared import prepare
from octavo.errors import InputError, OctavoError
from octavo.run.channels import write_channels

SPLITS = ("train", "validation")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _drawn(documents, seed=0):
    """Rows of token ids, each id once, with labels of their own and holes."""
    draw, rows, at = np.random.default_rng(seed), [], 0
    for _ in range(documents):
        length = int(draw.integers(2, 30))
        ids = np.arange(at, at + length)
        labels = np.where(draw.random(length) < 0.5, IGNORED, draw.integers(0, 5000, length))
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        at += length
    return rows


def _write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix:
        write_lines(path, rows)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def _documents(data, split):
    offsets = data.offsets(split).astype(int)
    columns = data.tokens(split), data.labels(split)
    return [tuple(column[a:b].tolist() for column in columns) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
@pytest.mark.parametrize("limits", [{}, {"max_tokens": 300}, {"max_documents": 25}])
def test_labels_are_stored_at_their_tokens_in_both_splits(tmp_path, config, name, limits):
    rows = _drawn(60)
    data = prepare(config(_write(tmp_path / name, rows), **limits))
    whole = {row["input_ids"][0]: row for row in rows}
    count = 0
    for split in SPLITS:
        for ids, labels in _documents(data, split):
            row = whole[ids[0]]
            assert ids == row["input_ids"][: len(ids)]
            assert labels == row["labels"][: len(ids)]
            count += 1
    assert count == 60 if not limits else 10 < count <= 25 or "max_tokens" in limits
    assert data.labels("train").dtype == np.dtype("<i4")
    assert {"train.labels.bin", "validation.labels.bin"} <= set(data.manifest.files)
    other = [{**row, "labels": [IGNORED, *row["input_ids"][1:]]} for row in rows]
    again = prepare(config(_write(tmp_path / f"b{name}", other), **limits))
    assert again.tokens("train").tolist() == data.tokens("train").tolist()
    assert again.manifest.fingerprint != data.manifest.fingerprint


def test_one_document_is_split_with_its_labels(tmp_path, config):
    ids, labels = list(range(40)), [IGNORED, *range(1001, 1040)]
    data = prepare(config(write_lines(tmp_path / "a.jsonl", [{"input_ids": ids, "labels": labels}])))
    assert _documents(data, "train") == [(ids[:32], labels[:32])]
    assert _documents(data, "validation") == [(ids[32:], labels[32:])]
    assert data.manifest.max_token_id == 1039


def test_the_length_of_a_prompt_says_nothing_beside_labels():
    row = {"input_ids": [1, 2, 3], "labels": [IGNORED, IGNORED, 3], "prompt_length": 2}
    assert tokens_of(row, "row 1")[1].tolist() == row["labels"]


def test_labels_that_are_the_ids_and_masks_of_ones_store_nothing(tmp_path, config):
    rows = [{"input_ids": [i, i + 1, i + 2]} for i in range(20)]
    plain = prepare(config(write_lines(tmp_path / "a.jsonl", rows)))
    more = {"attention_mask": [1] * 3, "loss_mask": [True] * 3, "position_ids": [0, 1, 2], "token_type_ids": [0] * 3}
    says = {**more, "weight": 1.0, "special_tokens_mask": [1, 0, 0], "length": 3, "id": 7, "source": "web", "score": 0.5}
    same = prepare(config(write_lines(tmp_path / "b.jsonl", [{**row, "labels": row["input_ids"], **says} for row in rows])))
    assert same.labels("train") is plain.labels("train") is None
    assert same.manifest.fingerprint == plain.manifest.fingerprint
    mixed = prepare(config(write_lines(tmp_path / "c.jsonl", [*rows, {"input_ids": [90, 91], "labels": [IGNORED, 91]}])))
    assert sorted(_documents(mixed, "train") + _documents(mixed, "validation")) == [
        *((row["input_ids"],) * 2 for row in rows),
        ([90, 91], [IGNORED, 91]),
    ]


CASES = {
    "loss mask": ({"loss_mask": [0, 1, 0, 1]}, [1, 2, 3, 4], [-100, 2, -100, 4]),
    "loss mask of floats": ({"loss_mask": [0.0, 1.0, 1.0, 1.0]}, [1, 2, 3, 4], [-100, 2, 3, 4]),
    "both": ({"loss_mask": [1, 1, 0, 1], "labels": [-100, 7, 8, 9]}, [1, 2, 3, 4], [-100, 7, -100, 9]),
    "padding behind": ({"attention_mask": [1, 1, 1, 0]}, [1, 2, 3], None),
    "padding in front": ({"attention_mask": [0, 0, 1, 1]}, [3, 4], None),
    "padding of labels": ({"attention_mask": [1, 1, 1, 0], "labels": [-100, 2, 3, -100]}, [1, 2, 3], [-100, 2, 3]),
    "padding of all": ({"attention_mask": [0, 0, 0, 0]}, [], None),
    "large labels": ({"labels": [1, 2, 3, 2**32 - 1]}, [1, 2, 3, 4], [1, 2, 3, 2**32 - 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_targets_of_a_row(case):
    columns, ids, labels = CASES[case]
    found = tokens_of({"input_ids": [1, 2, 3, 4], **columns}, "row 1")
    assert found[0].tolist() == ids
    assert (found[1] if found[1] is None else found[1].tolist()) == labels


LONG = list(range(10, 30))
REFUSED = {
    "short labels": ({"labels": [1, 2, 3]}, r"'labels' has 3 entries, but 'input_ids' 4"),
    "null labels": ({"labels": None}, r"'labels' must be a list of whole numbers"),
    "class": ({"labels": 3}, r"'labels' must be a list of whole numbers"),
    "floats": ({"labels": [1.0, 2.0, 3.0, 4.0]}, r"'labels' must be a list of whole numbers"),
    "other ignored": ({"labels": [-1, 2, 3, 4]}, r"-1 in 'labels' is no token id .* not -100"),
    "huge label": ({"labels": [1, 2, 3, 2**32]}, r"4294967296 in 'labels' is no token id"),
    "weights in the mask": ({"loss_mask": [0, 0.5, 1, 1]}, r"'loss_mask' must be a list of 0 and 1"),
    "text in the mask": ({"loss_mask": "1111"}, r"'loss_mask' must be a list of 0 and 1"),
    "short mask": ({"loss_mask": [1]}, r"'loss_mask' has 1 entries"),
    "hole": ({"attention_mask": [1, 0, 1, 1]}, r"'attention_mask' has a 0 between ones, at 1"),
    "documents": ({"attention_mask": [1, 1, 2, 2]}, r"'attention_mask' must be a list of 0 and 1"),
    "target at padding": ({"attention_mask": [1, 1, 1, 0], "labels": [1, 2, 3, 0]}, r"'attention_mask' is 0 at a target"),
    "positions": ({"position_ids": [0, 1, 0, 1]}, r"'position_ids' .* as a separate row .* \"documents\""),
    "types": ({"token_type_ids": [0, 0, 1, 1]}, r"'token_type_ids' cannot be used with"),
    "segments": ({"segment_ids": [[0], [1, 1]]}, r"'segment_ids' cannot be used with"),
    "weight": (
        {"weight": 0.5},
        r"'weight' cannot be used with .* loss_mask excludes tokens, and data\.weights weighs "
        "sources",
    ),
    "weights": ({"loss_weights": [1, 1, 2, 1]}, r"'loss_weights' cannot be used with"),
    "null weight": ({"weight": None}, r"'weight' cannot be used with"),
    "mask of another name": ({"completion_mask": [0, 0, 1, 1]}, r"'completion_mask' cannot be used with .* name it loss_mask"),
    "shifted": ({"shift_labels": [2, 3, 4, -100]}, r"'shift_labels' cannot be used with .* labels\[i\] is the token at i"),
    "lengths": ({"cu_seqlens": [0, 2, 4]}, r"'cu_seqlens' cannot be used with"),
    "prompt": ({"prompt_length": 2}, r"'prompt_length' cannot be used with .* give a loss_mask that is 0 in the prompt"),
    "pixels": ({"pixel_values": [[0.5]]}, r"'pixel_values' cannot be used with .* only on token ids"),
    "case of a weight": ({"Sample-Weight": 0.5}, r"'Sample-Weight' cannot be used with .* weighs all targets alike"),
    "case of labels": ({"Labels": [1, 2, 3, 4]}, r"'Labels' cannot be used with 'input_ids': name it labels"),
    "unknown": ({"advantage": [0.5, 1, 2, 1]}, r"'advantage' has a number per token"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_column_that_cannot_be_used_is_refused_by_name_and_row(tmp_path, config, case, kind):
    columns, message = REFUSED[case]
    rows = [{"input_ids": [1, 2, 3, 4], **columns}]
    if kind == ".parquet" and case in ("weights in the mask", "unknown", "null labels"):
        rows = [
            {**rows[0], name: None if value is None else [float(each) for each in value]} for name, value in columns.items()
        ]
    with pytest.raises(InputError, match=rf"a\{kind}, (line|row) 1: {message}"):
        prepare(config(_write(tmp_path / f"a{kind}", rows)))
    assert not (tmp_path / "prepared").exists()


def test_labels_that_are_shifted_already_are_recognised():
    with pytest.raises(InputError, match=r"row 1: 'labels' are the next tokens.*labels\[i\] is the token at i"):
        tokens_of({"input_ids": LONG, "labels": [*LONG[1:], IGNORED]}, "row 1")
    with pytest.raises(InputError, match="'labels' are the next tokens"):
        tokens_of({"input_ids": LONG, "labels": [IGNORED] * 5 + [*LONG[6:], IGNORED]}, "row 1")
    for labels in (LONG, [IGNORED, *LONG[1:]], [IGNORED] * 20, LONG[::-1]):
        tokens_of({"input_ids": LONG, "labels": labels}, "row 1")
    tokens_of({"input_ids": [7] * 20, "labels": [7] * 20}, "row 1")


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ""])
@pytest.mark.parametrize("targets", [1, 3])
def test_labels_that_are_shifted_already_are_recognised_over_short_rows(tmp_path, config, kind, targets):
    """Answers of a token or a few behind a prompt: too few in one row."""

    def rows(shift):
        for i in range(40):
            ids = [i * 7 + k * k for k in range(6)]
            after = [*ids[shift:], *[IGNORED] * shift]
            yield {"input_ids": ids, "labels": [IGNORED] * (5 - targets) + after[5 - targets : 5] + [IGNORED]}

    with pytest.raises(InputError, match=r"row, and of earlier rows, are the next tokens.*labels\[i\] is the token at i"):
        prepare(config(_write(tmp_path / f"a{kind}", list(rows(1)))))
    assert prepare(config(_write(tmp_path / f"b{kind}", list(rows(0))))).labels("train") is not None
    other = [{"input_ids": row["input_ids"], "labels": [i % 300] * 6} for i, row in enumerate(rows(0))]
    few = list(rows(1))[:15]  # most rows have labels of their own, which follow here and there by chance
    assert prepare(config(_write(tmp_path / f"c{kind}", [*other, *few]))).labels("train") is not None


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_weights_and_masks_beside_text_are_refused(tmp_path, config, kind):
    def read(**columns):
        path = tmp_path / f"a{kind}"
        rows = [{"text": "a b", **{name: values[row] for name, values in columns.items()}} for row in range(2)]
        if kind == ".csv":
            path.write_text("".join(",".join(map(str, each)) + "\n" for each in [rows[0], *(row.values() for row in rows)]))
        else:
            _write(path, rows)
        return [document.text for document in Corpus(config(path))]

    assert read(weight=[1, 1], id=[3, 4], score=[0.5, 0.1]) == ["a b", "a b"]
    with pytest.raises(InputError, match=r"(line 3|line 2|row 2): 'weight' cannot be used with text: .*data\.weights"):
        read(weight=[1.0, 2.5])
    with pytest.raises(InputError, match=r"(line 2|line 1|row 1): 'loss_mask' cannot be used with text"):
        read(loss_mask=[1, 1])
    assert read(labels=[3, 4]) == ["a b", "a b"]
    if kind != ".csv":
        assert read(labels=[[0, 1], [2]]) == read(labels=["a", "b"]) == ["a b", "a b"]
        with pytest.raises(InputError, match=r"2: 'labels' cannot be used with text: -100 in it marks tokens"):
            read(labels=[[0, 1], [IGNORED, 2]])


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_text_beside_token_ids_is_a_choice_of_the_user(tmp_path, config, kind):
    path = _write(tmp_path / f"a{kind}", [{"text": "a", "body": "b", "input_ids": [1, 2], "labels": [-100, 2]}])
    with pytest.raises(InputError, match=r"1 holds both 'text' and 'input_ids'\. Set data\.text_field = \"input_ids\""):
        list(Corpus(config(path)))
    with pytest.raises(InputError, match=r"there is no 'txt', only .* Did you mean 'text'\?"):
        list(Corpus(config(path, text_field="txt")))
    (document,) = Corpus(config(path, text_field="input_ids"))
    assert (document.input_ids.tolist(), document.labels.tolist()) == ([1, 2], [-100, 2])
    assert [document.text for document in Corpus(config(path, text_field="body"))] == ["b"]


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_a_data_set_without_a_target_is_refused(tmp_path, config, packing):
    rows = [{"input_ids": [i, i + 1, i + 2], "loss_mask": [0, 0, 0]} for i in range(20)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(InputError, match=r"48 tokens for train, and no target: 'labels' are -100"):
        prepare(config(path, packing=packing))
    assert not (tmp_path / "prepared").exists()
    write_lines(path, [{**row, "loss_mask": [1, 0, 0]} for row in rows])  # the first tokens of documents
    if packing == "documents":
        with pytest.raises(InputError, match="no target"):
            prepare(config(path, packing=packing))
    else:
        data = prepare(config(path, packing=packing))
        values = {"seed": 0, "global_batch": 1}
        assert len(list(BatchLoader(data, "train", sequence_length=8, packing="join", **values).validation(100))) == 6
        for split in SPLITS:
            with pytest.raises(InputError, match=rf"the {split} split has .* but no sequence with a target"):
                BatchLoader(data, split, sequence_length=8, packing="documents", **values)
        with pytest.raises(InputError, match="no sequence with a target"):
            BatchLoader(data, "train", sequence_length=3, packing="join", **values)


def test_each_source_with_a_weight_needs_a_target(tmp_path, config):
    good = write_lines(tmp_path / "a.jsonl", [{"input_ids": [i, i + 1, i + 2]} for i in range(20)])
    bad = write_lines(tmp_path / "b.jsonl", [{"input_ids": [50 + i, 51], "labels": [IGNORED] * 2} for i in range(20)])
    with pytest.raises(InputError, match=r"data\.source '.*b\.jsonl' gives 32 tokens for train, and no target"):
        prepare(config([str(good), str(bad)], weights=[1, 1]))
    joined = prepare(config([str(good), str(bad)]))
    of_source = sequences_of(joined, "train", sequence_length=8, packing="documents").of_source
    assert of_source[0] < len(joined.offsets("train")) - 1


@pytest.mark.parametrize(("label", "words"), [(-7, "the label -7"), (9_000, "the token id 9000")])
def test_a_file_of_labels_that_has_changed_is_refused_before_the_model_sees_it(tmp_path, config, label, words):
    data = prepare(config(write_lines(tmp_path / "a.jsonl", _drawn(60)), validation_fraction=0.0))
    labels = np.memmap(data.folder / "train.labels.bin", "<i4", mode="r+")
    labels[9] = label
    labels.flush()
    loader = BatchLoader(data, "train", sequence_length=8, packing="join", seed=0, global_batch=1)
    with pytest.raises(OctavoError, match=rf"the train split has {words}, but .*has changed\. Remove"):
        list(loader.validation(10**6))
    assert prepare(config(tmp_path / "a.jsonl", validation_fraction=0.0)).labels("train")[9] != label  # prepared anew


def test_channels_hold_the_labels_and_read_back_the_same(tmp_path, config):
    section = config(write_lines(tmp_path / "a.jsonl", _drawn(80)), sequence_length=16)
    data = prepare(section)
    write_channels(data, section, tmp_path / "ch")
    again = config(tmp_path / "ch" / "train", validation_source=str(tmp_path / "ch" / "test"), sequence_length=16)
    found = prepare(again)
    for split in SPLITS:
        length = len(data.tokens(split)) // 16 * 16
        assert found.tokens(split).tolist() == data.tokens(split)[:length].tolist()
        assert found.labels(split).tolist() == data.labels(split)[:length].tolist()
