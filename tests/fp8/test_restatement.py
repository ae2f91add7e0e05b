"""The yardstick itself: codes, midpoints, scales and histories of the restatement, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from restatement import E4M3, E5M2, DelayedState, amax, blockwise, cast, power_of_two_below, rowwise, scale_of

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
LARGEST = np.finfo(np.float32).max


def test_the_formats_are_the_ones_of_the_design():
    assert (E4M3.max, E5M2.max) == (448, 57344)
    assert (E4M3.table[1], E5M2.table[1]) == (2.0**-9, 2.0**-16)
    assert (E4M3.table[0x38], E5M2.table[0x3C]) == (1, 1)
    assert np.flatnonzero(np.isnan(E4M3.table)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(E4M3.table).any()
    assert np.flatnonzero(np.isinf(E5M2.table)).tolist() == [0x7C, 0xFC]
    assert np.flatnonzero(np.isnan(E5M2.table)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


@FORMATS
def test_every_code_round_trips(fmt):
    finite = np.flatnonzero(np.isfinite(fmt.table))
    assert fmt.encode(fmt.table[finite]).tolist() == finite.tolist()
    assert np.isnan(fmt.decode(fmt.encode(np.array([np.nan, -np.nan])))).all()
    assert (np.diff(fmt.magnitudes) > 0).all()


@FORMATS
def test_midpoints_tie_to_even_and_their_neighbours_do_not_tie(fmt):
    codes = np.arange(len(fmt.magnitudes) - 1)
    middle = (fmt.magnitudes[:-1] + fmt.magnitudes[1:]) / 2
    for sign, offset in ((1, 0), (-1, 128)):
        assert fmt.encode(sign * middle).tolist() == (codes + codes % 2 + offset).tolist()
        for number in (np.float32, np.float64):
            exact = middle.astype(number)
            assert fmt.encode(sign * np.nextafter(exact, number(np.inf))).tolist() == (codes + 1 + offset).tolist()
            assert fmt.encode(sign * np.nextafter(exact, number(0))).tolist() == (codes + offset).tolist()


@FORMATS
def test_a_cast_saturates_infinities_and_keeps_nan(fmt):
    x = np.array([np.inf, -np.inf, 1e30, -1e30, fmt.max, np.nan, 0], dtype=np.float32)
    want = [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max, np.nan, 0]
    np.testing.assert_array_equal(fmt.decode(cast(x, np.float32(1), fmt)), want)


def test_the_product_with_the_scale_is_rounded_to_float32_before_the_cast():
    # 1.0625 is the midpoint of 1 and 1.125. The exact products lie above it by less than half a float32 step.
    scales = np.linspace(1, 2, 101, dtype=np.float32)
    x = np.float32(1.0625) / scales
    above = (x.astype(np.float64) * scales > 1.0625) & (x * scales == np.float32(1.0625))
    assert above.sum() > 5
    assert (E4M3.decode(cast(x, scales, E4M3))[above] == 1).all()


def test_amax_ignores_nan():
    assert amax(np.array([np.nan, -3, 2])) == 3


def test_amax_of_nothing_is_zero():
    assert amax(np.zeros((0, 4))) == 0
    assert amax(np.array([np.nan])) == 0
    assert amax(np.array([np.nan, -np.inf])) == np.inf


def test_a_history_by_hand():
    state = DelayedState(E4M3, 3)
    for value, scale, history in [
        (2.0, 224, [0, 0, 2]),
        (0.0, 224, [0, 0, 2]),
        (4.0, 112, [0, 2, 4]),
        (1.0, 112, [0, 4, 1]),
        (1.0, 112, [0, 1, 1]),
        (1.0, 448, [0, 1, 1]),
        (np.inf, 448, [0, 1, np.inf]),
        (7.0, 448, [0, np.inf, 7]),
        (7.0, 448, [0, 7, 7]),
        (7.0, 64, [0, 7, 7]),
    ]:
        state.step(np.array([value], dtype=np.float32))
        assert (state.scale, state.history.tolist()) == (scale, history)


def test_short_histories_margins_and_the_largest_scale():
    state = DelayedState(E5M2, 1, margin=2)
    state.step(np.array([7.0]))
    assert (state.scale, state.history.tolist()) == (2048, [0])
    state.step(np.array([1e-42]))
    assert state.scale == LARGEST
    recent = DelayedState(E4M3, 2, "most_recent")
    recent.step(np.array([448.0]))
    recent.step(np.array([1.0]))
    assert recent.scale == 448


def test_scales_of_rows_and_blocks():
    assert scale_of(np.array([0, np.inf, 2, 7], dtype=np.float32), E4M3).tolist() == [1, 1, 224, 64]
    assert power_of_two_below(np.array([1, 1.5, 2, 447.9, 0.7], dtype=np.float32)).tolist() == [1, 1, 2, 256, 0.5]
    # 3 × 448/3 is 448; 1 × 149.33 = 149.33 rounds to 144.
    np.testing.assert_allclose(rowwise(np.array([[3, 1], [0, 0]]), E4M3), [[3, 144 * 3 / 448], [0, 0]], rtol=1e-6)
    # Blocks of 128: the 5 and the 0.3 at the end have scales of their own, 64 and 1024; 307.2 rounds to 320.
    x = np.full((1, 130), 5, dtype=np.float32)
    x[0, 128:] = 0.3
    assert blockwise(x, E4M3, 1)[0, [0, 127, 128, 129]].tolist() == [5, 5, 320 / 1024, 320 / 1024]
