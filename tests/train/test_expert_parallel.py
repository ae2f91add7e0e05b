"""Runs whose experts are spread over ranks: they move between expert degrees, and survive a kill in a checkpoint's write."""

import os
import re

import pytest
from test_ranked_loop import EXACT, losses, run
from transformers import MixtralConfig

import ranks
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.run.resume import check_resumable


@pytest.fixture
def mixture(tiny_run, tmp_path):
    """A factory of tiny runs of four experts."""
    MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02, bos_token_id=0, eos_token_id=0,
    ).save_pretrained(tmp_path / "mixture")  # fmt: skip

    def make(name, **settings):
        made = tiny_run(name, **settings)
        text = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "", made.file.read_text(), flags=re.DOTALL)
        made.file.write_text(re.sub(r'(?m)^source = "llama-tiny"', f'source = "{tmp_path / "mixture"}"', text))
        return made

    return make


@pytest.mark.long
def test_a_run_moves_between_expert_degrees(mixture, capsys):
    exact = [*(given for given in EXACT if "attention_dropout" not in given), "train.validate_batches=1000"]
    whole = mixture("whole", steps=8, every=2)
    ranks.run(1, run, whole.file, [*exact, "train.micro_batch=4"])  # experts are balanced over a micro-batch of all ranks
    moving = mixture("moving", steps=8, every=2)
    for count, degree, steps in ((4, 4, 2), (1, 1, 4), (2, 2, 6), (4, 2, 8)):
        given = [f"train.steps={steps}", f"train.micro_batch={4 // count}", f"parallel.expert_parallel_degree={degree}"]
        if count == 1:
            run(moving.file, [*exact, *given])  # in this process, whose words are seen
        else:
            ranks.run(count, run, moving.file, [*exact, *given])
    assert "expert_parallel_degree was 4 and is now 1: sums have another order" in capsys.readouterr().err
    assert losses(moving.output) == pytest.approx(losses(whole.output), rel=1e-5)
    wanted, found = (read_metrics(one.output / "metrics.jsonl") for one in (whole, moving))
    for one, other in zip(wanted, found, strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert other["expert_load"] == pytest.approx(one["expert_load"], rel=1e-4)
        assert other["dropped_tokens"] == 0
    for key in ("validation_loss", "perplexity"):
        assert found[-1][key] == pytest.approx(wanted[-1][key], rel=1e-5)


def killed(file, overrides, name):
    """A run of which one rank is killed in the write of a checkpoint."""
    if os.environ["RANK"] == "1" or name != "within-shard":
        os.environ |= {"OCTAVO_FAILPOINT": name, "OCTAVO_FAILPOINT_STEP": "4"}
    return run(file, overrides)


@pytest.mark.long
def test_a_kill_in_a_checkpoints_write(mixture):
    given = ["parallel.expert_parallel_degree=2", "moe.router_jitter_noise=0.01"]
    undisturbed = mixture("undisturbed", steps=6, every=2)
    ranks.run(2, run, undisturbed.file, given)
    wanted = [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(undisturbed.output / "metrics.jsonl")]
    for name in ("within-shard", "before-rename", "after-rename"):
        cut = mixture(name, steps=6, every=2)
        with pytest.raises(AssertionError, match="died"):
            ranks.run(2, killed, cut.file, given, name)
        ranks.run(2, run, cut.file, given)
        found = [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(cut.output / "metrics.jsonl")]
        assert found == wanted, name
        assert not list(cut.output.glob("**/.tmp-*"))


def test_a_run_whose_tokens_travel_in_fp8_stays_on_several_ranks(mixture):
    def config(*overrides):
        resolved = ("fp8.head=backward", "fp8.fast_accumulation=input_gradient", "parallel.expert_parallel_degree=2")
        return RunConfig.from_file(mixture_run.file, [*resolved, *overrides])

    mixture_run = mixture("travels")
    before = config("parallel.expert_dispatch_fp8=true")
    check_resumable(
        before, config("parallel.expert_dispatch_fp8=true", "parallel.expert_parallel_degree=4"), mixture_run.output
    )
    with pytest.raises(InputError, match=r"Continue it with parallel\.expert_parallel_degree of 2 or more"):
        check_resumable(before, config("parallel.expert_parallel_degree=1"), mixture_run.output)
    with pytest.raises(InputError, match="Restore them"):
        check_resumable(before, config(), mixture_run.output)


@pytest.mark.parametrize(
    ("world", "given", "words"),
    [
        (12, ["parallel.expert_parallel_degree=3"], "does not divide the 4 experts of mixtral. Set {} to 1, 2 or 4."),
        (6, ["parallel.expert_parallel_degree=6"], "does not divide the 4 experts of mixtral. Set {} to 1 or 2."),
        (3, ["parallel.expert_parallel_degree=3"], "does not divide the 4 experts of mixtral. Set {} to 1."),
        (
            2,
            ["parallel.expert_parallel_degree=2", "parallel.expert_dispatch_fp8=true", 'fp8.skip=["*.experts.gate_up_proj"]'],
            "parallel.expert_dispatch_fp8 = true has no effect: fp8.skip and fp8.layers leave",
        ),
    ],
)
def test_degrees_and_a_dispatch_that_cannot_be_are_refused_before_work(world, given, words, mixture, capsys):
    command = [
        "train",
        str(mixture("refused").file),
        "--dry-run",
        "--world-size",
        str(world),
        f"train.global_batch={2 * world}",
    ]
    assert main([*command, *given]) == 2
    assert words.format("parallel.expert_parallel_degree") in capsys.readouterr().err
    if world == 2:  # the second product's tokens have travelled by then
        given[-1] = 'fp8.skip=["*.experts.down_proj"]'
        assert main([*command, *given]) == 0
