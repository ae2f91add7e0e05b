"""One step: accumulation is one big batch, the loss counts targets, validation changes nothing."""

import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from octavo.config.run import RunConfig
from octavo.data.prepared import prepare
from octavo.parallel.world import seed_everything
from octavo.plan.run import check
from octavo.train.evaluate import perplexity, validate
from octavo.train.setup import build
from octavo.train.step import count_targets, loss_of, train_step


def built(run, *overrides):
    config = RunConfig.from_file(run.file, overrides)
    plan = check(config)
    stepper, validation = build(plan, prepare(config.data))
    seed_everything(0)
    return stepper, validation


EXACT = ("model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.clip=0")
DOCUMENTS = ("data.packing=documents", "data.sequence_length=160")  # several documents in most sequences


@pytest.mark.parametrize("packing", ["join", "documents"])
def test_accumulation_equals_one_big_batch(tiny_run, packing):
    run = tiny_run()
    curves, weights = [], []
    for micro in (1, 2, 4):
        stepper, _ = built(run, *EXACT, f"data.packing={packing}", "data.sequence_length=160", f"train.micro_batch={micro}")
        counts = [count_targets(b.labels) for b in stepper.loader.step(0)]
        assert len(counts) == 4 // micro
        if packing == "documents" and micro == 1:
            assert len(set(counts)) > 1  # uneven, so a mean of means would be another number
        results = [train_step(stepper, step) for step in (1, 2, 3)]
        curves.append([(r.loss, r.grad_norm) for r in results])
        weights.append([p.detach() for p in stepper.model.parameters()])
    for other in (1, 2):
        for found, wanted in zip(curves[other], curves[0], strict=True):
            assert found == pytest.approx(wanted, rel=2e-5)
        for a, b in zip(weights[other], weights[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5)


def test_the_loss_is_the_sum_over_all_real_targets_divided_by_their_number(tiny_run):
    stepper, _ = built(tiny_run(), *EXACT, *DOCUMENTS, "train.micro_batch=1", "optimizer.lr=1e-12")
    batches = stepper.loader.step(0)
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = stepper.model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits[:, :-1].double()
            labels = batch.labels[:, 1:]
            total += functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum").item()
            targets += int((labels != -100).sum())
    assert targets < sum(batch.labels[:, 1:].numel() for batch in batches)
    assert train_step(stepper, 1).loss == pytest.approx(total / targets, rel=1e-6)


def test_the_gradient_norm_is_that_of_pytorch_and_the_rate_that_of_the_schedule(tiny_run):
    stepper, _ = built(tiny_run(), *EXACT)
    (twin, _) = built(stepper_file := tiny_run("twin"), *EXACT)
    assert stepper_file.output.exists() is False
    batches = twin.loader.step(0)
    targets = sum(count_targets(b.labels) for b in batches)
    for b in batches:
        twin.model(input_ids=b.input_ids, labels=b.labels, num_items_in_batch=targets).loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.model.parameters() if p.grad is not None])
    result = train_step(stepper, 1)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert result.lr == 3e-3 * 1 / 2
    assert result.tokens == 4 * 32


@pytest.mark.parametrize("fp8", ["true", "false"])
def test_validation_is_a_mean_over_targets_and_leaves_no_trace(tiny_run, fp8):
    run = tiny_run()
    stepper, validation = built(run, f"fp8.enabled={fp8}", *DOCUMENTS)
    plain, _ = built(run, f"fp8.enabled={fp8}", *DOCUMENTS)
    losses = []
    seed_everything(3)
    for step in (1, 2, 3):
        losses.append(train_step(stepper, step).loss)
        found = validate(stepper, validation).loss
        assert validate(stepper, validation).loss == found  # no dropout, nothing recorded
        assert stepper.model.training
        assert math.isfinite(found)
    seed_everything(3)
    assert [train_step(plain, step).loss for step in (1, 2, 3)] == losses
    one_by_one = sum(validate(stepper, [b]).loss * count_targets(b.labels) for b in validation)
    assert found == pytest.approx(one_by_one / sum(count_targets(b.labels) for b in validation), rel=1e-3)


def test_fp8_is_what_runs(tiny_run):
    with_fp8, _ = built(tiny_run(), "model.config.attention_dropout=0.0")
    without, _ = built(tiny_run("b"), "model.config.attention_dropout=0.0", "fp8.enabled=false")
    a, b = train_step(with_fp8, 1), train_step(without, 1)
    assert a.loss != b.loss
    assert a.loss == pytest.approx(b.loss, rel=1e-2)


def gradient(run, targets):
    """Of the first samples, for the matrices of the blocks, as a part of a step of so many targets."""
    batch = run.loader.step(0)[0]
    loss_of(run, batch, targets).backward()
    return torch.cat([p.grad.double().flatten() for p in run.model.layers.parameters() if p.dim() == 2])


@pytest.mark.parametrize("targets", [2**17, 2**23])
@pytest.mark.parametrize("how", [("model.config.num_hidden_layers=6",), ("train.micro_batch=2",)])
def test_the_first_step_of_delayed_scaling_is_as_exact_as_current_scaling(tiny_run, how, targets, monkeypatch):
    monkeypatch.setattr("octavo.train.step._global_targets", lambda run, batches: targets)
    run = tiny_run()
    recipes = ("fp8.enabled=false", "fp8.recipe=current", "fp8.amax_history_len=8")
    wide, current, delayed = (gradient(built(run, *how, recipe)[0], targets) for recipe in recipes)
    assert (delayed - wide).norm() < 1.05 * (current - wide).norm()


def test_a_perplexity_is_the_exponential_even_where_a_float_ends():
    assert perplexity(math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def gpt_neo(folder):
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        vocab_size=320,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=8,
        attention_dropout=0.0,
        resid_dropout=0.0,
        embed_dropout=0.0,
    )
    config.architectures = ["GPTNeoForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_a_model_that_keeps_its_own_code_has_hugging_faces_loss(tiny_run, tmp_path):
    run = tiny_run()
    text = run.file.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    run.file.write_text(f'[model]\nsource = "{gpt_neo(tmp_path / "neo")}"\n' + text[end:])
    assert start == 0
    stepper, _ = built(run, "model.dtype=float32", "fp8.enabled=false", "train.micro_batch=1")
    theirs = AutoModelForCausalLM.from_config(stepper.model.config, dtype=torch.float32).eval()
    theirs.load_state_dict(stepper.model.state_dict())
    total, targets = 0.0, 0
    with torch.no_grad():
        for batch in stepper.loader.step(0):
            logits = theirs(input_ids=batch.input_ids).logits[:, :-1]
            total += functional.cross_entropy(logits.flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum").item()
            targets += count_targets(batch.labels)
    assert train_step(stepper, 1).loss == pytest.approx(total / targets, rel=1e-5)
