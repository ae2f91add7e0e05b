"""`octavo verify --gpu` of a small run."""

import json

import pytest
import torch

from octavo.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

RUN = """
[model]
source = "llama-1b"
config = { hidden_size = 512, intermediate_size = 1024, num_attention_heads = 8, num_key_value_heads = 4, vocab_size = 4096 }
[data]
source = "python:docstrings"
sequence_length = 512
vocab_size = 4096
[train]
steps = 3
global_batch = 4
offload = true
output = "runs/never"
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_layers_repeat_to_the_bit(gpus, tmp_path):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    run, output = tmp_path / "run.toml", tmp_path / "verify.json"
    run.write_text(RUN)
    degree = f"parallel.tensor_parallel_degree={gpus}"
    assert main(["verify", str(run), "--gpu", "--ranks", str(gpus), "--output", str(output), degree]) == 0
    found = json.loads(output.read_text())
    assert found["verified"]
    assert [each["comparison"] for each in found["comparisons"]] == ["repeated", "one kernel after the other"]
