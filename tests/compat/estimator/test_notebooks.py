"""Calls as SageMaker's published notebooks for SMP make them: names and arguments in their order, with small scripts.

`model_parallel_v2` of aws/amazon-sagemaker-examples and lab 16 of the workshop on distributed training.
"""

import json
import subprocess
import sys

import pytest

from octavo.compat.sagemaker import distribution, estimator
from octavo.compat.sagemaker.sdk import PyTorch
from octavo.compat.sagemaker.session import Session
from octavo.errors import InputError

SCRIPT = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint_dir", default="/opt/ml/checkpoints")
parser.add_argument("--training_dir", default=os.environ["SM_CHANNEL_TRAIN"])
parser.add_argument("--test_dir", default=os.environ["SM_CHANNEL_TEST"])
parser.add_argument("--model_dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--resume_from_checkpoint")
given, others = parser.parse_known_args()
parameters = json.loads(os.environ["SM_HP_MP_PARAMETERS"])
name = f"rank-{os.environ['RANK']}"
resumed = None
if given.resume_from_checkpoint:
    resumed = pathlib.Path(given.resume_from_checkpoint, name).read_text()
seen = {"parameters": parameters, "world": os.environ["WORLD_SIZE"], "others": others, "resumed": resumed,
        "train": os.listdir(given.training_dir), "test": os.listdir(given.test_dir), "debug": os.environ.get("NCCL_DEBUG")}
