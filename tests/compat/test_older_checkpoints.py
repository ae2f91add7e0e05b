"""Checkpoints of an older PyTorch: files that 2.5.1 wrote are read by the names that are listed, without a plain unpickle."""

import itertools
import pickle

import numpy as np
import older_ranks
import pytest
import torch

import ranks


def test_local_and_sharded_checkpoints_of_pytorch_2_5_are_read():
    for found in ranks.run(2, older_ranks.read, ""):
        kinds, ways = ("local", "sharded"), ("file", "folder", "rest")
        assert found == dict.fromkeys(itertools.product(kinds, ways), (True, True, True))


def test_arrays_of_numpy_load_and_what_they_could_hide_does_not(tsm, tmp_path):
    torch.manual_seed(0)
    kinds = ("bool", "int8", "int16", "uint32", "uint64", "float16", "float64")
    arrays = {kind: np.array(torch.randint(0, 2, (3, 2)).tolist(), kind) for kind in kinds}
    torch.save({"arrays": arrays, "rng": np.random.get_state()}, tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt")
    assert all(
        np.array_equal(found["arrays"][kind], array) and found["arrays"][kind].dtype == kind for kind, array in arrays.items()
    )
    assert np.array_equal(found["rng"][1], np.random.get_state()[1])
    torch.save({"hidden": np.array([print], object)}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError, match="ObjectDType"):
        torch.load(tmp_path / "file.pt")
