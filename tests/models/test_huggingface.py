"""Octavo's decoder has what loops use of a Hugging Face model, with its results, and names the way to the rest."""

import copy
import json
import pickle
import re

import pytest
import torch
from expectations import refused, same_bits
from llamas import SHAPES, VOCABULARY, assert_same_gradients, llama, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel, MixtralConfig, PreTrainedModel

import octavo
from octavo.build import transform
from octavo.errors import InputError
from octavo.models.convert import conversion, load_pretrained
from octavo.models.huggingface import INSTEAD, OFFERED

SOME = ("plain", "tied", "all-biases", "one-group", "mistral-llama3-rope", "qwen3", "phi3", "neox")


def pair(seed=0, **changes):
    """A Hugging Face model and its transformation in float32, both in evaluation mode."""
    reference = llama(seed, **changes).eval()
    return reference, transform(copy.deepcopy(reference), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SOME)
def test_a_decoder_becomes_hugging_faces_model_again_to_the_bit(shape, dtype):
    reference = llama(3, dtype, **SHAPES[shape])
    reference.generation_config = GenerationConfig(eos_token_id=[5, 7], temperature=0.25, do_sample=True)
    model = transform(copy.deepcopy(reference))
    back = octavo.to_huggingface(model)
    assert type(back) is type(reference)
    assert back.dtype == dtype
    assert not back.training
    same_bits(back.state_dict(), reference.state_dict())
    assert (back.get_output_embeddings().weight is back.get_input_embeddings().weight) == reference.config.tie_word_embeddings
    assert back.generation_config.to_dict() == reference.generation_config.to_dict()
    ids = tokens(2, 9)
    assert torch.equal(back(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    same_bits(back.state_dict(), reference.state_dict())  # no memory is shared


OWN_CODE = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16),
    "mixtral": MixtralConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    ),
}


@pytest.mark.parametrize("kind", OWN_CODE)
def test_weights_of_a_models_own_code_become_its_model_again_to_the_bit(kind):
    """As `octavo sample` takes them from a checkpoint; Mixtral's experts are published one by one and joined again."""
    reference = AutoModelForCausalLM.from_config(OWN_CODE[kind])
    tensors = transform(copy.deepcopy(reference), dtype=torch.float32).state_dict()
    found = load_pretrained(tensors, reference.config)
    assert type(found) is type(reference)
    same_bits(found.state_dict(), reference.state_dict())


def test_a_model_with_its_own_code_is_told_what_to_do():
    model = transform(GPT2LMHeadModel(OWN_CODE["gpt2"]), dtype=torch.float32)
    refused(("GPT2LMHeadModel", "octavo.export(model, folder)"), octavo.to_huggingface, model)


@pytest.mark.parametrize("shape", SOME)
def test_greedy_text_is_that_of_hugging_faces_model(shape):
    reference, model = pair(2, **SHAPES[shape], eos_token_id=None)
    model.train()
    ids = tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))
    assert model.training


@pytest.mark.parametrize("shape", ["plain", "tied"])
def test_save_pretrained_writes_what_export_writes(shape, tmp_path):
    reference, model = pair(**SHAPES[shape])
    model.save_pretrained(tmp_path / "saved", is_main_process=False)
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(tmp_path / "saved")
    octavo.export(model, tmp_path / "exported")
    reference.save_pretrained(tmp_path / "theirs")
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json"}
    for name in names:
        saved = (tmp_path / "saved" / name).read_bytes()
        assert saved == (tmp_path / "exported" / name).read_bytes()
    same_bits(load_file(tmp_path / "saved" / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors"))
    ours, theirs = (json.loads((tmp_path / f / "generation_config.json").read_text()) for f in ("saved", "theirs"))
    assert ours == theirs
    refused("model.push_to_hub(repository)", model.save_pretrained, tmp_path / "hub", push_to_hub=True)
    refused("max_shard_size", model.save_pretrained, tmp_path / "hub", max_shard_size="1GB")
    refused("a part of a model", model.save_pretrained, tmp_path / "hub", state_dict={"norm.weight": model.norm.weight})
    refused("not empty", octavo.export, model, tmp_path / "saved")


def test_save_pretrained_replaces_a_model_and_leaves_other_files(tmp_path):
    _, model = pair()
    (tmp_path / "checkpoint-3").mkdir()
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt", "config.json"):
        (tmp_path / stale).write_text("of before")
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), safe_serialization=True)
    names = {"checkpoint-3", "notes.txt", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "notes.txt").read_text() == "of before"
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    same_bits(found.state_dict(), octavo.to_huggingface(model).state_dict())


