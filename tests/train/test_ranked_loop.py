"""`octavo train` on several ranks is the run of one rank: samples, losses, validation, files."""

import json
import math

import pytest

import ranks
from octavo.run.metrics import read_metrics

EXACT = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "optimizer.schedule=constant"]


def run(file, overrides):
    """`octavo train` in this process, which is one rank of those that the pool has joined."""
    from rich.console import Console

    from octavo.config.run import RunConfig
    from octavo.train.trainer import Trainer

    result = Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()
    return result.summary.loss, result.summary.validation_loss


def losses(output):
    return [record["loss"] for record in read_metrics(output / "metrics.jsonl")]


FEW = [
    (4, ["data.workers=0", "checkpoint.async=true"]),
    (2, ["parallel.context_parallel_degree=2"]),
    (4, ["parallel.context_parallel_degree=2", "parallel.hybrid_shard_degree=2", "parallel.cp_comm_type=p2p"]),
]
FURTHER = [(2, []), (4, ["parallel.hybrid_shard_degree=2"])]
"""Layouts of make test-long."""


@pytest.mark.long(lambda packing, layouts: packing == "join" or layouts is FURTHER)
@pytest.mark.parametrize("packing", ["join", "documents"])
@pytest.mark.parametrize("layouts", [FEW, FURTHER], ids=["few", "further"])
def test_two_and_four_ranks_train_as_one_does(tiny_run, packing, layouts):
    given = [*EXACT, f"data.packing={packing}", "train.micro_batch=1", "train.validate_every=3", "data.workers=2"]
    one = tiny_run("one", steps=4, every=3)
    ranks.run(1, run, one.file, given)
    wanted = read_metrics(one.output / "metrics.jsonl")
    for count, more in layouts:
        several = tiny_run(f"{count}-{len(more)}-{''.join(more)[-1:]}", steps=4, every=3)
        said = ranks.run(count, run, several.file, [*given, *more])
        assert len(set(said)) == 1  # every rank says the same
        found = read_metrics(several.output / "metrics.jsonl")
        assert [r["tokens"] for r in found] == [r["tokens"] for r in wanted]
        for a, b in zip(found, wanted, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
            assert a.get("validation_loss", 0) == pytest.approx(b.get("validation_loss", 0), rel=1e-5)


@pytest.mark.long
def test_a_validation_is_the_same_on_any_number_of_ranks(tiny_run):
    """Without `train.micro_batch`, which is then another on each number of ranks."""
    given = [*EXACT, "train.global_batch=4", "train.validate_batches=1", "data.packing=documents"]
    found = []
    for count in (1, 2, 4):
        tiny = tiny_run(f"{count}", steps=2)
        tiny.file.write_text(tiny.file.read_text().replace("micro_batch = 2\n", ""))
        found += ranks.run(count, run, tiny.file, given)
    wanted = found[0][1]
    assert [validation for _, validation in found] == pytest.approx([wanted] * 7, rel=1e-5)


@pytest.mark.long
def test_a_run_that_continues_on_other_ranks_validates_on_the_same_sequences(tiny_run):
    """At a rate of zero the model stays, so that every validation has one loss."""
    tiny = tiny_run(steps=6)
    tiny.file.write_text(tiny.file.read_text().replace("micro_batch = 2\n", ""))
    given = [*EXACT, "optimizer.lr=1e-30", "train.validate_every=2", "train.validate_batches=1"]
    for count, steps in ((1, 2), (4, 4), (2, 6)):
        ranks.run(count, run, tiny.file, [*given, f"train.steps={steps}"])
    found = [r["validation_loss"] for r in read_metrics(tiny.output / "metrics.jsonl") if "validation_loss" in r]
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_a_run_moves_between_numbers_of_ranks_and_degrees(tiny_run):
    whole = tiny_run("whole", steps=6, every=2)
    ranks.run(1, run, whole.file, [*EXACT, "train.micro_batch=1"])
    moving = tiny_run("moving", steps=6, every=2)
    for count, context, steps in ((4, 2, 2), (1, 1, 3), (2, 2, 5), (2, 1, 6)):
        degree = f"parallel.context_parallel_degree={context}"
        given = [*EXACT, "train.micro_batch=1", f"train.steps={steps}", degree]
        ranks.run(count, run, moving.file, given)
    assert losses(moving.output) == pytest.approx(losses(whole.output), rel=1e-5)
    starts = json.loads((moving.output / "environment.json").read_text())["starts"]
    assert len(starts) == 4


def test_fp8_beside_bf16_on_two_ranks(tiny_run):
    several = tiny_run("several", steps=6)
    (loss, _), (other, _) = ranks.run(2, run, several.file, ["train.compare_bf16=true"])
    assert loss == other
    assert losses(several.output / "bf16")[-1] == pytest.approx(losses(several.output)[-1], rel=0.05)


def gathering_run(file, overrides, memory):
    """A run whose ranks have a GPU of so many bytes; what it says."""
    from io import StringIO

    from rich.console import Console

    from octavo.config.run import RunConfig
    from octavo.parallel import gathered
    from octavo.train.trainer import Trainer

    gathered.memory_of_gpu = lambda kind: memory
    text = StringIO()
    Trainer(RunConfig.from_file(file, overrides), console=Console(file=text, width=400)).train()
    return text.getvalue()


@pytest.mark.long
def test_a_run_chooses_how_long_blocks_stay_gathered_and_continues_on_other_gpus(tiny_run):
    """The same bits by either choice, given or by the rule."""
    small, large = 1 << 16, 1 << 30
    wanted = None
    for name, asked, parts in (
        ("given", "true", ((None, 3),)),
        ("kept", '"auto"', ((large, 3),)),
        ("moved", '"auto"', ((large, 1), (small, 2), (None, 3))),
    ):
        tiny = tiny_run(name, steps=3, every=1)
        for memory, steps in parts:
            overrides = ["optimizer.schedule=constant", f"train.steps={steps}", f"parallel.reshard_after_forward={asked}"]
            said, _ = ranks.run(2, gathering_run, tiny.file, overrides, memory)
            chosen = {
                None: "freed after their forward, as",
                small: "freed after their forward: gathered",
                large: "stay gathered",
            }
            assert (f"fp8: blocks {'are ' if memory != large else ''}{chosen[memory]}" in said) == (asked != "true")
            assert said.count("blocks") == (asked != "true")
        wanted = wanted or losses(tiny.output)
        assert losses(tiny.output) == wanted
        assert f"reshard_after_forward = {asked}" in (tiny.output / "run.toml").read_text()


@pytest.mark.long
def test_a_run_continues_where_the_ranks_sum_gradients_at_other_times(tiny_run):
    """Sums in another order: the same losses within their rounding, whichever way it was saved."""
    wanted = None
    for name, parts in (
        ("once", (("false", 6),)),
        ("then each", (("false", 2), ("true", 6))),
        ("then once", (("true", 4), ("false", 6))),
    ):
        tiny = tiny_run(name, steps=6, every=2)
        for each, steps in parts:
            given = ["optimizer.schedule=constant", f"train.steps={steps}", f"parallel.sync_each_micro_batch={each}"]
            ranks.run(2, run, tiny.file, [*given, "train.micro_batch=1"])
        assert f"sync_each_micro_batch = {parts[-1][0]}" in (tiny.output / "run.toml").read_text()
        wanted = wanted or losses(tiny.output)
        assert losses(tiny.output) == pytest.approx(wanted, rel=1e-3)
        assert len(wanted) == 6


def test_the_figures_of_a_run_are_read_by_the_rank_that_wrote_them(tiny_run):
    several = tiny_run("several", steps=2)
    new = ranks.run(2, run_with_stale_metrics, several.file)
    assert ranks.run(2, run_with_stale_metrics, several.file) == new  # already trained
    assert len(set(new)) == 1


def run_with_stale_metrics(file):
    """A run in which another host's file system still shows an older metrics.jsonl."""
    import os

    from octavo.run import summary

    if os.environ["RANK"] != "0":
        summary.read_metrics = lambda path: []
    return run(file, [])


def test_float16_skips_the_same_steps_on_every_rank(tiny_run):
    several = tiny_run("half", steps=8)
    given = ["model.dtype=float16", "fp8.enabled=false", 'train.loss_scale="dynamic"']
    said = ranks.run(2, overflowing, several.file, given)
    assert said[0] == said[1]
    records = read_metrics(several.output / "metrics.jsonl")
    skipped = [r["step"] for r in records if r["skipped"]]
    assert skipped == [3]
    scales = [r["loss_scale"] for r in records]
    assert scales[3] == scales[2] / 2  # halved after the overflow
    assert scales[-1] == 2 * scales[3]  # and grown again
    assert all(math.isfinite(r["loss"]) for r in records if r["step"] != 3)


def overflowing(file, overrides):
    """A run in which the gradient of one rank alone overflows in step 3, and the scale grows every 4 good steps."""
    import octavo.train.loss_scale as lossscale
    import octavo.train.step as step_module
    from octavo.parallel.world import state

    lossscale.FIRST_SCALE, lossscale.GROWTH_INTERVAL = 2.0**10, 4
    loss_of, steps = step_module.loss_of, []

    def spoiled(*arguments, **keywords):
        steps.append(1)
        loss = loss_of(*arguments, **keywords)
        return loss * (float("inf") if len(steps) == 3 and state.rank == 1 else 1.0)

    step_module.loss_of = spoiled
    return run(file, overrides)


@pytest.mark.long
def test_each_rank_keeps_the_state_of_its_callbacks(tiny_run):
    """Another number of ranks: a new rank has rank 0's."""
    several = tiny_run("several", steps=3)
    assert ranks.run(2, counting_run, several.file, 1) == [([], [0]), ([], [1])]
    assert ranks.run(4, counting_run, several.file, 2) == [([0], [0, 0]), ([1], [1, 1]), ([0], [0, 2]), ([0], [0, 3])]
    assert ranks.run(2, counting_run, several.file, 3) == [([0, 0], [0, 0, 0]), ([1, 1], [1, 1, 1])]


def counting_run(file, until):
    """The state of a callback as it was handed back, and at the end; the run is stopped after step `until`."""
    import os

    from rich.console import Console

    import octavo

    class Counting(octavo.Callback):
        def __init__(self):
            self.loaded, self.seen = [], []

        def on_step(self, trainer, record):
            self.seen.append(int(os.environ["RANK"]))

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.loaded, self.seen = list(state["seen"]), state["seen"]

    counting = Counting()
    settings = {"steps": until, "global_batch": 4, "micro_batch": 1}
    octavo.Trainer(file, callbacks=[counting], console=Console(quiet=True), train=settings, optimizer=CONSTANT).train()
    return counting.loaded, counting.seen


CONSTANT = {"schedule": "constant", "warmup_steps": 0}
