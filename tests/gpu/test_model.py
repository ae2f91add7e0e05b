"""The whole model on a GPU: the same scales as on the CPU, compiled as eager, and FP8 beside float32."""

import pytest
import torch
from transformers import AutoConfig

import octavo
from building import built_model
from octavo.fp8.scaling import state_records
from octavo.models.sources import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = load_config("llama-tiny", {"num_hidden_layers": 2, "vocab_size": 1000})
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
FAMILIES = {
    "gpt_neox": load_config("pythia-160m", SIZES),
    "gpt_neox serial": load_config("pythia-160m", SIZES | {"use_parallel_residual": False}),
    "qwen3": AutoConfig.for_model("qwen3", **SIZES, num_key_value_heads=2, head_dim=96, tie_word_embeddings=True),
}
"""Blocks of other kinds than Llama's."""
RECIPES = [
    octavo.recipe.DelayedScaling(amax_history_len=4),
    octavo.recipe.CurrentScaling(),
    octavo.recipe.RowwiseScaling(),
    octavo.recipe.BlockScaling(),
]


def built(device, *, config=CONFIG, dtype=torch.bfloat16, compile=False, **options):
    """compile: each block, as a user's own loop may."""
    model = built_model(config, dtype=dtype, params_dtype=torch.float32, device=device, seed=3, **options)
    for part in (*model.layers, model.norm) if compile else ():
        part.compile()
    return model


def train(device, recipe, *, steps=6, **options):
    model = built(device, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        ids = torch.randint(1000, (4, 96), generator=generator).to(device)
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, torch.tensor(losses)


def test_initial_weights_are_those_of_the_cpu():
    make = {"dtype": torch.bfloat16, "params_dtype": torch.float32, "seed": 3}
    cpu, gpu = (built_model(CONFIG, device=device, **make) for device in ("cpu", "cuda"))
    for (name, a), (_, b) in zip(cpu.named_parameters(), gpu.named_parameters(), strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
@pytest.mark.parametrize("compile", [False, True])
def test_gpu_follows_cpu(recipe, compile):
    _, cpu = train("cpu", recipe)
    _, gpu = train("cuda", recipe, compile=compile)
    torch.testing.assert_close(gpu, cpu, rtol=5e-3, atol=0)


@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=lambda r: r.name if r else "bf16")
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_follows_cpu_in_other_families(family, recipe):
    _, cpu = train("cpu", recipe, config=FAMILIES[family])
    _, gpu = train("cuda", recipe, config=FAMILIES[family])
    torch.testing.assert_close(gpu, cpu, rtol=5e-3, atol=0)


def test_first_scales_are_those_of_the_cpu():
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    cpu, gpu = (state_records(train(device, recipe, steps=1, dtype=torch.float32)[0]) for device in ("cpu", "cuda"))
    assert cpu.keys() == gpu.keys()
    for name, value in cpu.items():
        if "weight" in name:
            torch.testing.assert_close(gpu[name].cpu(), value, rtol=1e-5, atol=0, msg=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_keeps_the_histories_of_eager(recompute):
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    eager = state_records(train("cuda", recipe, steps=3)[0])
    compiled = state_records(train("cuda", recipe, steps=3, compile=True, recompute=recompute)[0])
    for name, value in eager.items():
        # Rounding moves single values, the largest of a gradient too; a history that is not kept is off by far more.
        torch.testing.assert_close(compiled[name], value, rtol=0.3, atol=1e-6, msg=f"{name}: {compiled[name]} {value}")
        assert (value != 0).any()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", [None, RECIPES[0]], ids=["bf16", "delayed"])
@pytest.mark.parametrize("recompute", [False, True])
def test_offloading_changes_nothing(recipe, compile, recompute, monkeypatch):
    monkeypatch.setattr("octavo.parallel.offload.SMALLEST_BYTES", 0)
    _, plain = train("cuda", recipe, compile=compile, recompute=recompute)
    _, away = train("cuda", recipe, compile=compile, recompute=recompute, offload=True)
    # Attention's backward does not repeat bit for bit, and an FP8 cast makes a whole step of what is off by a bit.
    torch.testing.assert_close(away, plain, rtol=1e-4 if recipe is None else 5e-3, atol=0)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_gradients_near_float32(recipe, compile):
    exact, model = built("cuda", dtype=torch.float32), built("cuda", compile=compile)
    ids = torch.randint(1000, (4, 96), device="cuda")
    exact(input_ids=ids, labels=ids).loss.backward()
    for _ in range(2):  # the second step has scales
        model.zero_grad()
        with octavo.fp8_autocast(fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    for (name, a), (_, b) in zip(exact.named_parameters(), model.named_parameters(), strict=True):
        cosine = torch.nn.functional.cosine_similarity(a.grad.flatten(), b.grad.flatten(), 0)
        assert cosine > 0.97, name
