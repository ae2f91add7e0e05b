"""A sharded model is written whole, by the methods that its library has, or not at all."""

import warnings

import pytest
import torch
import torch.distributed as dist
from llamas import VOCABULARY, llama, tokens
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

import octavo
import ranks
from octavo.errors import InputError
from octavo.parallel import saving

peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* deprecated:FutureWarning"),  # of PEFT's merge
]

TASK = {"task_type": "CAUSAL_LM"}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj"], **TASK),
    "head and biases": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], bias="all", **TASK),
    "embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True, **TASK),
    "tokens": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 5], **TASK),
    "shared projections": lambda: peft.VeraConfig(target_modules=["q_proj"], **TASK),
    "factors": lambda: peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], **TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "computed prompt": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **TASK),
}


def adapted(kind):
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(attention_bias=True), ADAPTERS[kind]())
    if kind == "lora":
        model.add_adapter("second", ADAPTERS["lora"]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return model


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def own_adapter():
    """transformers' own interface of adapters."""
    torch.manual_seed(0)
    model = llama()
    model.add_adapter(ADAPTERS["lora"]())
    return model


def takes_adapters():
    """transformers takes this PEFT; 5.24 asks for one newer than PyPI's."""
    try:
        check_peft_version(min_version=MIN_PEFT_VERSION)
    except ValueError:
        return False
    return True


MODELS = {
    "own code": (gpt2, {}),
    "tied": (lambda: llama(tie_word_embeddings=True), {"blocks": "own"}),
    "joined experts": (lambda: llama(model_type="mixtral", num_local_experts=4, intermediate_size=48), {"blocks": "own"}),
    **({"adapter of transformers": (own_adapter, {})} if takes_adapters() else {}),
    "decoder": (llama, {}),
}


def compare(ours, theirs):
    """Every file of a folder that one process has written is there, with the same tensors."""
    paths = sorted(path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file())
    assert paths == sorted(path.relative_to(ours) for path in ours.rglob("*") if path.is_file())
    for path in paths:
        if path.suffix == ".safetensors":
            found, wanted = load_file(ours / path), load_file(theirs / path)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), (path, name)
        elif path.name == "config.json":
            assert (ours / path).read_bytes() == (theirs / path).read_bytes()


