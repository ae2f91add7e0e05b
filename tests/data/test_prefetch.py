"""Reading ahead changes when a batch is read, never which."""

import threading
from contextlib import closing

import pytest
import torch

from octavo.data.loader import BatchLoader, sequences_of
from octavo.data.prefetch import Prefetcher
from octavo.data.prepared import prepare


@pytest.fixture
def data(config, lines):
    return prepare(config(lines))


def _loader(data, **changes):
    values = {"sequence_length": 32, "packing": "join", "seed": 7, "global_batch": 8, "micro_batch": 2}
    return BatchLoader(data, "train", **{**values, **changes})


def _sequences(data, split="train", **changes):
    return sequences_of(data, split, **{"sequence_length": 32, "packing": "join", **changes})


def _rows(batches):
    return [torch.stack([array[i] for array in batch[:3]]).tolist() for batch in batches for i in range(len(batch.input_ids))]


def _readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("octavo-read")]


class Spied:
    """A loader that notes what is asked of it, and fails at one sample."""

    def __init__(self, loader, fails_at=None):
        self.loader, self.global_batch, self.fails_at, self.asked = loader, loader.global_batch, fails_at, []

    def step(self, first_sample):
        self.asked.append(first_sample)
        if first_sample == self.fails_at:
            self.fails_at = None
            raise OSError(f"sample {first_sample} is on a disk that is gone")
        return self.loader.step(first_sample)


@pytest.mark.parametrize("packing", ["join", "documents"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_step_is_that_of_the_loader_over_epochs_and_ranks(data, packing, ranks):
    n = len(_sequences(data, packing=packing))
    reference = _loader(data, packing=packing, micro_batch=8)
    settings = [{"packing": packing, "dp_rank": rank, "dp_size": ranks} for rank in range(ranks)]
    crossed = 0
    readers = [Prefetcher(_loader(data, **one), workers=workers) for workers in (0, 2) for one in settings]
    for first in range(0, 3 * n, 8):
        crossed += first // n != (first + 7) // n
        steps = [reader.step(first) for reader in readers]
        loaders = [_loader(data, **one).step(first) for one in settings]
        for part in (steps[:ranks], steps[ranks:]):
            found = [row for batches in part for row in _rows(batches)]
            assert found == [row for batches in loaders for row in _rows(batches)]
            order = sorted if packing == "documents" else list  # which ranks share evenly, in another order
            assert order(found) == order(_rows(reference.step(first)))
        assert all(batch.input_ids.shape == (2, 32) for batches in steps for batch in batches)
    assert crossed >= 2
    for reader in readers:
        reader.close()


def test_many_threads_over_epochs_that_are_shorter_than_a_step(config, tmp_path):
    (tmp_path / "few.txt").write_text("".join(f"line {i} of a short text\n" for i in range(12)))
    data = prepare(config(tmp_path / "few.txt", validation_fraction=0.0))
    n = len(_sequences(data))
    assert 1 < n < 16
    plain = _loader(data, global_batch=16, micro_batch=4)
    with closing(Prefetcher(_loader(data, global_batch=16, micro_batch=4), workers=8)) as reader:
        for first in range(0, 16 * 40, 16):
            assert _rows(reader.step(first)) == _rows(plain.step(first))


def test_a_resumed_run_may_begin_anywhere_and_jump(data):
    plain = _loader(data)
    with closing(Prefetcher(_loader(data), workers=3)) as reader:
        for first in (40, 48, 56, 8, 16, 16, 1000, 0):
            assert _rows(reader.step(first)) == _rows(plain.step(first))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_no_more_steps_are_read_than_asked_for_and_none_after_the_last(data, workers):
    spied = Spied(_loader(data))
    with closing(Prefetcher(spied, workers=workers, end=80)) as reader:
        for step in range(10):
            reader.step(8 * step)
            assert max(spied.asked) <= min(8 * (step + workers), 72)
            assert len(reader._queue) == min(workers, 9 - step)
    assert sorted(spied.asked) == list(range(0, 80, 8))


def test_without_workers_nothing_is_read_ahead(data):
    spied = Spied(_loader(data))
    reader = Prefetcher(spied)
    reader.step(0)
    reader.step(8)
    assert spied.asked == [0, 8]
    assert not _readers()


def test_an_error_comes_at_the_step_it_belongs_to_and_the_step_can_be_asked_for_again(data):
    spied, plain = Spied(_loader(data), fails_at=16), _loader(data)
    with closing(Prefetcher(spied, workers=3)) as reader:
        for first in (0, 8):
            assert _rows(reader.step(first)) == _rows(plain.step(first))
        with pytest.raises(OSError, match="sample 16 is on a disk that is gone"):
            reader.step(16)
        for first in (24, 16):
            assert _rows(reader.step(first)) == _rows(plain.step(first))
    assert not _readers()


def test_threads_end_with_close_also_after_an_error(data):
    reader = Prefetcher(_loader(data), workers=2)

    def interrupted():
        with closing(reader):
            reader.step(0)
            assert _readers()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not _readers()
    assert _rows(reader.step(8)) == _rows(_loader(data).step(8))  # closed, it reads at once
    reader.close()


def test_for_a_gpu_the_threads_pin_in_its_own_context(data, monkeypatch):
    devices, pinned = [], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((device, threading.current_thread().name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(threading.current_thread().name) or tensor)
    with closing(Prefetcher(_loader(data), workers=1, device=torch.device("cuda", 3), end=16)) as reader:
        reader.step(0)
        reader.step(8)
    assert devices == [(torch.device("cuda", 3), "octavo-read_0")]
    assert pinned == ["octavo-read_0"] * (2 * 4 * 4)
    with closing(Prefetcher(_loader(data), workers=1, device=torch.device("cpu"), end=8)) as reader:
        reader.step(0)
    assert len(pinned) == 32
