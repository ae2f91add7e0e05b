"""examples/chat_sft.py trains a folder on a file of conversations, and says what is trained."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from chat_templates import save_tokenizer
from octavo.run.metrics import read_metrics

EXAMPLE = Path(__file__).parent.parent / "examples" / "chat_sft.py"
SIZES = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048,
}  # fmt: skip


def test_it_trains_the_assistants_turns(tmp_path, monkeypatch, capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    save_tokenizer(tmp_path / "model", "chatml")
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "a fox?"}, {"role": "assistant", "content": "the lazy dog"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk * 3}) + "\n")
    (tmp_path / "chats.jsonl").write_text((tmp_path / "chats.jsonl").read_text() * 200)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "model", "chats.jsonl", "out"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"train: 190 conversations, [\d,]+ tokens, \d\d\.\d% of them trained", said)
    assert re.findall(r"^trained +('.*)$", said, re.M) == ["'the lazy dog<|im_end|>'"] * 3
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert records[0]["loss"] == pytest.approx(6.24, abs=0.5)  # of random weights: log 512
