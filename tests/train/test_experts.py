"""A run of a mixture of experts: what it records, and a continuation to the last bit."""

import dataclasses
import math
import re
import shutil

import pytest
import torch
from test_step import EXACT, built
from torch.nn import functional
from transformers import MixtralConfig

import octavo
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.hardware import lookup
from octavo.models import convert
from octavo.nn.moe import routing_metrics
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.run.resume import ASSIGNED, BALANCED
from octavo.train.evaluate import perplexity, validate
from octavo.train.step import train_step


def test_metrics_of_experts():
    # Two layers of three experts, two visits a token: 6 tokens, all of which the first layer sends to experts 0 and 1.
    routing = torch.tensor([[4.0, 1, 1, 6, 6, 0, 0.5, 3.0], [2.0, 2, 2, 4, 4, 4, 0.5, 6.0]])
    found = routing_metrics(routing, 2)
    assert found["expert_load"] == pytest.approx([1.25, 1.25, 0.5])
    assert found["largest_expert_load"] == pytest.approx(1.5)
    assert found["router_entropy"] == pytest.approx(9 / 12)
    assert found["dropped_tokens"] == 0


def mixture(run, folder, **settings):
    """The run with a Mixtral of random weights, and a z loss of its routers."""
    MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02, bos_token_id=0, eos_token_id=0, **settings,
    ).save_pretrained(folder)  # fmt: skip
    text = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "", run.file.read_text(), flags=re.DOTALL)
    text = re.sub(r'(?m)^source = "llama-tiny"', f'source = "{folder}"', text)
    run.file.write_text(f"{text}\n[moe]\nmoe_z_loss_coeff = 0.01\n")
    return run


def document_by_document(model, batches):
    """(cross entropy, balancing loss, z loss, load) by Hugging Face's model of each document by itself, without padding."""
    theirs = octavo.to_huggingface(model).eval()
    nats, targets, routed = 0.0, 0, []
    for batch in batches:
        for ids, labels, positions in zip(*batch[:3], strict=True):
            for one, own in zip(
                *(torch.tensor_split(row, torch.nonzero(positions == 0)[1:, 0]) for row in (ids, labels)), strict=True
            ):
                if (own == -100).all():
                    continue
                output = theirs(one[None], output_router_logits=True)
                nats += functional.cross_entropy(output.logits[0, :-1], one[1:], reduction="sum").item()
                targets += len(one) - 1
                routed.append(torch.stack(output.router_logits))
    logits = torch.cat(routed, 1).flatten(0, 1).double()
    visits = torch.zeros_like(logits).scatter_(1, logits.topk(2).indices, 1.0).mean(0)
    balance = 4 * (visits * logits.softmax(-1).mean(0)).sum()
    return nats / targets, balance.item(), logits.logsumexp(-1).square().mean().item(), (2 * visits).tolist()


def test_forwards_of_a_callback_are_not_in_the_metrics_of_the_next_step(tiny_run, tmp_path):
    found = []
    for name in ("alone", "beside"):
        stepper, _ = built(mixture(tiny_run(name), tmp_path / "mixture"), *EXACT, "train.micro_batch=2")
        if name == "beside":
            ids = torch.randint(0, 300, (3, 20))
            stepper.model(input_ids=ids, labels=ids).loss.backward()
            stepper.optimizer.zero_grad()
        found.append(train_step(stepper, 1).routing)
    assert found[0] == found[1]
    assert sum(found[0]["expert_load"]) == pytest.approx(4, rel=1e-5)


RUN = (*(given for given in EXACT if "attention_dropout" not in given), "data.packing=documents", "data.sequence_length=160")


def test_padding_is_neither_balanced_nor_counted(tiny_run, tmp_path):
    stepper, _ = built(mixture(tiny_run(), tmp_path / "mixture"), *RUN, "train.micro_batch=4")
    (batch,) = stepper.loader.loader.step(0)
    assert batch.real() is not None  # so there is padding
    nats, balance, z_loss, load = document_by_document(stepper.model, [batch])
    result = train_step(stepper, 1)
    assert result.loss == pytest.approx(nats + 0.02 * balance + 0.01 * z_loss, rel=1e-5)
    assert result.routing["balancing_loss"] == pytest.approx(balance, rel=1e-5)
    assert result.routing["router_z_loss"] == pytest.approx(z_loss, rel=1e-5)
    assert result.routing["expert_load"] == pytest.approx(load, rel=1e-5)


@pytest.mark.parametrize("micro", [1, 4])
def test_validation_balances_all_of_its_tokens_and_perplexity_is_of_the_cross_entropy(tiny_run, tmp_path, micro):
    run = mixture(tiny_run(), tmp_path / "mixture")
    stepper, validation = built(run, *RUN, f"train.micro_batch={micro}", f"train.validate_batches={8 // micro}")
    nats, balance, z_loss, _ = document_by_document(stepper.model, validation)
    found = validate(stepper, validation)
    assert found.cross_entropy == pytest.approx(nats, rel=1e-5)
    assert found.loss == pytest.approx(nats + 0.02 * balance + 0.01 * z_loss, rel=1e-5)
    assert stepper.model.take_routing() is None
    assert main(["train", str(run.file), *RUN, "train.steps=1"]) == 0
    (record,) = read_metrics(run.output / "metrics.jsonl")
    assert record["perplexity"] < 0.99 * math.exp(record["validation_loss"])
    assert perplexity(nats) == pytest.approx(math.exp(nats))