def plain():
    """Adapters on a module that is no model of transformers."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    return peft.get_peft_model(layers, peft.LoraConfig(target_modules=["0"], modules_to_save=["2"]))


def _quiet():
    warnings.simplefilter("ignore")  # of PEFT and torch, about models of this size
    octavo.init()


def _save_adapters(folder):
    _quiet()
    gathered = []
    whole_tensor = saving.whole_tensor
    saving.whole_tensor = lambda tensor: gathered.append(tensor.numel()) or whole_tensor(tensor)
    counts = {}
    for kind in ADAPTERS:
        model = octavo.transform(adapted(kind))
        gathered.clear()
        model.save_pretrained(folder / kind, is_main_process=dist.get_rank() == 0)
        counts[kind] = sum(gathered), sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    return counts


@pytest.mark.long
def test_adapters_of_every_kind_are_written_whole_by_one_rank(tmp_path):
    counts = ranks.run(2, _save_adapters, tmp_path)
    for kind in ADAPTERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted(kind).save_pretrained(tmp_path / "theirs" / kind)
        compare(tmp_path / kind, tmp_path / "theirs" / kind)
    assert counts[0] == counts[1]
    adapters = counts[0]["lora"][1]
    ends = 2 * VOCABULARY * 48
    assert counts[0]["lora"][0] == adapters + ends  # the frozen blocks stay where they are


def _save_models(folder):
    _quiet()
    for kind, (make, options) in MODELS.items():
        model = octavo.transform(make(), dtype=torch.float32, **options)
        loss = model(input_ids=tokens(2, 8), labels=tokens(2, 8)).loss
        model.save_pretrained(folder / kind)  # a backward is to come
        loss.backward()
        model.save_pretrained(folder / kind / "again", **({"max_shard_size": "20KB"} if kind == "own code" else {}))
    octavo.transform(plain()).save_pretrained(folder / "plain")
    inner = octavo.transform(gpt2()).transformer
    inner.save_pretrained(folder / "inner")
    merged = octavo.transform(adapted("lora")).merge_and_unload()
    merged.save_pretrained(folder / "merged")


def test_models_are_written_as_one_process_writes_them(tmp_path):
    ranks.run(2, _save_models, tmp_path / "ours")
    theirs = tmp_path / "theirs"
    for kind, (make, _) in MODELS.items():
        make().save_pretrained(theirs / kind)
        make().save_pretrained(theirs / kind / "again", **({"max_shard_size": "20KB"} if kind == "own code" else {}))
    plain().save_pretrained(theirs / "plain")
    gpt2().transformer.save_pretrained(theirs / "inner")
    adapted("lora").merge_and_unload().save_pretrained(theirs / "merged")
    compare(tmp_path / "ours", theirs)


READERS = {
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], use_dora=True, **TASK),
    "hra": lambda: peft.HRAConfig(target_modules=["q_proj"], **TASK),
    "boft": lambda: peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4, **TASK),
}


def _train_readers():
    """Loss and largest gradient of adapters that read the weight of their base layer, in FP8."""
    warnings.simplefilter("ignore")
    found = {}
    for kind, make in READERS.items():
        torch.manual_seed(0)
        model = octavo.transform(peft.get_peft_model(llama(), make()), dtype=torch.float32)
        with octavo.fp8_autocast():
            loss = model(input_ids=tokens(2, 16), labels=tokens(2, 16)).loss
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        found[kind] = [loss.item(), max(grad.abs().max().item() for grad in whole)]
    return found


def _train_readers_sharded():
    _quiet()
    return _train_readers()


def test_adapters_that_read_the_weight_of_their_layer_train_sharded():
    with warnings.catch_warnings():
        wanted = _train_readers()
    for found in ranks.run(2, _train_readers_sharded):
        for kind, values in wanted.items():
            assert found[kind] == pytest.approx(values, rel=0.02), kind


def _message(call, *arguments):
    with pytest.raises(InputError) as raised:
        call(*arguments)
    return str(raised.value)


def _write_shards(folder):
    _quiet()
    torch.manual_seed(0)
    model = octavo.transform(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)))
    adapters = octavo.transform(adapted("lora"))
    messages = [
        _message(torch.save, model.state_dict(), folder / f"{dist.get_rank()}.pt"),
        _message(torch.save, model[0].state_dict(), folder / f"{dist.get_rank()}.pt"),
        _message(save_file, model.state_dict(), str(folder / f"{dist.get_rank()}.safetensors")),
        _message(save_model, model, str(folder / f"{dist.get_rank()}.safetensors")),
        _message(save_file, peft.get_peft_model_state_dict(adapters), str(folder / f"{dist.get_rank()}.safetensors")),
    ]
    exported = _message(octavo.export, model, folder / "out")
    model.load_state_dict(model.state_dict())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        save_file(state, folder / "whole.safetensors")
    return messages, exported, {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_no_file_has_the_shards_of_a_rank_and_the_message_names_a_way_that_works(tmp_path):
    for messages, exported, whole in ranks.run(2, _write_shards, tmp_path):
        for message in messages:
            assert "weight of state_dict() is a shard of 2 ranks" in message or "weight is a shard" in message
            assert "octavo.save(path, model)" in message
        for message in (*messages, exported):
            assert "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))" in message
        assert exported.startswith("octavo.export: Sequential has no Hugging Face config")
        found = load_file(tmp_path / "whole.safetensors")
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert torch.equal(found[name], tensor), name


def _share():
    _quiet()
    model = gpt2()
    model.transformer.h[1].ln_1.weight = model.transformer.h[0].ln_1.weight
    return _message(octavo.transform, model)


def test_a_parameter_of_two_blocks_is_refused():
    for message in ranks.run(2, _share):
        assert message.startswith("transformer.h.1.ln_1.weight is also a parameter of transformer.h.0")


def test_one_process_saves_as_ever(tmp_path):
    model = octavo.transform(gpt2())
    model.save_pretrained(tmp_path / "ours")
    gpt2().save_pretrained(tmp_path / "theirs")
    compare(tmp_path / "ours", tmp_path / "theirs")
    torch.save(model.state_dict(), tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt").keys() == model.state_dict().keys()
