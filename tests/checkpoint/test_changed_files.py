"""Checkpoints whose manifest or headers were changed: they load to the exact values, or are refused with nothing changed."""

import pytest
import rank_saving

import ranks
from octavo.errors import OctavoError


@pytest.mark.long(lambda saving, seeds: seeds[0] == 60 or (saving > 1 and len(seeds) > 12))
@pytest.mark.parametrize(
    ("saving", "loading", "seeds"),
    [
        (1, 1, range(60)), (1, 1, range(60, 120)), (2, 2, range(120, 132)), (2, 2, range(132, 160)), (2, 1, range(160, 172)),
        (2, 1, range(172, 200)),
    ],
)  # fmt: skip
def test_a_changed_checkpoint_loads_exactly_or_is_refused_on_all_ranks_with_nothing_changed(tmp_path, saving, loading, seeds):
    (saved, files), *_ = ranks.run(saving, rank_saving.save_for_changes, tmp_path)
    answers = ranks.run(loading, rank_saving.load_changed, tmp_path, files, seeds)
    loaded = 0
    for before, found in answers:
        for seed, error, extra, after in found:
            if error is None:
                loaded += 1
                assert after[0] == saved, seed
                assert extra == {"schedule": {"step": 2, "rates": [0.5, 0.25]}}, seed
            else:
                assert isinstance(error, OctavoError), seed
                assert after == before, (seed, error)
    for each in zip(*(found for _, found in answers), strict=True):
        assert len({(type(error) is type(None), getattr(error, "exit_code", None)) for _, error, *_ in each}) == 1
    assert 0 < loaded < len(seeds) * loading / 2  # changes without a meaning, such as of the version that wrote it
