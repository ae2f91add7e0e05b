"""Calls of an estimator, read by `octavo migrate` and then made: what it says of each is what happens."""

import pytest

from octavo.compat import finder
from octavo.compat.migrate.report import figures, lines, runs_unchanged
from octavo.compat.migrate.run_file import run_file
from octavo.compat.migrate.script import read
from octavo.compat.sdk import SHIM as SDK
from octavo.errors import InputError

HEAD = "from sagemaker.pytorch import PyTorch\nimport sagemaker\nfrom sagemaker.inputs import TrainingInput\n"
BIG = "'t.py', instance_type='ml.p4d.24xlarge'"
RUNS = [
    "PyTorch(entry_point='t.py', instance_type='local')",
    f"PyTorch('t.py', '2.3', 'py311', '.', {{'a': 1}}, {BIG[8:]}, distribution={{'torch_distributed': {{'enabled': True}}}})",
    f"PyTorch({BIG}, distribution={{'torch_distributed': {{'enabled': False}}}})",
    "PyTorch('t.py', instance_type='local', wait=False, training_plan=None, environment={'A': 1}, max_run=2.5)",
    "TrainingInput('s3://a/b', distribution='FullyReplicated', s3_data_type='S3Prefix', input_mode='FastFile')",
    "sagemaker.Session(1, boto_session=2)\nsagemaker.get_execution_role()",
    "s = sagemaker.Session(default_bucket_prefix='a')\nf'{s.boto_region_name} {s.default_bucket_prefix} {s.boto_session}'",
    "prefix = sagemaker.Session().default_bucket_prefix\nif prefix:\n    prefix = '/' + prefix",
    "e = PyTorch('t.py', instance_type='local')\ne.set_hyperparameters(a=1)\ne.hyperparameters(), e.model_data",
]
FAILS = [
    "PyTorch('t.py', instance_type='local', environment=0)",
    "PyTorch('t.py', instance_type='local', dependencies=3)",
    "PyTorch('t.py', instance_type='local', dependencies=[3])",
    f"PyTorch({BIG}, distribution={{'torch_distributed': {{'enabled': True}}, 'pytorchddp': 'on'}})",
    "PyTorch('t.py')",
    "PyTorch('t.sh', instance_type='local')",
    "PyTorch('t.py', instance_type='local', nonsense=1)",
    "PyTorch('t.py', instance_type='local', inputs='x')",
    "PyTorch('t.py', instance_type='local', max_run=-1)",
    "PyTorch('t.py', instance_type='local', max_run='1')",
    "PyTorch('t.py', instance_type='local', environment=['A'])",
    "PyTorch('t.py', instance_type='local', dependencies='x')",
    "PyTorch('t.py', instance_type='local', instance_count=0)",
    "PyTorch('t.py', instance_type='local', training_plan='x')",
    "PyTorch('t.py', instance_type='local', input_mode='Pipe')",
    "PyTorch('t.py', instance_type='ml.nothing.xlarge')",
    "PyTorch('t.py', '2.3', 'py311', None, {}, None, None, None, 'x', instance_type='local')",
    f"PyTorch({BIG}, hyperparameters={{'fp8': 1}})",
    f"PyTorch({BIG}, distribution={{'mpi': {{'enabled': True}}}})",
    "e = PyTorch('t.py', instance_type='local')\ne.nothing()",
    "e = PyTorch('t.py', instance_type='local')\ne.fit('x', nonsense=1)",
    "e = PyTorch('t.py', instance_type='local')\ne.fit({'bad name!': 'x'})",
    "TrainingInput()",
    "TrainingInput('s3://a/b', distribution='ShardedByS3Key')",
    "TrainingInput('s3://a/b', content_type='text/csv')",
    "TrainingInput('s3://a/b', nonsense=1)",
    "sagemaker.get_execution_role(1, 2, 3)",
    "sagemaker.Session().upload_data('x')",
    "from sagemaker.estimator import Estimator",
]
UNCHECKED = {
    "PyTorch('nowhere.py', instance_type='local')": "entry_point = 'nowhere.py' is not in '.'",
    "PyTorch('t.py', instance_type='local', dependencies=['nowhere'])": "dependencies: 'nowhere' is not there",
    "PyTorch('t.py', instance_type='local', output_path='s3://x')": "output_path = 's3://x' is an address that is not tried",
    "PyTorch('t.py', instance_type='local').fit({'train': '/nowhere'})": "the channel train = '/nowhere' is not there",
    "PyTorch(script(), instance_type='local')": "the file of its script is known only at run time",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "t.sh").write_text("")
    there = finder.installed(SDK) is not None
    finder.install(SDK)
    yield tmp_path
    if not there:
        finder.uninstall(SDK)


