"""Files of older runs are compared by what they mean."""

import pytest

from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.resume import check_resumable, with_keys_of


def run_of(**data):
    sections = {"model": {"source": "llama-tiny"}, "train": {"steps": 2, "global_batch": 1}}
    return RunConfig.from_dict({**sections, "data": {"source": "owner/texts", "sequence_length": 8, **data}})


def test_the_split_that_older_files_list_is_the_default(tmp_path):
    older, now = run_of(split="train"), run_of()
    for before, after in ((older, now), (now, older), (older, older)):
        check_resumable(before, with_keys_of(before, after, after)[0], tmp_path)
    for before, after in ((run_of(split="test"), older), (older, run_of(split="test"))):
        with pytest.raises(InputError, match=r"data\.split was .* and is now"):
            check_resumable(before, with_keys_of(before, after, after)[0], tmp_path)
