"""Names of other packages in published SMP scripts, on a machine without these packages."""

import functools
import importlib
import importlib.util
import itertools
import pickle
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

import octavo
from octavo.compat import finder, versions
from octavo.compat.smp import beside
from octavo.nn.block import TransformerLayer
from octavo.process import process

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def one_process():
    process.said.clear()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    octavo.shutdown()


def test_the_backend_of_sagemakers_containers_is_gloo_without_gpus_said_once(tsm, one_process, capsys):
    importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")
    dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == dist.get_backend(dist.new_group([0], backend="SMDDP")) == "gloo"
    assert dist.Backend("cpu:smddp,cuda:smddp") == "cpu:gloo,cuda:nccl"
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]
    assert capsys.readouterr().err.count("smddp") == 1


def test_the_backend_is_unknown_again_without_the_names(one_process):
    finder.install(beside.SMDDP)
    try:
        importlib.import_module("smdistributed.dataparallel.torch.torch_smddp")  # alone: scripts without torch.sagemaker
        assert dist.Backend("smddp") == "gloo"
    finally:
        finder.uninstall(beside.SMDDP)
    assert dist.Backend("smddp") == "smddp"
    assert dist.Backend("gloo") == "gloo"


def test_a_request_for_flash_attention_gives_the_numbers_of_transformers_default(tsm, one_process, capsys):
    tsm.init()
    config = LlamaConfig(**TINY)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2"))
    ids = torch.randint(0, 64, (2, 8))
    assert torch.equal(models[0](ids).logits, plain(ids).logits)
    torch.testing.assert_close(tsm.transform(models[1])(ids).logits, plain(ids).logits)
    assert capsys.readouterr().err.count('attn_implementation="flash_attention_2"') == 1
    with pytest.raises(ValueError, match="flash_attention_9x"):
        AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_9x")


@pytest.mark.parametrize("config", [MistralConfig, MixtralConfig])
def test_a_config_without_a_number_of_key_value_heads_has_as_many_as_attention_heads(tsm, config):
    assert config(num_attention_heads=6, num_key_value_heads=None).num_key_value_heads == 6
    assert config(num_key_value_heads=None).num_key_value_heads == config().num_attention_heads
    assert config(num_attention_heads=6, num_key_value_heads=3).num_key_value_heads == 3
    assert config().num_key_value_heads == 8
    asked = config(**TINY, num_key_value_heads=None)
    assert config.from_dict(asked.to_dict()).num_key_value_heads == TINY["num_attention_heads"]


def test_a_config_without_a_number_of_key_value_heads_is_refused_again_without_the_names():
    with pytest.raises(Exception, match="num_key_value_heads"):
        MixtralConfig(num_key_value_heads=None)


def _experts(tsm):
    from torch.sagemaker.moe.moe_config import MoEConfig

    torch.manual_seed(0)
    config = MixtralConfig(**TINY | {"num_hidden_layers": 4}, num_key_value_heads=1, num_local_experts=4)
    return FullyShardedDataParallel(tsm.transform(AutoModelForCausalLM.from_config(config), config=MoEConfig()))


def _recomputed(model):
    return [isinstance(layer, CheckpointWrapper) for layer in model.module.layers]


def test_recomputation_that_names_layers_with_experts_is_of_the_blocks_and_changes_no_bit(tsm, te, one_process, capsys):
    tsm.init()

    def steps(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(0, 64, (2, 16))
            with te.fp8_autocast():
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    wanted = steps(_experts(tsm))
    for impl in CheckpointImpl:
        model = _experts(tsm)
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda part: isinstance(part, MixtralDecoderLayer)
        )
        assert _recomputed(model) == [True] * 4
        assert steps(model) == wanted
    assert "selects no module" not in capsys.readouterr().err


def test_a_choice_that_counts_sees_each_layer_once(tsm, one_process):
    tsm.init()
    for kind in (MixtralDecoderLayer, TransformerLayer):
        model, seen = _experts(tsm), itertools.count()
        apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, kind) and next(seen) % 2 == 1)  # noqa: B023
        assert _recomputed(model) == [False, True, False, True]


def test_a_choice_of_nothing_is_said(tsm, one_process, capsys):
    tsm.init()
    model = FullyShardedDataParallel(tsm.transform(AutoModelForCausalLM.from_config(LlamaConfig(**TINY))))
    for choice in (
        lambda part: isinstance(part, LlamaDecoderLayer),  # which SMP does not leave in place either
        lambda part: isinstance(part, MixtralDecoderLayer) and part.hidden_size > 0,
    ):
        apply_activation_checkpointing(model, check_fn=choice)
        assert _recomputed(model) == [False]
    assert capsys.readouterr().err.count("nothing is recomputed") == 1
    apply_activation_checkpointing(
        _experts(tsm), check_fn=lambda part: isinstance(part, MixtralDecoderLayer) and part.training_
    )
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    apply_activation_checkpointing(other, check_fn=lambda part: isinstance(part, torch.nn.Linear))
    assert isinstance(other[0], CheckpointWrapper)
    assert capsys.readouterr().err.count("selects no module") == 0