folder = pathlib.Path(given.checkpoint_dir, "llama_v2-10steps")
folder.mkdir(parents=True, exist_ok=True)
(folder / name).write_text(os.environ["TRAINING_JOB_NAME"])
pathlib.Path(given.model_dir, f"{name}.json").write_text(json.dumps(seen))
"""
HYPERPARAMETERS = {
    "activation_checkpointing": 1, "auto_wrap_policy": "transformer_auto_wrap_policy", "backward_fetch_policy": "backward_pre",
    "beta1": 0.9, "bf16": 1, "checkpoint_dir": "/opt/ml/checkpoints", "checkpoint_freq": 10, "delayed_param": 1, "epochs": 100,
    "fp8": 0, "lr": 0.0001, "max_steps": 15, "min_lr": 1e-05, "model_type": "llama_v2", "seed": 12345,
    "sharding_strategy": "hybrid_shard", "train_batch_size": 16, "use_smp_implementation": 1, "zipped_data": 0,
}  # fmt: skip
CALL = {
    "entry_point": "train.py", "source_dir": "shared-scripts", "role": "arn:aws:iam::1:role/x", "checkpoint_local_path": None,
    "instance_type": "ml.p4d.24xlarge", "volume_size": 400, "instance_count": 1, "py_version": "py311",
    "framework_version": "2.3.1", "max_run": 86400, "debugger_hook_config": False, "base_job_name": "smp-07b-p4d24x-hs4-cp2",
    "metric_definitions": [{"Name": "base_metric", "Regex": "<><><><><><>"}],
}  # fmt: skip
SAID = {"role", "volume_size", "py_version", "framework_version", "metric_definitions"}
IMAGE = {"framework_version": None, "py_version": "py310", "image_uri": "1.dkr.ecr.us-west-2.amazonaws.com/smp:2"}
WORKSHOP = {
    "framework_version": "2.4.1", "keep_alive_period_in_seconds": 1800, "wait": False,
    "environment": {"HF_TOKEN": "x", "NCCL_DEBUG": "INFO", "NCCL_MIN_NRINGS": "1", "NCCL_IB_TIMEOUT": "22"},
}  # fmt: skip
P5 = {"instance_type": "ml.p5.48xlarge"}
BASE = {"activation_loading_horizon": 2, "hybrid_shard_degree": 4, "sm_activation_offloading": False}
NOTEBOOKS = {
    # name: (SMP's parameters, hyperparameters, other arguments, the refusal)
    "train-gpt-neox-fsdp-tp": (BASE | {"tensor_parallel_degree": 2}, {"model_type": "gpt_neox"}, {}, None),
    "finetuning-gpt-neox-fsdp-tp": (BASE | {"tensor_parallel_degree": 2}, {"model_type": "gpt_neox"}, IMAGE, None),
    "train-llama-fsdp-tp": (BASE | {"tensor_parallel_degree": 2}, {}, {}, None),
    "finetuning-llama-fsdp-tp": (BASE | {"tensor_parallel_degree": 2}, {"use_smp_flash_attn": 1}, IMAGE, None),
    "train-llama-fsdp-tp-fp8": (BASE | {"tensor_parallel_degree": 2}, {"fp8": 1}, P5, None),
    "train-llama-fsdp-tp-cp": (BASE | {"tensor_parallel_degree": 2, "context_parallel_degree": 2}, {}, {}, None),
    "train-llama-fsdp-cp": (BASE | {"tensor_parallel_degree": 1, "context_parallel_degree": 2}, {}, {}, None),
    "train-mixtral-fsdp-ep": (BASE | {"expert_parallel_degree": 2}, {"moe": 1, "moe_load_balancing": "sinkhorn"}, {}, None),
    "train-mixtral-fsdp-ep-fp8": (BASE | {"expert_parallel_degree": 2}, {"moe": 1, "fp8": 1}, P5, None),
    "fp8-on-p4d": (BASE, {"fp8": 1}, {}, "A100 40GB, have no FP8 products"),
    "workshop-without-cp": (
        {"delayed_parameter_initialization": True, "hybrid_shard_degree": 8}, {"do_train": True}, WORKSHOP, None,
    ),
    "workshop-cp-fp8": (
        {"context_parallel_degree": 8, "hybrid_shard_degree": 8, "delayed_parameter_initialization": True},
        {"fp8": 1, "max_context_width": 16384, "do_eval": False, "distributed_backend": "nccl"}, P5 | WORKSHOP, None,
    ),
    "beyond-the-gpus": (
        {"hybrid_shard_degree": 16}, {}, P5,
        "degrees do not fit 8 ranks: hybrid_shard 16 x tensor 1 = 16 does not divide the world of 8",
    ),
}  # fmt: skip


def call(parameters, hyperparameters=None, **changes):
    ranks = {
        "torch_distributed": {"enabled": True},
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
    }
    return CALL | {"hyperparameters": HYPERPARAMETERS | (hyperparameters or {}), "distribution": ranks} | changes


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(distribution, "installed_gpus", list)
    monkeypatch.chdir(tmp_path)
    for folder in ("shared-scripts", "data/train", "data/test"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "shared-scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "shared-scripts" / "requirements.txt").write_text("accelerate\n")
    (tmp_path / "data" / "train" / "training.json").write_text("{}")
    (tmp_path / "data" / "test" / "validation.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_call_of_a_notebook_is_accepted_or_refused_by_name(place, capfd, name):
    parameters, hyperparameters, changes, refusal = NOTEBOOKS[name]
    arguments = call(parameters, hyperparameters, **changes)
    if refusal is not None:
        with pytest.raises(InputError) as refused:
            PyTorch(**arguments)
        assert refusal in str(refused.value)
        assert "parallel." not in str(refused.value)
        return
    PyTorch(**arguments)
    said = capfd.readouterr().err
    assert said.endswith(" have no effect on this machine.\n")
    named = set(said.removeprefix("octavo: estimator: ").partition(" have ")[0].split(", "))
    without = {"framework_version"} if "image_uri" in changes else set()
    wanted = SAID - without | {"image_uri", "keep_alive_period_in_seconds", "wait"} & changes.keys()
    assert named == wanted


def test_remote_addresses_need_their_package_or_name_the_way(place):
    from importlib.util import find_spec

    for argument in ("checkpoint_s3_uri", "output_path"):
        arguments = call(BASE, **{argument: "s3://sagemaker-us-west-2-1/experiments/x/"})
        if find_spec("s3fs") is None:
            with pytest.raises(InputError, match=rf"{argument} = 's3://.*pip install 'octavo\[s3\]'"):
                PyTorch(**arguments)
        else:
            PyTorch(**arguments)


def test_the_bucket_of_a_session_is_its_accounts(place):
    class Boto:
        region_name = "us-west-2"

        def client(self, name):
            assert name == "sts"
            return self

        def get_caller_identity(self):
            return {"Account": "123"}

    assert Session(boto_session=Boto()).default_bucket() == "sagemaker-us-west-2-123"
    assert Session(Boto()).boto_region_name == "us-west-2"
    assert Session(default_bucket="mine").default_bucket() == "mine"
    assert Session(default_bucket="mine", default_bucket_prefix="runs").default_bucket_prefix == "runs"
    assert Session(boto_session=Boto()).default_bucket_prefix is None
    with pytest.raises(InputError, match=r"default_bucket is of an account of AWS.*give folders as inputs"):
        Session().default_bucket()


def test_a_notebook_trains_and_resumes_in_its_order(place):
    """Two ranks on a CPU: one job, and one that resumes from its checkpoints, from a thread as in the workshop."""
    arguments = call(BASE | {"hybrid_shard_degree": 2, "tensor_parallel_degree": 1, "context_parallel_degree": 2})
    arguments |= WORKSHOP | {"instance_type": "local", "instance_count": 2, "output_path": "out", "checkpoint_s3_uri": "kept"}
    for name in ("role", "distribution", "hyperparameters"):
        arguments.pop(name)
    (place / "notebook.py").write_text(
        f"""import copy
