"""`octavo migrate`: what a script uses, told without running it, and the run file of SMP's arguments."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.compat.migrate.known import UNKNOWN
from octavo.compat.migrate.names import LIBRARIES, NAMES, STATE, find, library_of
from octavo.compat.migrate.report import lines, runs_unchanged
from octavo.compat.migrate.run_file import run_file
from octavo.compat.migrate.script import read
from octavo.compat.sdk import SHIM as SDK
from octavo.compat.smp.beside import SMDDP
from octavo.compat.smp.init import state
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE
from octavo.config.run import RunConfig
from octavo.errors import InputError

TRAIN = """\
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.sagemaker.delayed_param import DelayedParamIniter
from accelerate import Accelerator
open("ran", "w")
tsm.init()
accelerator = Accelerator(mixed_precision="fp8")
model = tsm.transform(build(), cp_comm_type="p2p")
initer = DelayedParamIniter(model)
model = FSDP(
    model,
    limit_all_gathers=True,
    param_init_fn=initer.get_param_init_fn(),
)
with te.fp8_autocast(fp8_group=tsm.state.world_process_group):
    accelerator.backward(model(1))
model.cuda()
dist.init_process_group("nccl")
"""
ESTIMATOR = """\
from sagemaker.pytorch import PyTorch
degree = 2 ** 3
hyperparameters = {"max_context_width": 16384, "train_batch_size": 4, "bf16": 1, "use_smp_implementation": 1}
hyperparameters.update(fp8=1, lr=2e-4)
hyperparameters["hf_pretrained_model_name_or_dir"] = "model"
distribution = {"torch_distributed": {"enabled": True}, "smdistributed": {"modelparallel": {"enabled": True,
    "parameters": {"context_parallel_degree": degree, "hybrid_shard_degree": 8}}}}
PyTorch(entry_point="train.py", hyperparameters=hyperparameters, instance_type="ml.p5.48xlarge", instance_count=2,
        distribution=distribution, role=get_role()).fit({"train": "channels/train", "test": "/data/test"})
