"""Muon: PyTorch's on Hugging Face's matrices to the bit, whole matrices over ranks, each once, and exact across resume."""

import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import octavo
import ranks
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.convert import conversion_of
from octavo.models.hidden import hidden_parameters
from octavo.plan.advice import memory_of
from octavo.plan.memory import exact_bytes
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train.muon import MuonAdamW, orthogonalised
from octavo.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from llamas import SHAPES, hugging_face, llama

from muon_ranks import FACTORS, SETTINGS, built, continued, stepped, whole_state


def split_as_hugging_face(name, matrix, config):
    """The matrices of one of Hugging Face's parameters inside of blocks: its parts, and those of each expert."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name.endswith("qkv_proj.weight"):
        return matrix.split([config.num_attention_heads * head_dim, *[config.num_key_value_heads * head_dim] * 2])
    if name.endswith("query_key_value.weight"):  # of each head: query, key, value
        return tuple(part.flatten(0, 1) for part in matrix.unflatten(0, (-1, 3, head_dim)).unbind(1))
    if name.endswith("gate_up_proj.weight"):
        return matrix.chunk(2)
    if name.endswith("gate_up_proj"):
        return tuple(half for expert in matrix for half in expert.chunk(2))
    return tuple(matrix) if matrix.ndim == 3 else (matrix,)


def is_hidden(name, parameter):
    return ".layers." in name and parameter.ndim > 1 and not name.endswith(("norm.weight", ".gate.weight", "router.weight"))


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", ["one-group", "phi3", "neox", "qwen3-moe-mixed"])
def test_steps_are_those_of_pytorchs_muon_and_adamw_on_each_matrix(shape, scale):
    reference = llama(**SHAPES[shape])
    model = octavo.transform(llama(**SHAPES[shape]), dtype=torch.float32)
    config = reference.config
    settings = {"lr": 0.02, "weight_decay": 0.1}
    optimizer = octavo.muon(model, adamw_lr=0.004, scale=scale, dtype=torch.bfloat16, **settings)
    parts = {
        name: [nn.Parameter(part.detach().clone()) for part in split_as_hugging_face(name, p, config)]
        for name, p in reference.named_parameters()
        if is_hidden(name, p)
    }
    muon = torch.optim.Muon([part for each in parts.values() for part in each], adjust_lr_fn=scale, **settings)
    others = [(name, p) for name, p in reference.named_parameters() if name not in parts]
    adamw = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for _, p in others],
        lr=0.004, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(torch.seed() % 2**31)
    way = conversion_of(model)
    for _ in range(3):
        grads = {name: torch.randn(p.shape, generator=draw) for name, p in reference.named_parameters()}
        for name, p in others:
            p.grad = grads[name].clone()
        for name, each in parts.items():
            for part, grad in zip(each, split_as_hugging_face(name, grads[name], config), strict=True):
                part.grad = grad.clone()
        for name, p in model.named_parameters():
            p.grad = way.join(name, tuple(grads[source] for source in way.names(name))).clone()
        for each in (optimizer, muon, adamw):
            each.step()
    found = hugging_face({name: p.detach() for name, p in model.named_parameters()}, model.spec)
    for name, each in parts.items():
        for part, own in zip(each, split_as_hugging_face(name, found[name], config), strict=True):
            assert torch.equal(own, part), name
    for name, p in others:
        assert torch.equal(found[name], p), name


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_rates_by_name_and_depth_are_those_of_a_group_for_each_matrix(scale):
    model = octavo.transform(llama(**SHAPES["one-group"]), dtype=torch.float32)
    reference = llama(**SHAPES["one-group"])
    rates, decay = {"*.down_proj": 0.5, "lm_head": 2.0, "*norm*": 3.0}, 0.7
    optimizer = octavo.muon(model, lr=0.02, adamw_lr=0.004, scale=scale, rates=rates, layer_decay=decay)
    blocks = model.spec.layers

    def factor(name):
        depth = 0 if "embed" in name else int(name.split("layers.")[1].split(".")[0]) + 1 if ".layers." in name else blocks + 1
        by_name = 0.5 if "down_proj" in name else 3.0 if "norm" in name else 2.0 if name.startswith("lm_head") else 1.0
        return by_name * decay ** (blocks + 1 - depth)

    named = dict(reference.named_parameters())
    muon = torch.optim.Muon(
        [{"params": [p], "lr": 0.02 * factor(name)} for name, p in named.items() if is_hidden(name, p)],
        lr=0.02, weight_decay=0.1, adjust_lr_fn=scale,
    )  # fmt: skip
    decayed = {name: 0.1 if p.ndim > 1 else 0.0 for name, p in named.items()}
    adamw = torch.optim.AdamW(
        [
            {"params": [p], "lr": 0.004 * factor(name), "weight_decay": decayed[name]}
            for name, p in named.items()
            if not is_hidden(name, p)
        ],
        betas=(0.9, 0.95),
    )
    way, before = conversion_of(model), {name: p.detach().clone() for name, p in named.items()}
    for _ in range(3):
        for p in named.values():
            p.grad = torch.randn_like(p)
        for name, p in model.named_parameters():
            p.grad = way.join(name, tuple(named[source].grad for source in way.names(name))).clone()
        for each in (optimizer, muon, adamw):
            each.step()
    found = hugging_face({name: p.detach() for name, p in model.named_parameters()}, model.spec)
    for name, p in named.items():
        moved = (p - before[name]).abs().max()
        # PyTorch's iteration runs in bfloat16, Octavo's on a CPU in float32.
        assert (found[name] - p).abs().max() < (0.15 if is_hidden(name, p) else 1e-4) * moved, name


@pytest.mark.parametrize("shape", [(3, 40, 24), (3, 24, 40), (1, 33, 33), (2, 1, 16)])
def test_singular_values_go_near_one_and_vectors_stay(shape):
    stack = torch.randn(shape, dtype=torch.float64)
    found = orthogonalised(stack, torch.float64)
    for matrix, own in zip(stack, found, strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        turned = left.mT @ own @ right.mT  # diagonal, with the new singular values
        torch.testing.assert_close(turned, torch.diag(turned.diagonal()), rtol=0, atol=1e-8)
        assert turned.diagonal().max() < 1.3
    torch.testing.assert_close(orthogonalised(stack, torch.float64, batched=True), found, rtol=0, atol=1e-12)
    in_float32, in_bf16 = (orthogonalised(stack.float(), dtype).double() for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(in_float32, found, rtol=0, atol=1e-4)
    torch.testing.assert_close(in_bf16, found, rtol=0, atol=0.1)
    assert not orthogonalised(torch.zeros(shape), torch.float32).any()


LAYOUTS = {
    "replicate 2": (2, {"hybrid_shard_degree": 1}, "intermediate-odd"),
    "shard 2": (2, {}, "one-group"),
    "shard 4, uneven rows": (4, {}, "intermediate-odd"),
    "tensor 2": (2, {"tensor_parallel_degree": 2}, "one-group"),
    "tensor 2 x shard 2": (4, {"tensor_parallel_degree": 2}, "phi3"),
    "expert 2": (2, {"expert_parallel_degree": 2}, "mixtral"),
}


MIXED = ("shard 4, uneven rows", "tensor 2 x shard 2", "expert 2")
"""Layouts of make test; the others have parts of them."""


@pytest.mark.long(lambda layout: layout not in MIXED or layout == "shard 4, uneven rows")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_continues_one_rank_and_one_rank_continues_it(layout, tmp_path):
    world, degrees, shape = LAYOUTS[layout]
    changes = SHAPES[shape]
    model, optimizer = built(changes, FACTORS)
    stepped(model, optimizer, 7)
    octavo.save(tmp_path / "begun", model, optimizer)
    (own_counts, wanted) = continued(changes, None, tmp_path / "begun", tmp_path / "own")
    found = ranks.run(world, continued, changes, degrees, tmp_path / "begun", tmp_path / "saved")
    assert [sum(counts) for counts in zip(*(counts for counts, _ in found), strict=True)] == own_counts  # each matrix once
    assert all(counts[0] for counts, _ in found)
    for _, state in found:
        assert state.keys() == wanted.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-9, atol=1e-9, msg=name)
    octavo.load(tmp_path / "saved", model, optimizer)
    for name, tensor in whole_state(model, optimizer).items():
        assert torch.equal(tensor, found[0][1][name]), name


def test_a_step_after_a_checkpoint_has_the_same_bits(tmp_path):
    model, optimizer = built(SHAPES["mixtral"])
    stepped(model, optimizer, 1)
    octavo.save(tmp_path / "saved", model, optimizer)
    stepped(model, optimizer, 2)
    other, fresh = built(SHAPES["mixtral"])
    octavo.load(tmp_path / "saved", other, fresh)
    stepped(other, fresh, 2)
    wanted = whole_state(model, optimizer)
    assert {name.split(".")[0] for name in wanted} >= {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    for name, tensor in whole_state(other, fresh).items():
        assert torch.equal(tensor, wanted[name]), name
    with pytest.raises(InputError, match="another optimizer"):
        octavo.load(tmp_path / "saved", other, torch.optim.AdamW(octavo.parameter_groups(other, 0.1)))


def test_embedding_head_norms_biases_and_routers_are_adamws():
    model, optimizer = built(SHAPES["mixtral"])
    names = {p: name for name, p in model.named_parameters()}
    (muon, *others) = optimizer.param_groups
    assert {names[p].split(".", 2)[-1] for p in muon["params"]} == {
        "self_attention.qkv.weight", "self_attention.proj.weight", "moe.experts.fc1_weight", "moe.experts.fc2_weight",
    }  # fmt: skip
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)
    assert {group["lr"] for group in others} == {0.003}
    assert any(names[p].endswith("router.weight") for group in others for p in group["params"])


class Joint(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({name: nn.Linear(8, 24)})])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Joint("c_attn"), "several matrices each"),
        (lambda: Joint("gate"), "trains no matrix in numbered blocks"),
        (lambda: nn.Linear(8, 8), "trains no matrix in numbered blocks"),
        (lambda: nn.Embedding(8, 8), "trains no matrix in"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "trains no matrix in"),
        (lambda: Joint("experts"), "several matrices each"),
    ],
)
def test_models_without_clear_matrices_are_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        octavo.muon(make())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "original"}, "Give adamw_lr too"),
        ({"scale": "spectral"}, '"match_rms_adamw" or "original"'),
        ({"lr": 0.0}, "rate above 0"),
        ({"momentum": 1.0}, "from 0 to below 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        octavo.muon(Joint("proj"), **settings)


def test_groups_in_place_of_a_model_are_refused():
    groups = octavo.parameter_groups(llama(), 0.1, lr=1e-3, layer_decay=0.5)
    with pytest.raises(InputError, match="model is of type list: give the model itself"):
        octavo.muon(groups)


@pytest.mark.parametrize("decay", [-1.0, math.nan, "0.1"])
def test_a_weight_decay_that_is_no_number_from_0_is_refused(decay):
    with pytest.raises(InputError, match="weight_decay = "):
        octavo.muon(octavo.transform(llama()), weight_decay=decay)


def test_low_rank_factors_are_refused():
    model = octavo.transform(llama(), dtype=torch.float32, lora=octavo.LoRA(rank=2))
    with pytest.raises(InputError, match="low-rank factors"):
        octavo.muon(model)


def test_frozen_matrices_and_those_without_a_gradient_stay():
    model, _ = built({})
    frozen = model.get_parameter("layers.0.self_attention.proj.weight").requires_grad_(False)
    assert frozen not in {one.parameter for one in hidden_parameters(model)}
    optimizer = octavo.muon(model, **SETTINGS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.requires_grad and "layers.1" not in name:
            p.grad = torch.randn_like(p)
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n in before if "layers.1" not in n and n != "layers.0.self_attention.proj.weight"}


def test_parameters_that_were_replaced_are_refused():
    model, optimizer = built({})
    proj = model.layers[0].self_attention.proj
    proj.weight = nn.Parameter(proj.weight.detach().clone())
    proj.weight.grad = torch.ones_like(proj.weight)
    with pytest.raises(InputError, match=r"layers\.0\.self_attention\.proj\.weight of octavo\.muon are no longer parameters"):
        optimizer.step()


def frozen_on_one_rank():
    octavo.init({"hybrid_shard_degree": 1})
    model = octavo.transform(llama(), dtype=torch.float32)
    if octavo.state.rank:
        model.get_parameter("layers.0.self_attention.proj.weight").requires_grad_(False)
    with pytest.raises(InputError, match=r"rank 1 and rank 0 do not train the same matrices: layers\.0\.self_attention\.proj"):
        octavo.muon(model)
    octavo.shutdown()
    return True


def test_ranks_that_train_other_matrices_are_refused_and_do_not_wait():
    assert all(ranks.run(2, frozen_on_one_rank, timeout=100))


def test_no_group_is_added_later():
    model, optimizer = built({})
    assert isinstance(optimizer, MuonAdamW)
    with pytest.raises(InputError, match="accepts no other group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    del model


MUON = ["optimizer.name=muon", "optimizer.schedule=constant", "optimizer.adamw_lr=0.002", "optimizer.lr=0.004"]


def run(file, overrides):
    Trainer(RunConfig.from_file(file, [*MUON, *overrides]), console=Console(quiet=True)).train()


def numbers(output):
    return [(record["loss"], record["grad_norm"], record["lr"]) for record in read_metrics(output / "metrics.jsonl")]


def test_a_run_continues_with_the_same_bits_and_over_shards(tiny_run):
    whole, stopped, other = (tiny_run(name, steps=4) for name in ("whole", "stopped", "other"))
    run(whole.file, [])
    for steps in (2, 4):
        run(stopped.file, [f"train.steps={steps}"])
    assert numbers(stopped.output) == numbers(whole.output)
    assert [rate for *_, rate in numbers(whole.output)] == [0.002, 0.004, 0.004, 0.004]
    run(other.file, ["train.steps=2"])
    ranks.run(2, run, other.file, [])
    for mine, wanted in zip(numbers(other.output), numbers(whole.output), strict=True):
        assert mine == pytest.approx(wanted, rel=2e-3)


def test_a_run_with_factors_continues_with_the_same_bits_and_refuses_others(tiny_run, capsys):
    plain, whole, stopped = (tiny_run(name, steps=4) for name in ("plain", "whole", "stopped"))
    factors = ['optimizer.rates={ "*embed*" = 0.1, "*.mlp" = 0.5 }', "optimizer.layer_decay=0.5"]
    run(plain.file, [])
    run(whole.file, factors)
    for steps in (2, 4):
        run(stopped.file, [*factors, f"train.steps={steps}"])
    assert numbers(stopped.output) == numbers(whole.output)
    assert numbers(whole.output)[0][0] == numbers(plain.output)[0][0]
    assert numbers(whole.output)[-1][0] != numbers(plain.output)[-1][0]
    with pytest.raises(InputError, match=r"optimizer.layer_decay was"):
        run(stopped.file, [factors[0], "optimizer.layer_decay=0.25", "train.steps=6"])


def test_the_dry_run_counts_one_state_of_muons_matrices(tiny_run):
    config = RunConfig.from_file(tiny_run("dry", steps=2).file, MUON)
    plan = check(config)
    assert plan.muon is not None
    hidden = sum(math.prod(one.shape) for one in hidden_parameters(plan.model_on_meta))
    assert plan.muon.elements == hidden
    assert plan.muon.matrices == 7 * plan.spec.layers
    assert memory_of(plan).estimate.exact == exact_bytes(plan.parameters, 4) - 4 * hidden


def test_a_run_with_adapters_is_refused_before_anything_is_built(tiny_run):
    with pytest.raises(InputError, match=r'optimizer.name = "muon" and lora.rank = 4'):
        RunConfig.from_file(tiny_run("adapters").file, [*MUON, "lora.rank=4"])
    with pytest.raises(InputError, match=r"optimizer.adamw_lr too"):
        RunConfig.from_file(tiny_run("rates").file, ["optimizer.name=muon", "optimizer.muon_scale=original"])
    with pytest.raises(InputError, match=r"optimizer.muon_momentum = 0.9 has no effect"):
        RunConfig.from_file(tiny_run("idle").file, ["optimizer.muon_momentum=0.9"])
