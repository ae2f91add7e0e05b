"""The rule of `reshard_after_forward = "auto"`: what it counts, what it chooses, and that the choice changes no number."""

import pytest
import sharded
import torch
from test_own_code import neo_config
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GPTNeoForCausalLM, LlamaForCausalLM

import octavo
import ranks
from building import built_model
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import RECIPES
from octavo.hardware import GIB, Device
from octavo.parallel import gathered, world
from octavo.parallel.fsdp import settle
from octavo.parallel.gathered import Choice, choose, gathered_bytes

EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None}
EVEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
"""Sizes that two ranks divide: FSDP2 pads nothing."""


def test_a_twenty_fifth_of_the_memory_is_the_limit():
    memory = 139 * GIB
    assert choose(memory // 25, memory) == Choice(
        False, "blocks stay gathered from forward to backward: 5.6 GiB, at most 1/25 of a GPU's memory (5.6 GiB)"
    )
    assert choose(memory // 25 + 1, memory).reshard
    assert choose(10 * GIB, 80 * GIB) == Choice(
        True, "blocks are freed after their forward: gathered they take 10.0 GiB, more than 1/25 of a GPU's memory (3.2 GiB)"
    )
    assert choose(0, None) == Choice(True, "blocks are freed after their forward, as always on a CPU")


def test_the_memory_is_that_of_the_rank_s_own_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        gathered, "describe_device", lambda index: asked.append(index) or Device("GPU", None, (9, 0), 79.6, "cuda")
    )
    assert gathered.memory_of_gpu(torch.device("cuda")) == 79 * GIB
    assert gathered.memory_of_gpu(torch.device("cuda", 1)) == 79 * GIB
    assert asked == [3, 1]
    assert gathered.memory_of_gpu(torch.device("cpu")) is None


def meta_blocks(**changes):
    """Blocks of a decoder with float32 parameters, on meta."""
    layers = changes.pop("layers", {})
    config = sharded.llama_config(**EVEN | changes)
    model = built_model(
        config, dtype=torch.bfloat16, params_dtype=torch.float32, device="meta", seed=0, layers=layers,
    )  # fmt: skip
    return list(model.layers)


def test_bytes_worked_out_by_hand():
    # [q k v] 64 x 32 of 4 heads with 2 key-value heads of 8, projection 32 x 32, MLP 128 x 32 and 32 x 64, and two norms.
    matrices, norms = 64 * 32 + 32 * 32 + 128 * 32 + 32 * 64, 2 * 32
    delayed, rowwise = RECIPES["delayed"](), RECIPES["rowwise"]()
    blocks = meta_blocks()
    assert gathered_bytes(blocks, delayed, torch.bfloat16) == 3 * (2 * matrices + 4 * norms)
    assert gathered_bytes(blocks, None, torch.bfloat16) == 3 * 2 * (matrices + norms)
    assert gathered_bytes(blocks, rowwise, torch.bfloat16) == 3 * 2 * (matrices + norms)  # cast behind the gathering
    assert gathered_bytes(blocks, None, None) == 3 * 4 * (matrices + norms)
    # A block with a weight in FP8 has its others in their own dtype.
    some = meta_blocks(layers={"layers.*.ffn.*": None})
    mlp = 128 * 32 + 32 * 64
    assert gathered_bytes(some, delayed, torch.bfloat16) == 3 * (2 * (matrices - mlp) + 4 * (mlp + norms))
    # Experts: two of four on each of two ranks; router and norms are the block's.
    experts = 4 * 3 * 64 * 32
    rest = 64 * 32 + 32 * 32
    for degree in (1, 2):
        found = gathered_bytes(meta_blocks(**EXPERTS), delayed, torch.bfloat16, experts_over=degree)
        assert found == 3 * (2 * (experts // degree + rest) + 4 * (norms + 4 * 32))
    assert gathered_bytes([blocks[0], blocks[0]], delayed, None) == gathered_bytes(blocks[:1], delayed, None)  # shared


def held(kind, recipe, degree):
    """(bytes that this rank's blocks hold behind a forward, bytes by the rule, whether FSDP2 frees a block)."""
    world.init({"expert_parallel_degree": degree})
    counted = []
    count, gathered.memory_of_gpu = gathered.gathered_bytes, lambda kind: GIB
    gathered.gathered_bytes = lambda *of, **more: counted.append(count(*of, **more)) or counted[-1]
    recipe = None if recipe is None else RECIPES[recipe]()
    if kind == "neo":
        torch.manual_seed(0)
        theirs = GPTNeoForCausalLM(neo_config())
        octavo.init({"reshard_after_forward": "auto"})
        model = octavo.transform(theirs, recipe, dtype=torch.bfloat16, params_dtype=torch.float32)
        blocks = list(model.transformer.h)
    else:
        sizes = EVEN | (EXPERTS if kind == "mixtral" else {})
        model = sharded.build(torch.bfloat16, recipe, settings={"reshard_after_forward": "auto"}, sizes=sizes)
        blocks = list(model.layers)
    ids = torch.arange(24).view(2, 12) % 17
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        model(input_ids=ids, labels=ids)
    return sum(map(bytes_of, blocks)), counted[0], any(map(frees, model.modules()))


def bytes_of(block):
    """Bytes of all that FSDP2 has gathered for a block."""
    groups = [part._get_fsdp_state()._fsdp_param_group for part in block.modules() if isinstance(part, FSDPModule)]
    parameters = [parameter for group in groups if group is not None for parameter in group.fsdp_params]
    inner = [tensor for parameter in parameters for tensor in getattr(parameter, "_unsharded_inner_tensors", ())]
    outputs = [tensor for parameter in parameters for tensor in parameter.all_gather_outputs]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*outputs, *inner))


