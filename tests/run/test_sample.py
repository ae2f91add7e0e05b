"""Text from runs, folders and live models: Hugging Face's greedy tokens, refusals with the way, and trainings unchanged."""

import copy
import io
import json
import shutil

import pytest
import torch
from expectations import refused
from llamas import VOCABULARY, llama
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import octavo
import ranks
from octavo.cli import main
from octavo.data.tokenizer import train
from octavo.errors import OctavoError
from octavo.parallel import world
from octavo.run.sample import _Choice, _tokenizer_of, sample, sample_text

TEXT = "a scale for each tensor keeps small values in reach"
PROMPT = "a scale"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a tokenizer with at most as many tokens as the models have."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train([TEXT], 300).save(folder)
    return folder


def model_of(seed=0, **changes):
    return llama(seed, vocab_size=320, **changes)


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    octavo.export(octavo.transform(model_of()), tmp_path / "model")
    shutil.copytree(tokenizer, tmp_path / "model", dirs_exist_ok=True)
    return tmp_path / "model"


def greedy(model, folder, prompt, tokens):
    """Hugging Face's greedy continuation, by the most probable token of whole forwards, of those that the tokenizer has."""
    theirs = AutoTokenizer.from_pretrained(folder)
    unknown = [i for i in range(model.config.vocab_size) if i not in theirs.get_vocab().values()]
    ids = theirs(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(tokens):
            logits = model.eval()(input_ids=ids).logits[:, -1]
            logits[:, unknown] = -torch.inf
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat((ids, new), 1)
            if new.item() == theirs.eos_token_id:
                break
    return theirs.decode(ids[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_run_is_continued_from_each_checkpoint(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=4, every=2)
    refused("neither the folder of a run", sample, run.output)
    assert main(["train", str(run.file)]) == 0
    capsys.readouterr()
    octavo.export(run.output, tmp_path / "export")
    wanted = greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "export"), tmp_path / "export", PROMPT, 12)
    capsys.readouterr()
    assert main(["sample", str(run.output), "--prompt", PROMPT, "--temperature", "0", "--tokens", "12"]) == 0
    captured = capsys.readouterr()
    assert captured.out == wanted + "\n"
    assert captured.err == ""
    found = sample(tmp_path / "export", PROMPT, temperature=0, tokens=12)
    assert found["text"] == wanted
    assert found["checkpoint"] is None
    assert sample(run.output, PROMPT, tokens=12)["checkpoint"] == "step-4"
    older = sample(run.output, PROMPT, tokens=12, checkpoint="step-2")
    assert older["checkpoint"] == "step-2"
    assert older["text"] != sample(run.output, PROMPT, tokens=12)["text"]
    refused(("step-3", "step-2"), sample, run.output, PROMPT, checkpoint="step-3")
    shutil.rmtree(run.output / "checkpoints")
    refused("no checkpoint yet", sample, run.output, PROMPT)
    shutil.rmtree(run.output / "tokenizer")
    assert main(["sample", str(run.output)]) == 2


def test_options_of_the_command(model_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    assert main(["sample", str(model_folder), "--prompt", "-", "--json", "--seed", "3", "--tokens", "9", "--top-p", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"] == PROMPT
    assert found["text"].startswith(PROMPT)
    assert found["tokens"] <= 9
    assert (found["seed"], found["top_p"], found["temperature"]) == (3, 0.5, 0.8)
    assert found == sample(model_folder, PROMPT, seed=3, tokens=9, top_p=0.5)
    assert found["text"] != sample(model_folder, PROMPT, seed=4, tokens=9, top_p=0.5)["text"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    assert main(["sample", str(model_folder), "--prompt", "-"]) == 2


def test_a_new_text_begins_with_the_tokenizers_first_token(model_folder):
    found = sample(model_folder, tokens=5)
    assert found["prompt_tokens"] == 1
    assert found["text"]
    names = ("tokenizer_config.json", "special_tokens_map.json")
    config = json.loads((model_folder / names[0]).read_text())
    (model_folder / names[0]).write_text(json.dumps({k: v for k, v in config.items() if k not in ("bos_token", "eos_token")}))
    refused("--prompt", sample, model_folder)


def test_a_long_prompt_ends_at_the_models_positions(model_folder):
    room = 128 - len(AutoTokenizer.from_pretrained(model_folder)(TEXT * 2).input_ids)
    assert 0 < room < 128
    assert sample(model_folder, TEXT * 2, temperature=0)["tokens"] <= room
    refused((f"--tokens {room}", "128 positions"), sample, model_folder, TEXT * 2, tokens=room + 1)
    refused(("128 positions", "at most 127"), sample, model_folder, TEXT * 40)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a\udcff"}, "character 1 of the prompt is not UTF-8"),
        ({"tokens": 0}, "tokens = 0"),
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": 1e-30}, "temperature = 1e-30"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"seed": -1}, "seed = -1"),
        ({"checkpoint": "step-1"}, "without checkpoints"),
    ],
)
def test_wrong_options_are_refused(arguments, words, model_folder):
    refused(words, sample, model_folder, **{"prompt": PROMPT} | arguments)


def test_folders_without_a_language_model_or_a_tokenizer_are_refused(model_folder, tmp_path, tokenizer):
    (model_folder / "tokenizer.json").unlink()
    refused(("cannot be loaded", "save_pretrained"), sample, model_folder, PROMPT)
    (model_folder / "tokenizer_config.json").unlink()
    refused(("no tokenizer", "save_pretrained"), sample, model_folder, PROMPT)
    vit = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32)
    ViTForImageClassification(vit).save_pretrained(tmp_path / "vit")
    refused(("'vit'", "not a causal language model"), sample, tmp_path / "vit", PROMPT)
    t5 = T5Config(vocab_size=320, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    refused("not a causal language model", sample, tmp_path / "t5", PROMPT)
    (tmp_path / "timm").mkdir()
    save_file({"head.weight": torch.zeros(2, 2)}, tmp_path / "timm" / "model.safetensors")
    refused("vision transformer", sample, tmp_path / "timm", PROMPT)
    octavo.export(octavo.transform(llama()), tmp_path / "small")
    shutil.copytree(tokenizer, tmp_path / "small", dirs_exist_ok=True)
    refused((f"{VOCABULARY} tokens", "another model"), sample, tmp_path / "small", PROMPT)
    refused("Did you mean", sample, tmp_path / "smal", PROMPT)


def gpt2():
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2, n_positions=128))


@pytest.mark.parametrize("make", [model_of, gpt2])
def test_greedy_text_of_a_live_model_is_hugging_faces(make, tokenizer):
    reference = make()
    model = octavo.transform(copy.deepcopy(reference), dtype=torch.float32).train()
    found = sample_text(model, tokenizer, PROMPT, tokens=20, temperature=0)
    assert found == greedy(reference, tokenizer, PROMPT, 20)
    drawn = {seed: sample_text(model, tokenizer, PROMPT, tokens=20, temperature=1, seed=seed) for seed in (1, 2)}
    assert drawn[1] != drawn[2]
    assert drawn[1] == sample_text(model, tokenizer, PROMPT, tokens=20, temperature=1, seed=1)
    refused("128 positions", sample_text, model, tokenizer, PROMPT, tokens=200)
    refused("empty", sample_text, model, tokenizer, "")


def test_ids_that_the_tokenizer_does_not_have_are_never_chosen(tmp_path, tokenizer):
    reference = model_of()
    size = len(AutoTokenizer.from_pretrained(tokenizer))
    with torch.no_grad():
        reference.lm_head.weight[size:] *= 100  # so that the most probable token is one of them
        first = reference.eval()(input_ids=torch.tensor([[5, 6]])).logits[0, -1]
    assert first.argmax() >= size
    wanted = greedy(reference, tokenizer, PROMPT, 12)
    model = octavo.transform(copy.deepcopy(reference), dtype=torch.float32)
    assert sample_text(model, tokenizer, PROMPT, tokens=12, temperature=0) == wanted
    octavo.export(model, tmp_path / "model")
    shutil.copytree(tokenizer, tmp_path / "model", dirs_exist_ok=True)
    assert sample(tmp_path / "model", PROMPT, tokens=12, temperature=0)["text"] == wanted
    logits = torch.randn(2, 320)
    masked = _tokenizer_of(tokenizer).masked(logits)
    assert torch.equal(masked[:, :size], logits[:, :size])
    assert (masked[:, size:] == -torch.inf).all()
    drawn = [_Choice(100.0, 1.0, 0).token(masked[0], torch.Generator().manual_seed(seed)) for seed in range(200)]
    assert max(drawn) < size
    assert sample(tmp_path / "model", PROMPT, tokens=12, temperature=100, top_p=1)["text"].startswith(PROMPT)


def test_top_p_draws_from_the_most_probable_tokens_alone(tokenizer):
    """Of probabilities 0.6, 0.3, 0.1 a share of 0.7 leaves the first two, in the ratio 2 to 1."""
    logits, generator = torch.tensor([0.3, 0.1, 0.6]).log(), torch.Generator().manual_seed(0)
    drawn = torch.tensor([_Choice(1.0, 0.7, 0).token(logits, generator) for _ in range(3000)]).bincount(minlength=3)
    assert drawn[1] == 0
    assert drawn[2] / 3000 == pytest.approx(2 / 3, abs=0.03)
    with pytest.raises(OctavoError, match="not finite"):
        _Choice(1.0, 0.7, 0).token(logits * torch.nan, generator)


def losses_of(model, recipe, tokenizer=None, steps=4):
    """Losses of a few steps with dropout, and the weights; with a tokenizer there is a sample in each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, losses = torch.Generator().manual_seed(3), []
    torch.manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(320, (2, 24), generator=draw)
        with octavo.fp8_autocast(fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        if tokenizer is not None:
            sample_text(model, tokenizer, PROMPT, tokens=3)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]


@pytest.mark.parametrize("make", [lambda: model_of(attention_dropout=0.2), gpt2], ids=["decoder", "own code"])
def test_a_training_with_samples_has_the_same_bits(make, tokenizer):
    recipe = octavo.recipe.DelayedScaling(amax_history_len=2)
    plain, sampled = (octavo.transform(make().train()) for _ in range(2))
    frozen = next(module for module in sampled.modules() if isinstance(module, torch.nn.Embedding)).eval()
    one, two = losses_of(plain, recipe), losses_of(sampled, recipe, tokenizer)
    assert one[0] == two[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    assert sampled.training
    assert not frozen.training


def sharded_samples(tokenizer):
    world.init({})
    model = octavo.transform(model_of(), dtype=torch.float32, device="cpu")
    recipe = octavo.recipe.DelayedScaling(amax_history_len=2, fp8_format=octavo.recipe.Format.HYBRID)
    texts = [sample_text(model, tokenizer, PROMPT, tokens=6, temperature=t) for t in (0, 1)]
    back = octavo.to_huggingface(model).state_dict()
    refused("Leave octavo.init out", torch.nn.parallel.DistributedDataParallel, model)
    model.save_pretrained(tokenizer.parent / "saved")
    assert (tokenizer.parent / "saved" / "model.safetensors").is_file()
    plain = losses_of(octavo.transform(model_of(), device="cpu"), recipe, steps=3)
    sampled = losses_of(octavo.transform(model_of(), device="cpu"), recipe, tokenizer, steps=3)
    same = plain[0] == sampled[0] and all(torch.equal(a, b) for a, b in zip(plain[1], sampled[1], strict=True))
    return texts, back, same


def test_sharded_ranks_give_the_text_of_one_and_train_the_same(tokenizer):
    model = octavo.transform(model_of(), dtype=torch.float32)
    wanted = [sample_text(model, tokenizer, PROMPT, tokens=6, temperature=t) for t in (0, 1)]
    for texts, back, same in ranks.run(2, sharded_samples, tokenizer):
        assert texts == wanted
        assert all(torch.equal(tensor, back[name]) for name, tensor in model_of().state_dict().items())
        assert same
