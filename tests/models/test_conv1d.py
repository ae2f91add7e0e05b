"""In a model's own code: GPT-2's `Conv1D` is a linear layer with the transposed weight; Falcon's linear layers; other heads."""

import copy

import pytest
import torch
from transformers import BioGptConfig, BioGptForCausalLM, FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.fp8.recipe import RECIPES

IN, OUT = 32, 48


def gpt2():
    torch.manual_seed(0)
    size = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")).train()


def test_in_high_precision_loss_and_gradients_are_hugging_face_s_to_the_bit():
    plain = gpt2()
    model = octavo.transform(copy.deepcopy(plain), dtype=torch.float32)
    ids = torch.randint(61, (2, 16))
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    assert [(name, t.shape) for name, t in model.state_dict().items()] == [(n, t.shape) for n, t in plain.state_dict().items()]
    found = octavo.describe(model)
    assert found.fp8_layers == 8
    assert all(layer.fp8 == ("Conv1D" in layer.kind) for layer in found.layers)


@pytest.mark.parametrize("recipe", [*RECIPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_fp8_it_is_the_linear_layer_of_the_transposed_weight_to_the_bit(recipe, dtype):
    linear = octavo.nn.Linear(IN, OUT)
    conv = Conv1D(OUT, IN)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.t())
        conv.bias.copy_(linear.bias)
    holder = octavo.transform(torch.nn.ModuleList([conv]), dtype=torch.float32, params_dtype=torch.float32)
    for _ in range(3):
        x, dy = torch.randn(2, 5, IN, dtype=dtype) * 3, torch.randn(2, 5, OUT, dtype=dtype)
        found = []
        for layer in (linear, holder[0]):
            layer.zero_grad()
            own = x.clone().requires_grad_()
            with octavo.fp8_autocast(True, RECIPES[recipe]()):
                y = layer(own)
            y.backward(dy)
            weight = layer.weight.grad if layer is linear else layer.weight.grad.t()
            found.append((y, own.grad, weight, layer.bias.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert not torch.equal(found[0][0], torch.nn.functional.linear(x, linear.weight.to(dtype), linear.bias.to(dtype)))


def test_skip_save_load_and_export_keep_hugging_face_s_names(tmp_path):
    recipe = octavo.recipe.DelayedScaling(amax_history_len=4)
    first = octavo.transform(gpt2(), dtype=torch.float32, skip=["*.0.attn*"])
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    ids = torch.randint(61, (2, 16))

    def step(model, optimizer):
        optimizer.zero_grad()
        with octavo.fp8_autocast(True, recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(2):
        step(first, optimizer)
    octavo.save(tmp_path / "saved", first, optimizer)
    octavo.export(first, tmp_path / "hf")
    exported = GPT2LMHeadModel.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in exported.state_dict().items())
    second = octavo.transform(gpt2(), dtype=torch.float32, skip=["*.0.attn*"])
    other = torch.optim.AdamW(second.parameters(), lr=1e-2)
    octavo.load(tmp_path / "saved", second, other)
    assert octavo.describe(second).fp8_layers == 6
    assert [step(second, other) for _ in range(3)] == [step(first, optimizer) for _ in range(3)]
    history = octavo.fp8.inspect(first)["transformer.h.1.mlp.c_fc"]["weight"]["amax_history"]
    assert history.count_nonzero() == 3


def test_falcons_linear_layers_are_linear_layers():
    torch.manual_seed(0)
    size = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "bias": True}
    plain = FalconForCausalLM(FalconConfig(**size, hidden_dropout=0.0, attention_dropout=0.0)).train()
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = octavo.transform(copy.deepcopy(plain), dtype=torch.float32)
    ids = torch.randint(61, (2, 16))
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)
    assert octavo.describe(model).fp8_layers == 8


def test_an_output_head_of_another_name_is_called_one():
    size = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    found = octavo.describe(octavo.transform(BioGptForCausalLM(BioGptConfig(**size))))
    (reason,) = (layer.reason for layer in found.layers if layer.name == "output_projection")
    assert reason.startswith("the output head stays in high precision")
