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

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}


EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}


def group(module):
    """FSDP2's parameters of a module."""
    return module._get_fsdp_state()._fsdp_param_group.fsdp_params


def gathered(module):
    """Bytes of a block's weights, gathered or being gathered."""
    tensors = {}
    for part in (*experts_in(module), module):
        received = part._get_fsdp_state()._fsdp_param_group._all_gather_result
        found = [] if received is None or received.all_gather_output is None else [received.all_gather_output]
        for parameter in group(part):
            found += [*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors]
        tensors |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    return sum(tensors.values())


def held_by_fsdp(recipe_name, sizes):
    """Bytes on this rank: of a gathered block, shards in FP8, gathered embedding, norm and head, a micro-batch's gradients."""
    world.init({})
    recipe = None if recipe_name is None else RECIPES[recipe_name]()
    model = build(torch.bfloat16, recipe, sizes=sizes)
    found = {}
    ends = model.embedding, model.head  # the norm is in the group of the head

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


def held_in_backward(recipe_name, degrees):
    """Bytes on this rank where the backward of each block's experts begins: of each gathered block, and of its gradients."""
    world.init(degrees)
    recipe = None if recipe_name is None else RECIPES[recipe_name]()
    model = build(torch.bfloat16, recipe, sizes=SIZES | EXPERTS)
    found = []

    def note(*_):
        of_blocks = [[p.grad.to_local().nbytes for p in block.parameters() if p.grad is not None] for block in model.layers]
        found.append((*map(gathered, model.layers), *map(sum, of_blocks)))

    for block in model.layers:
        for experts in experts_in(block):
            experts.register_forward_hook(lambda _, __, y: y.register_hook(note) and None)  # after FSDP2's own hook
    ids = torch.randint(0, 96, (1, 16))
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        model(input_ids=ids, labels=ids, num_items_in_batch=30).loss.backward()
    return found


@pytest.mark.parametrize("recipe", [None, "delayed", "rowwise"])
@pytest.mark.parametrize("expert", [1, 2])
def test_weights_and_gradients_in_the_backward_of_experts(recipe, expert):
    spec = spec_of(llama_config(**SIZES | EXPERTS))
    blocks = (BlockRecipes(*(recipe,) * 4),) * 3 if recipe else ()
    setup = Setup(spec, saved.parameters(spec), 1, 16, blocks=blocks, world=2, shard=2, expert=expert)
    gradients = 4 * saved.block_parameters(spec) / 2
    block, ahead = (memory._gathered_block(setup, spec, ahead=ahead) for ahead in (False, True))
    assert ahead < block / 3 if expert == 2 else ahead > block / 3
    for found in ranks.run(2, held_in_backward, recipe, {} if expert == 1 else {"expert_parallel_degree": 2}):
        last, middle, first = found
        assert last[:3] == pytest.approx((0, ahead, block), rel=0.01)
        assert middle[:3] == pytest.approx((ahead, block, 0), rel=0.01)
        assert first[:3] == pytest.approx((block, 0, 0), rel=0.01)
        # A block being reduced has its shards already.
        assert last[3:] == (0, 0, 0)
        assert middle[3:] == pytest.approx((0, 0, gradients), rel=0.01)
        assert first[3:] == pytest.approx((0, gradients, gradients), rel=0.01)


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
