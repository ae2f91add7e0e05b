"""Values of the trainer's arguments: of the wrong kind refused, never taken for the default; dictionaries as configurations."""

from pathlib import Path

import pytest

from octavo.compat.sagemaker import configs, distribution
from octavo.compat.sagemaker.environment import check_variables, joined
from octavo.compat.sagemaker.values import is_a
from octavo.errors import InputError
from octavo.launch import (
    SMP,
    CheckpointConfig,
    Compute,
    InputData,
    ModelTrainer,
    OutputDataConfig,
    PyTorch,
    SourceCode,
    Torchrun,
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(distribution, "installed_gpus", list)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    (tmp_path / "wrong.yaml").write_text("a: b: c\n")
    (tmp_path / "list.json").write_text("[1]")
    return tmp_path


def trainer(**changes):
    code = SourceCode(source_dir="src", entry_script="train.py")
    return ModelTrainer(**({"source_code": code, "compute": Compute(instance_type="local")} | changes))


def code(**changes):
    return SourceCode(**({"source_dir": "src", "entry_script": "train.py"} | changes))


def given(**values):
    return trainer(hyperparameters=values)


def twice():
    return [InputData(channel_name="train", data_source=folder) for folder in ("data", "src")]


def _smp(parameters):
    modelparallel = {"modelparallel": {"enabled": True, "parameters": parameters}}
    return {"torch_distributed": {"enabled": True}, "smdistributed": modelparallel}


REFUSED = [
    (lambda: trainer(input_data_config=twice()), "two channels are called 'train'"),
    (lambda: trainer().train(input_data_config=twice()), "two channels are called 'train'"),
    (lambda: trainer(source_code="src"), "source_code = 'src': give SourceCode(…)"),
    (lambda: trainer(compute="ml.p5.48xlarge"), "compute = 'ml.p5.48xlarge': give Compute(…)"),
    (lambda: trainer(compute={1: 2}), "compute = {1: 2}: give Compute(…)"),
    (lambda: trainer(compute={"instance_typ": "local"}), "Compute: unknown argument 'instance_typ'"),
    (lambda: trainer(compute=configs.HyperPodCompute()), "give Compute(…)"),
    (lambda: trainer(networking="net"), "networking = 'net': give Networking(…)"),
    (lambda: trainer(stopping_condition=60), "stopping_condition = 60: give StoppingCondition(…)"),
    (lambda: trainer(output_data_config="out"), "output_data_config = 'out': give OutputDataConfig(…)"),
    (lambda: trainer(checkpoint_config="kept"), "checkpoint_config = 'kept': give CheckpointConfig(…)"),
    (lambda: trainer(checkpoint_config=CheckpointConfig(s3_uri=3)), "CheckpointConfig.s3_uri = 3 is not a string"),
    (lambda: trainer(output_data_config=OutputDataConfig(s3_output_path=["a"])), "s3_output_path = ['a'] is not a string"),
    (lambda: trainer(compute=Compute(instance_type=["local"])), "instance_type = ['local'] is not a string"),
    (lambda: trainer(base_job_name=3), "base_job_name = 3 is not a string"),
    (lambda: trainer(source_code=code(source_dir=3)), "source_dir = 3 is not a string"),
    (lambda: trainer(source_code=code(entry_script=3)), "entry_script = 3 is not a string"),
    (lambda: trainer(source_code=code(requirements=True)), "SourceCode.requirements = True is not a string"),
    (lambda: trainer(source_code=code(ignore_patterns="data")), "ignore_patterns = 'data': give a list"),
    (lambda: trainer(source_code=code(ignore_patterns=[3])), "ignore_patterns = [3]: give a list"),
    (lambda: trainer(source_code=code(ignore_patterns=3)), "ignore_patterns = 3: give a list"),
    (lambda: PyTorch("src/train.py", instance_type="local", output_path=3), "output_path = 3 is not a string"),
    (lambda: PyTorch("src/train.py", instance_type="local", checkpoint_s3_uri=3), "checkpoint_s3_uri = 3 is not a string"),
    (lambda: PyTorch("src/train.py", instance_type="local", base_job_name=["a"]), "base_job_name = ['a'] is not a string"),
    (lambda: PyTorch(["src/train.py"], instance_type="local"), "entry_point = ['src/train.py'] is not a string"),
    (lambda: PyTorch("src/train.py", instance_type="local", dependencies=3), "dependencies = 3: give a list of paths"),
    (lambda: PyTorch("src/train.py", instance_type="local", dependencies="lib"), "dependencies = 'lib': give a list of paths"),
    (lambda: PyTorch("src/train.py", instance_type="local", dependencies=[3]), "dependencies = [3]: give a list of paths"),
    (lambda: PyTorch("src/train.py", instance_type="local", environment=["A"]), "environment = ['A'] is not a dictionary"),
    (lambda: PyTorch("src/train.py", instance_type="local", distribution={1: {}}), "unknown key 1 in distribution"),
    (lambda: PyTorch("src/train.py", instance_type="local", distribution=_smp({1: 2})), "unknown key 1. Known: hybrid"),
    (lambda: PyTorch("src/train.py", instance_type="local", distribution=_smp(0)), "is 0: write a dictionary"),
    (
        lambda: PyTorch("src/train.py", instance_type="local", distribution=_smp({}) | {"smdistributed": 0}),
        'distribution["smdistributed"] is 0: write',
    ),
    (
        lambda: PyTorch("src/train.py", instance_type="local", distribution=_smp({}) | {"pytorchddp": "on"}),
        "\"pytorchddp\" in distribution is 'on': write",
    ),
    (lambda: PyTorch("src/train.py", instance_type="local", environment=0), "environment = 0 is not a dictionary"),
    (lambda: trainer(environment=0), "environment = 0 is not a dictionary"),
    (lambda: trainer(hyperparameters=0), "hyperparameters = 0"),
    (lambda: trainer(source_code=code(ignore_patterns=0)), "ignore_patterns = 0: give a list"),
    (lambda: trainer(compute=Compute(instance_type=0)), "instance_type = 0 is not a string"),
    (lambda: trainer(training_mode=["local"]), "training_mode = ['local']: give Mode.LOCAL_CONTAINER"),
    (lambda: trainer(input_data_config=[InputData(channel_name=["a"], data_source="data")]), "give InputData(channel_name=…"),
    (lambda: trainer(distributed=Torchrun), "is not started here: use Torchrun()"),
    (lambda: trainer(distributed=Torchrun(smp=SMP)), "give SMP(…)"),
    (lambda: trainer(input_data_config="data"), "input_data_config = 'data': give a list"),
    (lambda: trainer(input_data_config=InputData(channel_name="a", data_source="data")), "give a list"),
    (lambda: trainer(input_data_config=[{"channel": "a"}]), "InputData: unknown argument 'channel'"),
    (lambda: trainer(hyperparameters="bytes.json"), "hyperparameters = 'bytes.json' is neither JSON nor YAML"),
    (lambda: trainer(hyperparameters=Path("wrong.yaml")), "mapping values are not allowed here, line 1"),
    (lambda: trainer(hyperparameters="list.json"), "holds no names and values"),
    (lambda: trainer(hyperparameters="src"), "there is no such file"),
    (lambda: trainer(hyperparameters={"--lr": 1}), "'--lr' is not a name: it becomes an argument --name of the script. Write"),
    (lambda: given(**{"a b": 1}), "'a b' is not a name"),
    (lambda: given(a='"\\u0000"'), "has a character"),
    (lambda: trainer(environment={"A": None}), "environment['A'] = None is not a string"),
    (lambda: trainer(entry_point="train.py"), "argument of PyTorch: give ModelTrainer source_code=SourceCode(entry_script=…)"),
    (lambda: PyTorch("src/train.py", compute=1), "argument of ModelTrainer: give PyTorch instance_type and instance_count"),
    (lambda: setattr(trainer(), "hyperparameter", {}), "no 'hyperparameter' to set. Did you mean 'hyperparameters'?"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_value_of_the_wrong_kind_is_refused_in_one_line(place, number):
    act, part = REFUSED[number]
    with pytest.raises(InputError) as refused:
        act()
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_dictionaries_are_configurations(place, capfd):
    (place / "values.json").write_text('{"lr": 1}')
    one = ModelTrainer(
        source_code={"source_dir": Path("src"), "entry_script": "train.py"},
        compute={"instance_type": "local", "instance_count": 2},
        distributed=Torchrun(process_count_per_node=2),
        checkpoint_config={"local_path": "/opt/ml/checkpoints/here"},
        input_data_config=[{"channel_name": "a", "data_source": "data", "content_type": "text/csv"}],
        hyperparameters=Path("values.json"),
    )
    assert one._request().layout().ranks == 4
    assert one.hyperparameters == {"lr": 1}
    said = "trainer: InputData.content_type, CheckpointConfig.local_path have no effect on this machine."
    assert said in capfd.readouterr().err
    one.train(dry_run=True)
    assert is_a(type("Mine", (Compute,), {})(), "Compute")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hyperparameters": {"a": "/opt/ml/elsewhere"}}, "a job has the folders /opt/ml/checkpoints"),
        (
            {"hyperparameters": {"a": "/opt/ml/input/data/train/x"}},
            "no channel 'train'. Give it in input_data_config=[InputData(…)]",
        ),
        ({"source_code": code(ignore_patterns=["*.py"])}, "is left out by ignore_patterns = ['*.py']"),
        ({"output_data_config": OutputDataConfig(s3_output_path="list.json")}, "the folder of jobs"),
    ],
)
def test_a_dry_run_finds_what_a_start_would(place, changes, part):
    one = trainer(**changes)
    for call in (lambda: one.train(dry_run=True), one.train):
        with pytest.raises(InputError) as refused:
            call()
        assert part in str(refused.value)
    assert not (place / "jobs").exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hyperparameters": {"a": "x" * 200_000, "b": 1}}, "hyperparameters['a'] of 200,000 characters is too long"),
        (
            {"environment": {"A": "x" * 200_000}, "hyperparameters": {"b": 1}},
            "environment['A'] of 200,000 characters is too long",
        ),
        (
            {"hyperparameters": {f"a{n}": "x" * 1000 for n in range(200)}},
            "environment of 200,000 characters together are too long",
        ),
    ],
)
def test_values_too_long_for_a_process_are_named(place, changes, part):
    with pytest.raises(InputError) as refused:
        trainer(**changes).train()
    assert part in str(refused.value)
    assert not list((place / "jobs").iterdir())


def test_a_path_of_the_script_goes_before_that_of_its_job():
    script = check_variables({"PYTHONPATH": "/mine", "A": 1})
    assert joined({"PYTHONPATH": "/octavo", "B": "2"}, script) == {"PYTHONPATH": "/mine:/octavo", "A": "1", "B": "2"}
    assert joined({}, script)["PYTHONPATH"] == "/mine"
    assert joined({"PYTHONPATH": "/octavo"}, {}) == {"PYTHONPATH": "/octavo"}
