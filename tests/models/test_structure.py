"""A model that Hugging Face would load as another one is not written for it."""

import copy
import warnings

import pytest
import torch
from expectations import refused, same_bits
from llamas import VOCABULARY, llama
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import octavo
from octavo.build import transform


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


KINDS = {
    "decoder": lambda: transform(llama(num_hidden_layers=3), dtype=torch.float32),
    "own code": lambda: transform(llama(num_hidden_layers=3), dtype=torch.float32, blocks="own"),
    "gpt2": lambda: transform(gpt2(), dtype=torch.float32),
    "not transformed": lambda: llama(num_hidden_layers=3),
}


def parts(model):
    """The blocks, the last norm, and a module with an activation."""
    if hasattr(model, "transformer"):
        return model.transformer.h, model.transformer.ln_f, model.transformer.h[0].mlp
    if hasattr(model, "layers"):
        return model.layers, model.norm, model.layers[0].layernorm_mlp
    return model.model.layers, model.model.norm, model.model.layers[0].mlp


class Foreign(nn.Module):
    """A block of a user's own with the parameters of another."""

    def __init__(self, block):
        super().__init__()
        vars(self).update(copy.copy(vars(block)))

    def forward(self, *inputs, **options):
        return inputs[0]


def foreign(model):
    parts(model)[0][0] = Foreign(parts(model)[0][0])


def of_the_same_name(model):
    block = parts(model)[0][0]
    kind = type(block)
    block.__class__ = type(kind.__name__, (kind,), {"forward": Foreign.forward, "__module__": kind.__module__})


def shared(model):
    parts(model)[0][1] = parts(model)[0][0]


def tied(model):
    first, second = parts(model)[0][:2]
    name = next(name for name, parameter in first.named_parameters() if parameter.ndim == 2)
    module, _, leaf = name.rpartition(".")
    setattr(second.get_submodule(module), leaf, first.get_parameter(name))


def other_eps(model):
    setattr(parts(model)[1], "eps" if hasattr(parts(model)[1], "eps") else "variance_epsilon", 0.5)


def other_activation(model):
    mlp = parts(model)[2]
    if hasattr(mlp, "activation"):
        mlp.activation = "reglu"
    else:
        setattr(mlp, "act" if hasattr(mlp, "act") else "act_fn", nn.ReLU())


def patched(model):
    block = parts(model)[0][0]
    forward = block.forward
    block.forward = lambda *inputs, **options: forward(*inputs, **options)


def patched_root(model):
    forward = model.forward
    model.forward = lambda *inputs, **options: forward(*inputs, **options)


def other_rotation(model):
    if hasattr(model, "transformer"):
        model.transformer.h[0].attn.scaling = 0.1
    else:
        owner = model.rotary if hasattr(model, "rotary") else model.model.rotary_emb
        owner.inv_freq = owner.inv_freq * 2


def edited(model):
    setattr(model.config, "layer_norm_epsilon" if hasattr(model, "transformer") else "rms_norm_eps", 0.25)


def shorter(model):
    model.config.num_hidden_layers = 1


def other_tie(model):
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings


CHANGES = {
    "foreign block": (foreign, "0 is a Foreign, not a "),
    "class of the same name": (of_the_same_name, " of other code"),
    "shared layer": (shared, "1 and "),
    "tied parameters": (tied, "shares the tensor of "),
    "removed layer": (lambda model: parts(model)[0].__delitem__(-1), "2 is missing"),
    "appended layer": (lambda model: parts(model)[0].append(copy.deepcopy(parts(model)[0][0])), "3 is a "),
    "added module": (lambda model: setattr(model, "extra", nn.Linear(4, 4)), "extra is a Linear, not missing"),
    "extra parameter": (lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(3))), "extra is an extra"),
    "extra buffer": (lambda model: model.register_buffer("extra", torch.ones(3)), "extra is an extra"),
    "eps": (other_eps, "0.5, where its config says 1e-05"),
    "activation": (other_activation, ""),
    "forward": (patched, f"0.forward is overridden, by {__name__}.patched"),
    "forward of the model": (patched_root, "model.forward is overridden"),
    "rotation": (other_rotation, ""),
    "weight norm": (lambda m: nn.utils.parametrizations.weight_norm(m.get_output_embeddings()), "is a Parametrized"),
    "config edited": (edited, "0.25"),
    "fewer layers in the config": (shorter, ""),
    "tie in the config": (other_tie, ""),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_another_model_than_the_config_describes_is_refused(kind, change, tmp_path):
    model = KINDS[kind]()
    make, words = CHANGES[change]
    make(model)
    writes = [lambda: octavo.export(model, tmp_path / "out")]
    if kind == "decoder":
        writes += [lambda: octavo.to_huggingface(model), lambda: model.save_pretrained(tmp_path / "out")]
    for write in writes:
        refused((words, "octavo.save(path, model)"), write)
    assert not (tmp_path / "out").exists()
    octavo.save(tmp_path / "checkpoint", model)  # the way that the message names


def dropout_off(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


HARMLESS = {
    "padding": lambda model: setattr(model.config, "pad_token_id", 3),
    "dropout": dropout_off,
    "tags": lambda model: model.add_model_tags(["mine"]),
    "note": lambda model: setattr(model, "note", "mine"),
    "cache": lambda model: setattr(model.config, "use_cache", False),
}


@pytest.mark.parametrize("change", HARMLESS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_inference_does_not_see_is_no_other_model(kind, change, tmp_path):
    model = KINDS[kind]()
    HARMLESS[change](model)
    octavo.export(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_a_callers_own_is_named_since_no_folder_holds_it(kind, tmp_path):
    model = KINDS[kind]()
    parts(model)[0][1].register_forward_hook(lambda module, inputs, output: None)
    with pytest.warns(UserWarning, match=rf"the forward hook of .*1 \({__name__}\..*\) is not written"):
        octavo.export(model, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.export(KINDS[kind](), tmp_path / "other")


def test_parameters_of_two_half_dtypes_keep_their_bits(tmp_path):
    reference = llama(dtype=torch.float16)
    for norm in (reference.model.norm, reference.model.layers[0].input_layernorm):
        norm.to(torch.bfloat16)
    model = transform(copy.deepcopy(reference), blocks="own", params_dtype=None, dtype=torch.float16)
    octavo.export(model, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.float32
    same_bits(found.state_dict(), {name: tensor.float() for name, tensor in reference.state_dict().items()})


class Own(LlamaForCausalLM):
    """A subclass, which a config of Llama does not load."""


def test_a_subclass_is_saved_for_its_own_class(tmp_path):
    reference = llama()
    reference.__class__ = Own
    model = transform(reference)
    refused(("Own is a custom class", "model.save_pretrained(folder)"), octavo.export, model, tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    same_bits(Own.from_pretrained(tmp_path / "out").state_dict(), llama().state_dict())


def test_recomputation_chunks_and_recipes_are_no_other_model(tmp_path):
    for number, options in enumerate(
        ({"recompute": True}, {"recompute": "mlp", "mlp_chunks": 2}, {"offload": True}, {"fp8_head": False})
    ):
        model = transform(llama(), layers={"layers.0.*": None}, **options)
        model.output_hidden_states = True
        octavo.export(model, tmp_path / str(number))
        assert (tmp_path / str(number) / "model.safetensors").is_file()
    own = transform(gpt2(), recompute=True)
    octavo.export(own, tmp_path / "own")
    assert (tmp_path / "own" / "model.safetensors").is_file()
