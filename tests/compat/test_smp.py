"""SMP's names: configuration, state, and transformed models in FSDP over real ranks, beside one rank and Hugging Face."""

import json
import pickle

import accelerate
import fsdp_ranks
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import octavo
import ranks
from octavo.errors import InputError
from octavo.process import process


@pytest.fixture(autouse=True)
def one_rank():
    yield
    octavo.shutdown()


def test_layouts_strategies_and_sequences_in_parts_give_the_numbers_of_one_rank(tmp_path):
    wanted = fsdp_ranks.on_one_rank()
    results = ranks.run(4, fsdp_ranks.layouts, str(tmp_path))
    found = results[3]
    for name in ("hybrid", "zero2", "none", "overridden"):
        for kind in ("whole", "parts"):
            for row, expected in zip(found[name, kind], wanted, strict=True):
                assert row == pytest.approx(expected, rel=1e-4), (name, kind)
        assert found[name, "whole"] == found[name, "parts"] == results[0][name, "whole"]
    assert found["hybrid"] == {
        "group": [2, 3], "strategy": "HYBRID_SHARD", "replicas": (1, [[0, 2], [1, 3]]), "replica": [2, 3], "asked": 2,
        "rows": 16,
    }  # fmt: skip
    assert found["zero2"]["group"] == found["none"]["group"] == [0, 1, 2, 3]
    assert (found["zero2"]["strategy"], found["none"]["strategy"]) == ("_HYBRID_SHARD_ZERO2", "FULL_SHARD")
    assert (found["none"]["asked"], found["none"]["rows"]) == (0, 8)
    assert found["overridden"]["strategy"] == "HYBRID_SHARD"
    assert "parts of it before, and the same tokens now" in found["mixed"]


def test_a_model_is_placed_once(te, tsm, tmp_path):
    """By FSDP, which shards it and has its device; on one rank by transform, whose model is used with and without FSDP."""
    wanted = [{"placed": 1, "kept": 0}] * 2
    assert ranks.run(2, fsdp_ranks.placements, "weights") == wanted
    assert ranks.run(2, fsdp_ranks.placements, "rank 0") == wanted
    assert ranks.run(2, fsdp_ranks.placements, "meta") == wanted
    assert fsdp_ranks.placements("weights") == {"placed": 1, "kept": 8}
    assert fsdp_ranks.placements("meta") == {"placed": 1, "kept": 8}


@pytest.mark.long
def test_a_second_world_has_meshes_of_its_own(tmp_path):
    for rank, (first, second) in enumerate(ranks.run(4, fsdp_ranks.two_worlds, str(tmp_path))):
        assert first == second
        assert first[0] == [[0, 1], [2, 3]][rank // 2]


def test_checkpoints_wrappers_fine_tuning_and_pytorchs_own_fsdp(tmp_path):
    results = ranks.run(2, fsdp_ranks.checkpoints, str(tmp_path))
    for found in results:
        assert found["same with REENTRANT"]
        assert found["same with NO_REENTRANT"]
        assert found["same with attention alone"]
        assert found["finalised"] == [0]
        assert found["hugging face"][0] > 0
        assert found["norms of an own loss"][0] == pytest.approx(found["norms of an own loss"][1], rel=1e-4)
        assert found["whole states"]
        assert found["local"]
        assert found["together"]
        assert "is not the model's tensor" in found["refused"][0]
        assert "ranks write one checkpoint and give the folders" in found["refused"][1]
        assert found["full"]
        assert found["all"]
        assert found["file"]
        assert found["extra"] == ({"total_steps": 7}, 1)
        assert found["rate"] == 1e-2
        assert found["rank 0"]
        assert found["native"]
        assert found["native save"].startswith("the model is PyTorch's FullyShardedDataParallel")
        assert found["native norm"] > 0
        for name, text in {
            "weights": "hold different weights", "meta": "are on the meta device", "own init": "DelayedParamIniter",
            "sync": "sync_module_states=True", "around": "in which 0 is transformed", "summon": "FULL_STATE_DICT",
            "strategy": "give ShardingStrategy.FULL_SHARD", "dtype": "float64) is not supported", "parts": "of which this rank",
            "position": "ignored_modules",
            "routers": "in float32, and a sharded model has parameters of one dtype. Give",
        }.items():  # fmt: skip
            assert text in found[f"refusal {name}"], name
    mean = sum(found["hugging face"][0] for found in results) / 2
    assert results[0]["hugging face"][1] == pytest.approx(mean, rel=1e-5)


LLAMA = LlamaConfig(**fsdp_ranks.TINY)
EXPERTS = MixtralConfig(**fsdp_ranks.TINY, num_local_experts=4, sliding_window=None)
WAYS = {
    "shard": (2, {"hybrid_shard_degree": 2}, LLAMA, "FULL_SHARD"),
    "gathered": (2, {}, LLAMA, "SHARD_GRAD_OP"),
    "replicas": (2, {"hybrid_shard_degree": 1}, LLAMA, "NO_SHARD"),
    "hybrid": (4, {"hybrid_shard_degree": 2}, LLAMA, "HYBRID_SHARD"),
    "context": (2, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}, LLAMA, "FULL_SHARD"),
    "experts": (2, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}, EXPERTS, "FULL_SHARD"),
}
"""Ranks, degrees, model and strategy."""
RULES = {("octavo", "te"): "current", ("none", "octavo"): "current", ("te", "te"): "te", ("none", "te"): "te"}
"""Recipe and autocast → the recipe whose numbers a first step has: scale 1 by Transformer Engine's names alone."""


