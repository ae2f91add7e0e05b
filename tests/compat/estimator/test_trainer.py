"""`ModelTrainer`: the job of the estimator by the call of the SDK's version 3; what is refused, by the names of that call."""

import importlib
import json
import signal
import subprocess
import sys

import pytest

from octavo.compat.sagemaker import configs, distribution
from octavo.compat.sdk import MODULES
from octavo.errors import InputError
from octavo.launch import (
    MPI,
    SMP,
    Channel,
    CheckpointConfig,
    Compute,
    DataSource,
    FileSystemDataSource,
    InputData,
    JobFailed,
    ModelTrainer,
    Networking,
    OutputDataConfig,
    PyTorch,
    S3DataSource,
    SourceCode,
    StoppingCondition,
    Torchrun,
    TrainingJob,
)
from octavo.supervision import start_time

SCRIPT = """
import json, os, pathlib, sys
rank = os.environ.get("RANK")
if rank in (None, "0"):
    seen = {"argv": sys.argv[1:], "world": os.environ.get("WORLD_SIZE"),
            "variables": {name: value for name, value in os.environ.items() if name.startswith("SM_")},
            "code": sorted(str(path) for path in pathlib.Path().rglob("*.*")), "more": os.environ.get("MORE")}
    pathlib.Path(os.environ["SM_MODEL_DIR"], "seen.json").write_text(json.dumps(seen))
    pathlib.Path(dict(zip(sys.argv[1::2], sys.argv[2::2]))["--checkpoint_dir"], "step").write_text("10")
print("done", rank)
"""
VALUES = {
    "bf16": True, "none": None, "sizes": [1, 2], "table": {"b": 1}, "text": "it's \"a\" b", "number": "1e-3", "k": 3,
    "learning-rate": 1e-4, "checkpoint_dir": "/opt/ml/checkpoints", "script": "/opt/ml/input/data/code/train.py",
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(distribution, "installed_gpus", list)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "notes").mkdir(parents=True)
    (tmp_path / "src" / "train.py").write_text(SCRIPT)
    (tmp_path / "src" / "notes" / "a.md").write_text("")
    (tmp_path / "src" / "gpu.txt").write_text("accelerate\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_text("{}")
    return tmp_path


def trainer(**changes):
    given = {
        "source_code": SourceCode(source_dir="src", entry_script="train.py"),
        "compute": Compute(instance_type="local", instance_count=1),
        "hyperparameters": {"checkpoint_dir": "/opt/ml/checkpoints"},
    }
    return ModelTrainer(**(given | changes))


def test_a_job_of_all_arguments(place, capfd):
    one = trainer(
        training_image="1.dkr.ecr.us-west-2.amazonaws.com/smp:2.4.1",
        source_code=SourceCode(
            source_dir="src", entry_script="train.py", requirements="gpu.txt", ignore_patterns=["notes", "*.lock"]
        ),
        distributed=Torchrun(process_count_per_node=2, smp=SMP(hybrid_shard_degree=2, sm_activation_offloading=False)),
        compute=Compute(instance_type="local", instance_count=1, volume_size_in_gb=400, keep_alive_period_in_seconds=1800),
        networking=Networking(subnets=["s"], enable_network_isolation=False, enable_inter_container_traffic_encryption=True),
        hyperparameters=VALUES,
        input_data_config=[InputData(channel_name="train", data_source="nowhere-yet")],
        output_data_config=OutputDataConfig(s3_output_path="out"),
        checkpoint_config=CheckpointConfig(s3_uri="kept"),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=600),
        environment={"MORE": "/opt/ml/model"},
        base_job_name="smp",
    )
    said = capfd.readouterr().err
    names = "training_image, Compute.volume_size_in_gb, Compute.keep_alive_period_in_seconds, Networking.subnets"
    assert said == f"octavo: trainer: {names} have no effect on this machine.\n"
    source = DataSource(s3_data_source=S3DataSource(s3_data_type="S3Prefix", s3_uri="data"))
    channels = [
        InputData(channel_name="train", data_source="data"),
        Channel(channel_name="test", data_source=source, input_mode="File"),
        InputData(channel_name="more", data_source=FileSystemDataSource(directory_path=str(place / "data"))),
    ]
    one.train(channels)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["done 0", "done 1"]
    assert "gpu.txt is not installed by a job" in shown.err
    job = one._latest_training_job
    assert job.folder.parent == place / "out"
    assert job.name.startswith("smp-")
    assert (job.training_job_status, job.failure_reason) == ("Completed", None)
    assert job.model_artifacts.s3_model_artifacts == job.model_data == str(job.folder / "model")
    assert one.output_data == str(job.folder / "output" / "data")
    seen = json.loads((job.folder / "model" / "seen.json").read_text())
    assert seen["argv"] == [
        "--bf16", "true", "--none", "null", "--sizes", "[1, 2]", "--table", '{"b": 1}', "--text", "it's \"a\" b",
        "--number", "0.001", "--k", "3", "--learning-rate", "0.0001", "--checkpoint_dir", str(job.folder / "checkpoints"),
        "--script", str(job.folder / "code" / "train.py"),
    ]  # fmt: skip
    assert (seen["world"], seen["more"]) == ("2", str(job.folder / "model"))
    assert seen["code"] == ["gpu.txt", "train.py"]
    found = seen["variables"]
    assert (found["SM_HP_BF16"], found["SM_HP_NONE"], found["SM_HP_LEARNING_RATE"]) == ("true", "null", "0.0001")
    assert json.loads(found["SM_HPS"])["number"] == 0.001
    assert json.loads(found["SM_HP_MP_PARAMETERS"]) == {"hybrid_shard_degree": 2, "sm_activation_offloading": False}
    assert sorted(json.loads(found["SM_CHANNELS"])) == ["more", "test", "train"]
    assert found["SM_CHANNEL_TRAIN"] == str(job.folder / "input" / "data" / "train")
    assert (found["SM_SOURCE_DIR"], found["SM_ENTRY_SCRIPT"]) == (str(job.folder / "code"), "train.py")
    assert (place / "kept" / "step").read_text() == "10"


