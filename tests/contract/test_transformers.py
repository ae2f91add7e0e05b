"""transformers' loading and conversion of weights, and the marks that it leaves on models and configs."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from private_names import Name, check, resolve
from transformers import LlamaConfig, LlamaForCausalLM

_LOADING = "part of `from_pretrained`; Octavo reads files shard by shard, on each rank only its rows"
NAMES = (
    Name(
        "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys",
        ("models/published.py",),
        f"which missing and additional tensors are no error: {_LOADING}",
        ("self", "loading_info"),
    ),
    Name(
        "transformers.PreTrainedModel._get_dtype_plan",
        ("models/original_code.py",),
        "which parameters stay in float32 in a model of another dtype",
        ("self", "dtype"),
    ),
    Name(
        "transformers.PreTrainedModel._init_weights",
        ("parallel/module_init.py", "compat/smp/delayed.py"),
        "initial values of a module on the meta device, on each rank the same",
        ("self", "module"),
    ),
    Name(
        "transformers.PreTrainedModel._check_and_adjust_attn_implementation",
        ("compat/smp/substitutes.py",),
        "replaced: published scripts request flash_attention_2, which a transformed model does not need",
        ("self", "attn_implementation"),
    ),
    Name(
        "transformers.PreTrainedModel._keys_to_ignore_on_save",
        ("models/convert.py",),
        "parameters that a saved folder leaves out",
    ),
    Name("transformers.PreTrainedModel._no_split_modules", ("compat/smp/transform.py",), "names of a model's whole layers"),
    Name("transformers.PreTrainedModel._hf_peft_config_loaded", ("run/export.py",), "adapters that an export would lose"),
    Name("transformers.AutoModelForCausalLM._model_mapping", ("run/sample.py",), "which configs have a causal language model"),
    Name("transformers.PretrainedConfig._attn_implementation", ("models/exact.py",), "the attention of the model"),
    Name(
        "transformers.PretrainedConfig._experts_implementation",
        ("models/exact.py", "benchmarks/chosen.py"),
        "that of its experts",
    ),
)
ATTRIBUTES = {
    "_name_or_path": "of a config: its origin, ignored when configs are compared",
    "_loss_function": "of a model: a custom loss, which a decoder would not compute",
    "_is_hf_initialized": "of a parameter loaded from a file, which initialisation skips",
    "_weight_conversions": "of a loaded model: the conversions that `from_pretrained` used, which saving reverts",
}
"""Attributes of instances."""
FUNCTIONS = {
    "transformers.conversion_mapping.get_model_conversion_mapping": ("model",),
    "transformers.core_model_loading.rename_source_key": (
        "source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict",
    ),
    "transformers.core_model_loading.revert_weight_conversion": ("model", "state_dict"),
    "transformers.core_model_loading.dot_natural_key": ("s",),
}  # fmt: skip
"""Without an underscore, of modules that transformers does not document: `models/published.py` reads files by them."""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_name(name):
    check(name)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_function(path):
    found = tuple(inspect.signature(resolve(path)).parameters)
    assert found[: len(FUNCTIONS[path])] == FUNCTIONS[path]


@pytest.fixture(scope="module")
def model():
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1))


def test_attributes_of_a_model(model, tmp_path):
    assert model.config._name_or_path == ""
    model.loss_function = max
    assert model._loss_function is max
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded._weight_conversions == []
    assert all(parameter._is_hf_initialized for parameter in loaded.parameters())


def test_the_plan_of_dtypes_has_patterns_of_names(model):
    plan = model._get_dtype_plan(torch.bfloat16)
    assert all(isinstance(pattern, str) and dtype == torch.float32 for pattern, dtype in plan.items())


def test_the_version_is_one_that_was_tested():
    from octavo.versions import untested

    assert untested("transformers") is None, transformers.__version__