"""
ARGUMENTS = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--max_context_width", type=int, default=4096)
parser.add_argument("--model_type", default="llama_v2")
parser.add_argument("--hidden_width", default=512)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--lr_decay_style", default="linear")
parser.add_argument("--lr_decay_iters", default=100)
parser.add_argument("--warmup", default=0.1)
parser.add_argument("--sharding_strategy", default="shard_grad_op")
parser.add_argument("--own_option", default=3)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"train.py": TRAIN, "launch.py": ESTIMATOR, "arguments.py": ARGUMENTS}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_row_is_of_a_library_and_says_what_it_does():
    for name, row in NAMES.items():
        assert library_of(name) in LIBRARIES.values(), name
        assert row.here, name
        assert row.name == name


def test_what_the_table_promises_is_in_the_compatibility_layer_and_the_other_way_round():
    for shim in (SMP, TE, SDK):
        there = set(shim.modules) | {
            f"{module}.{name}" for module, parts in shim.modules.items() for names in parts.values() for name in names.split()
        }
        for name in there:
            assert find(name).status != "absent", name
        promised = {row.name.partition("(")[0] for row in NAMES.values() if library_of(row.name) == LIBRARIES[shim.root]}
        beside = set(SMDDP.modules) if shim is SDK else set()
        assert {name for name in promised if find(name).status != "absent"} <= there | beside


def test_each_line_of_a_script_is_told_and_nothing_of_it_runs(place, capsys):
    modules = set(sys.modules)
    assert main(["migrate", "train.py", "--json"]) == 0
    assert not {name for name in set(sys.modules) - modules if name.startswith(("transformer_engine", "torch.sagemaker"))}
    assert not (place / "ran").exists()
    found = json.loads(capsys.readouterr().out)["scripts"][0]
    uses = {(use["line"], use["name"].rpartition(".")[2]) for use in found["uses"]}
    assert uses >= {
        (1, "sagemaker"), (2, "pytorch"), (3, "FullyShardedDataParallel"), (4, "DelayedParamIniter"), (5, "Accelerator"),
        (7, "init"), (8, 'Accelerator(mixed_precision="fp8")'), (9, "transform"), (9, "transform(cp_comm_type=)"),
        (11, "FullyShardedDataParallel"), (13, "FullyShardedDataParallel(limit_all_gathers=)"),
        (14, "FullyShardedDataParallel(param_init_fn=)"), (14, "get_param_init_fn"), (16, "fp8_autocast"),
        (16, "world_process_group"), (17, "backward"),
    }  # fmt: skip
    assert {(one["line"], one["what"]) for one in found["needs_gpu"]} == {(18, ".cuda()"), (19, '"nccl"')}
    assert found["runs_unchanged"]
    assert main(["migrate", "train.py"]) == 0
    text = capsys.readouterr().out
    assert "It runs unchanged on a GPU: python -m octavo.compat train.py" in text
    assert "own" not in text or "octavo.fp8_autocast" in text


def test_an_except_excuses_what_its_own_try_does_not_find(place):
    header = "try:\n    import transformer_engine.pytorch as te\nexcept ImportError:\n    te = None\n"
    (place / "found.py").write_text(f"{header}import transformer_engine.pytorch.cpu_offload\nte.ops.Linear(8, 8)\n")
    assert lines(read(place / "found.py"))[-1] == (
        "To change first: transformer_engine.pytorch.cpu_offload (line 5), transformer_engine.pytorch.ops.Linear (line 6)."
    )
    (place / "lacking.py").write_text(
        "try:\n    import transformer_engine.pytorch as te\n    import transformer_engine.pytorch.cpu_offload as co\n"
        "except ImportError:\n    te = None\nif te:\n    te.ops.Linear(8, 8), co.Offload()\n"
    )
    assert "It runs unchanged: " in lines(read(place / "lacking.py"))[-2]


def test_names_that_are_not_there_come_first_to_change(place, capsys):
    (place / "old.py").write_text(
        "import torch.sagemaker as tsm\nimport transformer_engine.pytorch as te\ntsm.frobnicate()\nx = te.cpp_thing\n"
        "from transformer_engine.common.recipe import MXFP8BlockScaling\nfrom torch.sagemaker.nn.huggingface import nothing\n"
    )
    assert main(["migrate", "old.py"]) == 1
    text = capsys.readouterr().out
    for name in (
        "torch.sagemaker.frobnicate (line 3)",
        "transformer_engine.pytorch.cpp_thing (line 4)",
        "torch.sagemaker.nn.huggingface.nothing (line 6)",
    ):
        assert name in text.splitlines()[-1]
    assert find("torch.sagemaker.frobnicate").status == "absent"
    assert find("sagemaker.model.Model").status == "absent"
    assert find("sagemaker.modules.train.ModelTrainr").change.startswith("Did you mean ModelTrainer?")
    for home in ("train", "train.model_trainer", "modules.train"):
        row = find(f"sagemaker.{home}.ModelTrainer")
        assert (row.here, row.change) == ("for jobs of this machine", "from octavo.launch import ModelTrainer")
    assert find("sagemaker.train.configs.Tag").change == ""
    assert find("sagemaker.core.helper.session_helper.get_execution_role").status == "accepted"
    assert find("sagemaker.core.image_uris.retrieve").status == "accepted"
    assert find("sagemaker.train.distributed.MPI").status == "differs"
    assert find("torch.sagemaker.state.cp_sise").change == "Did you mean cp_size?"
    assert all(hasattr(state, name) for name in STATE)
    assert "octavo.graphed" in find("transformer_engine.pytorch.make_graphed_callables").change
    (place / "ours.py").write_text('from octavo.launch import PyTorch\nPyTorch("t.py", instance_type="local")\n')
    (place / "t.py").write_text("")
    assert main(["migrate", "ours.py"]) == 0
    assert capsys.readouterr().out.endswith("Estimator: local: one process.\n\nIts estimator is Octavo's already.\n")
    (place / "plain.py").write_text("import torch\n")
    assert main(["migrate", "plain.py"]) == 0
    assert "nothing of SMP" in capsys.readouterr().out


def test_a_run_file_has_the_arguments_in_its_own_units(place, capsys):
    assert main(["migrate", "launch.py", "--run-file", "run.toml"]) == 0
    config = RunConfig.from_file(place / "run.toml")
    assert (config.model.source, config.model.load, config.model.dtype) == ("model", True, "bfloat16")
    assert (config.data.sequence_length, config.data.validation_source) == (16384, "/data/test/*.json.gz")
    assert config.data.source == f"{place}/channels/train/*.json.gz"
    assert (config.parallel.context_parallel_degree, config.parallel.hybrid_shard_degree) == (8, 8)
    assert (config.fp8.enabled, config.fp8.recipe, config.fp8.amax_history_len, config.fp8.head) == (
        True,
        "delayed",
        1024,
        False,
    )
    assert (config.optimizer.lr, config.optimizer.min_lr_fraction, config.optimizer.weight_decay) == (2e-4, 0.05, 0.2)
    assert (config.train.global_batch, config.train.micro_batch, config.train.recompute) == (8, 4, True)  # 16 ranks / 8 = 2
    assert config.optimizer.warmup_steps == round(0.0032 * 47683)
    assert "octavo train run.toml" in capsys.readouterr().err
    assert main(["migrate", "launch.py", "--run-file", "run.toml"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["migrate", "arguments.py", "--run-file", "two.toml"]) == 2
    assert "--world-size" in capsys.readouterr().err
    text = run_file([read(place / "arguments.py")], world_size=4)
    config = RunConfig.from_dict(tomllib.loads(text))
    assert config.model.source == "llama2-7b"
    assert config.model.config["hidden_size"] == 512
    assert config.model.config["num_key_value_heads"] == 12
    assert (config.train.steps, config.train.global_batch) == (2500, 2 * 2 * 4)
    assert (config.optimizer.schedule, config.optimizer.warmup_steps) == ("linear", 10)
    assert (config.parallel.reshard_after_forward, config.fp8.enabled) == (False, False)
    whole = ARGUMENTS.replace("shard_grad_op", "full_shard")
    (place / "whole.py").write_text(whole)
    whole_config = RunConfig.from_dict(tomllib.loads(run_file([read(place / "whole.py")], world_size=4)))
    assert whole_config.parallel.reshard_after_forward is True
    (place / "usual.py").write_text(whole.replace('parser.add_argument("--sharding_strategy", default="full_shard")\n', ""))
    usual_config = RunConfig.from_dict(tomllib.loads(run_file([read(place / "usual.py")], world_size=4)))
    assert usual_config.parallel.reshard_after_forward == "auto"  # SMP's example names no strategy here
    assert "no key for: own_option = 3." in text
    assert "ends after 100 iterations" in text


def test_a_training_script_and_its_estimator_make_one_run_file(place):
    text = run_file([read(place / "arguments.py"), read(place / "launch.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert config.data.sequence_length == 16384  # the estimator's is over the default of the script
    assert config.train.global_batch == 4 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "source", "validated", "told"),
    [
        ({}, "/data/*.json.gz", 5, "zipped_data = 1 (SMP's default)"),
        ({"zipped_data": 1}, "/data/*.json.gz", 5, "zipped_data = 1"),
        ({"zipped_data": 0}, "/data/*.json", 5, "zipped_data = 0"),
        ({"zipped_data": "0"}, "/data/*.json", 5, "zipped_data = 0"),
        ({"dataset_type": "hf", "zipped_data": 1}, "/data", 5, "dataset_type = 'hf'"),
        ({"use_synthetic_data": 1}, "/data/*.json.gz", 0, "use_synthetic_data = 1 trains on random tokens"),
    ],
)
def test_data_of_a_run_file_are_those_that_the_example_reads(place, arguments, source, validated, told):
    hyperparameters = {"max_context_width": 64, "validation_freq": 5, "training_dir": "/data/", "test_dir": "/data"} | arguments
    (place / "launch.py").write_text(
        "from sagemaker.pytorch import PyTorch\n"
        f'PyTorch(entry_point="train.py", instance_type="local", hyperparameters={hyperparameters})\n'
    )
    text = run_file([read(place / "launch.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert (config.data.source, config.data.validation_source) == (source, source)
    assert config.train.validate_every == validated
    assert told in text


def test_a_kind_of_data_without_a_reader_is_refused(place):
    (place / "launch.py").write_text(
        "from sagemaker.pytorch import PyTorch\n"
        'PyTorch(entry_point="t.py", instance_type="local", hyperparameters={"max_context_width": 8, "dataset_type": "nemo"})\n'
    )
    with pytest.raises(InputError, match="dataset_type = 'nemo' is data that Octavo does not read: 'gpt_jsonl' and 'hf' are"):
        run_file([read(place / "launch.py")])


def test_values_are_calculated_within_bounds_and_never_run(place):
    (place / "sum.py").write_text(
        "import sagemaker.pytorch as sp\na = 10 ** 10 ** 10\nb = 'x' * 10 ** 9\nc = 3 * 4 - 2\nd = 1 / 0\ne = -c\n"
        "f = {**{'k': 1}, 'l': c}\ng = open('ran', 'w')\nh = f['l'] + f['k']\ni = dict(f, m=2)\nj = float('1e-4')\n"
        "k = int(1e999)\nsp.PyTorch(hyperparameters=dict(a=a, b=b, c=c, d=d, e=e, g=g, h=h, i=i, j=j, k=k))\n"
    )
    found = read(place / "sum.py").estimators[0]["hyperparameters"]
    assert found == {
        "a": UNKNOWN, "b": UNKNOWN, "c": 10, "d": UNKNOWN, "e": -10, "g": UNKNOWN, "h": 11, "i": {"k": 1, "l": 10, "m": 2},
        "j": 1e-4, "k": UNKNOWN,
    }  # fmt: skip
    assert not (place / "ran").exists()


MIXTURE = """\
import argparse
import torch.sagemaker as tsm
from torch.sagemaker.moe.moe_config import MoEConfig
parser = argparse.ArgumentParser()
parser.add_argument("--max_context_width", default=512)
parser.add_argument("--model_type", default="mixtral")
parser.add_argument("--moe", default=1)
parser.add_argument("--moe_load_balancing", default="KIND")
parser.add_argument("--num_local_experts", default=4)
model = tsm.transform(model, config=MoEConfig(moe_load_balancing="KIND"))
"""


@pytest.mark.parametrize(("kind", "comment"), [("aux_loss", None), ("none", None), ("sinkhorn", None), ("balanced", None)])
def test_experts_of_a_script_become_the_section_of_a_run_file(place, kind, comment):
    (place / "mixture.py").write_text(MIXTURE.replace("KIND", kind))
    script = read(place / "mixture.py")
    assert runs_unchanged(script)
    text = run_file([script], world_size=2)
    config = RunConfig.from_dict(tomllib.loads(text))
    wanted = {"moe_load_balancing": kind, "moe_z_loss_coeff": 0.001}
    assert config.moe.given == wanted | ({"moe_aux_loss_coeff": 0.001} if kind == "aux_loss" else {})
    assert (config.model.source, config.model.config["num_local_experts"]) == ("mixtral-8x7b", 4)
    assert comment is None or comment in text
    (place / "dense.py").write_text(MIXTURE.replace('"--moe", default=1', '"--moe", default=0'))
    assert not RunConfig.from_dict(tomllib.loads(run_file([read(place / "dense.py")], world_size=2))).moe.given


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        ("", None),
        ("moe_load_balancing='balanced'", None),
        ("smp_moe=False", None),
        ("**given", None),
        ("moe_load_balancing='none', global_token_shuffle=True", "global_token_shuffle=true"),
        ("moe_load_balancing='none', global_token_shuffle=False", None),
    ],
)
def test_a_refused_moe_config_is_to_change_first(place, arguments, refused):
    (place / "mixture.py").write_text(MIXTURE.replace('moe_load_balancing="KIND")', f"{arguments})"))
    script = read(place / "mixture.py")
    assert runs_unchanged(script) == (refused is None)
    absent = [use.row.name for use in script.uses if use.row is not None and use.row.status == "absent"]
    assert absent == ([] if refused is None else [f"torch.sagemaker.moe.moe_config.MoEConfig({refused})"])


def test_a_notebook_is_read_cell_by_cell(place):
    cells = [
        {"cell_type": "code", "source": "%%bash\necho hi (\n"},
        {"cell_type": "markdown", "source": ["# text"]},
        {"cell_type": "code", "source": ["%pip install x\n", "import torch.sagemaker as tsm\n", "x = !ls\n", "tsm?\n"]},
        {"cell_type": "code", "source": "%%time\ntext = ('%d'\n% 3)\ntsm.init()\n"},
        {"cell_type": "code", "source": "%%writefile train.py\nimport accelerate\n"},
    ]
    (place / "book.ipynb").write_text(json.dumps({"cells": cells}))
    script = read(place / "book.ipynb")
    assert [(script.place(use.line), use.name) for use in script.uses] == [
        ("2:2", "torch.sagemaker"),
        ("3:4", "torch.sagemaker.init"),
    ]
    assert script.notes == ["code cell 1 is not read: %%bash", "code cell 4 is not read: %%writefile train.py"]
    assert lines(script)[-1].startswith("As far as it is read, it runs unchanged, with this in its first cell: import octavo")
    cells[3]["source"] = "x = 1\ndef f(:\n"
    (place / "book.ipynb").write_text(json.dumps({"cells": cells}))
    assert "code cell 3 is not read, line 2: invalid syntax: 'def f(:'" in read(place / "book.ipynb").notes
    (place / "book.ipynb").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is no notebook"):
        read(place / "book.ipynb")


def test_names_of_a_star_import_are_followed_as_far_as_they_are_known(place):
    (place / "star.py").write_text("from torch.sagemaker import *\ninit()\nothers()\nstate.rank\n")
    script = read(place / "star.py")
    names = [(use.line, use.name) for use in script.uses]
    assert names == [(1, "torch.sagemaker"), (2, "torch.sagemaker.init"), (4, "torch.sagemaker.state.rank")]
    assert script.notes == ["line 1: of import *, only names that Octavo has are seen"]
    assert "As far as it is read, it runs unchanged" in lines(script)[-2]


@pytest.mark.parametrize(
    ("handler", "unchanged"),
    [
        ("except ImportError:\n    thing = None", True),
        ("except (ValueError, ModuleNotFoundError):\n    thing = None", True),
        ("except:\n    pass", True),
        ("except ValueError:\n    pass", False),
        ("except ImportError:\n    raise SystemExit('no')", False),
        ("except ImportError:\n    sys.exit(1)", False),
    ],
)
def test_a_script_with_a_way_around_an_absent_name_runs_unchanged(place, handler, unchanged):
    (place / "try.py").write_text(
        f"import sys\ntry:\n    from transformer_engine.pytorch import cpp_thing as thing\n{handler}\nif thing:\n    thing(1)\n"
    )
    assert runs_unchanged(read(place / "try.py")) == unchanged


def test_a_call_of_an_estimator_that_is_refused_or_unknown_is_told(place):
    call = "from sagemaker.pytorch import PyTorch\nPyTorch('t.py', instance_type='ml.p4d.24xlarge', %s)\n"
    for arguments, text, unchanged in (
        ("hyperparameters={'fp8': 1}", "have no FP8 products", False),
        ("git_config={}", "clone the repository", False),
        ("distribution=made()", "Estimator: its distribution cannot be told", True),
        ("distribution={'torch_distributed': {'enabled': x}}", "Estimator: its distribution cannot be told", True),
        ("**made()", "cannot be told without running", True),
        ("role=role()", "Estimator: ml.p4d.24xlarge: one process", True),
    ):
        (place / "call.py").write_text(call % arguments)
        script = read(place / "call.py")
        told = lines(script)
        assert any(text in line for line in told), told
        assert runs_unchanged(script) == unchanged
        assert ("the arguments of an estimator marked x" in told[-1]) == (not unchanged)


def test_a_script_in_another_encoding_is_read(place):
    (place / "latin.py").write_bytes("# coding: latin-1\nimport torch.sagemaker  # é\n".encode("latin-1"))
    assert [use.line for use in read(place / "latin.py").uses] == [2]


@pytest.mark.parametrize(
    ("text", "part"),
    [("def f(:\n", "line 1: "), ("x = (1,\n", "line 1: "), ("(" * 3000, "")],
)
def test_what_is_no_python_is_refused_with_its_line(place, text, part):
    (place / "bad.py").write_text(text)
    with pytest.raises(InputError) as refused:
        read(place / "bad.py")
    assert part in str(refused.value)
    assert len(str(refused.value)) < 300
    with pytest.raises(InputError, match="cannot be read"):
        read(place / "nowhere.py")


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('"train_batch_size": 4', '"train_batch_size": batch()', "not known without running the script: train_batch_size"),
        ("degree = 2 ** 3", "degree = 8\nif big():\n    degree = 4", "the script: context_parallel_degree"),
        ("degree = 2 ** 3", "degree = 3", "context 3 does not divide hybrid_shard 8"),
        ("degree = 2 ** 3", "degree = len(x)", "the script: context_parallel_degree"),
        (
            "hyperparameters.update(fp8=1, lr=2e-4)",
            "hyperparameters.update(given())",
            "the hyperparameters are computed at run",
        ),
        ("hyperparameters.update(fp8=1, lr=2e-4)", "if x:\n    hyperparameters['fp8'] = 0", "the script: fp8"),
        (
            "hyperparameters.update(fp8=1, lr=2e-4)",
            "hyperparameters = {**hyperparameters, **more()}",
            "the hyperparameters are",
        ),
        ("hyperparameters=hyperparameters", "hyperparameters=given()", "the hyperparameters are computed at run time"),
        ("hyperparameters=hyperparameters", "**given()", "arguments of the estimator are computed at run time"),
        (
            '"parameters": {"context_parallel_degree": degree, "hybrid_shard_degree": 8}',
            '"parameters": p()',
            "distribution are",
        ),
        ("lr=2e-4", "lr='fast'", "lr = 'fast' is not a number"),
        ("lr=2e-4", "lr=[1, 2]", "lr = [1, 2] is not a number"),
        ("lr=2e-4", "lr=1e999", "lr = inf is not a number"),
        ("lr=2e-4", "lr='nan'", "lr = 'nan' is not a number"),
        ("lr=2e-4", "lr=0", "lr = 0 trains nothing"),
        ('"train_batch_size": 4', '"train_batch_size": 0', "train_batch_size = 0 trains nothing"),
    ],
)
def test_an_estimator_without_known_values_is_no_run_file(place, old, new, part):
    assert old in ESTIMATOR
    (place / "late.py").write_text(ESTIMATOR.replace(old, new))
    with pytest.raises(InputError) as refused:
        run_file([read(place / "late.py")])
    assert part in str(refused.value)


CALL = 'PyTorch(entry_point="train.py", hyperparameters=hyperparameters,'
UPDATE = "hyperparameters.update(fp8=1, lr=2e-4)"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (UPDATE, "hyperparameters |= {'fp8': '1', 'lr': '2e-4'}"),
        (UPDATE, "if __name__ == '__main__':\n    hyperparameters['fp8'] = True\n    hyperparameters['lr'] = 1e-4 * 2"),
        (CALL, 'PyTorch("train.py", "2.3.1", "py311", "src", hyperparameters,'),
        (CALL, 'PyTorch("train.py", **dict(hyperparameters=hyperparameters),'),
    ],
)
def test_the_ways_to_write_an_estimator_are_read_alike(place, old, new):
    assert old in ESTIMATOR
    (place / "other.py").write_text(ESTIMATOR.replace(old, new))
    same, found = (RunConfig.from_dict(tomllib.loads(run_file([read(place / name)]))) for name in ("launch.py", "other.py"))
    for section in ("fp8", "data", "train", "parallel", "optimizer"):
        assert getattr(found, section) == getattr(same, section)


def test_arguments_of_octavos_own_estimator_and_later_ones_count(place):
    text = ESTIMATOR.replace("sagemaker.pytorch", "octavo.launch").replace(", instance_count=2,", ",")
    text = text.replace(
        f'{CALL} instance_type="ml.p5.48xlarge"', 'first = PyTorch("t.py", "src", hyperparameters, "ml.p5.48xlarge", 1'
    )
    start = text.index(".fit(")
    later = "\nfirst.set_hyperparameters(lr=5e-4, max_context_width='8192')\nfirst"
    (place / "ours.py").write_text(f"{text[:start]}{later}{text[start:]}first.set_hyperparameters(lr=1.0)\n")
    text = run_file([read(place / "ours.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert (config.optimizer.lr, config.data.sequence_length, config.train.global_batch) == (5e-4, 8192, 4)
    (place / "two.py").write_text(ESTIMATOR * 2)
    assert "# from the last of 2 calls of an estimator" in run_file([read(place / "two.py")])
    options = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--max_context_width', default='64')\n"
    (place / "options.py").write_text(options + "p.add_argument('--fp8', action='store_true')\n")
    config = RunConfig.from_dict(tomllib.loads(run_file([read(place / "options.py")], world_size=1)))
    assert (config.data.sequence_length, config.fp8.enabled) == (64, False)
    (place / "options.py").write_text(options + "p.add_argument('--lr', default=rate())\n")
    with pytest.raises(InputError, match="the script: lr"):
        run_file([read(place / "options.py")], world_size=1)


def test_a_script_without_arguments_of_smp_is_no_run_file(place):
    with pytest.raises(InputError, match="nothing to write a run file from"):
        run_file([read(place / "train.py")])


PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"


def test_the_page_has_every_name_and_agrees_with_the_table():
    text = PAGE.read_text(encoding="utf-8")
    for shim in (SMP, TE):
        for parts in shim.modules.values():
            for name in " ".join(parts.values()).split():
                assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name
    rows = dict(re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", text, re.M))
    accepted, refused = (
        next(names for names, here in rows.items() if here.startswith(start)) for start in ("no effect", "refused")
    )
    for name, row in NAMES.items():
        argument = re.fullmatch(r".*FullyShardedDataParallel\((\w+)=\)", name)
        if argument:
            assert f"`{argument[1]}`" in text or argument[1] == "device_id", name
            assert (f"`{argument[1]}`" in accepted) == (row.status == "accepted"), name
            assert (f"`{argument[1]}`" in refused) == (row.status == "absent"), name
