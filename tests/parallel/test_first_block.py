"""The first block's MLP is gathered and reduced by itself: with the numbers of a block in one, to the last bit."""

import pytest
import torch
from sharded import TOKENS, build, full
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.parallel import fsdp, world
from octavo.parallel.fsdp import accumulate


def steps(recipe_name, micro_batches, settings, options):
    """Losses, gradients and reductions of two steps: of blocks in one, and of the first with its MLP apart."""
    return [_steps(recipe_name, micro_batches, settings, options, apart) for apart in (lambda first: [], fsdp._separate_mlp)]


def _steps(recipe_name, micro_batches, settings, options, apart):
    group, reduced = _fsdp_param_group.FSDPParamGroup, []
    own, reduce = fsdp._separate_mlp, group.post_backward

    def post_backward(self, *unused):
        behind_attention = model.layers[0].self_attention.proj.weight.grad is not None
        reduced.append(([parameter._param_fqn for parameter in self.fsdp_params], behind_attention))
        reduce(self, *unused)

    fsdp._separate_mlp, group.post_backward = apart, post_backward
    try:
        world.init({})
        recipe = None if recipe_name is None else RECIPES[recipe_name]()
        model = build(torch.float32, recipe, sizes={"num_hidden_layers": 2}, settings=settings, **options)
        draw = torch.Generator().manual_seed(world.state.rank)
        losses = []
        for step in torch.randint(0, 17, (2, micro_batches, 2, TOKENS), generator=draw):
            for index, part in enumerate(step):
                accumulate(model, last=index == micro_batches - 1)
                with microbatch(first=index == 0), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    loss = model(input_ids=part, labels=part, num_items_in_batch=100).loss
                    loss.backward()
                losses.append(loss.detach())
    finally:
        fsdp._separate_mlp, group.post_backward = own, reduce
    return torch.stack(losses), {name: full(parameter.grad) for name, parameter in model.named_parameters()}, reduced


@pytest.mark.long(lambda recipe, micro_batches, frees: recipe == "delayed" and micro_batches == 1 and frees)
@pytest.mark.parametrize(
    ("recipe", "micro_batches", "frees", "options"),
    [
        (None, 1, True, {}),
        ("delayed", 1, False, {}),
        ("delayed", 3, True, {}),
        ("current", 2, True, {"recompute": "selective"}),
        ("delayed", 1, True, {"recompute": True}),
    ],
)
def test_the_mlp_of_the_first_block_is_reduced_before_its_attention(recipe, micro_batches, frees, options):
    settings = {"reshard_after_forward": frees}
    for (losses, grads, _), (own_losses, own_grads, reduced) in ranks.run(2, steps, recipe, micro_batches, settings, options):
        assert torch.equal(losses, own_losses)
        assert grads.keys() == own_grads.keys()
        for name, gradient in grads.items():
            assert torch.equal(gradient, own_grads[name]), name
        (mlp, late), (attention, _) = [group for group in reduced if group[0][0].startswith("layers.0.")][:2]
        assert all("ffn" in name for name in mlp)
        assert all("self_attention" in name for name in attention)
        assert not late
