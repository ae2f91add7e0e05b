"""TRL's trainers and lm-eval around a transformed model, where they are installed, compute what they do with Hugging Face's.

What they ask of a model is also in `tests/models/test_huggingface.py`: tags, `base_model`, `tie_weights`.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "models"))
from expectations import refused
from llamas import llama
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import octavo
from octavo.build import transform

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that this project does not choose
WORDS = {**{f"w{i}": i for i in range(90)}, "[UNK]": 90, "[EOS]": 91, "[PAD]": 92}
QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "bf16": False, "max_steps": 2}


@pytest.fixture
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]", pad_token="[PAD]")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder of a model, since TRL reads the reference of a DPO again."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    llama(max_position_embeddings=64).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def texts():
    return {"text": [" ".join(f"w{(7 * i + j) % 90}" for j in range(12)) for i in range(16)]}


def pairs():
    rows = range(16)
    return {
        "prompt": [f"w{i} w{i + 1}" for i in rows],
        "chosen": [f"w{i + 2} w3" for i in rows],
        "rejected": [f"w{i + 4} w9 w2" for i in rows],
    }


def trainer(kind, model, tokenizer, folder, **options):
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets")
    make, settings, rows = {
        "SFT": (trl.SFTTrainer, trl.SFTConfig, texts),
        "DPO": (trl.DPOTrainer, trl.DPOConfig, pairs),
    }[kind]
    values = QUIET | {"gradient_checkpointing": False, "save_strategy": "no", "learning_rate": 1e-3} | options
    data = datasets.Dataset.from_dict(rows())
    return make(model, args=settings(str(folder), **values), train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trl_computes_what_it_computes_with_hugging_faces_model_and_writes_it(kind, source, tokenizer, tmp_path):
    losses, models = [], []
    for ours in (False, True):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model = transform(model, dtype=torch.float32) if ours else model
        run = trainer(kind, model, tokenizer, tmp_path / "run")
        run.train()
        losses.append(torch.tensor([log["loss"] for log in run.state.log_history if "loss" in log]))
        run.save_model(str(tmp_path / f"{ours}"))
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / f"{ours}").state_dict())
    assert len(losses[0]) == 2
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-3, atol=2e-4)
        assert not torch.equal(models[1][name], before[name]), name


def test_trl_asked_for_recomputation_names_the_way(source, tokenizer, tmp_path):
    model = transform(AutoModelForCausalLM.from_pretrained(source))
    run = trainer("SFT", model, tokenizer, tmp_path / "run", gradient_checkpointing=True)
    refused(("recompute=True", "gradient_checkpointing = False"), run.train)


def test_lm_eval_finds_the_likelihood_of_hugging_faces_model(source, tokenizer):
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm_eval")
    from lm_eval.api.instance import Instance

    found = []
    for ours in (False, True):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model = transform(model, dtype=torch.float32) if ours else model
        around = harness.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
        asked = [Instance("loglikelihood", {}, ("w1 w2", f" w{i} w4"), i) for i in range(3)]
        text = Instance("generate_until", {}, ("w1 w2", {"until": ["[EOS]"], "max_gen_toks": 6, "do_sample": False}), 0)
        found.append(([likelihood for likelihood, _ in around.loglikelihood(asked)], around.generate_until([text])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == found[0][1]
    assert octavo.describe(model).layers