@pytest.mark.parametrize("shape", [*SOME, "mixtral", "qwen3-moe-mixed"])
def test_a_state_dict_of_an_exported_folder_loads(shape, tmp_path):
    _, model = pair(**SHAPES[shape])
    _, other = pair(9, **SHAPES[shape])
    model.save_pretrained(tmp_path)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), False)
    same_bits(other.state_dict(), model.state_dict())
    part = dict(list(load_file(tmp_path / "model.safetensors").items())[:2])
    name = "gpt_neox.embed_in.weight" if shape == "neox" else "model.embed_tokens.weight"
    part[name] = load_file(tmp_path / "model.safetensors")[name]
    refused("lacks", other.load_state_dict, part, False)


def test_push_to_hub_is_that_of_transformers_model_with_these_weights(tmp_path, monkeypatch):
    def push(self, repository, **options):
        self.save_pretrained(tmp_path / repository)
        return self.model_tags, options

    monkeypatch.setattr(PreTrainedModel, "push_to_hub", push)  # the network
    _, model = pair()
    model.add_model_tags("one")
    model.add_model_tags(["two", "one"])
    assert model.push_to_hub("mine", private=True) == (["one", "two"], {"private": True})
    same_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict(), octavo.to_huggingface(model).state_dict())


@pytest.mark.parametrize("shape", ["plain", "tied", "qwen3", "neox", "phi3", "mixtral"])
def test_the_base_model_gives_the_states_behind_the_last_norm_with_their_gradients(shape):
    reference, _ = pair(2, **SHAPES[shape])
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    weights = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3)) * mask[..., None]
    for each in (model, reference):
        state = each.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (state * weights).sum().backward()
    ours = model.base_model(ids, mask).last_hidden_state * mask[..., None]
    theirs = reference.base_model(ids, mask).last_hidden_state * mask[..., None]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    head = conversion(model.spec).names("head.weight")[0]
    for parameter in (model.head.weight, reference.get_parameter(head)):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    assert_same_gradients(model, reference)


def test_the_base_model_is_in_the_dtype_of_the_head_and_refuses_a_loss_that_it_has_not():
    reference, _ = pair()
    model = transform(copy.deepcopy(reference), dtype=torch.bfloat16)
    assert model.base_model(tokens(2, 9)).last_hidden_state.dtype == model.head.weight.dtype == torch.float32
    refused("use_cache = True", model.base_model, tokens(2, 9), use_cache=True)
    refused("input_ids is missing", model.base_model)
    _, mixture = pair(**SHAPES["mixtral-balanced"])
    mixture.eval().base_model(tokens(2, 9))
    refused("no loss of the routers", mixture.train().base_model, tokens(2, 9))
    refused('blocks="own"', mixture.eval().base_model, tokens(2, 9), output_router_logits=True)


def test_tie_weights_changes_nothing_and_refuses_a_replaced_head():
    _, model = pair(tie_word_embeddings=True)
    model.tie_weights()
    assert model.head.weight is model.embedding.weight
    model.head.weight = torch.nn.Parameter(model.head.weight.detach() + 1)
    refused("tie_word_embeddings", model.tie_weights)


