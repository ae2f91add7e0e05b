"""The same samples in the same global batches, whatever the ranks and the place where a run resumes."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.train import TrainConfig
from octavo.data import rng
from octavo.data.loader import BatchLoader, sequences_of
from octavo.data.prepared import prepare
from octavo.errors import InputError, OctavoError


@pytest.fixture
def data(config, lines):
    return prepare(config(lines))


def _loader(data, split="train", **changes):
    values = {"sequence_length": 32, "packing": "join", "seed": 7, "global_batch": 8, "micro_batch": 2}
    return BatchLoader(data, split, **{**values, **changes})


def _sequences(data, split="train", **changes):
    return sequences_of(data, split, **{"sequence_length": 32, "packing": "join", **changes})


def _rows(batches):
    """The sequences of batches, each as one list of ids, labels and positions."""
    return [torch.stack([array[i] for array in batch[:3]]).tolist() for batch in batches for i in range(len(batch.input_ids))]


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_batches_are_int64_tensors_of_the_shape_asked_for(data, packing):
    batches = _loader(data, packing=packing).step(0)
    assert len(batches) == 4
    for batch in batches:
        assert [tuple(array.shape) for array in batch] == [(2, 32)] * 3 + [(2,)]
        assert {array.dtype for array in batch} == {torch.int64}
        targets = batch.labels != -100
        assert torch.equal(batch.labels[targets], batch.input_ids[targets])
        assert torch.equal(targets & (batch.position_ids == 0), torch.zeros_like(targets))


def test_an_epoch_is_every_sequence_once_and_the_next_is_in_another_order(data):
    loader = _loader(data, global_batch=1, micro_batch=1)
    everything = _rows(_loader(data, seed=0).validation(10**6))
    n = len(everything)
    epochs = [[_rows(loader.step(epoch * n + i))[0] for i in range(n)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(everything)
    assert epochs[0] != epochs[1]
    assert epochs[0] != everything
    assert epochs[0] != [_rows(_loader(data, global_batch=1, micro_batch=1, seed=8).step(i))[0] for i in range(n)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_sees_the_same_global_batches(data, ranks):
    reference = _loader(data, micro_batch=8)
    loaders = [_loader(data, dp_rank=r, dp_size=ranks) for r in range(ranks)]
    for first in range(0, 3 * len(_sequences(data)), 8):  # over two edges of epochs
        assert [row for loader in loaders for row in _rows(loader.step(first))] == _rows(reference.step(first))


def test_a_global_batch_crosses_epochs_and_may_hold_several(data):
    one = _loader(data, global_batch=1, micro_batch=1)
    n = len(_sequences(data))
    wide = _loader(data, global_batch=3 * n, micro_batch=n)
    expected = [_rows(one.step(n - 2 + i))[0] for i in range(3 * n)]
    assert _rows(wide.step(n - 2)) == expected


def test_threads_share_the_permutation_of_an_epoch(data, monkeypatch):
    loader = _loader(data)
    expected = _rows(_loader(data).step(0))
    found, epochs = [], []
    second = threading.Thread(target=lambda: found.append(_rows(loader.step(0))))
    generator = rng.generator

    def counted(seed, stream):
        epochs.append(stream)
        if len(epochs) == 1:  # while the first thread computes the order
            second.start()
            second.join(timeout=0.3)
        return generator(seed, stream)

    monkeypatch.setattr(rng, "generator", counted)
    assert _rows(loader.step(0)) == expected
    second.join()
    assert found == [expected]
    assert epochs == [0]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A loader, and the first samples of its data in order."""
    from octavo.config.data import DataConfig

    folder = tmp_path_factory.mktemp("stream")
    (folder / "a.txt").write_text("".join(f"line {i} of the text\n" for i in range(200)))
    section = DataConfig(source=str(folder / "a.txt"), vocab_size=300, sequence_length=32, folder=str(folder / "data"))
    data = prepare(section)
    samples = [_rows(_loader(data, global_batch=1, micro_batch=1).step(i))[0] for i in range(300)]
    return samples, _loader(data)