import os
import sagemaker
import threading
from sagemaker import get_execution_role
from sagemaker.pytorch import PyTorch

role = get_execution_role()
sagemaker_session = sagemaker.session.Session(boto_session=None)
train = sagemaker.inputs.TrainingInput("data/train", distribution="FullyReplicated", s3_data_type="S3Prefix")
data_channels = {{"train": train}}
data_channels["test"] = sagemaker.inputs.TrainingInput("data/test", distribution="FullyReplicated", s3_data_type="S3Prefix")
hyperparameters = {HYPERPARAMETERS!r}
distribution = {call(BASE | {"hybrid_shard_degree": 2, "context_parallel_degree": 2})["distribution"]!r}
smp_estimator = PyTorch(hyperparameters=hyperparameters, role=role, sagemaker_session=sagemaker_session,
                        distribution=distribution, **{arguments!r})
smp_estimator.fit(inputs=data_channels)
hyperparameters["resume_from_checkpoint"] = os.path.join(hyperparameters["checkpoint_dir"], "llama_v2-10steps")
smp_estimator = PyTorch(hyperparameters=hyperparameters, role=role, sagemaker_session=sagemaker_session,
                        distribution=distribution, **{arguments | {"base_job_name": "resume-smp"}!r})
thread = threading.Thread(target=lambda: smp_estimator.fit(inputs=data_channels))
thread.daemon = True
thread.start()
thread.join()
print(smp_estimator.latest_training_job.describe()["TrainingJobStatus"])
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "octavo.compat", "notebook.py"], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Completed"
    first, second = sorted((place / "out").iterdir(), key=lambda path: path.name.startswith("resume"))
    for rank in (0, 1):
        one, two = (json.loads((job / "model" / f"rank-{rank}.json").read_text()) for job in (first, second))
        assert (one["resumed"], two["resumed"]) == (None, first.name)
        assert one["train"] == ["training.json"]
        assert one["test"] == ["validation.json"]
        assert (one["world"], one["debug"]) == ("2", "INFO")
        assert one["parameters"] == BASE | {"hybrid_shard_degree": 2, "context_parallel_degree": 2}
        assert one["others"][:6] == ["--activation_checkpointing", "1", "--auto_wrap_policy", "transformer_auto_wrap_policy",
                                     "--backward_fetch_policy", "backward_pre"]  # fmt: skip
    assert sorted(path.name for path in (place / "kept" / "llama_v2-10steps").iterdir()) == ["rank-0", "rank-1"]
    assert "requirements.txt is not installed" in done.stderr
    assert "names /opt/ml/checkpoints" not in done.stderr  # the hyperparameter replaces it


def test_a_path_in_the_script_that_nothing_replaces_is_said(place, capfd):
    (place / "shared-scripts" / "train.py").write_text("# '/opt/ml/model'\nout = '/opt/ml/model/x'\n")
    estimator.PyTorch("train.py", "shared-scripts", instance_type="local").fit(logs=False)
    assert "train.py, line 2 names /opt/ml/model/x, which a job of this machine has in its folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"training_recipe": "fine-tuning/llama/x"}, "HyperPod recipes are not supported: give a script as entry_point"),
        ({"recipe_overrides": {"run": {}}}, "HyperPod recipes are not supported"),
        ({"enable_network_isolation": True}, "the network of this machine"),
        ({"container_entry_point": ["python"]}, "give the script as entry_point"),
    ],
)
def test_arguments_that_would_change_the_job_are_refused(place, arguments, part):
    with pytest.raises(InputError) as refused:
        PyTorch(**call(BASE, **arguments))
    assert part in str(refused.value)


def test_arguments_that_ask_for_what_is_so_anyway_are_not_named(place, capfd):
    plain = {"entry_point": "train.py", "source_dir": "shared-scripts", "instance_type": "local"}
    met = {
        "debugger_hook_config": False,
        "disable_profiler": True,
        "use_spot_instances": False,
        "tags": [],
        "input_mode": "File",
    }
    one = PyTorch(**plain, **met)
    assert capfd.readouterr().err == ""
    PyTorch(**plain, disable_profiler=False, max_wait=3600, tags=[{"Key": "a", "Value": "b"}], subnets=["s"])
    assert "estimator: disable_profiler, max_wait, tags, subnets have no effect" in capfd.readouterr().err
    assert not hasattr(one, "deploy")
    with pytest.raises(InputError, match=r"PyTorch\.deploy needs AWS's cloud\. Load the folder model_data"):
        one.deploy()
    with pytest.raises(AttributeError, match="no attribute 'depoly'"):
        one.depoly()