def test_every_public_name_of_a_model_of_transformers_is_offered_or_refused_with_a_way():
    reference, model = pair()
    assert isinstance(model, PreTrainedModel)
    assert not set(OFFERED) & INSTEAD.keys()
    for name in OFFERED:
        assert hasattr(model, name), name
    for name in INSTEAD:
        assert not hasattr(model, name), name
    absent = 0
    for name in dir(reference):
        if name.startswith("_") or hasattr(torch.nn.Module, name) or hasattr(model, name):
            continue
        if not hasattr(PreTrainedModel, name) and name not in INSTEAD:  # of its own class
            continue
        absent += 1
        message = refused(f"Octavo's decoder has no {name}: ", getattr, model, name)
        assert re.search(r"octavo\.|model\.|labels|it has no|Hugging Face's model", message), message
    assert absent > 40
    for name in ("to", "half", "float", "train", "eval"):
        assert getattr(type(model), name) is getattr(torch.nn.Module, name)
    assert model.dtype is torch.float32
    assert model.can_generate()
    assert model.name_or_path == ""


def test_a_generation_config_stays_with_the_model(tmp_path):
    reference, _ = pair()
    reference.generation_config = GenerationConfig(eos_token_id=[5, 7], temperature=0.25, do_sample=True)
    octavo.export(transform(reference), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == [5, 7]


@pytest.mark.parametrize(
    ("recompute", "shape"), [(False, "plain"), (True, "plain"), (False, "qwen3"), (True, "neox"), (False, "neox-serial")]
)
def test_hidden_states_are_hugging_faces(recompute, shape):
    reference, _ = pair(4, **SHAPES[shape])
    model = transform(copy.deepcopy(reference), dtype=torch.float32, recompute=recompute)
    ids = tokens(2, 11)
    theirs = reference(input_ids=ids, output_hidden_states=True).hidden_states
    ours = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == 3
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    with_labels = model(input_ids=ids, labels=ids, output_hidden_states=True)
    assert torch.equal(with_labels.hidden_states[-1], ours[-1])
    assert torch.equal(with_labels.loss, model(input_ids=ids, labels=ids).loss)


def test_results_as_a_tuple_and_logits_of_some_positions():
    reference, model = pair()
    ids = tokens(2, 9)
    whole = model(input_ids=ids, use_cache=False, past_key_values=None, cache=None, output_attentions=False).logits
    (logits,) = model(input_ids=ids, return_dict=False)
    assert torch.equal(logits, whole)
    (loss,) = model(input_ids=ids, labels=ids, return_dict=False)
    assert torch.equal(loss, model(input_ids=ids, labels=ids).loss)
    for kept in (1, 4, torch.tensor([0, 7])):
        found = model(input_ids=ids, logits_to_keep=kept).logits
        torch.testing.assert_close(found, reference(input_ids=ids, logits_to_keep=kept).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"use_cache": True}, "use_cache = True: it has no cache of keys and values: model.generate"),
        ({"past_key_values": ()}, "past_key_values: it has no cache of keys and values"),
        ({"cache": ()}, "cache: it has no cache of keys and values"),
        ({"cache_position": torch.arange(9)}, "cache_position: it has no cache of keys and values"),
        ({"is_causal": False}, 'is_causal = False: its attention is causal; octavo.transform(model, blocks="own")'),
        ({"ignore_index": 0}, "ignore_index = 0: a label of -100 is not predicted"),
        ({"shift_labels": tokens(2, 9)}, "shift_labels: it shifts labels itself"),
        ({"num_logits_to_keep": 1}, "num_logits_to_keep = 1: its name is logits_to_keep"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, "cu_seq_lens_q: only position_ids tell where documents begin"),
        ({"max_length_k": 9}, "max_length_k = 9: only position_ids"),
        ({"something": 0}, "something = 0"),
        ({"attention_mask": {"full_attention": None}}, "attention_mask is dict, not a tensor"),
        ({"position_ids": torch.arange(9.0)[None] / 2}, "position_ids is torch.float32: positions are whole numbers"),
        ({"inputs_embeds": torch.zeros(1, 9, 48)}, 'blocks="own"'),
        ({"output_attentions": True}, "output_attentions"),
        ({"label": torch.ones(2, 9)}, "did you mean labels?"),
        ({"labels": tokens(2, 9), "logits_to_keep": 1}, "leave labels or logits_to_keep out"),
        ({"something": 3}, "something = 3"),
    ],
)
def test_an_argument_that_the_decoder_cannot_follow_is_refused(arguments, words):
    _, model = pair()
    refused(words, model, input_ids=tokens(2, 9), **arguments)