def test_a_job_in_the_background_and_one_that_fails(place, capfd):
    one = trainer()
    one.train(wait=False)
    job = one.latest_training_job
    job.wait(poll=1, timeout=100, logs=True)
    assert capfd.readouterr().out == "done None\n"
    assert job.refresh().get_name() == job.training_job_name == TrainingJob.get(training_job_name=job.name).name
    found = PyTorch.attach(job.name)
    assert found.latest_training_job.status == "Completed"
    with pytest.raises(InputError, match="started by ModelTrainer"):
        found.fit()
    (place / "src" / "train.py").write_text(
        "import sys, time\ntime.sleep(float(sys.argv[2]))\nraise ValueError('no such thing')\n"
    )
    one.hyperparameters = {"seconds": 0}
    with pytest.raises(JobFailed, match="ValueError: no such thing"):
        one.train(logs=False)
    assert one.latest_training_job.failure_reason == "ValueError: no such thing"
    one.hyperparameters = {"seconds": 600}
    one.output_data_config = OutputDataConfig(s3_output_path="out")
    one.train(wait=False)
    background = one.latest_training_job
    assert background.reached_by == f"TrainingJob.get({background.name!r}, output_path={str(place / 'out')!r})"
    assert TrainingJob.get(background.name, output_path="out").training_job_status == "InProgress"
    with pytest.raises(TimeoutError, match=r"is InProgress after timeout = 0\.1 seconds"):
        one.latest_training_job.wait(timeout=0.1)
    one.latest_training_job.stop()


def test_a_dry_run_finds_the_faults_and_starts_nothing(place):
    one = trainer()
    one.train(dry_run=True)
    with pytest.raises(InputError, match=r"input_data_config\['train'\] = 'nowhere' does not exist"):
        one.train([InputData(channel_name="train", data_source="nowhere")], dry_run=True)
    assert not (place / "jobs").exists()


