"""`octavo train` with tensor parallelism is the run of one rank: samples, losses, norms, validation, checkpoints, exports."""

import contextlib
import io
import json
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import ranks
from octavo import errors
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.run.metrics import read_metrics
from octavo.run.resume import DRAWN, SCALED, SHARED, warn_of_other_layout
from octavo.train.trainer import Trainer

EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]
FP8 = ["fp8.enabled=true", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]


def degree(tensor):
    return f"parallel.tensor_parallel_degree={tensor}"


def run(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    result = Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()
    return result.summary.loss, result.summary.validation_loss


def records(output):
    return read_metrics(output / "metrics.jsonl")


def losses(output):
    return [record["loss"] for record in records(output)]


CONTEXT = "parallel.context_parallel_degree=2"
FURTHER = [(4, [])]
"""Layouts of make test-long."""


def of_one_rank(tiny_run, given):
    """The records of four steps on one rank."""
    one = tiny_run("one", steps=4, every=3)
    ranks.run(1, run, one.file, given)
    return records(one.output)


@pytest.mark.long(lambda packing, layouts: packing == "join" or layouts is FURTHER)
@pytest.mark.parametrize("packing", ["join", "documents"])
@pytest.mark.parametrize("layouts", [[(2, ["train.recompute=mlp"]), (4, [CONTEXT])], FURTHER], ids=["few", "further"])
def test_tensor_parallel_ranks_train_as_one_does(tiny_run, packing, layouts):
    """Sequences of 31 tokens, which two ranks do not divide."""
    given = [*EXACT, f"data.packing={packing}", "data.sequence_length=31", "train.validate_every=3", "train.micro_batch=1"]
    wanted = of_one_rank(tiny_run, given)
    for count, more in layouts:
        several = tiny_run(f"{count}-{len(more)}", steps=4, every=3)
        said = ranks.run(count, run, several.file, [*given, degree(2), *more])
        assert len(set(said)) == 1  # every rank says the same
        found = records(several.output)
        assert [r["tokens"] for r in found] == [r["tokens"] for r in wanted]
        for a, b in zip(found, wanted, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
            assert a.get("validation_loss", 0) == pytest.approx(b.get("validation_loss", 0), rel=1e-5)


EXPERTS = ["model.source=mixtral-8x7b", "model.config.num_local_experts=4"]
SPREAD = "parallel.expert_parallel_degree="


@pytest.mark.long
def test_ranks_with_experts_train_as_one_does(tiny_run):
    """Slices, and whole experts. Routed tokens, router losses and validations count each token once; some are padding, as two
    ranks do not divide 31."""
    given = [
        *EXACT, *EXPERTS, "model.config.router_aux_loss_coef=0.3", "model.config.output_router_logits=true",
        "moe.moe_z_loss_coeff=0.1", "data.sequence_length=31", "train.validate_every=3", "train.micro_batch=1",
    ]  # fmt: skip
    one = tiny_run("one", steps=4, every=3)
    ranks.run(1, run, one.file, given)
    wanted = records(one.output)
    shared = "parallel.context_parallel_degree=2"
    for count, more in ((2, []), (4, [shared]), (2, [f"{SPREAD}2"]), (4, [f"{SPREAD}4", shared])):
        several = tiny_run(f"{count}-{len(more)}-{more[:1] == [shared]}", steps=4, every=3)
        said = ranks.run(count, run, several.file, [*given, degree(2), *more])
        assert len(set(said)) == 1
        for a, b in zip(records(several.output), wanted, strict=True):
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
            for key in ("loss", "validation_loss", "balancing_loss", "router_z_loss", "expert_load", "largest_expert_load"):
                assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-4), key


@pytest.mark.long
def test_what_a_run_combines_with_tensor_parallelism(tiny_run, tmp_path):
    """Pretrained weights that get more words, a frozen part, chunks of the MLP, recomputation, offloading, sums in each
    micro-batch, another loss: beside one rank."""
    config = LlamaConfig(
        vocab_size=290, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "pretrained")
    settings = [
        *EXACT[:2], "optimizer.schedule=constant", "train.micro_batch=1", f"model.source={tmp_path / 'pretrained'}",
        "model.load=true", "model.resize=true", 'train.freeze=["layers.0.*"]', "train.mlp_chunks=2",
        "train.recompute=selective", "train.offload=true", "parallel.sync_each_micro_batch=true",
        "train.label_smoothing=0.1", "train.z_loss=1e-3",
    ]  # fmt: skip
    found = []
    for count, more in ((1, []), (4, [degree(2)])):
        tiny = tiny_run(f"{count}", steps=3)
        text = tiny.file.read_text()
        start, end = text.index("[model.config]"), text.index("[data]")
        tiny.file.write_text(text[:start] + text[end:])
        given = settings if count > 1 else [each for each in settings if "sync_each" not in each]
        ranks.run(count, run, tiny.file, [*given, *more])
        found.append(records(tiny.output))
    for a, b in zip(*found, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


@pytest.mark.long
def test_a_comparison_with_bf16_trains_both_over_tensor_ranks(tiny_run):
    tiny = tiny_run(steps=4)
    said = ranks.run(2, run, tiny.file, [*FP8, "train.compare_bf16=true", degree(2)])
    assert said[0] == said[1]
    assert losses(tiny.output / "bf16")[-1] == pytest.approx(losses(tiny.output)[-1], rel=0.05)


def killed(file, overrides, step):
    """A run whose ranks die behind a step."""
    import os
    import signal

    import octavo

    class Killed(octavo.Callback):
        def on_step(self, trainer, record):
            if record["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)

    Trainer(RunConfig.from_file(file, overrides), callbacks=[Killed()], console=Console(quiet=True)).train()


def test_a_killed_run_continues_to_the_same_bits_and_at_other_degrees(tiny_run):
    """In FP8 by delayed scaling, with a head in FP8."""
    given = [*FP8, "fp8.head=true", "train.micro_batch=1", degree(2)]
    whole, tiny = (tiny_run(name, steps=6, every=2) for name in ("whole", "killed"))
    ranks.run(2, run, whole.file, given)
    assert ranks.exit_codes(2, killed, tiny.file, given, 3) == [-9, -9]
    assert [path.name for path in sorted((tiny.output / "checkpoints").iterdir())] == ["step-2"]
    ranks.run(2, run, tiny.file, given)
    assert losses(tiny.output) == losses(whole.output)
    found, wanted = (load_file(exported(each)) for each in (tiny, whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    # The same run over shards, over one rank and over both; sums have other orders there.
    moving = tiny_run("moving", steps=6, every=2)
    for count, tensor, steps in ((2, 2, 2), (1, 1, 4), (4, 2, 6)):
        ranks.run(count, run, moving.file, [*given[:-1], degree(tensor), f"train.steps={steps}"])
    assert losses(moving.output) == pytest.approx(losses(whole.output), rel=2e-3)
    starts = json.loads((moving.output / "environment.json").read_text())["starts"]
    assert [start["ranks"] for start in starts] == [2, 1, 4]
    assert main(["describe", str(moving.output)]) == 0  # on the ranks of the last start


@pytest.mark.long
def test_a_run_continues_with_slices_whole_experts_or_on_one_rank(tiny_run):
    """In FP8 by delayed scaling, whose scales are an expert's."""
    given = [*FP8, *EXPERTS, "train.micro_batch=1"]
    layouts = {
        "2 of 2": (2, [degree(2), f"{SPREAD}2"]),
        "2": (2, [degree(2)]),
        "4": (4, [degree(2), f"{SPREAD}4"]),
        "1": (1, []),
    }
    runs = {}
    for name, order in (("whole", ["2 of 2"] * 5), ("moving", ["2 of 2", "1", "4", "2", "2 of 2"])):
        runs[name] = tiny_run(name, steps=6, every=2)
        for number, layout in enumerate(order):
            count, more = layouts[layout]
            ranks.run(count, run, runs[name].file, [*given, *more, f"train.steps={number + 2}"])
    assert losses(runs["moving"].output) == pytest.approx(losses(runs["whole"].output), rel=2e-3)
    found, wanted = (load_file(exported(each)) for each in runs.values())
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in wanted.items()}


def warned(file, overrides):
    """What a run says on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run(file, overrides)
    return said.getvalue()


CURRENT = ["fp8.recipe=current", "model.config.attention_dropout=0.0"]
BLOCK = ["fp8.recipe=block", 'fp8.layers={"layers.0.*" = "rowwise"}', "model.config.attention_dropout=0.0"]
CHANGES = {
    "tensor": ([], [degree(2)], {DRAWN, SHARED}),
    "shard": ([], [], {DRAWN, SCALED}),
    "current": (CURRENT, [], set()),
    "current of tensor": ([*CURRENT, "model.config.num_key_value_heads=2"], [degree(2)], set()),
    "fewer": (CURRENT, ["train.micro_batch=1"], {SCALED}),
    "rows": (BLOCK, [degree(2)], {SCALED, SHARED}),
    "plain": (EXACT, [degree(2)], set()),
}
"""Settings of a run of one rank, what two ranks change of them, and what they say is another."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_continuation_says_what_changes_beyond_the_last_bits(tiny_run, name):
    """By the settings that it has: dropout, shared key-value heads in FP8, scales of what a rank holds."""
    given, more, wanted = CHANGES[name]
    given, tiny = ["optimizer.schedule=constant", "train.micro_batch=2", *given], tiny_run(steps=4, every=2)
    ranks.run(1, run, tiny.file, [*given, "train.steps=1"])
    first, _ = ranks.run(2, warned, tiny.file, [*given, *more, "train.steps=2"])
    assert "in the last bits" in first
    assert {key for key in (DRAWN, SHARED, SCALED) if f"{key} was" in first} == wanted
    if name == "tensor":  # once said, and saved by the new layout, it has no further cause
        again, _ = ranks.run(2, warned, tiny.file, [*given, *more, "train.steps=3"])
        assert "continues, but" not in again


def test_a_checkpoint_of_an_older_version_says_what_its_layout_lets_change(capsys):
    saved = {"ranks": 1, "tensor_parallel_degree": 1}
    for now in (saved | {DRAWN: "a"}, saved | {"tensor_parallel_degree": 2, DRAWN: "a", SHARED: 2}):
        warn_of_other_layout("step-2", saved, now)
        said = capsys.readouterr().err
        assert (f"{DRAWN} is now a" in said) == (now["tensor_parallel_degree"] == 2)
        assert ("by the rounding of FP8" in said) == (now["tensor_parallel_degree"] == 2)


@pytest.mark.long(lambda recipe: recipe == "rowwise")
@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_a_run_under_other_recipes_is_near_that_of_one_rank(tiny_run, recipe):
    """The first block under another recipe than the others."""
    other = {"rowwise": "block", "block": "delayed"}[recipe]
    given = [*FP8, f"fp8.recipe={recipe}", f'fp8.layers={{"layers.0.*" = "{other}"}}', "fp8.head=true", "train.micro_batch=1"]
    one, two = tiny_run("one", steps=4), tiny_run("two", steps=4)
    ranks.run(1, run, one.file, given)
    ranks.run(2, run, two.file, [*given, degree(2)])
    assert losses(two.output) == pytest.approx(losses(one.output), rel=5e-3)


@pytest.mark.long
def test_a_killed_run_with_dropout_continues_to_the_same_bits(tiny_run):
    given = [FP8[0], "model.config.attention_dropout=0.2", FP8[2], "train.micro_batch=1", "train.recompute=true", degree(2)]
    whole, tiny = (tiny_run(name, steps=4, every=2) for name in ("whole", "killed"))
    ranks.run(2, run, whole.file, given)
    assert ranks.exit_codes(2, killed, tiny.file, given, 3) == [-9, -9]
    ranks.run(2, run, tiny.file, given)
    assert losses(tiny.output) == losses(whole.output)
    without = tiny_run("without", steps=4, every=2)
    ranks.run(2, run, without.file, [*FP8, "train.micro_batch=1", "train.recompute=true", degree(2)])
    assert losses(without.output) != losses(whole.output)


HALF = ["model.dtype=float16", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]


def overflowing(file, overrides, planted, kind, dies=None):
    """[(scale, skipped)] of a run's steps on this rank, and this rank's parameters that all tensor ranks hold.

    planted: step → the rank whose part of a gradient is infinite. kind: "gradient": a parameter's; "cast": that of a product's
    output before its cast to FP8, so that no parameter's is. dies: the step behind which the ranks die. A dynamic scale begins
    at 1,024 and grows after two steps.
    """
    import os
    import signal

    import octavo
    import octavo.train.loss_scale as loss_scale
    import octavo.train.step as step_module
    from octavo.parallel.world import state

    loss_scale.FIRST_SCALE, loss_scale.GROWTH_INTERVAL = 2.0**10, 2
    clip, seen, handles = step_module.clip_grad_norm_, [], []

    def spoil(gradient):
        gradient = gradient.clone()
        gradient[0, 3, 0, 5] = torch.inf
        return gradient

    def spoiled(model, *arguments, **keywords):
        if kind == "gradient" and planted.get(len(seen) + 1) == state.rank:
            weight = model.layers[1].ffn.fc2.weight
            getattr(weight.grad, "_local_tensor", weight.grad)[0, 0] = torch.inf
        return clip(model, *arguments, **keywords)

    def hooked(trainer):
        if kind == "cast" and planted.get(len(seen) + 1) == state.rank:
            qkv = trainer.model.layers[0].self_attention.qkv
            handles.append(qkv.register_forward_hook(lambda module, args, output: output[1].register_hook(spoil) and None))

    class Seen(octavo.Callback):
        def on_step(self, trainer, record):
            seen.append((record["loss_scale"], record["skipped"]))
            if record["step"] == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            while handles:
                handles.pop().remove()
            hooked(trainer)

    step_module.clip_grad_norm_ = spoiled
    trainer = Trainer(RunConfig.from_file(file, overrides), callbacks=[Seen()], console=Console(quiet=True))
    trainer.train()
    return seen, [p.detach().clone() for n, p in trainer.model.named_parameters() if "norm" in n]


PLANTED = {
    "dynamic": (
        '"dynamic"',
        [(1024, False), (1024, True), (512, False), (512, True), (256, False), (256, False), (512, False)],
    ),
    "fixed": ("256.0", [(256, False), (256, True), (256, False), (256, True), *[(256, False)] * 3]),
}
SHORT = [(2, 1, "cast", "dynamic"), (4, 1, "gradient", "fixed"), (4, 2, "gradient", "dynamic")]


@pytest.mark.long(lambda count, more, kind, scale: (count, len(more), kind, scale) not in SHORT)
@pytest.mark.parametrize("scale", PLANTED)
@pytest.mark.parametrize("kind", ["gradient", "cast"])
@pytest.mark.parametrize(
    ("count", "more"),
    [(2, [degree(2)]), (4, [degree(2)]), (4, [degree(2), "parallel.context_parallel_degree=2"])],
    ids=["2", "4", "context"],
)
def test_an_overflow_of_one_tensor_rank_is_skipped_by_all(tiny_run, count, more, kind, scale):
    value, wanted = PLANTED[scale]
    fp8 = [FP8[0]] if kind == "cast" else []
    tiny = tiny_run(steps=7)
    given = [*HALF, *fp8, *more, "train.global_batch=2", "train.micro_batch=1", f"train.loss_scale={value}"]
    (first, norms), *others = ranks.run(count, overflowing, tiny.file, given, {2: 1, 4: 0}, kind)
    assert first == wanted
    for seen, others_norms in others:
        assert seen == wanted
        if count == 2:  # whole on each rank
            assert all(torch.equal(a, b) for a, b in zip(norms, others_norms, strict=True))
    assert [r["step"] for r in records(tiny.output) if r["skipped"]] == [2, 4]


@pytest.mark.long
@pytest.mark.parametrize("scale", ['"dynamic"', "4096.0"])
@pytest.mark.parametrize("layouts", [[(2, ["train.recompute=true"]), (4, [CONTEXT])], FURTHER], ids=["few", "further"])
def test_tensor_ranks_train_in_float16_as_one_does(tiny_run, scale, layouts):
    given = [*HALF, f"train.loss_scale={scale}", "data.sequence_length=31", "train.validate_every=3", "train.micro_batch=1"]
    wanted = of_one_rank(tiny_run, given)
    for count, more in layouts:
        several = tiny_run(f"{count}-{len(more)}", steps=4, every=3)
        assert len(set(ranks.run(count, run, several.file, [*given, degree(2), *more]))) == 1
        for a, b in zip(records(several.output), wanted, strict=True):
            assert (a["loss_scale"], a["skipped"]) == (b["loss_scale"], b["skipped"])
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-4)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=5e-3)
            assert a.get("validation_loss", 0) == pytest.approx(b.get("validation_loss", 0), rel=2e-4)


@pytest.mark.long
def test_a_float16_run_continues_with_its_scale_to_the_same_bits_and_at_other_degrees(tiny_run):
    """Behind a skipped step and one that has grown the scale."""
    given = [*HALF, "train.global_batch=2", "train.micro_batch=1"]
    whole, cut = tiny_run("whole", steps=7, every=1), tiny_run("cut", steps=7, every=1)
    wanted = ranks.run(2, overflowing, whole.file, [*given, degree(2)], {2: 1}, "gradient")[0][0]
    assert [scale for scale, _ in wanted] == [1024, 1024, 512, 512, 1024, 1024, 2048]
    assert ranks.exit_codes(2, overflowing, cut.file, [*given, degree(2)], {2: 1}, "gradient", 4) == [-9, -9]
    found = ranks.run(2, overflowing, cut.file, [*given, degree(2)], {}, "gradient")[0][0]
    assert found == wanted[7 - len(found) :]
    assert 3 <= len(found) <= 4
    assert losses(cut.output) == losses(whole.output)
    moving = tiny_run("moving", steps=7, every=1)
    for count, tensor, steps in ((2, 2, 3), (1, 1, 4), (4, 2, 5), (2, 1, 6), (2, 2, 7)):
        layout, planted = [degree(tensor), f"train.steps={steps}"], {2: 1} if steps == 3 else {}
        ranks.run(count, overflowing, moving.file, [*given, *layout], planted, "gradient")
    assert [(r["loss_scale"], r["skipped"]) for r in records(moving.output)] == wanted


def exported(tiny):
    """The weights of `octavo export`."""
    folder = tiny.folder / "exported"
    assert main(["export", str(tiny.output), "--to", str(folder)]) == 0
    return folder / "model.safetensors"


def test_an_export_has_the_weights_of_one_rank_and_no_padding(tiny_run, capsys):
    """A vocabulary of 305 words is padded to 320 on two ranks."""
    given = [*EXACT, "model.config.vocab_size=305", "train.micro_batch=1"]
    one, two = tiny_run("one", steps=2), tiny_run("two", steps=2)
    ranks.run(1, run, one.file, given)
    ranks.run(2, run, two.file, [*given, degree(2)])
    wanted, found = load_file(exported(one)), load_file(exported(two))
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in wanted.items()}
    for name, value in wanted.items():
        assert torch.allclose(found[name].float(), value.float(), atol=2e-4), name
    texts = []
    for tiny in (one, two):
        capsys.readouterr()
        assert main(["sample", str(tiny.output), "--prompt", "a scale", "--tokens", "5", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def signalled(file, overrides, rank):
    """The command, of whose ranks one gets a signal behind the second step."""
    import os
    import signal
    import sys

    import octavo.train.loop as loop
    from octavo.parallel.world import state

    train_step = loop.train_step

    def stopped(context, step, stop):
        if step == 2 and state.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(context, step, stop)

    loop.train_step = stopped
    sys.exit(main(["train", str(file), *overrides]))


def test_a_signal_to_one_tensor_rank_stops_all(tiny_run):
    tiny = tiny_run(steps=5)
    given = [*EXACT, "train.micro_batch=1", degree(2)]
    assert ranks.exit_codes(2, signalled, tiny.file, given, 1, timeout=200) == [75, 75]
    assert len(losses(tiny.output)) == 2
    assert [path.name for path in (tiny.output / "checkpoints").iterdir()] == ["step-2"]


def sampling(file, overrides):
    """The sample of a run, of its live model."""
    return Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().sample


def test_a_live_sample_is_that_of_one_rank(tiny_run):
    given = [*EXACT, "train.sample_tokens=5", 'train.sample_prompt="a scale"', "train.micro_batch=1"]
    one, two = tiny_run("one", steps=2), tiny_run("two", steps=2)
    (wanted,) = ranks.run(1, sampling, one.file, given)
    assert wanted.startswith("a scale")
    assert ranks.run(2, sampling, two.file, [*given, degree(2)]) == [wanted, wanted]


REFUSED = {
    "own code": (["model.blocks=own"], [r'LlamaForCausalLM runs its original code.*degree = 1, or model\.blocks = "auto"']),
    "assignment": (
        [*EXPERTS, "moe.moe_load_balancing=balanced"],
        [r'moe\.moe_load_balancing = "balanced" with parallel.* Set moe\.moe_load_balancing = "aux_loss"'],
    ),
    "expert groups": (
        ["model.source=mixtral-8x7b", "model.config.num_local_experts=12", degree(4), "parallel.expert_parallel_degree=3"],
        [r"expert 3 does not divide hybrid_shard 1 .*x tensor 4 = 4\..* Change parallel\.expert_parallel_degree to (2|4)\."],
    ),
    "experts": (
        ["model.source=mixtral-8x7b", "model.config.num_local_experts=6", "parallel.expert_parallel_degree=4"],
        [r"parallel\.expert_parallel_degree = 4 does not divide the 6 experts of mixtral\. Set .*degree to 1 or 2\."],
    ),
    "heads": (
        ["model.config.num_attention_heads=6", "model.config.hidden_size=96", degree(4)],
        [r"degree = 4: 6 query heads \(num_attention_heads\) are not divisible\. Set parallel\.tensor_parallel_degree = 2\.$"],
    ),
    "intermediate size": (
        ["model.config.intermediate_size=33"],
        [r"an intermediate size \(intermediate_size\) of 33 is not divisible\. Set parallel\.tensor_parallel_degree = 1\.$"],
    ),
    "ranks": ([degree(3)], ["tensor 3 does not divide the world of 4.*tensor_parallel_degree to"]),
    "compiled": (["train.compile=true"], [r"train\.compile = true: blocks are not compiled"]),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), REFUSED.values(), ids=REFUSED)
def test_what_tensor_parallel_ranks_cannot_share_is_refused_before_anything_is_written(
    tiny_run, monkeypatch, capsys, overrides, said
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    tiny = tiny_run()
    before = sorted(tiny.folder.rglob("*"))
    given = [*FP8, "train.micro_batch=1", degree(2), *overrides]
    assert main(["train", str(tiny.file), *given]) == errors.EXIT_INPUT
    message = " ".join(capsys.readouterr().err.split())
    for words in said:
        assert re.search(words, message), message
    assert sorted(tiny.folder.rglob("*")) == before


def not_finite(file, overrides, planted):
    """What a run says on each rank whose third step has an infinite number on one rank alone, in a weight or in an output."""
    import octavo
    import octavo.train.loss_scale as loss_scale
    from octavo.parallel.world import state

    loss_scale.PATIENCE = 3

    class Planting(octavo.Callback):
        def on_step(self, trainer, record):
            if record["step"] != 2 or state.rank != 1:
                return
            if planted == "weight":
                weight = trainer.model.layers[1].ffn.fc1.weight
                getattr(weight, "_local_tensor", weight).data[0, 0] = torch.nan
            else:
                fc1 = trainer.model.layers[0].self_attention.core_attention
                fc1.register_forward_hook(lambda module, args, output: output * torch.inf)

    trainer = Trainer(RunConfig.from_file(file, overrides), callbacks=[Planting()], console=Console(quiet=True))
    try:
        trainer.train()
    except errors.OctavoError as error:
        return str(error)
    return ""


@pytest.mark.long(lambda planted: planted == "weight")
@pytest.mark.parametrize("planted", ["weight", "output"])
def test_all_ranks_stop_and_name_what_one_tensor_rank_has_found(tiny_run, planted):
    for number, given in enumerate([[*EXACT], [*HALF, "train.loss_scale=1.0"]]):
        tiny = tiny_run(f"{number}", steps=30)
        said = ranks.run(2, not_finite, tiny.file, [*given, degree(2), "train.micro_batch=1"], planted)
        assert said[0] == said[1]
        found = "weights that are not finite: layers.1.ffn.fc1.weight"
        if planted == "output":
            found = "the first output that is not finite is that of layers.0.self_attention.core_attention"
        assert found in said[0]
        # Nothing but a run in float16 skips steps, until it is sure that no scale helps.
        assert len(records(tiny.output)) == (2 if number == 0 else 5)
        assert ("train.loss_scale = 1 overflowed in 3 steps in a row" in said[0]) == (number == 1)
