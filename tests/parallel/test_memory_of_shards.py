"""The estimate of memory over several ranks, against the storages that FSDP2 holds."""

from unittest import mock

import pytest
import torch
from llamas import llama_config
from sharded import build, bytes_held, weights_in_fp8
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import octavo
import ranks
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.quantizer import DenseOperand, LinearQuantizer
from octavo.fp8.recipe import RECIPES
from octavo.models.families import spec_of
from octavo.parallel import world
from octavo.parallel.experts import experts_in
from octavo.parallel.fsdp import accumulate, sharded_modules
from octavo.plan import memory, saved
from octavo.plan.saved import BlockRecipes, Setup

pytestmark = ranks.alone
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}


def held_by_fsdp(recipe_name, sizes):
    """Bytes on this rank: of a gathered block, shards in FP8, gathered embedding, norm and head, a micro-batch's gradients."""
    world.init({})
    recipe = None if recipe_name is None else RECIPES[recipe_name]()
    model = build(torch.bfloat16, recipe, sizes=sizes)
    found = {}
    ends = model.embedding, model.head  # the norm is in the group of the head

    def group(module):
        return module._get_fsdp_state()._fsdp_param_group.fsdp_params

    def gathered(module):
        tensors = {}
        for parameter in (p for part in (*experts_in(module), module) for p in group(part)):
            for tensor in [*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors]:
                tensors[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(tensors.values())

    def note(*_):
        found["block"] = gathered(model.layers[1])

    block = model.layers[1]
    for experts in experts_in(block):
        experts.register_forward_pre_hook(note)
    if not experts_in(block):
        block.layernorm_mlp.register_forward_hook(note)
    ids = torch.randint(0, 96, (1, 16))
    accumulate(model, last=False)
    with microbatch(first=True), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=30).loss
    found["cast shards"] = bytes_held(weights_in_fp8(model))
    found["root"] = sum(gathered(end) for end in ends)
    loss.backward()
    whole = 0
    for module in (*sharded_modules(model.layers), *ends):
        for parameter in group(module):
            kept = parameter.unsharded_accumulated_grad
            if kept is None:
                kept = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            whole += 0 if kept is None else kept.untyped_storage().nbytes()
    found["whole gradients"] = whole
    found["shards"] = sum(p.to_local().nbytes for p in model.parameters())
    return found


@pytest.mark.long(lambda recipe, experts: experts == (recipe == "rowwise"))
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "rowwise"])
def test_gathered_weights_and_whole_gradients(recipe, experts):
    sizes = SIZES | (EXPERTS if experts else {})
    spec = spec_of(llama_config(**sizes))
    blocks = (BlockRecipes(*(recipe,) * 4),) * 3 if recipe else ()
    setup = Setup(spec, saved.parameters(spec), 1, 16, blocks=blocks, world=2, shard=2, accumulates=True)
    for found in ranks.run(2, held_by_fsdp, recipe, sizes):
        assert found["block"] == pytest.approx(memory._gathered_block(setup, spec), rel=0.01)
        assert found["cast shards"] == memory._cast_shards(setup, spec)
        assert found["root"] == pytest.approx(saved.root_parameters(spec) * 2, rel=0.01)
        assert found["whole gradients"] == memory._whole_gradients(setup, spec) == 4 * saved.parameters(spec)
        assert found["shards"] == memory.exact_bytes(saved.parameters(spec), 4, 2) // 4


def casts_of_a_weight(sharded):
    """Casts of a float32 weight in a step of a layer by itself, under PyTorch's `fully_shard`, beside a layer so, or not."""
    world.init({})
    layer, other = (octavo.nn.LayerNormLinear(64, 32, bias=False, params_dtype=torch.float32) for _ in range(2))
    mesh = init_device_mesh("cpu", (2,))
    if sharded == "another":
        fully_shard(other, mesh=mesh)
    elif sharded:
        layer = fully_shard(nn.Sequential(layer), mesh=mesh)
    reads = mock.patch.object(LinearQuantizer, "_operand", side_effect=DenseOperand)
    with reads as counted, fp8_autocast():
        layer(torch.randn(16, 64).requires_grad_()).square().sum().backward()
    return counted.call_count


@pytest.mark.parametrize("sharded", [False, "another", True])
def test_fsdp_of_others_frees_the_weight_that_backward_casts_again(sharded):
    assert ranks.run(2, casts_of_a_weight, sharded) == [2 if sharded is True else 1] * 2
