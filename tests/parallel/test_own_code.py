"""Sharded models that keep their own code, and models of which a part is frozen, compute what one rank computes."""

import fnmatch

import pytest
import sharded
import torch
import torch.distributed as dist
from llamas import llama_config
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import first_casts
import ranks
from building import built_model
from octavo.build import transform
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import CurrentScaling, DelayedScaling
from octavo.fp8.scaling import state_records
from octavo.parallel import world
from octavo.parallel.deferred_init import delayed_init
from octavo.parallel.fsdp import accumulate
from octavo.run.export import export
from octavo.train.optimizer import clip_grad_norm_

IDS = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(1))
TARGETS = 4 * 11
LARGE = 2.0**10
"""Factor of the loss: gradients of a mean over fewer samples are larger, and at scale 1 some would be lost in E5M2."""
FROZEN = {
    "nothing": (),
    "some": ("*wte.weight", "*embed_tokens.weight", "*.0.*", "*.1.mlp.c_fc.weight", "*.1.mlp.down_proj.weight"),
    "whole blocks": ("*.1.*", "*.2.*"),
}


def neo_config():
    return GPTNeoConfig(
        vocab_size=17,
        hidden_size=20,
        num_layers=3,
        num_heads=2,
        intermediate_size=36,
        attention_types=[[["global", "local", "global"], 1]],
        window_size=4,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
    )


def gpt2_config():
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(
        **{"vocab_size": 17, "n_embd": 20, "n_layer": 3, "n_head": 2, "n_positions": 32, **drop},
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )


def build(kind, frozen):
    """A model as `octavo train` makes it (its loss is divided by all targets), or as a loop of one's own does (means)."""
    if kind == "summed neo":
        recipe = DelayedScaling()
        sharding = sharded.sharding(recipe, torch.float32) if world.state.world_size > 1 else None
        options = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu"}
        model = built_model(neo_config(), seed=0, sharding=sharding, **options)
        freeze(model, frozen)
        return model
    torch.manual_seed(0)
    model = {
        "neo": lambda: GPTNeoForCausalLM(neo_config()),
        "gpt2": lambda: GPT2LMHeadModel(gpt2_config()),
        "llama": lambda: LlamaForCausalLM(llama_config(**sharded.SIZES)),
    }[kind]()
    freeze(model, frozen)
    return transform(model.train(), dtype=torch.float32, device="cpu")


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatch(name, pattern) for pattern in FROZEN[frozen]))