@pytest.mark.parametrize("text", ['{"lr": 0.1, "name": "x"}', "lr: 0.1\nname: x\n"])
def test_hyperparameters_of_a_file(place, text):
    (place / "values").write_text(text)
    assert trainer(hyperparameters="values").hyperparameters == {"lr": 0.1, "name": "x"}


RANKS = Torchrun(smp=SMP(context_parallel_degree=2))
REFUSED = [
    (lambda: trainer(sourcecode=1), "unknown argument 'sourcecode' of ModelTrainer. Did you mean 'source_code'?"),
    (lambda: trainer(algorithm_name="a"), "marketplace"),
    (lambda: trainer(model_package_config="a"), "model registry is not supported"),
    (lambda: trainer(training_mode="CLOUD"), "training_mode = 'CLOUD'"),
    (lambda: trainer(source_code=None), "source_code has no script"),
    (lambda: trainer(source_code=SourceCode(source_dir="src", command="torchrun train.py")), "command = 'torchrun train.py'"),
    (lambda: trainer(source_code=SourceCode(entry_script="train.py", args=["a"])), "SourceCode.args = ['a']"),
    (lambda: trainer(source_code=SourceCode(source_dir="src", entry_script="run.sh")), "entry_script = 'run.sh'"),
    (lambda: trainer(source_code=SourceCode(source_dir="src", entry_script="trian.py")), "Did you mean 'train.py'?"),
    (
        lambda: trainer(source_code=SourceCode(source_dir="src", entry_script="train.py", requirements="x.txt")),
        "SourceCode.requirements = 'x.txt' is not in source_dir = 'src'",
    ),
    (lambda: SourceCode(entry_scrip="x"), "SourceCode: unknown argument 'entry_scrip'. Did you mean 'entry_script'?"),
    (lambda: Compute(instance_types="x"), "Compute: unknown argument 'instance_types'"),
    (lambda: trainer(compute=Compute(instance_type="ml.p5.48xlage")), "Did you mean ml.p5.48xlarge?"),
    (lambda: trainer(compute=Compute(instance_type="local", instance_count=0)), "instance_count = 0"),
    (lambda: trainer(compute=Compute(instance_type="local", instance_groups=["a"])), "Compute.instance_groups"),
    (lambda: trainer(compute=Compute(instance_type="local", training_plan_arn="a")), "Compute.training_plan_arn"),
    (lambda: trainer(networking=Networking(enable_network_isolation=True)), "Networking.enable_network_isolation = True"),
    (lambda: trainer(distributed=MPI(process_count_per_node=8)), "MPI(process_count_per_node=8) is not started here"),
    (lambda: trainer(distributed=Torchrun(process_count_per_node=0)), "process_count_per_node = 0"),
    (lambda: trainer(distributed=Torchrun(smp={"a": 1})), "Torchrun.smp = {'a': 1}: give SMP(…)"),
    (lambda: SMP(tensor_parallel_degree=2, expert_parallel_degree=3), "SMP(…): expert_parallel_degree = 3 with tensor_"),
    (lambda: SMP(hybrid_shard_degre=2), "SMP(…): unknown key 'hybrid_shard_degre'. Did you mean 'hybrid_shard_degree'?"),
    (lambda: SMP(microbatches=4), "a key of SMP v1"),
    (lambda: SMP(sm_activation_offloading=1), "SMP(…): sm_activation_offloading = 1"),
    (
        lambda: trainer(
            distributed=Torchrun(process_count_per_node=3, smp=SMP(context_parallel_degree=2)),
            compute=Compute(instance_type="local", instance_count=3),
        ),
        "SMP(…): degrees do not fit 9 ranks: context 2 does not divide hybrid_shard 9",
    ),
    (
        lambda: trainer(
            distributed=Torchrun(process_count_per_node=16), compute=Compute(instance_type="ml.p5.48xlarge", instance_count=1)
        ),
        "process_count_per_node = 16 and instance_type = 'ml.p5.48xlarge', which has 8 GPUs",
    ),
    (
        lambda: trainer(hyperparameters={"fp8": 1}, compute=Compute(instance_type="ml.p4d.24xlarge")),
        "A100 40GB, have no FP8 products",
    ),
    (lambda: trainer(hyperparameters={"mp_parameters": {}}), "Torchrun(smp=SMP(…))"),
    (lambda: trainer(hyperparameters="nowhere.json"), "hyperparameters = 'nowhere.json': there is no such file"),
    (lambda: trainer(training_input_mode="Pipe"), "training_input_mode = 'Pipe'"),
    (lambda: trainer(environment="A=1"), "environment = 'A=1' is not a dictionary"),
    (lambda: trainer(stopping_condition=StoppingCondition(max_runtime_in_seconds=0)), "max_runtime_in_seconds = 0"),
    (lambda: trainer(output_data_config=OutputDataConfig(s3_output_path="nonsense://x")), "s3_output_path = 'nonsense://x'"),
    (lambda: trainer(checkpoint_config=CheckpointConfig(s3_uri="nonsense://x")), "CheckpointConfig.s3_uri = 'nonsense://x'"),
    (lambda: trainer(checkpoint_config=CheckpointConfig(s3_uri="a", local_path="/tmp")), "CheckpointConfig.local_path"),
    (lambda: trainer(input_data_config=["data"]), "give InputData(channel_name=…, data_source=…)"),
    (
        lambda: trainer(
            input_data_config=[InputData(channel_name="a", data_source=FileSystemDataSource(directory_path="/3x5"))]
        ),
        "input_data_config['a']: '/3x5' of an AWS file system is not here: mount it",
    ),
    (
        lambda: trainer(
            input_data_config=[
                InputData(channel_name="a", data_source=S3DataSource(s3_uri="data", s3_data_distribution_type="ShardedByS3Key"))
            ]
        ),
        "s3_data_distribution_type = 'ShardedByS3Key'",
    ),
    (lambda: trainer(input_data_config=[Channel(channel_name="a", data_source="data", input_mode="Pipe")]), "'Pipe'"),
    (lambda: ModelTrainer.from_recipe("a/b"), "from_recipe('a/b'): HyperPod recipes are not supported"),
    (lambda: ModelTrainer.from_jumpstart_config(None), "JumpStart is not supported"),
    (lambda: trainer(source_code=SourceCode(source_dir="src", entry_script="train.py", ignore_patterns=["*.py"])).train(),
     "entry_script = 'train.py' is left out by ignore_patterns = ['*.py']"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_wrong_call_is_refused_in_its_own_words(place, number):
    act, part = REFUSED[number]
    (place / "src" / "run.sh").write_text("")
    with pytest.raises(InputError) as refused:
        act()
    assert part in str(refused.value)
    assert "distribution[" not in str(refused.value)
    assert not (place / "jobs").exists()


def test_the_default_machine_has_no_gpu_and_ranks_are_counted(place, capfd):
    assert trainer(compute=None)._request().layout().ranks is None
    assert trainer(distributed=Torchrun(process_count_per_node=4))._request().layout().ranks == 4
    assert trainer(distributed=Torchrun(), compute=Compute(instance_type="ml.p5.48xlarge"))._request().layout().ranks == 8
    trainer(compute=Compute(instance_type="local", instance_count=2)).train(logs=False)
    assert "distributed starts no ranks: the script runs once. Ranks need distributed=Torchrun()." in capfd.readouterr().err


def test_methods_without_effect_say_so(place, capfd):
    one = trainer()
    for name in ("metric_definitions", "tensorboard_output_config", "retry_strategy", "infra_check_config",
                 "session_chaining_config", "remote_debug_config"):  # fmt: skip
        assert getattr(one, f"with_{name}")([]) is one
        assert capfd.readouterr().err == f"octavo: trainer: {name} has no effect on this machine.\n"
    assert one.with_checkpoint_config(CheckpointConfig(s3_uri="kept"))._request().checkpoints == "kept"


def test_configurations_are_values():
    assert Compute(instance_type="a") == Compute(instance_type="a") != Compute(instance_type="b")
    assert repr(Torchrun(smp=SMP(random_seed=3))) == "Torchrun(smp=SMP(random_seed=3))"
    assert isinstance(Torchrun(), configs.DistributedConfig)


def test_a_script_of_the_sdk_starts_its_job_unchanged(place):
    for home in MODULES:
        for source, names in MODULES[home].items():
            for name in names.split():
                assert hasattr(importlib.import_module(source), name), (home, name)
    (place / "launch.py").write_text(
        """from sagemaker.core import image_uris
from sagemaker.core.helper.session_helper import Session, get_execution_role
from sagemaker.core.training.configs import FileSystemDataSource, InputData
from sagemaker.modules.configs import Tag
from sagemaker.modules.distributed import SMP as OLD
from sagemaker.train import ModelTrainer
from sagemaker.train.configs import CheckpointConfig, Compute, OutputDataConfig, SourceCode, StoppingCondition
from sagemaker.train.distributed import SMP, Torchrun
from sagemaker.train.model_trainer import Mode

assert SMP is OLD
region = Session().boto_session.region_name
image = image_uris.retrieve(framework="pytorch", region=region, version="2.6", instance_type="ml.p5.48xlarge")
model_trainer = ModelTrainer(
    training_image=image, training_mode=Mode.SAGEMAKER_TRAINING_JOB, sagemaker_session=Session(), role=get_execution_role(),
    source_code=SourceCode(source_dir="./src", entry_script="train.py"), distributed=Torchrun(smp=SMP(hybrid_shard_degree=1)),
    compute=Compute(instance_type="local", instance_count=1), hyperparameters={"checkpoint_dir": "/opt/ml/checkpoints"},
    tags=[Tag(key="a", value="b")],
)
model_trainer.train(input_data_config=[InputData(channel_name="train", data_source="data")], wait=True, logs=True)
print(model_trainer._latest_training_job.training_job_status)
SMP(tensor_parallel_degree=2, expert_parallel_degree=3)
"""
    )
    done = subprocess.run(
        [sys.executable, "-m", "octavo.compat", "launch.py"], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == "done 0\nCompleted\n"
    assert "trainer: training_image, sagemaker_session, role, tags have no effect" in done.stderr
    last = f"octavo: {place}/launch.py, line 22: SMP(…): expert_parallel_degree = 3 with tensor_parallel_degree = 2: an expert "
    assert done.stderr.splitlines()[-1].startswith(last)


@pytest.mark.long(lambda caught, call, command: caught == (("ModelTrainer" in call) == bool(command)))
@pytest.mark.parametrize("command", [[], ["-m", "octavo.compat"]])
@pytest.mark.parametrize(
    "call",
    [
        "ModelTrainer(source_code=SourceCode(source_dir='src', entry_script='train.py'), base_job_name='one').train()",
        "PyTorch('train.py', 'src', instance_type='local', base_job_name='one').fit()",
    ],
)
@pytest.mark.parametrize("caught", [False, True])
def test_ctrl_c_stops_the_job_and_ends_the_script_without_a_traceback(place, command, call, caught):
    text = "import os, time\nprint('begun', os.getpid(), flush=True)\ntime.sleep(600)\n"
    (place / "src" / "train.py").write_text(text)
    (place / "launch.py").write_text(
        "import signal\nfrom octavo.launch import ModelTrainer, PyTorch, SourceCode\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever the tests' shell has set
        + (f"try:\n    {call}\nexcept KeyboardInterrupt:\n    print('caught')\n" if caught else f"{call}\n")
    )
    with subprocess.Popen(
        [sys.executable, *command, "launch.py"], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        begun, pid = process.stdout.readline().split()
        assert begun == "begun"
        process.send_signal(signal.SIGINT)
        out, said = process.communicate()
    assert process.returncode == (0 if caught else 130)
    assert ("caught" in out) == caught
    assert "stopping job one-" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert start_time(int(pid)) is None
    (folder,) = (place / "jobs").iterdir()
    assert TrainingJob.get(folder.name).training_job_status == "Stopped"
