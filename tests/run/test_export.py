"""Exports of models that keep their own code, and the folder: whole or absent, readable by others as the umask says."""

import copy
import os
import resource

import pytest
import torch
from expectations import refused, same_bits
from llamas import llama
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import octavo
from octavo.errors import EXIT_FAILED, OctavoError

VIT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("make", "auto"),
    [
        (lambda: ViTForImageClassification(ViTConfig(**VIT)), AutoModelForImageClassification),
        (lambda: T5ForConditionalGeneration(T5Config(**T5)), AutoModelForSeq2SeqLM),
    ],
    ids=["vit", "t5"],
)
def test_a_model_of_another_task_is_written_under_its_own_names(make, auto, tmp_path):
    model = make()
    octavo.export(octavo.transform(copy.deepcopy(model)), tmp_path / "out")
    same_bits(auto.from_pretrained(tmp_path / "out").state_dict(), model.state_dict())


class Wrapper(torch.nn.Module):
    """A user's own module around a Hugging Face model, with its config."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config


@pytest.mark.parametrize("config", [True, False])
def test_a_model_that_transformers_cannot_load_is_refused_with_the_way(config, tmp_path):
    model = octavo.transform(Wrapper(llama()) if config else torch.nn.Sequential(torch.nn.Linear(32, 32)))
    refused("model.state_dict()", octavo.export, model, tmp_path / "out")
    t5 = octavo.transform(Wrapper(T5ForConditionalGeneration(T5Config(**T5))))
    refused("model.state_dict()", octavo.export, t5, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_module_with_the_names_of_its_config_is_exported(tmp_path):
    class Own(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model, self.lm_head, self.config = inner.model, inner.lm_head, inner.config

    octavo.export(octavo.transform(Own(llama(2))), tmp_path / "out")
    same_bits(type(llama()).from_pretrained(tmp_path / "out").state_dict(), llama(2).state_dict())


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)])
def test_permissions_are_those_of_the_umask(umask, file, folder, tmp_path):
    before = os.umask(umask)
    try:
        octavo.export(octavo.transform(llama()), tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == folder
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(("model.safetensors", "config.json", "generation_config.json"), file)


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_takes_no_more_is_one_error_and_no_folder(exists, tmp_path):
    model = octavo.transform(llama())
    if exists:
        (tmp_path / "out").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a real write fails, after a part of the file
    try:
        with pytest.raises(OctavoError, match=r"out' could not be written: .*free") as raised:
            octavo.export(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.exit_code == EXIT_FAILED
    assert [path.name for path in tmp_path.rglob("*")] == ["out"] * exists
    octavo.export(model, tmp_path / "out")
    same_bits(type(llama()).from_pretrained(tmp_path / "out").state_dict(), llama().state_dict())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    model = octavo.transform(llama())
    refused(("file/inner", "Give another folder"), octavo.export, model, tmp_path / "file" / "inner")
    refused("/proc/nope", octavo.export, model, "/proc/nope")
    assert (tmp_path / "file").read_text() == "mine"
