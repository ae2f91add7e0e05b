"""float16: what is skipped, what the scale does, and that neither kill nor resume can be seen in the losses."""

import itertools
import json
import math
import threading

import pytest
import torch
from rich.console import Console

from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.config.train import LARGEST_SCALE
from octavo.data.prepared import prepare
from octavo.errors import InputError, OctavoError, RunStopped
from octavo.fp8 import scaling
from octavo.nn.head import linear_cross_entropy
from octavo.parallel.world import seed_everything
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train import loss_scale
from octavo.train.evaluate import validate
from octavo.train.loss_scale import PATIENCE, LossScale
from octavo.train.optimizer import clip_grad_norm_
from octavo.train.setup import build
from octavo.train.step import train_step
from octavo.train.trainer import Trainer
from octavo.watchdog.stopping import StopRequest

HALF = "model.dtype=float16"
PLAIN = "fp8.enabled=false"
GOOD, LOST = (2.0, 1.0), (2.0, math.inf)


@pytest.fixture
def small(monkeypatch):
    """Runs begin far too high and grow soon, so that a few steps see all that a scale does."""
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**34)
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)


def built(run, *overrides):
    config = RunConfig.from_file(run.file, [HALF, *overrides])
    stepper, validation = build(check(config), prepare(config.data))
    seed_everything(0)
    return stepper, validation


def curve(output):
    return [
        {key: value.hex() if isinstance(value, float) else value for key, value in record.items() if key in KEPT}
        for record in read_metrics(output / "metrics.jsonl")
    ]


KEPT = {"step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "validation_loss"}


# The scale by itself.


def dynamic(start):
    scale = LossScale()
    scale.scale = start
    return scale


def test_a_dynamic_scale_halves_doubles_and_stays_within_bounds(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    scale = dynamic(8.0)
    seen = []
    for numbers in (LOST, LOST, GOOD, LOST, GOOD, GOOD, GOOD, GOOD):
        seen.append((scale.update(*numbers), scale.scale))
    # A lost step between two good ones begins the count anew.
    assert seen == [(True, 4), (True, 2), (False, 2), (True, 1), (False, 1), (False, 2), (False, 2), (False, 4)]
    high = dynamic(LARGEST_SCALE)
    assert [high.update(*GOOD) for _ in range(2)] == [False, False]
    assert (high.scale, high.good_steps) == (LARGEST_SCALE, 0)


def test_a_dynamic_scale_doubles_after_2000_good_steps():
    scale = LossScale()
    scale.good_steps = 1998
    seen = [(scale.update(*GOOD), scale.scale) for _ in range(2)]
    assert seen == [(False, 65536), (False, 2 * 65536)]


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_any_number_that_is_not_finite_is_an_overflow(numbers):
    scale = dynamic(3.0)
    assert [scale.update(*numbers) for _ in range(2)] == [True, True]
    assert scale.scale == 1  # never below
    assert not scale.update(*numbers)  # and then no step can be saved by it
    assert "down to 1" in scale.advice


def test_a_fixed_scale_stays_and_has_patience_with_overflows_in_a_row():
    scale = LossScale(1024.0)
    for _ in range(PATIENCE - 1):
        assert scale.update(*LOST)
    assert not scale.update(*GOOD)
    assert [scale.update(*LOST) for _ in range(PATIENCE)] == [True] * PATIENCE
    assert not scale.update(*LOST)
    assert scale.scale == 1024
    assert "train.loss_scale = 1024" in scale.advice


def test_its_state_is_json_and_belongs_to_the_value_that_was_asked_for():
    scale = dynamic(64.0)
    for numbers in (LOST, GOOD, GOOD):
        scale.update(*numbers)
    state = json.loads(json.dumps(scale.state()))
    again = LossScale()
    again.load(state)
    assert again.state() == scale.state()
    fixed = LossScale(128.0)
    fixed.load(state)
    assert fixed.scale == 128
    other = LossScale(256.0)
    other.load(fixed.state())
    assert other.scale == 256


# The gradients.


def test_clipping_divides_by_the_scale_in_the_same_pass():
    models = [torch.nn.Linear(7, 5) for _ in range(2)]
    gradients = [torch.randn_like(p) for p in models[0].parameters()]
    for model, factor in zip(models, (1.0, 2.0**20), strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient * factor
    for limit in (0.0, 100.0, 0.5, 0.1):
        norms = [clip_grad_norm_(models[0], limit), clip_grad_norm_(models[1], limit, loss_scale=2.0**20)]
        assert norms[0] == norms[1]
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            b.grad = b.grad * 2.0**20


@pytest.mark.parametrize("params_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**24])
def test_the_heads_gradients_survive_many_targets_and_a_large_scale(params_dtype, scale):
    torch.manual_seed(0)
    targets = 2.0**24  # so that a gradient of the mean would be nothing in float16
    hidden = torch.randn(48, 32).half().requires_grad_()
    weight = (torch.randn(64, 32) / 8).to(params_dtype).requires_grad_()
    target = torch.randint(64, (48,))
    target[::5] = -100
    (linear_cross_entropy(hidden, weight, target, torch.tensor(targets)) * scale).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), target, ignore_index=-100, reduction="sum")
    (loss * (scale / targets)).backward()
    for found, wanted in zip((hidden, weight), exact, strict=True):
        assert found.grad.dtype == found.dtype
        smallest = 2.0**-24 if found.dtype == torch.float16 else 0.0
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=5e-3, atol=smallest + 2e-3 * wanted.grad.abs().max())


def test_a_frequent_token_does_not_overflow_the_heads_weight():
    hidden = torch.full((4096, 16), 30.0).half().requires_grad_()
    weight = torch.zeros(32, 16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.long), torch.tensor(4096.0)).backward()
    torch.testing.assert_close(weight.grad[0], torch.full((16,), -30 * 31 / 32), rtol=1e-3, atol=0)