@settings(deadline=None, max_examples=60)
@given(first=st.integers(0, 250), steps=st.integers(1, 4))
def test_a_run_resumes_at_any_sample(stream, first, steps):
    samples, loader = stream
    for step in range(steps):
        at = first + 8 * step
        assert _rows(loader.step(at)) == samples[at : at + 8]


def test_order_does_not_depend_on_global_random_state(data):
    np.random.seed(1)
    torch.manual_seed(1)
    first = _rows(_loader(data).step(0))
    np.random.seed(2)
    torch.manual_seed(2)
    assert _rows(_loader(data).step(0)) == first


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("micro_batch", "batches", "sequences"), [(1, 1, 1), (1, 7, 7), (None, 1, 24), (None, 50, 1200)])
def test_validation_is_the_same_sequences_on_any_number_of_ranks(data, ranks, micro_batch, batches, sequences):
    everything = _sequences(data, "validation", packing="documents", sequence_length=8)
    assert 24 < len(everything) < 1200
    expected = _rows([everything.batch(range(min(sequences, len(everything))))])
    train = TrainConfig(steps=1, global_batch=24, micro_batch=micro_batch, validate_batches=batches)
    batch = {"global_batch": 24, "micro_batch": micro_batch}
    found = []
    for rank in range(ranks):
        loader = _loader(data, "validation", packing="documents", sequence_length=8, dp_rank=rank, dp_size=ranks, **batch)
        found.append(list(loader.validation(train.validation_sequences)))
    assert len({len(rank) for rank in found}) == 1  # ranks stay in step
    assert max(len(each.input_ids) for rank in found for each in rank) <= (micro_batch or 24 // ranks)
    rows = [row for turn in zip(*found, strict=True) for row in _rows(turn)]
    assert [row for row in rows if set(row[1]) != {-100}] == expected


def test_a_validation_split_smaller_than_a_micro_batch_gives_a_smaller_batch(data):
    loader = _loader(data, "validation", sequence_length=256, global_batch=64, micro_batch=64)
    (batch,) = loader.validation(5 * 64)
    assert 0 < len(batch.input_ids) == len(_sequences(data, "validation", sequence_length=256)) < 64


def test_without_a_micro_batch_a_rank_takes_its_share_at_once(data):
    (batch,) = _loader(data, micro_batch=None, dp_rank=1, dp_size=2).step(0)
    assert len(batch.input_ids) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 3}, r"global_batch = 8 sequences cannot be shared equally by 3 data-parallel ranks.* works: 9 or 6"),
        ({"dp_size": 16}, r"global_batch = 8 sequences cannot be shared equally by 16 data-parallel ranks.* works: 16"),
        ({"micro_batch": 3}, r"micro_batch = 3 does not divide a rank's share of 8 .* works: 2 or 4"),
        ({"micro_batch": 100}, r"micro_batch = 100 .* works: 8"),
    ],
)
def test_batches_that_do_not_divide_are_refused_with_what_would(data, changes, message):
    with pytest.raises(InputError, match=message):
        _loader(data, **changes)


def test_an_empty_split_is_refused(config, lines):
    data = prepare(config(lines, validation_fraction=0.0))
    with pytest.raises(InputError, match=r"no validation data: data\.validation_fraction = 0"):
        _loader(data, "validation")


def test_documents_of_one_token_leave_nothing_to_predict(tmp_path, config):
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1]}\n' * 10)
    data = prepare(config(tmp_path / "ids.jsonl"))
    with pytest.raises(InputError, match=r"train split has 8 tokens in 8 documents, none with 2 tokens"):
        _loader(data, packing="documents")
    assert len(_rows(_loader(data, packing="join").validation(18))) == 1


def test_a_sample_number_below_zero_is_a_mistake(data):
    with pytest.raises(ValueError, match="start at 0"):
        _loader(data).step(-1)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_token_file_that_has_changed_is_refused_before_the_model_sees_it(data, split):
    tokens = np.memmap(data.folder / f"{split}.bin", "<u2", mode="r+")
    tokens[5] = 60_000
    tokens.flush()
    loader = _loader(data, split, global_batch=1, micro_batch=1)
    with pytest.raises(OctavoError, match=rf"the {split} split has the token id 60000.*has changed\. Remove"):
        _ = [loader.step(i) for i in range(50)] if split == "train" else list(loader.validation(1000))
