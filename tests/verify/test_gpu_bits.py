"""`octavo verify --gpu`: the bits of steps, which a CPU repeats too, and the report of those that differ."""

import pytest
import torch

import octavo
import ranks
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.models.lora import adapted
from octavo.models.sources import load_config
from octavo.plan.run import Target, check
from octavo.verify import gpu

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
RUN = {
    "data": {"source": "python:docstrings", "sequence_length": 32, "vocab_size": 512, "packing": "documents"},
    "train": {"steps": 9, "global_batch": 8, "offload": True, "output": "runs/never"},
}


def few(world, source="llama-1b", **sections):
    return gpu.of_few_layers(RunConfig.from_dict({**RUN, "model": {"source": source, "config": SIZES}, **sections}), world)


def twice(config, changed):
    """The bits of two trainings; before the second one bit of a weight is another, if asked for."""
    octavo.init(config.parallel.model_dump())
    first = gpu.trained(config)
    if not changed:
        return [first, gpu.trained(config)]
    build_model = gpu.build_model

    def build(*arguments, **options):
        model = build_model(*arguments, **options)
        with torch.no_grad():
            model.layers[1].ffn.fc1.weight.view(torch.int32)[3, 5] ^= 1
        return model

    gpu.build_model = build
    return [first, gpu.trained(config)]


@pytest.mark.parametrize("degree", [1, 2])
def test_steps_repeat_to_the_bit(degree):
    config = few(degree, parallel={"tensor_parallel_degree": degree})
    found = ranks.run(degree, twice, config, False)
    plan = check(config, target=Target(world_size=degree))
    figures, text = gpu.report(plan, found, [[first] for first, _ in found])
    assert figures["verified"]
    assert [line.split()[0] for line in text[2:]] == ["equal", "equal"]
    assert {name.split()[0] for name in found[0][0]} == {
        *("gradient", "loss", "norm", "parameter", "exp_avg", "exp_avg_sq"),
        "history",
    }


def test_one_bit_is_named():
    config = few(1)
    ((first, second),) = ranks.run(1, twice, config, True)
    figures, text = gpu.report(check(config), [[first, second]], [[first]])
    repeated, sequential = figures["comparisons"]
    assert not figures["verified"]
    assert not repeated["equal"]
    assert sequential["equal"]
    assert any(line.startswith(f"DIFFERS  repeated: {repeated['first']}") for line in text)
    last = "parameter layers.1.ffn.fc1.weight"
    assert first[last] != second[last]


def test_bits_know_their_places():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        x = torch.randn(1000).to(dtype)
        swapped = x.clone()
        swapped[[3, 900]] = x[[900, 3]]
        assert gpu.bits_of(x) == gpu.bits_of(x.clone())
        assert gpu.bits_of(x) != gpu.bits_of(swapped)


def test_two_layers_of_each_kind_of_full_width():
    config = RunConfig.from_dict({**RUN, "model": {"source": "mistral-7b"}})
    found = gpu.of_few_layers(config, 4)
    hf_config = load_config(found.model.source, found.model.config)
    assert hf_config.num_hidden_layers == 2
    assert hf_config.hidden_size == 4096
    assert found.train.deterministic


def test_patterns_of_single_layers_and_adapters_from_elsewhere():
    lora = {"load": "nowhere", "rank": 4, "alpha": 8.0, "targets": ["layers.31.self_attn.*_proj"], "rslora": False}
    sections = {"model": {"source": "mistral-7b"}, "fp8": {"skip": ["*.31.*"]}, "lora": lora | {"save_whole": []}}
    found = gpu.of_few_layers(RunConfig.from_dict({**RUN, **sections}), 2)
    plan = check(found, target=Target(world_size=2), notes=False)
    assert plan.hf_config.num_hidden_layers == 3
    skipped = {name for name, state in states_of(plan.model_on_meta) if state.skipped}
    assert {name.rpartition(".")[0] for name in skipped} == {"layers.2.self_attention", "layers.2.ffn"}
    targets = adapted(plan.model_on_meta).targets
    assert targets == tuple(f"model.layers.2.self_attn.{name}_proj" for name in "qkvo")


def test_without_gpus_it_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"--gpu: there are 0 GPUs, and --ranks is 2\. Without --gpu"):
        gpu.verify_on_gpus(few(2), 2)
    assert main(["verify", "presets/demo.toml", "--gpu", "--output", str(tmp_path / "verify.json")]) == 2
    assert "there are 0 GPUs. Without" in capsys.readouterr().err
    assert not (tmp_path / "verify.json").exists()
