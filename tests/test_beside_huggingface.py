"""Hugging Face's Trainer, Accelerate and PEFT around a transformed model give what they give around Hugging Face's model."""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "models"))
from expectations import refused
from llamas import llama, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import octavo
from octavo.build import transform

pytest.importorskip("accelerate", reason="needs accelerate, of the dev extra: pip install -e '.[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* deprecated:FutureWarning")
EXAMPLES = Path(__file__).parent.parent / "examples"


def needs(package):
    return pytest.importorskip(package, reason=f"needs {package}, of the dev extra: pip install -e '.[dev]'")


def samples(count=8):
    """Samples with different numbers of targets: a mean of micro-batches' means is not the mean over all."""
    ids = tokens(count, 16)
    labels = [ids[i].where(torch.arange(16) > 3 * i % 14, -100) for i in range(count)]
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(count)]


class Fp8Trainer(Trainer):
    def compute_loss_context_manager(self):
        context = super().compute_loss_context_manager()
        context.enter_context(octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()))
        return context


def trained(model, folder, kind=Trainer, resume=None, **options):
    """Losses and gradient norms of three steps of Trainer, and the loss of its evaluation."""
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
    settings = {"per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2} | quiet | options
    trainer = kind(model, TrainingArguments(str(folder), **settings), train_dataset=samples(), eval_dataset=samples(3))
    trainer.train(resume_from_checkpoint=resume)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    numbers = [log["loss"] for log in logs] + [log["grad_norm"] for log in logs] + [trainer.evaluate()["eval_loss"]]
    return torch.tensor(numbers), trainer


@pytest.mark.long(lambda options: "label_smoothing_factor" in options)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3},
        {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.3},
        {"neftune_noise_alpha": 5.0, "max_grad_norm": 0.1},
    ],
    ids=["accumulation", "label smoothing", "noise and clipping"],
)
def test_trainer_computes_what_it_computes_with_hugging_faces_model(options, tmp_path, capsys):
    theirs, _ = trained(llama(), tmp_path, **options)
    ours, trainer = trained(transform(llama(), dtype=torch.float32), tmp_path, **options)
    assert len(ours) == 7
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert trainer.state.total_flos > 0


def test_trainer_resumes_a_tied_model_in_fp8_with_the_same_bits(tmp_path, capsys):
    model = transform(llama(tie_word_embeddings=True))
    whole, trainer = trained(model, tmp_path, Fp8Trainer, save_strategy="steps", save_steps=2)
    other = transform(llama(9, tie_word_embeddings=True))
    again, resumed = trained(
        other, tmp_path, Fp8Trainer, resume=str(tmp_path / "checkpoint-2"), save_strategy="steps", save_steps=2
    )
    assert torch.equal(again, whole)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name
    plain, _ = trained(transform(llama(tie_word_embeddings=True)), tmp_path)
    assert not torch.equal(plain, whole)  # it was FP8


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, {"model_type": "mixtral", "num_local_experts": 4}])
def test_trainer_writes_a_model_that_hugging_face_loads_and_takes_it_back(shape, tmp_path, capsys):
    model = transform(llama(**shape), dtype=torch.float32)
    best = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
        "load_best_model_at_end": True,
    }
    _, trainer = trained(model, tmp_path, learning_rate=0.0, **best)
    for folder in (tmp_path / "model", tmp_path):  # beside its checkpoints, too
        trainer.save_model(str(folder))
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, tensor in octavo.to_huggingface(model).state_dict().items():
            assert torch.equal(found[name], tensor), name
    assert (tmp_path / "checkpoint-1" / "config.json").is_file()
    with torch.no_grad():
        model.norm.weight.add_(1)
    trainer.save_model(str(tmp_path))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).model.norm.weight, model.norm.weight)