def test_an_argument_that_asks_for_nothing_is_accepted():
    _, model = pair()
    ids = tokens(2, 9)
    nothing = {"is_causal": True, "ignore_index": -100, "num_logits_to_keep": 0, "use_cache": 0, "head_mask": None}
    assert torch.equal(model(ids, None, None, None, **nothing).logits, model(ids).logits)


def test_embeddings_in_place_of_ids_are_refused_with_the_way_that_takes_them():
    reference, model = pair()
    ids = tokens(2, 9)
    embedded = reference.get_input_embeddings()(ids).detach()
    refused(("does not take inputs_embeds", 'octavo.transform(model, blocks="own")'), model, inputs_embeds=embedded)
    own = transform(copy.deepcopy(reference), dtype=torch.float32, blocks="own")
    assert torch.equal(own(inputs_embeds=embedded, labels=ids).loss, reference(inputs_embeds=embedded, labels=ids).loss)


def test_ids_are_needed_and_later_arguments_have_names():
    """Hugging Face's positions behind position_ids are others: its labels would be another argument."""
    _, model = pair()
    ids = tokens(2, 9)
    refused("input_ids is missing: give the decoder token ids", model, labels=ids)
    refused("input_ids is list, not a tensor", model, ids.tolist())
    refused(("got 6 positional arguments", "labels=labels"), model, ids, None, None, None, None, ids)