# Steps.


@pytest.mark.long(lambda fp8: fp8 == "false")
@pytest.mark.parametrize("fp8", ["true", "false"])
def test_an_overflow_is_skipped_to_the_bit_the_scale_falls_and_grows_and_the_model_learns(tiny_run, fp8, small):
    stepper, validation = built(tiny_run(steps=40), f"fp8.enabled={fp8}", "train.global_batch=8")
    before = [p.detach().clone() for p in stepper.model.parameters()]
    results = [train_step(stepper, 1)]
    assert results[0].skipped
    assert math.isinf(results[0].grad_norm) or math.isnan(results[0].grad_norm)
    assert results[0].loss == pytest.approx(math.log(320), rel=0.05)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
    assert all(p.grad is None for p in stepper.model.parameters())
    assert not stepper.optimizer.state
    results += [train_step(stepper, step) for step in range(2, 41)]
    skipped = [r.skipped for r in results]
    first = skipped.index(False)
    assert first > 1
    assert [r.loss_scale for r in results[: first + 1]] == [2.0 ** (34 - i) for i in range(first + 1)]
    rates = [b.loss_scale / a.loss_scale for a, b in itertools.pairwise(results)]
    assert 2.0 in rates[first:]
    assert any(skipped[first:])  # grown too far, and back
    for rate, lost in zip(rates, skipped, strict=False):
        assert (rate == 0.5) == lost
    assert [r.lr for r in results][:2] == [0.0015, 0.003]  # the schedule goes on
    assert sum(r.loss for r in results[-3:]) / 3 < results[0].loss - 0.8
    assert math.isfinite(validate(stepper, validation).loss)


def test_the_curve_is_that_of_float32_within_the_format(tiny_run):
    run = tiny_run(steps=24)
    exact = (PLAIN, "model.config.attention_dropout=0.0")
    half, _ = built(run, *exact)
    full, _ = built(run, *exact, "model.dtype=float32")
    assert full.loss_scale is None
    for step in range(1, 25):
        found, wanted = train_step(half, step), train_step(full, step)
        assert (found.loss_scale, found.skipped) == (65536, False)
        assert (wanted.loss_scale, wanted.skipped) == (None, False)
        assert found.loss == pytest.approx(wanted.loss, rel=2e-4)  # five times less than bfloat16's rounding allows
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=5e-3)  # of what it is without the scale


def test_the_scale_does_not_show_in_loss_and_norm(tiny_run):
    run = tiny_run()
    results = [train_step(built(run, PLAIN, f"train.loss_scale={scale}")[0], 1) for scale in ("256.0", "4096.0")]
    assert results[0].loss == results[1].loss
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-3)
    assert [r.loss_scale for r in results] == [256, 4096]