@first_casts.by_one()
def train(kind, degrees, fp8, frozen, settings=None):
    """(loss, norm, gradients) of three steps, and the weights afterwards."""
    if dist.is_initialized():
        world.init(degrees | (settings or {}))
    model = build(kind, frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    mine = IDS[world.state.dp_rank :: world.state.dp_size]  # so each micro-batch has the same samples on any number of ranks
    parts = mine.chunk(2) if kind == "summed neo" else [mine]
    count = {"num_items_in_batch": TARGETS} if kind == "summed neo" else {}
    found = []
    for _ in range(3):
        total = torch.zeros(())
        for index, part in enumerate(parts):
            accumulate(model, last=index == len(parts) - 1)
            with microbatch(first=index == 0), fp8_autocast(enabled=fp8, fp8_recipe=DelayedScaling(amax_history_len=4)):
                loss = model(input_ids=part, labels=part, **count).loss
            (loss * LARGE).backward()
            total += loss.detach()
        if world.state.world_size > 1 and kind != "llama":
            dist.all_reduce(total)
            total /= 1 if count else world.state.world_size
        gradients = {name: sharded.full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append((total.item(), clip_grad_norm_(model, 1.0).item(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: sharded.full(p) for name, p in model.named_parameters()}


CASES = [
    ("neo", {}, "nothing", None),
    ("neo", {"hybrid_shard_degree": 1}, "nothing", None),
    ("neo", {}, "some", None),
    ("neo", {}, "whole blocks", {"reshard_after_forward": False}),
    ("gpt2", {}, "nothing", None),
    ("gpt2", {}, "some", {"reshard_after_forward": False}),
    ("summed neo", {}, "nothing", None),
    ("summed neo", {}, "some", None),
    ("llama", {}, "some", None),
    ("llama", {"hybrid_shard_degree": 1}, "some", None),
    ("llama", {}, "whole blocks", {"reshard_after_forward": False}),
]


@pytest.mark.long(
    lambda kind, degrees, frozen, settings, fp8: (
        not fp8 or CASES.index((kind, degrees, frozen, settings)) in (0, 2, 4, 6, 8, 10)
    )
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("kind", "degrees", "frozen", "settings"), CASES)
def test_two_ranks_equal_one(kind, degrees, frozen, settings, fp8):
    steps, weights = train(kind, degrees, fp8, frozen)
    assert all(0 < len(gradients) <= len(weights) for _, _, gradients in steps)
    assert (len(steps[0][2]) < len(weights)) == (frozen != "nothing")
    first, second = ranks.run(2, train, kind, degrees, fp8, frozen, settings)
    for (loss, norm, gradients), a, b in zip(steps, first[0], second[0], strict=True):
        assert a[:2] == b[:2]
        # GPT-2's weights of 0.02 move by half of themselves in a step, and casts of sums in another order round elsewhere.
        wide = 10 if kind == "gpt2" and fp8 else 1
        assert a[0] == pytest.approx(loss, rel=1e-5 * wide)
        assert a[1] == pytest.approx(norm, rel=1e-2 if fp8 else 1e-5)
        assert a[2].keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (a[2][name] - gradient).norm() <= (2e-2 if fp8 else 1e-4) * wide**0.5 * gradient.norm() + 1e-9, name
    for name, gradient in steps[0][2].items():
        assert (first[0][0][2][name] - gradient).norm() <= 2e-4 * gradient.norm() + 1e-9, name
    for name, weight in weights.items():
        assert torch.equal(first[1][name], second[1][name]), name
        if name not in steps[0][2]:
            assert torch.equal(first[1][name], weight), name


def load_and_export(source, target):
    """Fill a Mixtral from a folder, this rank's rows of the experts alone, and write it again; returns its whole weights."""
    if dist.is_initialized():
        world.init({})
    with delayed_init():
        model = MixtralForCausalLM(MixtralConfig.from_pretrained(source))
    model = transform(model, dtype=torch.float32, device="cpu", load_from=source, blocks="own")
    export(model, target)
    return {name: sharded.full(p) for name, p in model.named_parameters()}


def test_experts_are_joined_from_their_files_and_parted_again_on_ranks(tmp_path):
    sizes = {
        "vocab_size": 17,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 5}
    torch.manual_seed(3)
    theirs = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    theirs.save_pretrained(tmp_path / "source")
    published = load_file(tmp_path / "source" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.4.w3.weight" in published
    for loaded in ranks.run(2, load_and_export, tmp_path / "source", tmp_path / "target"):
        for name, parameter in theirs.named_parameters():
            assert torch.equal(loaded[name], parameter), name
    written = load_file(tmp_path / "target" / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())


NO_DROPOUT = {
    "gpt_neox": {"attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0, "word_embed_proj_dim": 32, "ffn_dim": 64},
}


def by_each_way(family, fp8):
    """Losses and scales without recomputation, with it, and with reentrant checkpoints."""
    if dist.is_initialized():
        world.init()
    return [losses_and_scales(family, fp8, way) for way in ("", "recompute", "reentrant")]


def losses_and_scales(family, fp8, way):
    """Two steps of three micro-batches, and an evaluation after the first of each."""
    size = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    size |= {"max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(family, **size, **NO_DROPOUT[family])
    recipe = DelayedScaling(amax_history_len=4)
    options = {"dtype": torch.bfloat16, "params_dtype": torch.float32, "device": "cpu", "seed": 0, "blocks": "own"}
    sharding = sharded.sharding(recipe, torch.bfloat16) if world.state.world_size > 1 else None
    model = built_model(config, sharding=sharding, recompute=way == "recompute", **options)
    if way == "reentrant":
        # By its name in later and in earlier versions of transformers.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    mine = IDS[world.state.dp_rank :: world.state.dp_size]
    found = []
    for step in range(2):
        for index in range(3):
            accumulate(model, last=index == 2)
            ids = (mine * (step + 1) + index) % 17
            with microbatch(first=index == 0), fp8_autocast(enabled=fp8, fp8_recipe=recipe):
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=3 * TARGETS).loss
            (loss * LARGE).backward()
            found.append(loss.item())
            if index == 0:
                with torch.no_grad(), fp8_autocast(enabled=fp8, fp8_recipe=CurrentScaling()):
                    found.append(model.eval()(input_ids=ids, labels=ids).loss.item())
                model.train()
        found.append(clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return found, {name: scale.tolist() for name, scale in state_records(model).items()}


@pytest.mark.long(lambda family, fp8, count: count == 1 or not fp8 or family == "opt")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("family", "fp8"), [("gpt_neox", True), ("gpt_neox", False), ("opt", True)])
def test_recomputation_of_micro_batches_changes_no_bit(family, fp8, count):
    for wanted, *others in ranks.run(count, by_each_way, family, fp8):
        assert bool(wanted[1]) == fp8
        assert others == [wanted] * 2


class Ordered(torch.nn.Module):
    """Four residual blocks that run in an order of their own."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
            for _ in range(4)
        )

    def forward(self, x, order):
        x = self.first(x)
        for index in order:
            x = x + self.layers[index](x)
        return x.square().mean()


ORDERS = {
    "their own": (0, 1, 2, 3),
    "backwards": (3, 2, 1, 0),
    "each twice": (0, 0, 1, 1, 2, 2, 3, 3),
    "all twice": (0, 1, 2, 3, 0, 1, 2, 3),
    "one again": (0, 1, 2, 1, 3),
    "mixed": (1, 3, 0, 2),
}


@first_casts.by_one()
def in_orders(keep, recipe, micro_batches, evaluation):
    """Losses and gradients of two steps in each order, an evaluation under another recipe before each backward."""
    if dist.is_initialized():
        world.init({"reshard_after_forward": not keep})
    samples = torch.randn(8, 8, 32, generator=torch.Generator().manual_seed(2))
    mine = samples.chunk(world.state.dp_size)[world.state.dp_rank]
    found = []
    for order in ORDERS.values():
        torch.manual_seed(0)
        model = transform(Ordered(), recipe, dtype=torch.float32, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):
            for index in range(micro_batches):
                accumulate(model, last=index == micro_batches - 1)
                x, first = mine + step + 0.5 * index, index == 0 if micro_batches > 1 else None
                with microbatch(first=first), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                    loss = model(x, order)
                if evaluation != "none":
                    with torch.no_grad(), fp8_autocast(enabled=evaluation is not None, fp8_recipe=evaluation):
                        model(2 * x, order)
                (loss * LARGE).backward()
                total = loss.detach().clone()
                if world.state.world_size > 1:
                    dist.all_reduce(total)
                found.append(total.item() / world.state.world_size)
            found.append({name: sharded.full(p.grad) for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "evaluation", "micro_batches"),
    [
        (None, "none", 3),
        *(
            (DelayedScaling(amax_history_len=4), other, count)
            for other, count in (("none", 3), (None, 1), (CurrentScaling(), 1))
        ),
        *((CurrentScaling(), other, count) for other, count in (("none", 1), (DelayedScaling(amax_history_len=4), 3))),
    ],
)
def test_blocks_that_run_in_another_order_or_twice(recipe, evaluation, micro_batches):
    one = in_orders(False, recipe, micro_batches, evaluation)
    freed, kept = (ranks.run(2, in_orders, keep, recipe, micro_batches, evaluation)[0] for keep in (False, True))
    # Current scaling casts the samples of each rank by their own amax.
    loss, gradient = {None: (1e-6, 1e-5), DelayedScaling: (1e-5, 2e-2)}.get(recipe and type(recipe), (2e-2, 0.2))
    for wanted, found, same in zip(one, freed, kept, strict=True):
        if isinstance(wanted, float):
            assert found == same == pytest.approx(wanted, rel=loss)
        else:
            for name, value in wanted.items():
                assert torch.equal(found[name], same[name]), name
                assert (found[name] - value).norm() <= gradient * value.norm() + 1e-9, name


@first_casts.by_one()
def block_by_itself(keep):
    """The gradients of a block that is called by itself, behind a first evaluation of the model."""
    if dist.is_initialized():
        world.init({"reshard_after_forward": not keep})
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4)
    model = transform(Ordered(), recipe, dtype=torch.float32, device="cpu")
    x = torch.randn(8, 8, 32, generator=torch.Generator().manual_seed(2)).chunk(world.state.dp_size)[world.state.dp_rank]
    with fp8_autocast(fp8_recipe=recipe):
        with torch.no_grad():
            model(x, ORDERS["backwards"])
        loss = model.layers[1](x).square().mean()
    (loss * LARGE).backward()
    return {name: sharded.full(p.grad) for name, p in model.layers[1].named_parameters()}


@pytest.mark.parametrize("keep", [False, True])
def test_a_block_that_is_called_by_itself(keep):
    one = block_by_itself(keep)
    for found in ranks.run(2, block_by_itself, keep):
        for name, gradient in one.items():
            assert (found[name] - gradient).norm() <= 2e-2 * gradient.norm(), name


def ernie(dtype):
    """A model whose router transformers keeps in float32."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 17}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
    config = AutoConfig.for_model("ernie4_5_moe", **shape, **experts, num_key_value_heads=2, moe_layer_end_index=1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def message_and_loss_of_mixed_dtypes():
    world.init({})
    try:
        transform(ernie(torch.bfloat16), device="cpu")
    except InputError as error:
        message = str(error)
    whole = transform(ernie(torch.bfloat16), device="cpu", params_dtype=torch.float32)
    mine = IDS[world.state.dp_rank :: world.state.dp_size]
    whole(input_ids=mine, labels=mine).loss.backward()
    return message, sharded.full(whole.model.layers[1].mlp.gate.weight.grad).norm().item()


def test_a_router_in_float32_beside_bf16_is_refused_over_ranks_and_float32_trains():
    for message, norm in ranks.run(2, message_and_loss_of_mixed_dtypes):
        assert message.startswith(
            "params_dtype = bfloat16 over several ranks: ernie4_5_moe leaves model.layers.1.mlp.gate.weight"
        )
        assert 'Set model.params_dtype = "float32" (params_dtype=torch.float32 in Python).' in message
        assert norm > 0
