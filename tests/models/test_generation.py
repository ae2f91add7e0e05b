"""generation_config.json: its text to the byte, and only what transformers refuses is left out, with its reason."""

import json

import pytest
from expectations import refused
from transformers import GenerationConfig, LlamaConfig

from octavo.models.generation import FILE, from_model_config, load_generation_config

REFUSED = [
    ({"max_new_tokens": -5}, {"max_new_tokens"}),
    ({"num_return_sequences": 3}, {"num_return_sequences"}),
    ({"cache_implementation": "none"}, {"cache_implementation"}),
    ({"early_stopping": "perhaps", "max_new_tokens": 0}, {"early_stopping", "max_new_tokens"}),
    ({"logits_processor": []}, {"logits_processor"}),
]


def _folder(tmp_path, values):
    text = values if isinstance(values, str) else json.dumps(values, indent=1)
    (tmp_path / FILE).write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]},
        {"top_k": 3, "a_key_of_a_later_version": {"x": [1]}},
        {},
    ],
)
def test_a_file_that_transformers_accepts_stays_to_the_byte(values, tmp_path):
    found = load_generation_config(_folder(tmp_path, values))
    kept, left_out = found.accepted()
    assert kept.text == (tmp_path / FILE).read_text()
    assert not left_out
    assert found.changed({"eos_token_id": values.get("eos_token_id"), "pad_token_id": None}) is found


@pytest.mark.parametrize(("fault", "keys"), REFUSED)
def test_what_transformers_refuses_is_left_out_alone(fault, keys, tmp_path):
    others = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    folder = _folder(tmp_path, {**others, **fault})
    with pytest.raises(ValueError):
        GenerationConfig.from_pretrained(folder)
    kept, left_out = load_generation_config(folder).accepted()
    assert left_out.keys() == keys
    assert all(left_out.values())
    assert kept.values == others
    (tmp_path / FILE).write_text(kept.text)
    assert GenerationConfig.from_pretrained(folder).top_p == 0.9


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_file_is_refused(text, tmp_path):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    refused((str(tmp_path / FILE), "or remove it"), load_generation_config, str(tmp_path))


def test_sources_without_one(tmp_path):
    assert load_generation_config("llama-tiny") is None
    assert load_generation_config(str(tmp_path)) is None
    assert load_generation_config("owner/no-such-model") is None
    assert load_generation_config("no/id/of/the/hub") is None
    assert from_model_config(LlamaConfig(eos_token_id=7)).values["eos_token_id"] == 7


def test_changed_ids_and_the_keys_with_ids(tmp_path):
    values = {"eos_token_id": 2, "bos_token_id": None, "suppress_tokens": [5], "forced_bos_token_id": 3, "max_new_tokens": 9}
    found = load_generation_config(_folder(tmp_path, values))
    assert found.ids() == ["eos_token_id", "suppress_tokens", "forced_bos_token_id"]
    new = found.changed({"eos_token_id": [2, 3], "suppress_tokens": None})
    assert new.values == json.loads(new.text)
    assert new.values == {"eos_token_id": [2, 3], "bos_token_id": None, "forced_bos_token_id": 3, "max_new_tokens": 9}
