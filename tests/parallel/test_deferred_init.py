"""Counter-based initial weights: the same whatever part a rank fills, and normal as they claim."""

import math

import pytest
import torch

from octavo.parallel import deferred_init
from octavo.parallel.deferred_init import counter_normal_


def values(count, *, seed=0, name="layers.0.weight", std=1.0, first_element=0, dtype=torch.float32):
    return filled(torch.empty(count, dtype=dtype), seed=seed, name=name, std=std, first_element=first_element)


def filled(tensor, *, first_element=0, **draw):
    return counter_normal_(tensor, lambda start, stop: torch.arange(first_element + start, first_element + stop), **draw)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 10_000), (1, 2), (7, 4103), (4999, 10_000), (9999, 10_000)])
def test_any_slice_equals_that_slice_of_the_whole(start, stop):
    whole = values(10_000, seed=3)
    assert torch.equal(values(stop - start, seed=3, first_element=start), whole[start:stop])


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_rows_filled_by_ranks_make_the_whole(ranks):
    whole = filled(torch.empty(61, 33), seed=5, name="w", std=0.02)
    parts = whole.tensor_split(ranks)
    offset = 0
    for part in parts:
        mine = filled(torch.empty(part.shape), seed=5, name="w", std=0.02, first_element=offset)
        assert torch.equal(mine, part)
        offset += part.numel()


@pytest.mark.parametrize("chunk", [1, 7, 64, 999, 1000, 1001])
def test_chunks_change_no_bit(monkeypatch, chunk):
    whole = values(1000, seed=1)
    monkeypatch.setattr(deferred_init, "_CHUNK", chunk)
    assert torch.equal(values(1000, seed=1), whole)
    assert torch.equal(values(500, seed=1, first_element=250), whole[250:750])


def test_elements_beyond_32_bits_are_their_own():
    far = 3 * 2**32 + 17
    assert torch.equal(values(100, first_element=far)[40:], values(60, first_element=far + 40))
    assert not torch.equal(values(100, first_element=far), values(100, first_element=17))


def test_the_values_are_normal():
    count = 1_000_000
    x = values(count, seed=11).double()
    error = 5 / math.sqrt(count)
    assert abs(x.mean()) < error
    assert abs(x.square().mean() - 1) < math.sqrt(2) * error
    assert abs(x.pow(3).mean()) < math.sqrt(15) * error
    assert abs(x.pow(4).mean() - 3) < math.sqrt(96) * error
    assert abs((x[1:] * x[:-1]).mean()) < error
    assert 4.4 < x.abs().max() < 5.8  # 24 bits of radius reach √(48 ln 2)
    # Kolmogorov and Smirnov: the largest gap to the normal distribution function, at about the 0.1% level.
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    expected = torch.special.ndtr(x.sort().values)
    gap = torch.maximum((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    assert gap < 1.95 / math.sqrt(count)


def test_names_and_seeds_are_independent():
    count = 100_000
    draws = [
        values(count, seed=seed, name=name).double()
        for seed, name in [(0, "layers.0.weight"), (1, "layers.0.weight"), (0, "layers.1.weight"), (0, "layers.0.bias")]
    ]
    for i, one in enumerate(draws):
        assert torch.equal(one, draws[i])
        for other in draws[i + 1 :]:
            assert abs((one * other).mean()) < 5 / math.sqrt(count)
            for lag in (1, 2):
                assert abs((one[lag:] * other[:-lag]).mean()) < 5 / math.sqrt(count)


def test_a_seed_and_a_name_do_not_run_into_each_other():
    assert not torch.equal(values(64, seed=1, name="2:w"), values(64, seed=12, name="w"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_dtype_is_the_rounding_of_float32(dtype):
    assert torch.equal(values(5000, std=0.02, dtype=dtype), values(5000, std=0.02).to(dtype))


@pytest.mark.parametrize("std", [0.02, 0.5, 3.0])
def test_std_scales(std):
    assert torch.equal(values(5000, std=std), values(5000) * std)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before, one = torch.get_rng_state(), values(100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(values(100), one)


def test_an_empty_part_stays_empty():
    assert values(0, first_element=5).shape == (0,)
