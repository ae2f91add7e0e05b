"""`train.deterministic` on a GPU: two runs, and one that continues, have the same losses to the last bit."""

import shutil

import pytest
import torch

import octavo
from octavo.kernels.attention import flash
from octavo.run.metrics import read_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
STEPS, KEPT = 6, 3


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(flash.missing() is not None, reason="no package"))])
def attention(request):
    """With and without FlashAttention-4."""
    before = flash.enabled()
    flash.enable(request.param)
    yield
    flash.enable(before)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("packing", ["join", "documents"])
def test_losses_repeat_and_continue_to_the_last_bit(tiny_run, packing, recipe, attention):
    def train(run):
        octavo.Trainer(
            run.file,
            model={"config": {**MODEL, "num_hidden_layers": 2, "attention_dropout": 0.0}},
            data={"sequence_length": 128, "packing": packing},
            fp8={"recipe": recipe},
            train={"deterministic": True, "steps": STEPS},
        ).train()
        return [(each["loss"].hex(), each["grad_norm"].hex()) for each in read_metrics(run.output / "metrics.jsonl")]

    first, second = (tiny_run(name, steps=STEPS, every=KEPT) for name in ("first", "second"))
    losses = train(first)
    assert len(losses) == STEPS
    assert train(second) == losses
    shutil.rmtree(second.output / "checkpoints" / f"step-{STEPS}")
    assert train(second) == losses
