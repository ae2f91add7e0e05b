"""Wrappers around a transformed model in FSDP: local checkpoints through every one are those of the model inside."""

import itertools

import pytest
import wrapper_ranks

import octavo
import ranks


@pytest.fixture(autouse=True)
def one_rank():
    yield
    octavo.shutdown()


@pytest.mark.long
def test_local_checkpoints_through_every_wrapper_restore_weights_and_the_next_loss(tmp_path):
    for found in ranks.run(2, wrapper_ranks.wrapped, str(tmp_path)):
        assert len(found) == 11
        wanted = found["own"]["next loss"]
        for kind, ways in found.items():
            assert ways.pop("next loss") == wanted, kind
            expected = ("each", "all", "file", *(["pytorch"] if kind == "offload" else []))
            assert ways == dict.fromkeys(expected, (True, True)), kind


def test_a_local_state_that_restores_nothing_is_refused():
    for found in ranks.run(2, wrapper_ranks.nothing_restored, ""):
        assert len(found) == 3
        for text in found:
            assert "has no key of" in text


def test_smps_local_type_around_pytorchs_own_fsdp(tmp_path):
    for found in ranks.run(2, wrapper_ranks.never_transformed, str(tmp_path)):
        assert found == dict.fromkeys(itertools.product((True, False), ("all", "each", "file")), True)