# Neither a recipe nor the autocast of a case that is long is new to its way, and both together are not new.
@pytest.mark.long(lambda way, given: (way != "shard" and given != ("te", "te")) or way not in ("shard", "hybrid"))
@pytest.mark.parametrize(("given", "equal"), RULES.items(), ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_first_step_by_these_names_has_the_rule_of_its_recipe(way, given, equal):
    count, degrees, config, strategy = WAYS[way]
    if way == "experts" and equal == "current":  # whose stacks have one scale before they have begun
        equal = "octavo"
    copies = count // degrees.get("context_parallel_degree", 1)
    loss, gradients = fsdp_ranks.first_steps_of_one_rank(equal, config, copies)
    other = fsdp_ranks.first_steps_of_one_rank("current" if equal == "te" else "te", config, copies)
    for evaluated, own, found in ranks.run(count, fsdp_ranks.first_steps, degrees, config, strategy, *given):
        assert own == evaluated == pytest.approx(loss, rel=1e-6)
        assert abs(own - other[0]) > 1e-5 * loss
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("config", [LLAMA, EXPERTS], ids=["llama", "mixtral"])
def test_rules_of_decay_find_the_matrices_and_octavo_save_all_weights(tmp_path, config):
    """By names, by classes as transformers' Trainer, and by `octavo.parameter_groups`."""
    for matrices, decayed, restored in ranks.run(2, fsdp_ranks.names_and_saves, config, str(tmp_path / "saved")):
        assert decayed == dict.fromkeys(("groups", "classes", "names"), matrices)
        assert restored


@pytest.mark.long(lambda kind: kind == "FULL")
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_loads_without_fp8_records_let_the_weights_that_they_write_begin_anew(kind):
    """By Octavo's rule; a whole state has none, the others bring their scales."""
    for trained, begun, error in ranks.run(2, fsdp_ranks.loads, kind, "octavo"):
        assert len(trained) == 8
        assert begun == (set() if kind == "FULL" else trained)
        assert (error < 0.1) == (kind == "FULL")  # the scales of the others saturate what is 100 times larger
    for trained, begun, _ in ranks.run(2, fsdp_ranks.loads, kind, "te"):
        assert len(trained) == 8
        assert begun == trained


@pytest.mark.long(lambda way: way != "experts")
@pytest.mark.parametrize("way", ["shard", "hybrid", "context", "experts"])
def test_gradients_summed_in_each_micro_batch_are_those_of_no_sync(way):
    """With `octavo.init` in the place of SMP's, whose keys do not have the choice."""
    whole, each = (ranks.run(WAYS[way][0], fsdp_ranks.micro_batches, *WAYS[way][1:], sync=sync) for sync in (False, True))
    for (expected, records, kept), (found, own_records, between) in zip(whole, each, strict=True):
        assert kept[0] > 0
        assert between == [0, 0, 0]
        assert all((found[name] - value).norm() <= 1e-5 * value.norm() for name, value in expected.items())
        assert all(torch.equal(value, own_records[name]) for name, value in records.items())


def test_configuration_of_a_dict_a_file_and_the_estimator(tsm, tmp_path, monkeypatch):
    assert not tsm.is_initialized() or tsm.state.sm_activation_offloading
    tsm.init()
    assert tsm.is_initialized()
    assert (tsm.state.hybrid_shard_degree, tsm.state.tp_size, tsm.state.cp_rank, tsm.state.world_size) == (0, 1, 0, 1)
    assert (tsm.state.sm_activation_offloading, tsm.state.activation_loading_horizon) == (True, 2)
    assert tsm.state.rep_rank_process_group is None
    assert not octavo.state.config.sm_activation_offloading  # the wrapper turns it on
    config = {"hybrid_shard_degree": 1, "sm_activation_offloading": False, "delayed_parameter_initialization": True}
    tsm.init(config)
    assert not tsm.state.sm_activation_offloading
    path = tmp_path / "smp.json"
    path.write_text(json.dumps(config | {"activation_loading_horizon": 4}))
    tsm.init(str(path))
    assert tsm.state.activation_loading_horizon == 4
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps({"random_seed": 7, "fsdp_cache_flush_warnings": True}))
    tsm.init()
    assert octavo.state.config.random_seed == 7
    for text, fault in (("{", "is not JSON"), ("[1]", "hybrid_shard_degree"), ('{"hybrid_shard": 8}', "hybrid_shard_degree")):
        monkeypatch.setenv("SM_HP_MP_PARAMETERS", text)
        with pytest.raises(InputError, match=fault):
            tsm.init()
    for config, fault in (
        ({"tensor_parallel_degree": 2}, "tensor 2 does not divide the world of 1"),
        (
            {"tensor_parallel_degree": 2, "expert_parallel_degree": 3},
            "an expert group must be a part of a tensor group, or several groups",
        ),
        ({"expert_parallel_degree": 8}, "do not fit 1 rank:"),
        ({"context_parallel_degree": 2}, "do not fit 1 rank:"),
        (tmp_path / "none.json", "cannot be read"),
        (7, "got int"),
    ):
        with pytest.raises(InputError, match=fault):
            tsm.init(config)
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"expert_parallel_degree": 8}')
    for face, where, machines in (
        ("", "SM_HP_MP_PARAMETERS in the environment", "torchrun's --nproc-per-node"),
        ("PyTorch", 'distribution["smdistributed"]["modelparallel"]["parameters"]', "that of instance_type and instance_count"),
        ("ModelTrainer", "SMP(…)", "that of Compute(instance_type=…, instance_count=…)"),
    ):
        monkeypatch.setenv("OCTAVO_LAUNCH_FACE", face)
        with pytest.raises(InputError) as refused:
            tsm.init()
        assert f"Degrees are keys of {where}; the number of ranks is {machines}" in str(refused.value)
    with pytest.raises(AttributeError, match=r"torch.sagemaker.state.dp_ranks is not in .*Did you mean dp_rank"):
        tsm.state.dp_ranks  # noqa: B018