def test_a_run_records_its_experts_and_continues_to_the_last_bit(tiny_run, tmp_path, capsys):
    run = mixture(tiny_run(steps=4, every=2), tmp_path / "mixture", router_jitter_noise=0.01)
    assert main(["train", str(run.file)]) == 0
    first = read_metrics(run.output / "metrics.jsonl")
    for record in first:
        assert len(record["expert_load"]) == 4
        assert sum(record["expert_load"]) == pytest.approx(4, rel=1e-4)
        assert record["largest_expert_load"] >= max(record["expert_load"]) - 1e-6
        assert 0 < record["router_entropy"] < 1.387  # of four experts, ln 4
        assert record["dropped_tokens"] == 0
        assert 1.9 < record["balancing_loss"] < 4  # of two experts per token; 2 if all get equal shares
        assert 1 < record["router_z_loss"] < 4  # near (ln 4)²
    shutil.rmtree(run.output / "checkpoints" / "step-4")
    assert main(["train", str(run.file)]) == 0
    again = read_metrics(run.output / "metrics.jsonl")
    for one, other in zip(first, again, strict=True):
        for key in ("loss", "grad_norm", "expert_load", "router_entropy", "balancing_loss", "router_z_loss"):
            assert one[key] == other[key], (one["step"], key)
    with run.file.open("a") as file:
        file.write('moe_load_balancing = "none"\n')
    assert main(["train", str(run.file)]) == 2
    assert "moe.moe_load_balancing was absent and is now 'none'" in capsys.readouterr().err


def test_a_run_that_continues_with_experts_balanced_over_other_tokens_says_so(tiny_run, tmp_path, capsys):
    run = mixture(tiny_run(), tmp_path / "mixture")
    constant = ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "checkpoint.every=1"]
    for steps, micro, changed in ((1, 2, False), (2, 2, False), (3, 1, True), (4, 1, False)):
        assert main(["train", str(run.file), f"train.steps={steps}", f"train.micro_batch={micro}", *constant]) == 0
        said = capsys.readouterr().err
        assert (f"{BALANCED} was 2 and is now 1" in said) == changed
        assert "in the last bits" not in said
    run = mixture(tiny_run("unbalanced"), tmp_path / "mixture")
    for steps, micro in ((1, 2), (2, 1)):
        given = [f"train.steps={steps}", f"train.micro_batch={micro}", 'moe.moe_load_balancing="none"', *constant]
        assert main(["train", str(run.file), *given]) == 0
    assert BALANCED not in capsys.readouterr().err


@pytest.mark.long(lambda balancing: balancing == "sinkhorn")
@pytest.mark.parametrize("balancing", ["sinkhorn", "balanced"])
def test_a_run_by_an_assignment_continues_to_the_last_bit_and_its_export_says_its_weights(
    balancing, tiny_run, tmp_path, capsys
):
    convert._warn_once.cache_clear()
    run = mixture(tiny_run(steps=4, every=2), tmp_path / "mixture")
    with run.file.open("a") as file:
        file.write(f'moe_load_balancing = "{balancing}"\n')
    assert main(["train", str(run.file)]) == 0
    first = read_metrics(run.output / "metrics.jsonl")
    assert all(record["largest_expert_load"] < 1.25 for record in first)
    shutil.rmtree(run.output / "checkpoints" / "step-4")
    assert main(["train", str(run.file)]) == 0
    again = read_metrics(run.output / "metrics.jsonl")
    assert [(r["loss"], r["grad_norm"], r["expert_load"]) for r in first] == [
        (r["loss"], r["grad_norm"], r["expert_load"]) for r in again
    ]
    capsys.readouterr()
    assert main(["export", str(run.output), "--to", str(tmp_path / "trained")]) == 0
    assert ("give other logits" in capsys.readouterr().err) == (balancing == "sinkhorn")
    longer = ["train.steps=5", "optimizer.schedule=constant"]
    shutil.rmtree(run.output)
    for steps, changed in ((["train.steps=2", *longer[1:]], False), ([*longer, "train.micro_batch=1"], True)):
        assert main(["train", str(run.file), *steps]) == 0
        assert (f"{ASSIGNED} was 2 sequences" in capsys.readouterr().err) == changed


@pytest.mark.parametrize(
    ("given", "in_fp8"),
    [
        ([], "qkv proj fc1 fc2"),
        (['fp8.skip=["*.experts.*"]'], "qkv proj"),
        (['fp8.skip=["*.self_attn.*"]'], "fc1 fc2"),
        (['fp8.skip=["*.experts.down_proj", "*.o_proj"]'], "qkv fc1"),
        (["model.blocks=own", "moe={}"], "qkv proj"),  # whose experts are no linear layers
    ],
    ids=str,
)
def test_mfu_counts_the_experts_that_a_token_visits_in_the_precision_that_they_run_in(given, in_fp8, tiny_run, tmp_path):
    run = mixture(tiny_run(), tmp_path / "mixture")
    if "moe={}" in given:
        run.file.write_text(run.file.read_text().partition("[moe]")[0])
        given = [*given[:-1], "model.config.output_router_logits=false"]
    plan = check(RunConfig.from_file(run.file, given))
    attention = {"qkv": 32 * 64, "proj": 32 * 32}
    experts = {"fc1": 2 * 32 * 96, "fc2": 2 * 32 * 48}  # two of the four
    sizes = attention | experts
    assert plan.flops.layers == 2 * 6 * sum(sizes.values())
    h200 = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, gpu=lookup("H200")))
    head = {"bf16": 2 * 320 * 32, "fp8": 4 * 320 * 32} if "model.blocks=own" not in given else {"bf16": 6 * 320 * 32, "fp8": 0}
    fp8 = 2 * 6 * sum(sizes[name] for name in in_fp8.split()) + head["fp8"]
    tflops, mfu = h200.rates(1e9)
    assert tflops == pytest.approx(plan.flops.total / 1e3)
    assert mfu == pytest.approx(1e9 * ((plan.flops.total - fp8) / 989e12 + fp8 / 1979e12), rel=1e-3)
