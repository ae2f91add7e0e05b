"""Checkpoints of a model's own code load into the same model with Octavo's blocks: weights, moments and FP8 state exactly."""

import json

import pytest
import torch
from llamas import SHAPES, llama, llama_config, tokens
from torch.nn import functional
from vits import images, vit

import octavo
import ranks
from octavo.build import transform
from octavo.errors import InputError
from octavo.fp8.scaling import state_records
from octavo.models.convert import conversion_of

RECIPE = octavo.recipe.DelayedScaling(amax_history_len=4)
LLAMA = {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
MODELS = {
    "mistral": lambda seed: llama(seed, model_type="mistral"),
    "llama": lambda seed: llama(seed, **LLAMA),
    "gpt_neox": lambda seed: llama(seed, model_type="gpt_neox"),
    "phi3": lambda seed: llama(seed, model_type="phi3"),
    "qwen3": lambda seed: llama(seed, model_type="qwen3"),
    "mixtral": lambda seed: llama(seed, model_type="mixtral", num_local_experts=4),
    "qwen3_moe": lambda seed: llama(seed, **SHAPES["qwen3-moe-mixed"]),
    "vit": vit,
}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def loss_of(model, seed):
    if hasattr(model, "patch_embed"):
        pixels, labels = images(seed=seed)
        return functional.cross_entropy(model(pixels), labels)
    ids = tokens(2, 19, seed=seed)
    return model(input_ids=ids, labels=ids).loss


def steps(model, optimizer, *, first, count, recipe=RECIPE):
    losses = []
    for step in range(first, first + count):
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of(kind, optimizer, blocks, seed=0, **options):
    model = transform(MODELS[kind](seed), RECIPE, dtype=torch.float32, device="cpu", blocks=blocks, **options)
    return model, OPTIMIZERS[optimizer](model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def taken_apart(model, tensors):
    way = conversion_of(model)
    return {theirs: part for name, t in tensors.items() for theirs, part in way.split(name, whole(t).detach()).items()}


def states(model, optimizer, key):
    return {name: optimizer.state[p][key] for name, p in model.named_parameters()}


@pytest.mark.long(lambda kind, optimizer: list(MODELS).index(kind) % 2 == list(OPTIMIZERS).index(optimizer) % 2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_moments_and_fp8_state_are_joined_exactly(tmp_path, kind, optimizer, capsys):
    own, own_optimizer = of(kind, optimizer, "own")
    steps(own, own_optimizer, first=1, count=3)
    octavo.save(tmp_path / "own", own, own_optimizer, at=3)
    assert json.loads((tmp_path / "own" / "state.json").read_text())["blocks"] is None
    model, joined = of(kind, optimizer, "auto", seed=5)
    assert octavo.load(tmp_path / "own", model, joined) == {"at": 3}
    said = capsys.readouterr().err
    assert ("FP8 state of head has no counterpart" in said) == (kind == "vit"), said
    assert ("experts had no FP8 state" in said) == (kind in ("mixtral", "qwen3_moe")), said
    wanted = {name: p.detach() for name, p in own.named_parameters()}
    for found, expected in [
        (dict(model.named_parameters()), wanted),
        *(
            (states(model, joined, key), states(own, own_optimizer, key))
            for key in (("exp_avg", "exp_avg_sq") if optimizer == "adamw" else ("momentum_buffer",))
        ),
    ]:
        parts = taken_apart(model, found)
        assert parts.keys() == expected.keys()
        assert all(torch.equal(parts[name], tensor) for name, tensor in expected.items())
    if optimizer == "adamw":
        assert {float(step) for step in states(model, joined, "step").values()} == {3.0}
    records, before = state_records(model), state_records(own)
    way = conversion_of(model)
    for name, record in records.items():
        module, operand, what = name.rsplit(".", 2)
        if module == "head" or ".experts." in name:  # in high precision in the model's own code
            assert torch.equal(record, torch.ones_like(record) if what == "scale" else torch.zeros_like(record))
            continue
        parameter = f"{module}.weight" if f"{module}.weight" in dict(model.named_parameters()) else f"{module}_weight"
        theirs = torch.stack([before[f"{n.removesuffix('.weight')}.{operand}.{what}"] for n in way.names(parameter)])
        assert torch.equal(record, theirs.amax(0) if what == "amax_history" else theirs.amin(0)), name
        assert record.count_nonzero()
    # The next steps are those of the model that kept its code, to rounding.
    again = steps(model, joined, first=4, count=2, recipe=None)
    assert again == pytest.approx(steps(own, own_optimizer, first=4, count=2, recipe=None), rel=1e-4)
    octavo.save(tmp_path / "joined", model, joined)
    layout = json.loads((tmp_path / "joined" / "state.json").read_text())["blocks"]
    assert layout == {"vit": "octavo/timm-vit"}.get(kind, f"octavo/{kind}")
    with pytest.raises(InputError, match=f'has Octavo\'s blocks \\({layout}\\).*blocks = "auto"'):
        octavo.load(tmp_path / "joined", own, own_optimizer)


def loaded(folder, kind, degrees):
    """The weights, moments and FP8 state of a model that loads the checkpoint over these ranks."""
    if torch.distributed.is_initialized():
        octavo.init(degrees)
    model, optimizer = of(kind, "adamw", "auto", seed=7)
    octavo.load(folder, model, optimizer)
    tensors = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    moments = {name: whole(state).clone() for name, state in states(model, optimizer, "exp_avg").items()}
    return tensors, moments, state_records(model)


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "vit"])
def test_each_rank_takes_its_rows(tmp_path, kind):
    own, optimizer = of(kind, "adamw", "own")
    steps(own, optimizer, first=1, count=2)
    octavo.save(tmp_path / "own", own, optimizer)
    one = loaded(tmp_path / "own", kind, {})
    for found in ranks.run(2, loaded, tmp_path / "own", kind, {"expert_parallel_degree": 2} if kind == "mixtral" else {}):
        for tensors, wanted in zip(found, one, strict=True):
            assert tensors.keys() == wanted.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_fp8_state_that_not_all_parts_have_starts_anew_and_is_named(tmp_path, capsys):
    own, optimizer = of("mistral", "adamw", "own", skip=["*.0.self_attn.k_proj"])
    steps(own, optimizer, first=1, count=2)
    octavo.save(tmp_path / "own", own, optimizer)
    model, joined = of("mistral", "adamw", "auto")
    octavo.load(tmp_path / "own", model, joined)
    said = capsys.readouterr().err
    assert "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.v_proj has no counterpart" in said
    records = state_records(model)
    assert not records["layers.0.self_attention.qkv.input.amax_history"].any()
    assert records["layers.1.self_attention.qkv.input.amax_history"].any()


def test_parts_without_the_same_states_are_refused_with_the_way_out(tmp_path):
    own, _ = of("mistral", "sgd", "own")
    trained = [p for name, p in own.named_parameters() if "k_proj" not in name]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    steps(own, optimizer, first=1, count=1)
    octavo.save(tmp_path / "own", own, optimizer)
    model, joined = of("mistral", "sgd", "auto")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(InputError, match=r'other parts of layers\.0\..*qkv\.weight are not.*blocks = "own"'):
        octavo.load(tmp_path / "own", model, joined)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_checkpoint_of_another_model_is_still_named_as_one(tmp_path):
    own, _ = of("mistral", "sgd", "own")
    octavo.save(tmp_path / "own", own)
    other = transform(llama(model_type="mistral", intermediate_size=48), dtype=torch.float32)
    with pytest.raises(InputError, match=r"belongs to another model: layers\.0\.ffn\.fc1\.weight is \[88, 48\]"):
        octavo.load(tmp_path / "own", other)
    assert llama_config(model_type="mistral").sliding_window is None