def test_transform_says_what_is_not_there(tsm):
    from torch.sagemaker.moe.moe_config import MoEConfig

    tsm.init()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**fsdp_ranks.TINY))
    with pytest.raises(InputError, match=r"the model \(llama\) has no experts"):
        tsm.transform(model, config=MoEConfig(moe_load_balancing="aux_loss"))
    with pytest.raises(InputError, match="cp_comm_type"):
        tsm.transform(model, cp_comm_type="a2a")
    new = tsm.transform(model, config=MoEConfig(smp_moe=False))
    with pytest.raises(InputError, match="already transformed"):
        tsm.transform(new)
    ids = torch.arange(16).view(2, 8)
    out = new(ids)
    assert torch.equal(out.sum(), out.logits.sum())  # SMP's snippet
    assert out.shape == (2, 8, 64)
    assert new(input_ids=ids, labels=ids)["loss"].dim() == 0
    with pytest.raises(AttributeError):
        new(input_ids=ids, labels=ids).sum()
    assert next(new.parameters()).dtype == torch.float32


def test_a_tie_that_accelerate_parts_is_the_configs_again(tsm):
    from transformers import GPT2Config

    tsm.init()
    model = fsdp_ranks.empty(tie_word_embeddings=True)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    names = [name for name, _ in tsm.transform(model).named_parameters()]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    with accelerate.init_empty_weights():  # a model's own code, transformed inside
        other = tsm.transform(AutoModelForCausalLM.from_config(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2)))
    assert other.lm_head.weight is other.transformer.wte.weight
    parted = fsdp_ranks.empty(tie_word_embeddings=False)
    assert "head.weight" in [name for name, _ in tsm.transform(parted).named_parameters()]


def mixtral(**changes):
    torch.manual_seed(0)
    sizes = fsdp_ranks.TINY | {"num_local_experts": 4, "sliding_window": None} | changes
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes))