@pytest.mark.parametrize("micro", [2, 4])
def test_an_overflow_that_an_fp8_cast_would_hide_is_seen_and_leaves_no_trace(tiny_run, micro):
    stepper, _ = built(tiny_run(), f"train.micro_batch={micro}", "fp8.amax_history_len=32")
    assert not train_step(stepper, 1).skipped
    left = [1]  # the first micro-batch alone overflows

    def spoil(gradient):
        gradient = gradient.clone()
        if left and left.pop():
            gradient[0, 3, 1, 5] = math.inf
        return gradient

    qkv = stepper.model.layers[0].self_attention.layernorm_qkv
    handle = qkv.register_forward_hook(lambda module, args, output: output[1].register_hook(spoil) and None)
    before = [p.detach().clone() for p in stepper.model.parameters()]
    result = train_step(stepper, 2)
    assert result.skipped
    assert result.grad_norm == math.inf
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
    handle.remove()
    assert not train_step(stepper, 3).skipped
    for _, state in scaling.states_of(stepper.model):
        for slot in state.slots.values():  # an infinity in a history would keep its scale where it was
            torch.testing.assert_close(slot.scale, slot.fp8_max / slot.history.max())


def test_a_fixed_scale_skips_and_stays(tiny_run):
    stepper, _ = built(tiny_run(), PLAIN, f"train.loss_scale={2.0**40}")
    before = [p.detach().clone() for p in stepper.model.parameters()]
    for step in (1, 2):
        result = train_step(stepper, step)
        assert (result.skipped, result.loss_scale) == (True, 2.0**40)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))


def test_a_loss_that_no_scale_mends_stops_the_run_with_the_weights_as_they_were(tiny_run):
    stepper, _ = built(tiny_run(), PLAIN)
    with torch.no_grad():
        stepper.model.layers[1].layernorm_mlp.fc2_weight[0, 0] = 1e6  # infinite in float16: so is the forward
    before = [p.detach().clone() for p in stepper.model.parameters()]
    assert all(train_step(stepper, 1).skipped for _ in range(16))
    with pytest.raises(OctavoError, match="loss scale is down to 1, so it is not the cause") as stopped:
        train_step(stepper, 1)
    assert "Lower optimizer.lr" in str(stopped.value)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))


# Runs.


@pytest.mark.long(lambda settings: not settings)
@pytest.mark.parametrize("settings", [(), (PLAIN, "data.packing=documents", "data.workers=2")], ids=["fp8", "plain"])
def test_a_resume_across_skipped_and_grown_steps_is_bit_exact(tiny_run, small, settings):
    whole, cut = tiny_run("whole", steps=30, every=4), tiny_run("cut", steps=30, every=4)
    overrides = [HALF, "train.validate_every=10", *settings]
    Trainer(RunConfig.from_file(whole.file, overrides), console=Console(quiet=True)).train()
    expected = curve(whole.output)
    lost = [record["step"] for record in expected if record["skipped"]]
    assert lost[:2] == [1, 2]
    assert any(a["loss_scale"] != b["loss_scale"] and not a["skipped"] for a, b in itertools.pairwise(expected))

    class Stop(StopRequest):
        """A signal in a given step."""

        @property
        def received(self):
            return "SIGTERM" if len(read_metrics(cut.output / "metrics.jsonl")) >= self.at else None

        @received.setter
        def received(self, value):
            pass

    late = max(step for step in lost if step < 30)
    assert not expected[late - 2]["skipped"]  # what a scale that has grown lost
    for at in (1, late - 1, late):
        stop = Stop()
        stop.at = at
        with pytest.raises(RunStopped, match=f"after step {at} of 30"):
            Trainer(RunConfig.from_file(cut.file, overrides), console=Console(quiet=True)).train(stop=stop)
    Trainer(RunConfig.from_file(cut.file, overrides), console=Console(quiet=True)).train()
    assert curve(cut.output) == expected
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-read")]


def test_metrics_and_checkpoints_tell_of_the_scale_and_other_dtypes_do_not(tiny_run, small, capsys):
    run, other = tiny_run(steps=4), tiny_run("other", steps=2)
    assert main(["train", str(run.file), HALF, PLAIN]) == 0
    assert "fp16  step 4/4" in capsys.readouterr().out
    records = read_metrics(run.output / "metrics.jsonl")
    assert [(r["loss_scale"], r["skipped"]) for r in records] == [(2.0 ** (34 - i), True) for i in range(4)]
    state = json.loads((run.output / "checkpoints" / "step-4" / "state.json").read_text())
    assert state["loss_scale"] == {"dynamic": True, "scale": 2.0**30, "good_steps": 0, "skipped_in_a_row": 4}
    assert main(["train", str(other.file)]) == 0
    assert not {"loss_scale", "skipped"} & read_metrics(other.output / "metrics.jsonl")[0].keys()


