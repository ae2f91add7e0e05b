"""Sizes that no memory holds are refused by arithmetic: at once, with the figures and the nearest size that fits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from octavo.cli import main
from octavo.config.degrees import fit_degrees
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.hardware import GIB, Device
from octavo.models.sources import load_config
from octavo.plan.dry_run import dry_run
from octavo.plan.memory import exact_bytes
from octavo.plan.run import Target, check
from octavo.plan.sizes import check_layers, check_sizes, least_parameters

ABSURD = {
    "hidden size": (["model.config.hidden_size=10000000"], ["bytes a parameter", "Set model.config.hidden_size to at most"]),
    "layers": (["model.config.num_hidden_layers=1000000"], ["model.config.num_hidden_layers = 1000000: use at most 16384"]),
    "more layers than a list holds": (["model.config.num_hidden_layers=10000000000000"], ["use at most 16384"]),
    "vocabulary": (["model.config.vocab_size=16000000"], ["Set model.config.vocab_size to at most"]),
    "global batch": (
        ["train.global_batch=60000000"],
        ["GiB of token ids in a rank's step", "Set train.global_batch to at most"],
    ),
    "sequence": (
        ["data.sequence_length=16000000", "model.config.max_position_embeddings=16000000"],
        ["data.sequence_length = 16000000", "Set train.global_batch to at most 2"],
    ),
}


def with_memory(monkeypatch, gib):
    """Let this machine have so much memory."""
    for module in ("octavo.hardware", "octavo.plan.sizes"):
        monkeypatch.setattr(f"{module}.system_memory_gib", lambda: gib)


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_sizes_are_refused_at_once(case, tiny_run, capsys, monkeypatch):
    with_memory(monkeypatch, 1.0)
    overrides, parts = ABSURD[case]
    run = tiny_run()
    assert main(["train", str(run.file), *overrides]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(part in message for part in parts), message
    assert not run.output.exists()


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_the_size_named_is_the_largest_that_is_not_refused(key, tiny_run):
    run, value = tiny_run(), 16_000 if key == "num_hidden_layers" else 10**7
    device = Device("a small one", None, None, 1 / 64, "cuda")  # 16 MiB
    degrees = fit_degrees(world_size=1)

    def refusal(size):
        config = RunConfig.from_file(run.file, [f"model.config.{key}={size}"])
        hf_config = load_config(config.model.source, config.model.config)
        try:
            check_sizes(config, hf_config, degrees, 1, device, planned=False, here=False)
        except InputError as error:
            return str(error)
        return None

    words = refusal(value).partition(f"model.config.{key} to at most ")[2].replace(",", " ").replace(".", " ").split()
    most = int(words[0])
    step = 8 if key == "hidden_size" else 1  # whole heads of an even size
    assert refusal(most) is None
    assert refusal(most + step) is not None


def test_the_exact_part_alone_decides(tiny_run):
    config = RunConfig.from_file(tiny_run().file)
    hf_config = load_config(config.model.source, config.model.config)
    count, _ = least_parameters(hf_config)
    degrees = fit_degrees(world_size=1)
    for factor, fits in ((1.001, True), (0.999, False)):
        device = Device("x", None, None, factor * exact_bytes(count, 4) / GIB, "cuda")
        if fits:
            check_sizes(config, hf_config, degrees, 1, device, planned=False, here=True)
            continue
        with pytest.raises(
            InputError, match=r"bytes a parameter.*Set model\.config.*bfloat16.*start 2 ranks with parallel\.hybr"
        ):
            check_sizes(config, hf_config, degrees, 1, device, planned=False, here=True)
        check_sizes(config, hf_config, fit_degrees(world_size=2), 1, device, planned=False, here=True)  # in shards it fits


def test_ranks_of_a_cpu_share_its_memory(tiny_run, monkeypatch):
    config = RunConfig.from_file(tiny_run().file)
    hf_config = load_config(config.model.source, config.model.config)
    whole = exact_bytes(least_parameters(hf_config)[0], 4) / GIB
    replicas = fit_degrees(world_size=2, hybrid_shard_degree=1)
    for kind, refused in (("cuda", False), ("cpu", True)):
        device = Device("x", None, None, 1.5 * whole, kind)
        if refused:
            with pytest.raises(InputError, match="GiB of x for a rank"):
                check_sizes(config, hf_config, replicas, 1, device, planned=False, here=False)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other rank has a machine of its own
        check_sizes(config, hf_config, replicas, 1, device, planned=False, here=False)


def test_an_activation_beyond_the_device_is_refused(tiny_run):
    config = RunConfig.from_file(tiny_run().file)
    hf_config = load_config(config.model.source, config.model.config)
    device = Device("x", None, None, 1.0, "cuda")
    row = config.data.sequence_length * hf_config.hidden_size * 2
    most = GIB // row
    check_sizes(config, hf_config, fit_degrees(world_size=1), most, device, planned=False, here=False)
    with pytest.raises(InputError, match=rf"Set train\.micro_batch to at most {most}\."):
        check_sizes(config, hf_config, fit_degrees(world_size=1), most + 1, device, planned=False, here=False)


def test_own_code_is_counted_from_below():
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    least, spec = least_parameters(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert spec is None
    assert 0 < least <= sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(InputError, match=r"n_layer = 20000: use at most 16384"):
        check_layers({"n_layer": 20_000})
    config.n_layer = 20_000
    with pytest.raises(InputError, match="20,000 layers, at most 16,384"):
        least_parameters(config)


def test_a_plan_for_other_devices_may_exceed_this_machine(tiny_run, monkeypatch):
    with_memory(monkeypatch, 1e-4)
    config = RunConfig.from_file(tiny_run().file)
    with pytest.raises(InputError, match="GiB of weights, gradients and optimizer states"):
        check(config)
    figures, text = dry_run(check(config, target=Target()))
    assert figures["memory"]["fits"] is False
    assert any("does not fit" in line for line in text)
    with pytest.raises(InputError, match="can be planned"):
        check(RunConfig.from_file(tiny_run("more").file, ["model.config.hidden_size=16000000"]), target=Target())