@pytest.mark.parametrize("shape", ["plain", "tied"])
@pytest.mark.parametrize("embeddings", [False, True])
def test_parameters_are_counted_as_hugging_face_counts_them(shape, embeddings):
    reference, _ = pair(**SHAPES[shape])
    reference.lm_head.weight.requires_grad_(False)
    model = transform(copy.deepcopy(reference), dtype=torch.float32)
    for only in (False, True):
        options = {"only_trainable": only, "exclude_embeddings": embeddings}
        assert model.num_parameters(**options) == reference.num_parameters(**options)
    assert model.get_input_embeddings().weight is model.embedding.weight
    assert model.get_output_embeddings().weight is model.head.weight
    assert model.device == reference.device


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("resize_token_embeddings", "before octavo.transform"),
        ("get_decoder", "model.base_model"),
        ("get_memory_footprint", 'blocks="own"'),
        ("loss_function", "logits"),
        ("enable_input_require_grads", "get_peft_model"),
        ("gradient_checkpointing_enable", "recompute=True"),
        ("activation_checkpointing_enable", "recompute=True"),
        ("prepare_inputs_for_generation", "get_peft_model"),
        ("add_adapter", "get_peft_model"),
        ("past_key_values", "model.generate"),
        ("cache", "model.generate"),
        ("model", "octavo.to_huggingface"),
        ("lm_head", "model.head"),
    ],
)
def test_what_is_missing_names_the_way_and_hasattr_is_false(name, way):
    _, model = pair()
    assert hasattr(llama(), name) or name in ("activation_checkpointing_enable", "past_key_values", "cache")
    assert not hasattr(model, name)
    refused((name, way), getattr, model, name)
    with pytest.raises(AttributeError):
        getattr(model, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = model.nonsense


def test_a_tied_weight_is_in_a_state_dict_once_so_that_safetensors_writes_it(tmp_path):
    _, model = pair(tie_word_embeddings=True)
    _, other = pair(9, tie_word_embeddings=True)
    save_file(model.state_dict(), tmp_path / "file.safetensors")
    state = load_file(tmp_path / "file.safetensors")
    assert "head.weight" not in state
    other.load_state_dict(state)
    same_bits(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight
    other.load_state_dict({**state, "head.weight": state["embedding.weight"]})  # as older files have it
    with pytest.raises(RuntimeError, match=r"embedding\.weight"):
        other.load_state_dict({name: tensor for name, tensor in state.items() if name != "embedding.weight"})


def test_a_load_by_assignment_keeps_the_tie():
    _, model = pair(tie_word_embeddings=True)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in model.state_dict()


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_tied_or_parted_later_is_kept_and_not_written_for_hugging_face(tied, tmp_path):
    _, model = pair(tie_word_embeddings=tied)
    model.head.weight = torch.nn.Parameter(model.head.weight.detach() + 1) if tied else model.embedding.weight
    state = model.state_dict()
    assert torch.equal(state["head.weight"], model.head.weight)
    _, again = pair(seed=1, tie_word_embeddings=tied)
    again.head.weight = torch.nn.Parameter(again.head.weight.detach().clone()) if tied else again.embedding.weight
    again.load_state_dict(state)
    assert torch.equal(again.head.weight, model.head.weight)
    octavo.save(tmp_path / "c", model)
    octavo.load(tmp_path / "c", again)
    assert torch.equal(again.head.weight, model.head.weight)
    for write in (
        octavo.to_huggingface,
        lambda model: octavo.export(model, tmp_path / "x"),
        lambda m: m.save_pretrained(tmp_path / "y"),
    ):
        with pytest.raises(InputError, match="tie_word_embeddings"):
            write(model)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["before", "behind", "observing", "backward"])
def test_hooks_of_the_head_change_no_loss(kind):
    _, model = pair()
    ids = tokens(2, 9)
    wanted = model(input_ids=ids, labels=ids).loss
    head = model.get_output_embeddings()
    if kind == "before":
        head.register_forward_pre_hook(lambda module, given: (given[0],))
    elif kind == "behind":
        head.register_forward_hook(lambda module, given, output: output / 2)
    elif kind == "observing":
        head.register_forward_hook(lambda *given: None)
    else:
        head.register_full_backward_hook(lambda *given: None)
    if kind in ("before", "behind"):
        with pytest.raises(InputError, match="a hook changes inputs or outputs of the output head"):
            model(input_ids=ids, labels=ids)
        assert model(input_ids=ids).logits.shape == (2, 9, VOCABULARY)
    else:
        assert torch.equal(model(input_ids=ids, labels=ids).loss, wanted)


def test_hooks_of_the_embedding_run():
    """NEFTune's noise is one."""
    reference, model = pair()
    for m in (reference, model):
        m.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * 2)
    ids = tokens(2, 9)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_a_head_that_the_loss_would_bypass_is_refused():
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight = base, base.weight

    _, model = pair()
    model.head = Adapter(model.head)
    for labels in ({}, {"labels": tokens(2, 9)}):
        refused(("Adapter", "get_peft_model"), model, input_ids=tokens(2, 9), **labels)


def test_its_text_is_that_of_a_decoder():
    assert str(pair()[1]).startswith(f"Decoder(\n  (embedding): Embedding({VOCABULARY}, 48)")


def pickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_nothing_of_the_interface_is_lost_in_a_pickle_or_a_copy(copied):
    _, model = pair()
    model.add_model_tags("mine")
    again = copied(model)
    ids = tokens(1, 4)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert isinstance(again, PreTrainedModel)
    assert again.model_tags == ["mine"]
    assert again.dtype is model.dtype
    with pytest.raises(InputError):
        _ = again.add_adapter