def test_a_fixed_scale_that_is_too_large_ends_the_run_and_may_be_changed_to_continue(tiny_run, capsys):
    run = tiny_run(steps=30, every=10)
    assert main(["train", str(run.file), HALF, PLAIN, f"train.loss_scale={2.0**40}"]) == 1
    err = capsys.readouterr().err
    assert "step 21: loss 5." in err
    assert f"overflowed in {PATIENCE} steps in a row" in err
    assert err.count("\n") == 2  # and that fp8.amax_history_len of the file is left out without FP8
    assert main(["train", str(run.file), HALF, PLAIN, "train.loss_scale=1024.0"]) == 0
    records = read_metrics(run.output / "metrics.jsonl")
    assert [r["skipped"] for r in records] == [True] * 20 + [False] * 10
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.long(lambda workers: workers == 1)
@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ahead_changes_no_bit_and_its_threads_end_with_a_failed_run_too(tiny_run, capsys, workers):
    plain, ahead = tiny_run("plain", steps=12), tiny_run("ahead", steps=12)
    assert main(["train", str(plain.file)]) == 0
    assert main(["train", str(ahead.file), f"data.workers={workers}"]) == 0
    losses = [[r["loss"] for r in read_metrics(run.output / "metrics.jsonl")] for run in (plain, ahead)]
    assert losses[0] == losses[1]
    failing = tiny_run("failing", steps=12)
    hopeless = ["optimizer.lr=1e30", "optimizer.clip=0", "optimizer.warmup_steps=0"]
    assert main(["train", str(failing.file), f"data.workers={workers}", *hopeless]) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("octavo-read")]


def test_a_model_with_its_own_code_trains_in_float16(tiny_run, tmp_path):
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64, window_size=8, attention_dropout=0.0, resid_dropout=0.0, embed_dropout=0.0,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "neo")
    run = tiny_run(steps=12)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{tmp_path / "neo"}"\n' + text[text.index("[data]") :])
    half, _ = built(run)
    full, _ = built(run, "model.dtype=float32")
    for step in range(1, 13):
        found, wanted = train_step(half, step), train_step(full, step)
        assert found.loss == pytest.approx(wanted.loss, rel=2e-3)
        assert not found.skipped


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.params_dtype=bfloat16"], r'params_dtype = "bfloat16": float16 trains float32 parameters. Set model.params_d'),
        (["train.loss_scale=0.0"], r"train.loss_scale = 0: a loss scale must be above 0 and at most 2\*\*60"),
        (["train.loss_scale=-8.0"], r"train.loss_scale = -8: .*such as 1024"),
        (["train.loss_scale=1e30"], r"train.loss_scale = 1e\+30: "),
        *(
            (
                ["fp8.enabled=true", f"fp8.recipe={recipe}"],
                rf"float16\" with {recipe} scaling \(layers\.0\..* fp8.recipe = \"delayed",
            )
            for recipe in ("current", "rowwise", "block")
        ),
        (["fp8.enabled=true", "fp8.layers={'layers.1.*' = 'block'}"], r"float16\" with block scaling \(layers\.1\."),
    ],
)
def test_what_float16_cannot_do_is_refused_before_any_work(tiny_run, overrides, message):
    with pytest.raises(InputError, match=message):
        check(RunConfig.from_file(tiny_run().file, [HALF, *overrides]))


def test_float16_counts_against_the_peak_of_bfloat16(tiny_run):
    from octavo.hardware import Device, lookup

    plans = [check(RunConfig.from_file(tiny_run(d).file, [f"model.dtype={d}"])) for d in ("float16", "bfloat16", "float32")]
    h200 = Device("NVIDIA H200", lookup("NVIDIA H200"), (9, 0), 139.0, "cuda")
    for plan in plans:
        object.__setattr__(plan, "hardware", h200)
    half, brain, full = (plan.rates(1e6) for plan in plans)
    assert half == brain
    assert half[1] is not None
    assert full == (half[0], None)
