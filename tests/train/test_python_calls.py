"""The host's work: Python calls into Octavo, kernels not counted, that a further layer adds to a step of training."""

import collections
import sys
import threading
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
import ranks
from octavo.train.adamw import AdamW

SOURCE = str(Path(octavo.__file__).parent)
KERNELS = str(Path(SOURCE, "kernels"))


def calls(layers):
    """By function, in the fourth step of a tiny Llama under delayed scaling: forward, backward, clipping, optimizer."""
    torch.manual_seed(0)  # ranks hold the same weights
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers}
    model = octavo.transform(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    found = collections.Counter()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(SOURCE) and not name.startswith(KERNELS):
            found[f"{name.removeprefix(SOURCE)}: {frame.f_code.co_name}"] += 1

    for step in range(4):
        ids = torch.randint(256, (2, 64))
        if step == 3:
            threading.setprofile(note)
            sys.setprofile(note)
        with octavo.fp8_autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        octavo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    sys.setprofile(None)
    threading.setprofile(None)
    return found


def calls_of_a_layer():
    more = calls(3)
    more.subtract(calls(2))
    return more


def calls_of_a_sharded_layer():
    octavo.init({"hybrid_shard_degree": 2, "context_parallel_degree": 2})
    return calls_of_a_layer()


def test_on_one_rank():
    (found,) = ranks.run(1, calls_of_a_layer)  # a process without the models of other tests
    assert found["/fp8/quantizer.py: _cast"] == 12  # of four weights, their inputs and the gradients of their outputs
    assert sum(found.values()) <= 240, found.most_common(30)


def test_on_two_ranks_that_share_weights_and_sequences():
    for found in ranks.run(2, calls_of_a_sharded_layer):
        assert sum(found.values()) <= 500, found.most_common(30)
