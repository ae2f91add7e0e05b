"""Levels of recomputation: values, order, and which model may use which."""

import itertools

import pytest

from octavo.config.recompute import LEVELS, check_blocks, check_values, levels_for, recomputes_block
from octavo.errors import InputError


@pytest.mark.parametrize("wrong", [1, 0, 1.0, None, "Selective", "true", ["mlp"], ("selective",)], ids=repr)
def test_anything_but_a_level_is_refused(wrong):
    with pytest.raises(InputError, match=r'recompute = .* use False, True, "selective", or "mlp"'):
        check_values(wrong, 1)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "2", None], ids=repr)
def test_a_number_of_chunks_is_a_whole_number_from_1(wrong):
    with pytest.raises(InputError, match="mlp_chunks = "):
        check_values(False, wrong)


@pytest.mark.parametrize(
    ("experts", "dropout", "levels"),
    [
        (False, 0.0, [False, "mlp", "selective", True]),
        (True, 0.0, [False, "selective", True]),
        (False, 0.1, [False, "mlp", True]),
        (True, 0.1, [False, True]),
    ],
)
def test_the_levels_of_a_model_are_those_that_its_blocks_take(experts, dropout, levels):
    assert list(levels_for(experts=experts, attention_dropout=dropout)) == levels
    for level, chunks in itertools.product(LEVELS, (1, 2)):
        if level in levels and not (experts and chunks > 1):
            check_blocks(level, chunks, experts=experts, attention_dropout=dropout)
            continue
        with pytest.raises(InputError, match=r"train\.(recompute|mlp_chunks) = "):
            check_blocks(level, chunks, experts=experts, attention_dropout=dropout)


def test_two_levels_save_the_input_of_a_block():
    assert [level for level in LEVELS if recomputes_block(level)] == ["selective", True]
