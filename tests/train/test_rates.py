"""`optimizer.rates` and `optimizer.layer_decay`: factors of the rate by name and depth, in runs and a loop."""

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import octavo
import ranks
from octavo.cli import main
from octavo.config.optimizer import OptimizerConfig
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.train.optimizer import build_optimizer, set_rates

EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0"]


def llama(tied=False, layers=3):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=40, num_hidden_layers=layers, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, **sizes
    )
    return AutoModelForCausalLM.from_config(config)


def rates_of(model, groups):
    found = {id(p): group["lr"] for group in groups for p in group["params"]}
    return {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_patterns_name_parameters_of_either_naming_and_the_last_one_counts():
    model = octavo.transform(llama())
    rates = {"model.layers.*": 0.5, "*.q_proj": 0.25, "*.k_proj": 0.25, "*.v_proj": 0.25, "layers.2": 4.0, "lm_head": 3.0}
    groups = octavo.parameter_groups(model, 0.1, lr=0.01, rates=rates)
    wanted = {
        name: 0.01 * (3.0 if name.startswith("head") else 4.0 if "layers.2" in name else 0.25 if "qkv" in name else 0.5)
        for name, _ in model.named_parameters()
    }
    wanted |= {"embedding.weight": 0.01, "norm.weight": 0.01}
    assert rates_of(model, groups) == wanted
    assert {name for group in groups if not group["weight_decay"] for name, p in model.named_parameters()
            if any(p is own for own in group["params"])} == {name for name in wanted if "norm" in name}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("blocks", ["octavo", "own"])
def test_the_decay_by_depth_is_that_of_its_formula(tied, blocks):
    model = octavo.transform(llama(tied)) if blocks == "octavo" else llama(tied)
    found = rates_of(model, octavo.parameter_groups(model, 0.1, lr=1.0, rates={"*layers.1.*": 10.0}, layer_decay=0.5))
    for name, rate in found.items():
        power = 4 if "embed" in name else 0 if "layers." not in name else 3 - int(name.split("layers.")[1][0])
        assert rate == 0.5**power * (10.0 if "layers.1." in name else 1.0), name
    assert ("head.weight" in found or "lm_head.weight" in found) == (not tied)


def test_positions_of_embeddings_are_embeddings():
    model = AutoModelForCausalLM.from_config(
        GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=1)
    )
    found = rates_of(model, octavo.parameter_groups(model, 0.1, lr=1.0, layer_decay=0.1))
    assert found["transformer.wpe.weight"] == found["transformer.wte.weight"] == pytest.approx(0.001)
    assert found["transformer.ln_f.bias"] == 1.0


def test_adapters_have_rates_by_their_names():
    model = octavo.transform(llama(), lora=octavo.LoRA(rank=2, targets=("q_proj", "down_proj")))
    found = rates_of(model, octavo.parameter_groups(model, 0.0, lr=1e-3, rates={"*.lora_B": 16.0}))
    assert {name.rpartition(".")[2]: rate for name, rate in found.items()} == {"lora_A": 1e-3, "lora_B": 16e-3}
    with pytest.raises(InputError, match=r"'.embedding' matches only frozen parameters"):
        octavo.parameter_groups(model, 0.0, lr=1e-3, rates={"*embedding": 2.0})


def test_a_schedule_multiplies_the_factor_and_leaves_a_run_without_factors_as_it_is():
    model = octavo.transform(llama())
    optimizer = build_optimizer(model, OptimizerConfig(rates={"*embed*": 0.1}))
    set_rates(optimizer, 0.3)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.3 * 0.1, 0.3]
    plain = build_optimizer(model, OptimizerConfig())
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    assert [sorted(group) for group in plain.param_groups] == [sorted(theirs.param_groups[0])] * 2


def refusals():
    yield {"rates": {"*embed_toknes*": 0.1}}, r"matches no parameter\. The nearest is 'model\.embed_tokens"
    yield (
        {"rates": {"*.q_proj": 0.1}},
        r"q_proj\.weight 0\.1, model\.layers\.0\.self_attn\.k_proj\.weight 1, .* one parameter here",
    )
    yield {"rates": {"*embed*": 0.0}}, r"a factor is a number above 0.* To freeze parameters: train\.freeze"
    yield {"rates": {"*embed*": float("nan")}}, "a factor is a number above 0"
    yield {"rates": {"*attention*": 0.5}}, "two meanings"
    yield {"rates": {"lm_head.bias": 0.5}}, "matches no parameter"
    yield {"rates": [("a", 1.0)]}, "give a table of pattern and factor"
    yield {"layer_decay": 0.0}, "give a number above 0, at most 1"
    yield {"layer_decay": 1.5}, "give a number above 0, at most 1"


@pytest.mark.parametrize(("given", "words"), list(refusals()))
def test_what_would_give_no_rate_or_two_is_refused(given, words):
    with pytest.raises(InputError, match=words):
        octavo.parameter_groups(octavo.transform(llama()), 0.1, lr=1.0, **given)


def test_factors_need_a_rate_and_depth_needs_one_stack_of_blocks():
    with pytest.raises(InputError, match="give lr too"):
        octavo.parameter_groups(octavo.transform(llama()), 0.1, layer_decay=0.5)
    with pytest.raises(InputError, match="no stack of blocks, but needs exactly one"):
        octavo.parameter_groups(nn.Sequential(nn.Linear(2, 2)), 0.1, lr=1.0, layer_decay=0.5)