def test_files_of_torch_save_load_weights_only_by_names_that_are_listed(tsm, one_process, tmp_path):
    tsm.init()
    config = LlamaConfig(**TINY)
    path = tmp_path / "0.pt"
    content = {"model_config": config, "num_params": np.prod((3, 4)), "lr": np.float32(0.5), "x": torch.ones(2)}
    torch.save(content, path)
    with pytest.raises(pickle.UnpicklingError, match="LlamaConfig"):
        torch.load(path)
    tsm.transform(AutoModelForCausalLM.from_config(config))
    found = torch.load(path)
    assert found["model_config"].to_dict() == config.to_dict()
    assert (found["num_params"], found["lr"]) == (12, 0.5)
    torch.save({"other": MixtralConfig()}, path)
    with pytest.raises(pickle.UnpicklingError, match="MixtralConfig"):
        torch.load(path)
    old = pickle.dumps(np.int64(7), 2).replace(np.int64(7).__reduce__()[0].__module__.encode(), b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in old  # as numpy 1 writes it
    names = torch.serialization.get_safe_globals()
    assert any(isinstance(one, tuple) and one[1] == "numpy.core.multiarray.scalar" for one in names)


def test_names_of_the_shims_go_with_them(tmp_path):
    before = list(sys.meta_path)
    octavo.compat.smp.install()
    import torch.sagemaker

    octavo.compat.smp.uninstall()
    torch.save({"n": np.int64(3)}, tmp_path / "n.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "n.pt")
    assert sys.meta_path == before


def test_the_error_of_a_save_in_the_background_has_megatrons_name_and_the_queue_takes_every_argument(tsm, tmp_path):
    assert importlib.util.find_spec("megatron") is None  # libraries that ask for Megatron-LM do not take it for the whole
    from megatron.core.dist_checkpointing.core import CheckpointingException as Same
    from megatron.core.dist_checkpointing.mapping import CheckpointingException
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save, maybe_finalize_async_calls

    assert Same is CheckpointingException
    queue = AsyncCallsQueue()
    assert queue.maybe_finalize_async_calls(True, None, skip_sync=True) == []
    assert queue.maybe_finalize_async_calls(blocking=False, process_group=None, no_dist=False) == []
    assert maybe_finalize_async_calls(blocking=True, process_group=None) == []
    path = tmp_path / "step"
    async_save({"x": torch.ones(2)}, checkpoint_id=path, queue=queue)
    async_save({"x": lambda: 0}, checkpoint_id=tmp_path / "other", queue=queue)
    with pytest.raises(CheckpointingException, match=r"^asynchronous save 1 failed: AttributeError: Can.t pickle"):
        queue.maybe_finalize_async_calls(blocking=True, process_group=None)
    assert (path / ".metadata").is_file()
    with pytest.raises(ImportError, match=r"megatron\.core\.parallel_state is not in .* Install Megatron-LM"):
        importlib.import_module("megatron.core.parallel_state")
    with pytest.raises(ImportError, match=r"SMP version 1 became torch\.sagemaker"):
        importlib.import_module("smdistributed.modelparallel.torch")


def test_an_installed_package_goes_before_the_names(tmp_path, monkeypatch):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("real = True")
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    finder.install(beside.MEGATRON)
    try:
        assert importlib.import_module("megatron").real
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'megatron\.core\.dist_checkpointing'"):
            importlib.import_module("megatron.core.dist_checkpointing.mapping")
    finally:
        finder.uninstall(beside.MEGATRON)
    assert sys.modules.pop("megatron").real
    sys.modules.pop("megatron.core")


@pytest.fixture
def without_distutils(monkeypatch):
    """A process whose Python has no distutils, as 3.12 and newer."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "distutils"]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)

    class Without:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] != "distutils":
                return None
            found = finder.installed(beside.DISTUTILS).find_spec(name, path, target)
            if found is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return found

    monkeypatch.setattr(sys, "meta_path", [Without, *sys.meta_path])
    finder.install(beside.DISTUTILS)
    yield
    finder.uninstall(beside.DISTUTILS)


def test_distutils_is_there_where_python_has_it_no_more_as_far_as_scripts_use_it(without_distutils):
    version, util = importlib.import_module("distutils.version"), importlib.import_module("distutils.util")
    assert version.LooseVersion is versions.LooseVersion
    assert util.strtobool("Yes") == 1
    with pytest.raises(ImportError, match=r"distutils\.dir_util is not in .* Use shutil\.copytree"):
        importlib.import_module("distutils.dir_util")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.9", "1.10"),
        ("2.1.0", "2.11.0+cu126"),
        ("2.1", "2.1.0"),
        ("1.5.1", "1.5.2b2"),
        ("0.4", "8.02"),
        ("1996.07.12", "3000"),
    ],
)
def test_versions_compare_by_their_numbers(older, newer):
    loose = versions.LooseVersion
    assert loose(older) < newer
    assert loose(newer) >= loose(older)
    assert loose(older) == older
    assert str(loose(newer)) == newer


def test_strict_versions_and_words():
    strict = versions.StrictVersion
    order = ["0.4", "0.4.1", "0.5a1", "0.5b3", "0.5", "0.9.6", "1.0", "1.0.4a3", "1.0.4b1", "1.0.4"]
    assert all(strict(older) < newer for older, newer in itertools.pairwise(order))
    assert strict("0.4") == "0.4.0"
    with pytest.raises(ValueError, match="invalid version number '1'"):
        strict("1")
    assert [versions.strtobool(word) for word in ("y", "TRUE", "1", "n", "Off", "0")] == [1, 1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="invalid truth value 'maybe'"):
        versions.strtobool("maybe")