def _read(place, text):
    (place / "s.py").write_text(f"{HEAD}{text}\n")
    return read(place / "s.py")


@pytest.mark.parametrize("text", RUNS)
def test_a_call_that_is_said_to_run_is_made(place, text):
    script = _read(place, text)
    assert runs_unchanged(script)
    assert any(line.startswith("It runs unchanged") for line in lines(script))
    exec(f"{HEAD}{text}", {})


@pytest.mark.parametrize("text", FAILS)
def test_a_call_that_is_to_change_first_is_refused(place, text):
    assert not runs_unchanged(_read(place, text))
    with pytest.raises(Exception):  # noqa: B017 - each has its own
        exec(f"{HEAD}{text}", {})


@pytest.mark.parametrize(("text", "told"), UNCHECKED.items())
def test_files_and_addresses_of_a_call_are_not_said_to_be_there(place, text, told):
    script = _read(place, text)
    assert figures(script)["estimators"][0]["unchecked"] == [told]
    assert runs_unchanged(script)
    assert not any(line.startswith("It runs unchanged") for line in lines(script))


TRAINER = """from sagemaker.train import ModelTrainer
from sagemaker.train.configs import Compute, InputData, SourceCode
from sagemaker.train.distributed import SMP, Torchrun
code, two = SourceCode(source_dir=".", entry_script="t.py"), Compute(instance_type="local", instance_count=2)
"""
ONE = "ModelTrainer(source_code=code, compute=two"
TRAINS = [
    f"{ONE}, distributed=Torchrun(smp=SMP(context_parallel_degree=2)), hyperparameters={{'a': 1}}).train(dry_run=True)",
    f"{ONE}, role='r', environment={{'A': '1'}}).train(input_data_config=None, wait=False, logs=False, dry_run=True)",
]
TRAINS_NOT = [
    "SMP(pipeline_parallel_degree=2)",
    "SMP(tensor_parallel_degree=2, expert_parallel_degree=3)",
    "SMP(context_parallel_degree='two')",
    "Compute(instance_typ='local')",
    f"{ONE}, training_recipe='x')",
    f"{ONE}, recipe_overrides={{'run': {{}}}})",
    f"{ONE}, hyperparameter={{}})",
    f"{ONE}, entry_point='t.py')",
    f"{ONE}, hyperparameters={{'--a': 1}})",
    f"{ONE}, environment={{'A': None}})",
    "ModelTrainer(source_code=SourceCode(source_dir='.', entry_script='t.py', command='python t.py')).train(dry_run=True)",
    f"{ONE}).train(dry=True)",
    "ModelTrainer.from_recipe('fine-tuning/llama')",
    "ModelTrainer.from_jumpstart_config(None)",
]


@pytest.mark.parametrize("text", TRAINS)
def test_a_call_of_the_trainer_that_is_said_to_run_is_made(place, text):
    (place / "s.py").write_text(f"{TRAINER}{text}\n")
    script = read(place / "s.py")
    assert runs_unchanged(script)
    assert any("combinations of its configurations" in note for note in script.notes)
    assert lines(script)[-2].startswith("As far as it is read, it runs unchanged: python -m octavo.compat")
    assert lines(script)[-1].startswith("or import ModelTrainer")
    exec(f"{TRAINER}{text}", {})


@pytest.mark.parametrize("text", TRAINS_NOT)
def test_a_call_of_the_trainer_that_is_to_change_first_is_refused(place, text):
    (place / "s.py").write_text(f"{TRAINER}{text}\n")
    assert not runs_unchanged(read(place / "s.py"))
    with pytest.raises(Exception):  # noqa: B017 - each has its own
        exec(f"{TRAINER}{text}", {})


def test_a_run_file_is_not_written_from_the_trainer(place):
    (place / "s.py").write_text(f"{TRAINER}{TRAINS[0]}\n")
    with pytest.raises(InputError, match=r"calls of ModelTrainer are not read for a run file\. Give the training script"):
        run_file([read(place / "s.py")])
