"""A run of a mixture of experts: what it records, and a continuation to the last bit."""

import re
import shutil

import pytest
import torch
from transformers import MixtralConfig

from octavo.cli import main
from octavo.nn.moe import routing_metrics
from octavo.run.metrics import read_metrics


def test_metrics_of_experts():
    # Two layers of three experts, two visits a token: 6 tokens, all of which the first layer sends to experts 0 and 1.
    routing = torch.tensor([[4.0, 1, 1, 6, 6, 0, 0.5, 3.0], [2.0, 2, 2, 4, 4, 4, 0.5, 6.0]])
    found = routing_metrics(routing, 2)
    assert found["expert_load"] == pytest.approx([1.25, 1.25, 0.5])
    assert found["largest_expert_load"] == pytest.approx(1.5)
    assert found["router_entropy"] == pytest.approx(9 / 12)
    assert found["dropped_tokens"] == 0


def test_a_run_records_its_experts_and_continues_to_the_last_bit(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=4, every=2)
    MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02, router_jitter_noise=0.01,
        bos_token_id=0, eos_token_id=0,
    ).save_pretrained(tmp_path / "mixture")  # fmt: skip
    settings = re.sub(r"\[model\.config\]\n.*?(?=\n\[)", "", run.file.read_text(), flags=re.DOTALL)
    settings = re.sub(r'(?m)^source = "llama-tiny"', f'source = "{tmp_path / "mixture"}"', settings)
    run.file.write_text(f"{settings}\n[moe]\nmoe_z_loss_coeff = 0.01\n")
    assert main(["train", str(run.file)]) == 0
    first = read_metrics(run.output / "metrics.jsonl")
    for record in first:
        assert len(record["expert_load"]) == 4
        assert sum(record["expert_load"]) == pytest.approx(4, rel=1e-4)
        assert record["largest_expert_load"] >= max(record["expert_load"]) - 1e-6
        assert 0 < record["router_entropy"] < 1.387  # of four experts, ln 4
        assert record["dropped_tokens"] == 0
        assert 1.9 < record["balancing_loss"] < 4  # of two visited experts; 2 if all are visited alike
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