def by_hand(folder, inputs, steps, lr):
    """PyTorch's AdamW over Hugging Face's model, each parameter with the rate of the formula."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    groups = []
    for name, p in model.named_parameters():
        depth = 0 if "embed" in name else int(name.split(".")[2]) + 1 if "layers." in name else 3
        factor = 0.5 ** (3 - depth) * (0.1 if "down_proj" in name else 1.0)
        groups.append({"params": [p], "lr": lr * factor, "weight_decay": 0.1 if p.dim() > 1 else 0.0})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(steps):
        optimizer.zero_grad()
        model(input_ids=inputs[step], labels=inputs[step]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return dict(model.named_parameters())


def loop(folder, inputs, steps, lr):
    """A loop of one's own; the parameters under Hugging Face's names, whole."""
    model = octavo.transform(AutoModelForCausalLM.from_pretrained(folder), dtype=torch.float32)
    groups = octavo.parameter_groups(model, 0.1, lr=lr, rates={"*.down_proj": 0.1}, layer_decay=0.5)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step in range(steps):
        rows = inputs[step][octavo.state.dp_rank :: octavo.state.dp_size]
        loss = model(input_ids=rows, labels=rows, num_items_in_batch=inputs[step][:, 1:].numel()).loss
        loss.backward()
        octavo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model, folder)


def whole(model, folder):
    target = folder / "out"
    octavo.export(model, target)
    return dict(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).named_parameters())


def of_rank(folder, inputs, steps, lr, degrees):
    octavo.init(degrees)
    found = loop(folder, inputs, steps, lr)
    return {name: p.detach().numpy() for name, p in found.items()}


@pytest.mark.long(lambda world, degrees: not degrees)
@pytest.mark.parametrize(("world", "degrees"), [(1, {}), (2, {}), (2, {"tensor_parallel_degree": 2})])
def test_a_loop_takes_the_steps_that_pytorch_takes_with_these_rates(world, degrees, tmp_path):
    torch.manual_seed(0)
    llama(layers=2).save_pretrained(tmp_path)
    inputs = [torch.randint(0, 40, (4, 12)) for _ in range(3)]
    wanted = by_hand(tmp_path, inputs, 3, 1e-2)
    start = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    found = ranks.run(world, of_rank, tmp_path, inputs, 3, 1e-2, degrees)[0]
    for name, p in wanted.items():
        moved = (p - start[name]).abs().max()
        assert moved > 0, name
        # AdamW turns a gradient near 0 into a step of about the rate, whatever its last bits.
        assert (torch.from_numpy(found[name]) - p).abs().max() < 0.02 * moved, name


def train(file, overrides):
    return octavo.Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary.loss


def losses(output):
    return [r["loss"] for r in read_metrics(output / "metrics.jsonl")]


@pytest.mark.long
def test_a_run_has_them_over_ranks_and_across_resume_and_refuses_others(tiny_run, capsys):
    given = [
        *EXACT,
        'optimizer.rates={ "*embed*" = 1e-30, "*.mlp" = 0.5 }',
        "optimizer.layer_decay=0.8",
        "optimizer.schedule=constant",
    ]
    one, two = (tiny_run(name, steps=4, every=2) for name in ("one", "two"))
    assert main(["train", str(one.file), *given]) == 0
    assert main(["train", str(two.file), *given, "train.steps=2"]) == 0
    assert main(["train", str(two.file), *given]) == 0
    assert losses(two.output) == losses(one.output)
    changed = [value.replace("0.5", "0.6") for value in given]
    assert main(["train", str(two.file), *changed, "train.steps=6"]) == 2
    assert "optimizer.rates was" in capsys.readouterr().err
    ranked = tiny_run("ranked", steps=4, every=2)
    ranks.run(2, train, ranked.file, [*given, "train.micro_batch=1"])
    assert losses(ranked.output) == pytest.approx(losses(one.output), rel=1e-5)
    assert main(["train", str(tiny_run("wrong").file), 'optimizer.rates={ "*embed_toknes*" = 0.5 }', "--dry-run"]) == 2
    assert "optimizer.rates pattern '*embed_toknes*' matches no parameter. The nearest is" in capsys.readouterr().err


def test_a_schedule_multiplies_both_rates_of_muon_by_the_factors():
    model = octavo.transform(llama())
    given = {"lr": 0.01, "adamw_lr": 0.002, "rates": {"*embed*": 0.1, "*.mlp": 0.25}, "layer_decay": 0.5}
    optimizer = build_optimizer(model, OptimizerConfig(name="muon", **given))
    set_rates(optimizer, 0.04)
    for name, rate in rates_of(model, optimizer.param_groups).items():
        power = 4 if "embed" in name else 0 if "layers." not in name else 3 - int(name.split("layers.")[1][0])
        by_name = 0.1 if "embed" in name else 0.25 if ".ffn.fc" in name else 1.0
        own = 0.008 if name.endswith(("embedding.weight", "head.weight")) or "norm" in name else 0.04
        assert rate == pytest.approx(own * by_name * 0.5**power, rel=1e-12), name


@pytest.mark.parametrize(("given", "words"), list(refusals()))
def test_muon_refuses_the_same_factors(given, words):
    with pytest.raises(InputError, match=words) as fault:
        octavo.muon(octavo.transform(llama()), lr=1e-3, **given)
    assert str(fault.value).startswith("octavo.muon: ")