def frees(module):
    group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
    return group is not None and group.post_forward_mesh_info is not None


@pytest.mark.long(lambda kind, recipe, degree: recipe == "current" or (kind, recipe, degree) == ("mixtral", None, 2))
@pytest.mark.parametrize(
    ("kind", "recipe", "degree"),
    [
        *(("llama", recipe, 1) for recipe in (None, "delayed", "current", "rowwise")),
        *(("mixtral", recipe, degree) for recipe in (None, "delayed") for degree in (1, 2)),
        *(("neo", recipe, 1) for recipe in ("rowwise", "current")),
    ],
)
def test_the_rule_counts_the_bytes_that_stay(kind, recipe, degree):
    for there, counted, freed in ranks.run(2, held, kind, recipe, degree):
        assert there == counted > 0
        assert not freed


def trained(asked, memories, *, delayed=True):
    """A loop of one's own through `octavo.init` and `octavo.transform`, with evaluations between its steps.

    memories: bytes of each rank's GPU; None: on the CPU that is there.
    """
    if memories is not None:
        gathered.memory_of_gpu = lambda kind: memories[world.state.rank]
    octavo.init({} if asked is None else {"reshard_after_forward": asked})
    config = sharded.llama_config(**sharded.SIZES)
    if delayed:
        with octavo.delayed_init():
            model = LlamaForCausalLM(config)
    else:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model = octavo.transform(model, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.arange(48).view(2, 2, 12)[world.state.rank] % 17
    losses = []
    for _ in range(3):
        with octavo.fp8_autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), model(input_ids=ids, labels=ids).loss.item()]
        with octavo.fp8_autocast():  # without a backward: kept weights would be those of before the next step
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    settle(model)  # else the parameters of kept blocks are the gathered ones
    weights = {name: sharded.full(parameter) for name, parameter in model.named_parameters()}
    return losses, weights, any(map(frees, model.modules())), octavo.describe(model).gathered


@pytest.mark.long
@pytest.mark.parametrize("delayed", [False, True])
def test_auto_computes_the_bits_of_the_value_that_it_chooses(delayed):
    freed, kept = (ranks.run(2, trained, asked, None, delayed=delayed) for asked in (True, False))
    for memories, same, word in (
        ((GIB, GIB), kept, "stay gathered"),
        ((GIB, 1 << 16), freed, "more than"),  # the smaller GPU decides, on both ranks
        ((1 << 16, GIB), freed, "more than"),
        (None, freed, "as always on a CPU"),
    ):
        for one, other in zip(ranks.run(2, trained, None, memories, delayed=delayed), same, strict=True):
            assert one[0] == other[0]
            assert one[1].keys() == other[1].keys()
            assert all(torch.equal(weight, other[1][name]) for name, weight in one[1].items())
            assert one[2] == other[2]
            assert word in one[3]
            assert other[3] == ""
    assert kept[0][0] == freed[0][0]
    assert (kept[0][2], freed[0][2]) == (False, True)


def evaluated(kept_since):
    """Whether all parameters are shards behind an evaluation of blocks that were built to be freed."""
    world.init({})
    model = sharded.build(torch.float32, None)
    if kept_since:
        model.set_reshard_after_forward(False)
    ids = torch.arange(24).view(2, 12) % 17
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("kept_since", [False, True])
def test_an_evaluation_leaves_shards_also_of_blocks_that_a_caller_keeps(kept_since):
    assert ranks.run(2, evaluated, kept_since) == [True, True]


def asked_for_nothing(asked):
    """A value that is given, or a CPU, asks no other rank."""

    def refuse():
        raise AssertionError("a collective")

    gathered.all_ranks = refuse
    return trained(asked, None)[2]


@pytest.mark.long(lambda asked: asked is True)
@pytest.mark.parametrize(("asked", "freed"), [(True, True), (False, False), ("auto", True)])
def test_a_given_value_and_a_cpu_need_no_collective(asked, freed):
    assert ranks.run(2, asked_for_nothing, asked) == [freed, freed]


def test_init_refuses_another_value():
    with pytest.raises(InputError, match=r"octavo\.init: reshard_after_forward = 'maybe': .*boolean.*'auto'"):
        octavo.init({"reshard_after_forward": "maybe"})


def test_the_description_of_a_model_says_what_auto_chose():
    from octavo.build import describe

    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    assert "gathered" not in str(describe(model))
    vars(model)["octavo_gathered"] = choose(0, None).why
    assert "\ngathered: blocks are freed after their forward, as always on a CPU\n" in str(describe(model))
