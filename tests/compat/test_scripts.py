"""Whole scripts for SMP and Transformer Engine, unchanged, by the one command; their numbers beside Hugging Face and Octavo."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import command_lines
import octavo
from octavo.compat.__main__ import command
from octavo.compat.te.recipes import DelayedScaling

SCRIPTS = Path(__file__).parent / "scripts"
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(*command, ranks=None, code=0, **environment):
    """What a script prints, and its messages; by `python -m octavo.compat`, or with `ranks` by torchrun."""
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port()}"]
    line = [sys.executable, *launcher, "-m", "octavo.compat", *map(str, command)]
    more = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRITON_INTERPRET": "1", **environment}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env={**os.environ, **more}, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def run_forked(folder, *command, environment):
    """The same by torchrun on two ranks, all forked with everything imported."""
    line = ["--nproc-per-node=2", f"--master-port={port()}", "-m", "octavo.compat", *map(str, command)]
    process = command_lines.CommandLine(command_lines.torchrun, folder, line, 2, environment=environment)
    assert process.wait(timeout=300) == 0, process.stderr
    return process.stdout, process.stderr


def run_alone(folder, script):
    """What a script prints in a process that is forked with everything imported."""
    process = command_lines.CommandLine(command_lines.compat, folder, [str(script)], environment={"OMP_NUM_THREADS": "1"})
    assert process.wait(timeout=300) == 0, process.stderr
    return process.stdout


def numbers(text, first):
    """The numbers of the lines that begin with a word."""
    rows = [line.split() for line in text.splitlines() if line.startswith(first)]
    return [[float(word) for word in row if word.lstrip("-").replace(".", "", 1).isdigit()] for row in rows]


def test_fp8_by_smps_snippet_with_backward_inside_and_outside(tmp_path):
    torch.manual_seed(0)
    model = octavo.transform(
        AutoModelForCausalLM.from_config(LlamaConfig(num_key_value_heads=2, **TINY)), dtype=torch.float32, device="cpu"
    )
    expected = []
    for _ in range(4):
        model.zero_grad()
        with octavo.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=32)):
            loss = model(torch.arange(32).view(2, 16)).logits.sum()
        loss.backward()
        expected.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
    out = run_alone(tmp_path, SCRIPTS / "fp8_smp.py")
    assert numbers(out, "norms")[0] == pytest.approx([expected[1], expected[3], loss.item()], rel=1e-6)


def test_half_precision_by_fsdps_policy_and_float32_beside_hugging_face(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_key_value_heads=2, **TINY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(64).view(4, 16)
    expected = []
    for step in range(3):
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append([step, loss.item(), norm.item()])
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRITON_INTERPRET": "1"}
    out, messages = run_forked(tmp_path, SCRIPTS / "mixed_precision.py", "float32", "bfloat16", environment=environment)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):
        for found, wanted in zip(numbers(out, dtype), expected, strict=True):
            assert found == pytest.approx(wanted, rel=tolerance)
    assert messages.count("rotary tables and other buffers stay float32") == 1


def test_layers_of_transformer_engine_or_pytorchs_where_it_is_missing(tmp_path, capsys):
    with_te = run_alone(tmp_path, SCRIPTS / "te_fallback.py")
    runpy.run_path(str(SCRIPTS / "te_fallback.py"))
    without = capsys.readouterr().out
    assert with_te.startswith("te ")
    assert without.startswith("torch ")
    assert numbers(with_te, "te")[0] == pytest.approx(numbers(without, "torch")[0], rel=1e-5)


@pytest.mark.long
def test_spawned_ranks_and_the_workers_of_their_loaders_find_the_names():
    out, _ = run(SCRIPTS / "spawned.py", PORT=str(port()))
    losses = [row[0] for row in numbers(out, "loss")]
    assert len(losses) == 2
    assert 1.0 < losses[1] < losses[0] < 2.0


@pytest.mark.long(lambda degree: degree == "hybrid_shard_degree")
@pytest.mark.parametrize(("degree", "samples"), [("hybrid_shard_degree", 8), ("tensor_parallel_degree", 4)])
def test_an_smp_training_resumes_to_the_same_numbers(tmp_path, degree, samples):
    script, folder = SCRIPTS / "smp_train.py", tmp_path / "checkpoints"
    common = ("--checkpoint_dir", folder, "--num_kept_checkpoints", 2)
    parameters = json.dumps({degree: 2, "delayed_parameter_initialization": True})  # as an estimator hands over
    environment = {"OMP_NUM_THREADS": "1", "SM_HP_MP_PARAMETERS": parameters}
    run_forked(
        *(tmp_path / "one", script, *common, "--metrics", tmp_path / "all.json", "--model_dir", tmp_path / "model"),
        environment=environment,
    )
    assert sorted(path.name for path in folder.iterdir()) == ["llama_v2-3steps", "llama_v2-6steps"]
    rows = json.loads((tmp_path / "all.json").read_text())
    run_forked(
        *(tmp_path / "two", script, *common, "--metrics", tmp_path / "rest.json"),
        *("--resume_from_checkpoint", folder / "llama_v2-3steps"),
        environment=environment,
    )
    assert json.loads((tmp_path / "rest.json").read_text()) == rows[3:]
    # The model folder is Hugging Face's.
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert hf.config.num_hidden_layers == 2
    ids = torch.stack([(torch.arange(32) * (index % 3 + 1) + 7 * index) % 128 for index in range(samples)])
    with torch.no_grad():
        assert hf(input_ids=ids, labels=ids).loss.item() == pytest.approx(rows[-1]["val_loss"], rel=2e-3)
    # The first step is that of Octavo itself on one rank, with the batches of both, or with the one of tensor ranks.
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(hf.config)
    model = octavo.transform(model, params_dtype=torch.float32, device="cpu")
    first = ids[: samples // 2]
    with octavo.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=4)):
        loss = model(input_ids=first, labels=first).loss
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-3)


@pytest.mark.long
def test_the_names_of_the_published_script_train_and_resume_from_a_checkpoint_of_each_kind(tmp_path):
    run_forked(tmp_path / "run", SCRIPTS / "smp_checkpoints.py", tmp_path, environment={"OMP_NUM_THREADS": "1"})
    losses, *resumed = json.loads((tmp_path / "losses.json").read_text())
    assert resumed == [losses[2]] * 4
    config = LlamaConfig(**TINY, num_key_value_heads=1, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(torch.load(tmp_path / "first.bin"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), lr=5e-3, weight_decay=0.1)
    expected = []
    for step in range(3):
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.5
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


def test_an_smp_training_of_experts_by_the_default_configuration(tmp_path):
    parameters = {"SM_HP_MP_PARAMETERS": json.dumps({"expert_parallel_degree": 2}), "OMP_NUM_THREADS": "1"}
    run_forked(tmp_path / "two", SCRIPTS / "smp_experts.py", tmp_path / "losses.json", environment=parameters)
    degree, found = json.loads((tmp_path / "losses.json").read_text())
    assert degree == 2
    # Octavo itself on one rank assigns the experts of each rank's tokens by two micro-batches.
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, sliding_window=None,
    )  # fmt: skip
    moe = {"moe_load_balancing": "sinkhorn", "moe_z_loss_coeff": 0.001}
    model = octavo.transform(AutoModelForCausalLM.from_config(config), dtype=torch.float32, device="cpu", moe=moe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = [model(input_ids=part, labels=part, num_items_in_batch=60).loss for part in ids.chunk(2)]
        sum(losses).backward()
        optimizer.step()
        wanted.append(sum(losses).item())
    with torch.no_grad():
        wanted.append(model.eval()(input_ids=ids, labels=ids).loss.item())
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
def test_a_missing_name_ends_with_the_name_and_the_way(tmp_path):
    script = tmp_path / "old.py"
    script.write_text("import transformer_engine.pytorch as te\nlayer = te.make_graphed_callables(None, ())\n")
    _, messages = run(script, code=2)
    assert messages.strip() == (
        f"octavo: {script}, line 2: transformer_engine.pytorch.make_graphed_callables is not in Octavo's compatibility layer. "
        "octavo.graphed(model) records a training step as a CUDA graph. docs/migrating.md has the table of names."
    )
    for arguments, fault in (
        ([], "no script given"),
        (["-m"], "no script given"),
        (["none.py"], "'none.py' does not exist"),
        (["--replace"], "unknown option --replace"),
    ):
        with pytest.raises(octavo.errors.InputError, match=fault):
            command(arguments)
    assert command(["-c", "print(1)"])[-2:] == ["-c", "print(1)"]