def test_trainer_resumes_from_a_folder_of_octavos_names(tmp_path, capsys):
    """As versions wrote that were no `PreTrainedModel` to Trainer."""
    model = transform(llama(), dtype=torch.float32)
    whole, _ = trained(model, tmp_path, save_strategy="steps", save_steps=2)
    folder = tmp_path / "checkpoint-2"
    other = transform(llama(9), dtype=torch.float32)
    other.load_state_dict(load_file(folder / "model.safetensors"))
    save_file(other.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    again, _ = trained(transform(llama(9), dtype=torch.float32), tmp_path, resume=str(folder))
    assert torch.equal(again, whole)


def test_trainer_asked_for_recomputation_names_the_way(tmp_path):
    model = transform(llama())
    refused("recompute=True", trained, model, tmp_path, gradient_checkpointing=True)


def test_accelerate_computes_what_it_computes_with_hugging_faces_model(tmp_path):
    from accelerate import Accelerator

    def losses(model):
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(tokens(12, 16), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = []
        for ids in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return torch.tensor(found), accelerator, model

    reference = llama(tie_word_embeddings=True)
    wanted, *_ = losses(copy.deepcopy(reference))
    found, accelerator, model = losses(transform(reference, dtype=torch.float32))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    accelerator.save_state(str(tmp_path / "state"))
    octavo.export(accelerator.unwrap_model(model), tmp_path / "model")
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    _, _, other = losses(transform(llama(4, tie_word_embeddings=True), dtype=torch.float32))
    accelerator.load_state(str(tmp_path / "state"))
    for name, tensor in octavo.to_huggingface(model).state_dict().items():
        assert torch.equal(weights[name], tensor), name
    assert not torch.equal(other.embedding.weight, model.embedding.weight)


def test_adapters_before_transform_are_peft_s_beside_fp8_products_and_with_a_head_outside_of_fp8(tmp_path):
    peft = needs("peft")
    reference = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    ids = tokens(2, 16)
    wanted, found = reference(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    fp8 = {layer.name.removeprefix("base_model.model."): layer.fp8 for layer in octavo.describe(model).layers}
    assert fp8["model.layers.0.self_attn.q_proj.base_layer"]
    assert not any(runs for name, runs in fp8.items() if "lora_" in name)
    assert not any(runs for name, runs in fp8.items() if name.startswith("lm_head"))
    with octavo.fp8_autocast():
        model(input_ids=ids, labels=ids).loss.backward()
    trains = {name: parameter.grad is not None for name, parameter in model.named_parameters()}
    assert {name for name, got in trains.items() if got} == {name for name in trains if "lora_" in name}
    refused("merge_and_unload", octavo.export, model, tmp_path / "out")
    octavo.export(model.merge_and_unload(), tmp_path / "out")
    merged = reference.merge_and_unload().state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)


def test_adapters_of_peft_are_computed_outside_of_fp8_unless_a_pattern_asks():
    """Delayed scales of the step before would clip B, which starts at 0 and grows by its own size."""
    peft = needs("peft")
    reference = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    model = transform(copy.deepcopy(reference), dtype=torch.float32, skip=["*.base_layer"])
    ids = tokens(2, 16)
    optimizers = [torch.optim.AdamW((p for p in each.parameters() if p.requires_grad), lr=0.05) for each in (reference, model)]
    for _ in range(3):
        with octavo.fp8_autocast():
            found = model(input_ids=ids, labels=ids).loss
        wanted = reference(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for loss, optimizer in zip((wanted, found), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    asked = transform(copy.deepcopy(reference), layers={"*q_proj.lora_*": octavo.recipe.CurrentScaling()})
    adapters = [layer for layer in octavo.describe(asked).layers if "lora_" in layer.name]
    assert {layer.name for layer in adapters if layer.fp8} == {layer.name for layer in adapters if "q_proj" in layer.name}


def test_a_trained_embedding_that_peft_ties_is_exported_merged(tmp_path):
    """PEFT gives the tied head the embedding's sizes the other way around; its weight has the right shape."""
    peft = needs("peft")
    options = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model = transform(
        peft.get_peft_model(llama(tie_word_embeddings=True), peft.LoraConfig(task_type="CAUSAL_LM", **options)),
        dtype=torch.float32,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    ids = tokens(2, 16)
    wanted = model.eval()(input_ids=ids).logits
    octavo.export(model.merge_and_unload(), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert found.lm_head.weight is found.model.embed_tokens.weight
    torch.testing.assert_close(found(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"target_modules": "all-linear", "task_type": "CAUSAL_LM"}, {"target_modules": ["head"]}])
def test_adapters_after_transform_are_refused_with_the_way(options):
    peft = needs("peft")
    ids = tokens(2, 16)

    def adapt_and_run():
        peft.get_peft_model(transform(llama()), peft.LoraConfig(**options))(input_ids=ids, labels=ids)

    refused("octavo.transform(get_peft_model(model, config))", adapt_and_run)


@pytest.mark.parametrize(("name", "model"), [("hf_trainer", "model"), ("accelerate_loop", ""), ("peft_lora", "merged")])
def test_an_example_runs_and_says_the_truth(name, model, tmp_path, monkeypatch, capsys):
    if name == "peft_lora":
        needs("peft")
    entered = []
    autocast = octavo.fp8_autocast
    monkeypatch.setattr(octavo, "fp8_autocast", lambda **options: entered.append(options) or autocast(**options))
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path / "out")])
    names = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    first, last = (float(word) for word in said.removeprefix("Loss ").split(" in FP8")[0].split(" → "))
    assert last < 0.95 * first
    assert len(entered) >= 24
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / model)
    ids = names["samples"][0]["input_ids"][None] if name == "hf_trainer" else names["samples"][:8]
    with torch.no_grad():
        again = loaded(input_ids=ids, labels=ids).loss.item()
    assert again == pytest.approx(float(said.split("with loss ")[1].split()[0]), abs=1e-3)
    assert again < 0.95 * first