def test_logs_are_what_the_sdk_takes(place, capfd):
    (place / "shared-scripts" / "train.py").write_text("print('hello')\n")
    one = PyTorch("train.py", source_dir="shared-scripts", instance_type="local")
    with pytest.raises(InputError, match="logs = 'Alles': give True, False, or a list of 'All', 'Training'"):
        one.fit(logs="Alles")
    one.fit(logs=["Training"])
    assert capfd.readouterr().out == "hello\n"
    one.latest_training_job.wait(logs="None")
    one.fit(logs=["None"])
    assert capfd.readouterr().out == ""
    one.latest_training_job.wait(logs="All")
    assert capfd.readouterr().out == "hello\n"
    found = one.latest_training_job.describe()
    assert (found["TrainingJobStatus"], found["SecondaryStatus"], found["HyperParameters"]) == ("Completed", "Completed", {})


@pytest.mark.parametrize(
    ("script", "waits", "said"),
    [
        ("raise ValueError('no such thing')", False, "failed with exit code 1: ValueError: no such thing. Its log is"),
        ("import time; time.sleep(600)", False, "continues in the background: PyTorch.attach('one') reaches it."),
        ("import time; time.sleep(600)", True, "ends with this process, which waits for it"),
    ],
)
def test_at_its_exit_a_process_says_what_becomes_of_its_jobs(place, script, waits, said):
    (place / "shared-scripts" / "train.py").write_text(f"{script}\n")
    (place / "launch.py").write_text(
        f"""import threading, time
from octavo.launch import PyTorch
one = PyTorch("train.py", "shared-scripts", instance_type="local")
threading.Thread(target=lambda: one.fit(wait={waits}, job_name="one"), daemon=True).start()
while one.latest_training_job is None or ("ValueError" in {script!r} and one.latest_training_job.status == "InProgress"):
    time.sleep(0.05)
"""
    )
    done = subprocess.run([sys.executable, "launch.py"], cwd=place, capture_output=True, text=True, check=True)
    assert said in done.stderr
    job = PyTorch.attach("one").latest_training_job
    if waits:
        assert job.until(lambda: job.status == "Stopped", 100)
    else:
        job.stop()


@pytest.mark.long
def test_a_script_of_smddp_reduces_over_the_ranks_that_it_asks_for(place, capfd):
    (place / "shared-scripts" / "train.py").write_text(
        """import json, os
import smdistributed.dataparallel.torch.torch_smddp
import torch
import torch.distributed as dist
dist.init_process_group("smddp")
seen = torch.tensor([dist.get_rank() + 1.0, float(os.environ["LOCAL_RANK"])])
dist.all_reduce(seen)
assert "sagemaker_distributed_dataparallel_enabled" not in os.environ["SM_FRAMEWORK_PARAMS"]  # transformers would look for more
if dist.get_rank() == 0:
    print(dist.get_world_size(), seen.tolist())
dist.destroy_process_group()
"""
    )
    data = {"smdistributed": {"dataparallel": {"enabled": True}}}
    one = PyTorch("train.py", source_dir="shared-scripts", instance_type="local", instance_count=2, distribution=data)
    one.fit()
    shown = capfd.readouterr()
    assert "2 [3.0, 1.0]" in shown.out
    assert shown.err.count("SageMaker's collectives") == 1


@pytest.mark.long
@pytest.mark.parametrize("degree", ["expert_parallel_degree", None])
def test_a_fault_of_all_ranks_is_one_line_with_the_keys_of_the_call(place, degree):
    """Under `python -m octavo.compat`, as the SDK's scripts run; the model tells the ranks what is wrong, not the call."""
    (place / "shared-scripts" / "train.py").write_text(
        f"""import torch
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
tsm.init()
if {degree!r}:
    torch.manual_seed(0)
size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
FullyShardedDataParallel(tsm.transform(LlamaForCausalLM(LlamaConfig(**size))))
"""
    )
    arguments = call({degree: 2} if degree else {}, instance_type="local", instance_count=2)
    (place / "launch.py").write_text(f"from sagemaker.pytorch import PyTorch\nPyTorch(**{arguments!r}).fit()\n")
    command = [sys.executable, "-m", "octavo.compat", "launch.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = done.stdout + done.stderr
    if degree:
        assert told.count("expert_parallel_degree = 2") == 1, told
        assert 'Degrees are keys of distribution["smdistributed"]["modelparallel"]["parameters"]; the number of ranks' in told
        assert "that of instance_type and instance_count" in told
    else:
        assert told.count("ranks 0 and 1 hold different weights") == 1, told
        assert "with DelayedParamIniter, or use the weights of rank 0: torch.sagemaker.transform(model, load_state_dict" in told
    assert "octavo.init" not in told
    assert "torchrun" not in told
