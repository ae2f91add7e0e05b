"""The table of docs/migrating.md: each change of PyTorch and transformers since SMP's container is as it says."""

import argparse
import inspect
import pickle

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from octavo.compat.migrate.names import find
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE

HYPERPOD = (
    "context_parallel.utils.setup_transformer_engine_cp_groups",
    "checkpoint.constants.SMP_IS_LOAD_INFO_KEY",
    "checkpoint.constants.SMP_IS_PARTIAL_KEY",
    "distributed.checkpoint.filesystem.path_to_file_system",
    "distributed.checkpoint.s3_filesystem.S3FileSystem",
    "distributed.checkpoint.s3_filesystem.format_s3_path",
    "distributed.checkpoint.s3_filesystem.is_s3_uri",
    "distributed.checkpoint.s3_filesystem.parse_s3_uri",
    "distributed.checkpoint.s3_filesystem.get_s3_region_from_uri",
    "distributed.checkpoint.s3_filesystem.retry_with_jitter",
    "distributed.checkpoint.state_dict_utils.compute_auto_checkpoint_interval",
    "distributed.checkpoint.state_dict_utils._Interval",
)


def _tiny():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def test_torch_load_refuses_objects_by_default(tmp_path):
    torch.save({"args": argparse.Namespace(x=1)}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=False)["args"].x == 1
    with torch.serialization.safe_globals([argparse.Namespace]):  # as add_safe_globals, for this block
        assert torch.load(tmp_path / "file.pt")["args"].x == 1


def test_old_scaler_warns():
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.cuda.amp.GradScaler(enabled=False)


def test_names_of_transformers_are_gone():
    assert not hasattr(transformers, "AdamW")
    assert not hasattr(modeling_llama, "LlamaSdpaAttention")
    assert not hasattr(modeling_llama, "LlamaFlashAttention2")
    arguments = inspect.signature(transformers.TrainingArguments.__init__).parameters
    assert not {"evaluation_strategy", "overwrite_output_dir"} & set(arguments)
    assert "eval_strategy" in arguments
    assert "tokenizer" not in inspect.signature(transformers.Trainer.__init__).parameters
    assert "processing_class" in inspect.signature(transformers.Trainer.__init__).parameters


def test_models_of_transformers_have_other_defaults(tmp_path):
    model = _tiny().to(torch.bfloat16)
    assert not hasattr(model.config, "rope_theta")
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    model.save_pretrained(tmp_path, safe_serialization=False)
    assert (tmp_path / "model.safetensors").is_file()
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    cache = model(torch.ones(1, 3, dtype=torch.long)).past_key_values
    assert cache.layers[0].keys.shape[2] == 3
    with pytest.raises(TypeError):
        cache[0][0]


def test_both_names_of_transformer_engine_are_here():
    names = " ".join(TE.modules["transformer_engine.pytorch"].values()).split()
    assert {"fp8_autocast", "autocast", "fp8_model_init", "quantized_model_init"} <= set(names)
    assert TE.modules["transformer_engine.pytorch.fp8"] == TE.modules["transformer_engine.pytorch.quantization"]


@pytest.mark.parametrize("name", HYPERPOD)
def test_names_of_hyperpods_adapter_are_here_or_refused_with_the_way(name):
    dotted = f"torch.sagemaker.{name}"
    module, _, last = dotted.rpartition(".")
    here = last in " ".join(SMP.modules.get(module, {}).values()).split()
    row = find(dotted)
    assert (row.status != "absent") == here
    assert here or row.change
