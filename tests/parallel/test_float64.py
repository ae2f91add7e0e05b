"""Layouts in float64: whatever the order of sums, losses, gradients and steps of ranks are those of one, in FP8 too."""

import pytest
import tensor_ranks
import torch

import octavo
import ranks
from octavo.errors import InputError

SIZES = tensor_ranks.ALIGNED | {"num_key_value_heads": 2}
MIXTURE = tensor_ranks.MIXTURE | {"num_key_value_heads": 2}
LAYOUTS = {
    "shard": ({}, 2, SIZES, (None,)),
    "replicate": ({"hybrid_shard_degree": 1}, 2, SIZES, (None,)),
    "tensor": ({"tensor_parallel_degree": 2}, 2, SIZES, (None, "delayed", "current")),
    "tensor of four": ({"tensor_parallel_degree": 4}, 4, SIZES | {"model_type": "gpt_neox"}, ("delayed", "current")),
    "gathered": ({"context_parallel_degree": 2}, 2, SIZES, (None, "delayed", "current")),
    "ring": ({"context_parallel_degree": 2, "cp_comm_type": "p2p"}, 2, SIZES, ("delayed",)),
    "heads": ({"context_parallel_degree": 2, "cp_comm_type": "a2a"}, 2, SIZES, ("current",)),
    "both": ({"tensor_parallel_degree": 2, "context_parallel_degree": 2}, 4, SIZES, ("delayed",)),
    "slices of experts": ({"tensor_parallel_degree": 2}, 2, MIXTURE, (None, "delayed", "current")),
    "experts": ({"expert_parallel_degree": 2}, 2, MIXTURE, (None,)),
}


@pytest.mark.long(lambda layout: layout in ("tensor of four", "ring"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_has_the_numbers_of_one_rank(layout):
    degrees, world, shape, recipes = LAYOUTS[layout]
    cells = [(shape, {"recipe": recipe, "dtype": torch.float64, "steps": 2, "micro_batches": 2}) for recipe in recipes]
    found = ranks.run(world, tensor_ranks.cells, degrees, cells)[0]
    for (_, options), each in zip(cells, found, strict=True):
        assert {gradient.dtype for gradient in each["gradients"].values()} == {torch.float64}
        errors = tensor_ranks.errors(each, tensor_ranks.trained(shape, None, **options))
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_every_recipe_computes_in_float64(recipe):
    setting = {"recipe": recipe, "steps": 1}
    wide, narrow = (tensor_ranks.trained(SIZES, None, dtype=dtype, **setting) for dtype in (torch.float64, torch.float32))
    assert max(tensor_ranks.errors(narrow, wide).values()) < 0.05  # a cast to FP8 may take the other neighbour
    assert narrow["losses"][0] == pytest.approx(wide["losses"][0], rel=1e-4)


def test_float64_is_for_activations_and_parameters_together():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    for settings in ({"params_dtype": torch.float64}, {"dtype": torch.float64, "params_dtype": torch.float32}):
        with pytest.raises(InputError, match=r"set torch\.float64 for both, on a CPU"):
            octavo.transform(model, **settings)