@pytest.mark.parametrize(
    ("asked", "ours"),
    [
        (
            {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2},
            {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2},
        ),
        ({"moe_load_balancing": "none"}, {"moe_load_balancing": "none", "moe_z_loss_coeff": 0.001}),
        ({}, {"moe_load_balancing": "sinkhorn", "moe_z_loss_coeff": 0.001}),
        ({"moe_load_balancing": "balanced"}, {"moe_load_balancing": "balanced", "moe_z_loss_coeff": 0.001}),
        ({"smp_moe": False, "moe_load_balancing": "sinkhorn"}, {}),
    ],
    ids=str,
)
def test_a_configuration_of_experts_does_what_the_section_of_a_run_file_does(tsm, asked, ours):
    from torch.sagemaker.moe.moe_config import MoEConfig
    from torch.sagemaker.moe.moe_layer import MoELayer

    tsm.init()
    ids = torch.arange(32).view(2, 16)
    switched_on = {"output_router_logits": True, "router_aux_loss_coef": 0.1}  # in the model's config
    model = tsm.transform(mixtral(**switched_on), config=MoEConfig(**asked))
    beside = octavo.transform(mixtral(**switched_on), dtype=torch.float32, moe=ours)
    losses = [each(input_ids=ids, labels=ids).loss for each in (model, beside)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    assert model.spec == beside.spec
    for loss in losses:
        loss.backward()
    for one, other in zip(model.parameters(), beside.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert sum(isinstance(module, MoELayer) for module in model.modules()) == 2
    assert not isinstance(model, MoELayer)
    assert len({MoELayer, torch.nn.Linear}) == 2  # in the sets of policies


def test_what_a_configuration_of_experts_asks_for_is_said_or_refused(tsm, capsys):
    from torch.sagemaker.moe.moe_config import MoEConfig
    from torch.sagemaker.moe.moe_layer import MoELayer

    tsm.init()
    assert MoEConfig() == MoEConfig(True, 12345, "sinkhorn", False, True, 0.001, 0.001, False)
    for config, words in (
        (MoEConfig(moe_load_balancing="none", global_token_shuffle=True), "not shuffled between ranks"),
        ({"smp_moe": True}, "MoEConfig"),
    ):
        with pytest.raises(InputError, match=words):
            tsm.transform(mixtral(), config=config)
    for asked, words in (
        ({"moe_load_balancing": "sinkhorm"}, "Did you mean 'sinkhorn'"),
        ({"moe_aux_loss_coeff": float("nan")}, "moe_aux_loss_coeff = nan is no coefficient"),
        ({"moe_z_loss_coeff": -1}, "moe_z_loss_coeff = -1"),
        ({"moe_z_loss_coeff": "0.1"}, "moe_z_loss_coeff = '0.1'"),
        ({"global_token_shuffle": "no"}, "global_token_shuffle = 'no' is neither True nor False"),
    ):
        with pytest.raises(InputError, match=words):
            MoEConfig(**asked)
    with pytest.raises(InputError, match=r"octavo\.nn\.LayerNormMoE"):
        MoELayer(8)
    assert not isinstance(torch.nn.Linear(1, 1), MoELayer)
    for asked, words in (
        ({}, ()),
        ({"moe_aux_loss_coeff": 0.3}, ('moe_aux_loss_coeff=0.3) has no effect with moe_load_balancing="sinkhorn"',)),
        ({"moe_load_balancing": "balanced"}, ("SMP publishes no definition",)),
    ):
        process.said.clear()
        capsys.readouterr()
        tsm.transform(mixtral(), config=MoEConfig(moe_z_loss_coeff=0, **asked))
        said = capsys.readouterr().err
        assert said.count("\n") == len(words)
        assert all(word in said for word in words)
    process.said.clear()
    capsys.readouterr()
    others = {"random_seed": 7, "moe_all_to_all_dispatcher": False, "use_cpu_initialization": 1, "global_token_shuffle": None}
    for _ in range(2):
        tsm.transform(mixtral(), config=MoEConfig(moe_load_balancing="aux_loss", **others))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[2].partition("=")[0].partition(":")[0] for line in said] == [
        "MoEConfig", "MoEConfig(random_seed", "MoEConfig(moe_all_to_all_dispatcher", "MoEConfig(use_cpu_initialization",
    ]  # fmt: skip


def test_attention_modules_are_softmax_by_hand(tsm):
    from torch.sagemaker.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention

    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5
    causal = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    expected = (causal.softmax(-1) @ v.double().repeat_interleave(2, 1)).float()
    grouped = FlashGroupedQueryAttention()
    torch.testing.assert_close(grouped(q, (k, v), causal=True, layout="b h s d"), expected)
    torch.testing.assert_close(grouped(q, torch.cat((k, v), 1), causal=True, layout="b h s d"), expected)
    swapped = grouped(q.transpose(1, 2), (k.transpose(1, 2), v.transpose(1, 2)), causal=True)
    torch.testing.assert_close(swapped.transpose(1, 2), expected)
    both = FlashSelfAttention()((k, k, v), layout="b h s d")
    torch.testing.assert_close(both, torch.nn.functional.scaled_dot_product_attention(k, k, v))
    with pytest.raises(InputError, match="ALiBi"):
        FlashSelfAttention(use_alibi=True)
    from torch.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention

    model = AutoModelForCausalLM.from_config(LlamaConfig(**fsdp_ranks.TINY)).eval()
    ids, weights = torch.randint(1, 64, (2, 8)), model.state_dict()
    expected = model(ids).logits
    written = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for layers in (model.model.layers[1:], model.model.layers):  # with the cache that a config has by default
        for layer in layers:
            layer.self_attn = LlamaFlashAttention(model.config)
        model.load_state_dict(weights)
        torch.testing.assert_close(model(ids).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), written)
    twin = pickle.loads(pickle.dumps(model))  # noqa: S301
    assert torch.equal(twin(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["past_key_values", "cache", None])
def test_an_attention_layer_takes_its_cache_by_either_name_and_without(tsm, name):
    """transformers 5.24 renamed past_key_values to cache."""
    from torch.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention

    config = LlamaConfig(**fsdp_ranks.TINY, attn_implementation="sdpa")
    layers = [LlamaFlashAttention(config).eval() for _ in range(2)]
    x = torch.randn(2, 6, config.hidden_size)
    rotary = LlamaRotaryEmbedding(config)
    whole = [layer(x, rotary(x, torch.arange(6)[None]))[0] for layer in layers]
    cache = DynamicCache(config=config)
    for first, last in ((0, 4), (4, 5), (5, 6)):
        table = rotary(x, torch.arange(first, last)[None])
        for layer, wanted in zip(layers, whole, strict=True):
            given = (x[:, first:last], table, None)
            found = layer(*given, cache)[0] if name is None else layer(*given, **{name: cache})[0]
            torch.testing.assert_close(found, wanted[:, first:last])
    assert [cache.get_seq_length(layer) for layer in range(2)] == [6, 6]
    assert [layer.layer_idx for layer in layers] == [0, 1]
    one = {"past_key_values": cache, "cache": cache}
    layers[0](x[:, :1], rotary(x, torch.arange(6, 7)[None]), **one)
    with pytest.raises(InputError, match="two names of one argument: give one"):
        layers[0](x, rotary(x, torch.arange(6)[None]), **one | {"cache": DynamicCache(config=config)})


def test_values_of_every_kind_are_read_back_and_other_state_dicts_refused(tsm, tmp_path):
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save

    queue = AsyncCallsQueue()
    saved = {"a": torch.randn(3), "n": 5, "betas": (0.9, 0.95), "l": [1, {"k": ("v", 2)}, (3,)], "none": None}
    async_save(saved, checkpoint_id=tmp_path / "step", queue=queue)
    assert queue.maybe_finalize_async_calls(blocking=True, skip_sync=True) == [0]
    found = {"a": torch.zeros(3), "n": 0, "betas": (0.0, 0.0), "l": [0, {"k": ("", 0)}, (0,)], "none": 1}
    tensor = found["a"]
    load(found, checkpoint_id=tmp_path / "step")
    assert found["a"] is tensor
    assert torch.equal(found.pop("a"), saved.pop("a"))
    assert found == saved
    for other, words in (
        ({"b": torch.ones(2)}, "does not fit this state dict: Missing key .* b. Load"),
        (
            {"a": torch.ones(4)},
            r"does not fit this state dict: Size mismatch .*\[3\].* FSDP\.optim_state_dict\(model, optimizer\), load at any",
        ),
    ):
        with pytest.raises(InputError, match=words):
            load(other, checkpoint_id=tmp_path / "step")


def test_checkpoint_folders_are_limited(tsm, tmp_path):
    from torch.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs

    for name in ("m-10steps", "m-9steps", "m-100steps", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "m-1steps").write_text("a file")
    assert limit_num_subdirs(str(tmp_path), 2, regex=r"^.*\d+steps$", log=False) == []
    assert limit_num_subdirs(str(tmp_path), 0, regex=r"^.*\d+steps$") == []
    assert limit_num_subdirs(str(tmp_path), 2, sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$") == ["m-9steps"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["m-1steps", "m-10steps", "m-100steps", "other"])
