"""Values of a script followed in the order of its statements: compared with what Python itself computes."""

import json
import tomllib

import pytest

from octavo.config.run import RunConfig
from octavo.migrate.run_file import run_file
from octavo.migrate.script import read
from octavo.migrate.values import UNKNOWN

HEAD = "from sagemaker.pytorch import PyTorch\n"
SAME = [
    "h = {'a': 1}\nh.update({'b': 2}, c=3)",
    "h = {'a': 1, 'b': 2}\nh = {**h, **{'b': 3}, 'c': 4}",
    "h = {'a': 1} | {'a': 2, 'b': 3}\nh |= {'c': 5}",
    "h = {'a': 1}\nk = h\nk['a'] = 2",
    "import copy\nh = {'a': {'b': 1}}\nk = copy.deepcopy(h)\nk['a']['b'] = 2",
    "import copy\nh = {'a': {'b': 1}}\nk = copy.copy(h)\nk['a']['b'] = 2\nk['c'] = 1",
    "k = {'a': {'b': 1}}\nh = dict(k, c=2)\nh['a']['b'] = 5",
    "h = {'a': 1}\nif False:\n    h['a'] = 2\nelse:\n    h['b'] = 3",
    "fsx = False\nh = {'a': 1}\nif not fsx and 1 < 2:\n    h['a'] = 2",
    "n = 'llama'\nsizes = {'llama': {7: {'w': 4096}}}\nh = {'m': f'{n}-{7:02d}'}\nh.update(sizes.get(n, {}).get(7))",
    "h = {}\nfor n in ['a', 'b']:\n    h[n] = len(h) + 1",
    "def fill(t, v=2):\n    t['x'] = v\n    return {'y': v * 3}\nh = {'a': 1}\nh.update(fill(h))",
    "a, b = 2, 3\nh = {'a': a ** b, 'b': a if b > 2 else 0, 'c': int('7'), 'd': max(a, b), 'e': not a}",
    "h = {'a': 1, 'b': 2}\ndel h['a']\nx = h.pop('b')\nh['c'] = x\nh.setdefault('d', 4)",
    "h = {'a': 1}\ntry:\n    n = 1\nexcept KeyError:\n    raise\nh['n'] = 1",
    "N = 1\ndef set_it():\n    global N\n    N = 5\nset_it()\nh = {'n': N}",
]


@pytest.mark.parametrize("text", SAME)
def test_known_values_are_those_of_python(tmp_path, text):
    wanted: dict = {}
    exec(text, wanted)
    (tmp_path / "s.py").write_text(f"{HEAD}{text}\nPyTorch('t.py', hyperparameters=h).fit()\nh['late'] = 1\nh = {{}}\n")
    assert read(tmp_path / "s.py").estimators[0]["hyperparameters"] == wanted["h"]


@pytest.mark.parametrize(
    "text",
    [
        "h = {'a': 1}\nif ask():\n    h['a'] = 2",
        "h = {'a': 1}\nif ask():\n    k = h\n    k['a'] = 2",
        "h = {'a': 1}\nfor n in some():\n    h['a'] += 1",
        "h = {'a': 1}\nwhile ask():\n    h['a'] = 2\n    break",
        "h = {'a': 1}\ndef f():\n    if ask():\n        h['a'] = 2\n        return\nf()",
        "h = {'a': 1}\ntry:\n    h['a'] = ask()\nexcept OSError:\n    pass",
        "h = {'a': 1}\ntry:\n    ask()\n    h['a'] = 2\nexcept OSError:\n    pass",
        "h = {'a': 1}\nchange(h)",
        "h = {'a': 1}\nh.update(given())",
        "h = {'a': 1}\nh[ask()] = 2",
        "h = {'a': 1}\nmatch ask():\n    case 1:\n        h['a'] = 2",
        "h = {'a': 1 if ask() else 2}",
        "h = {'a': f'{ask()}'}",
    ],
)
def test_what_a_run_may_change_is_unknown(tmp_path, text):
    (tmp_path / "s.py").write_text(f"{HEAD}{text}\nPyTorch('t.py', hyperparameters=h).fit()\n")
    assert read(tmp_path / "s.py").estimators[0]["hyperparameters"]["a"] is UNKNOWN


def test_a_branch_that_ends_the_script_leaves_no_trace(tmp_path):
    (tmp_path / "s.py").write_text(
        f"{HEAD}h = {{'a': 1}}\nif ask():\n    h['a'] = 2\n    raise ValueError\nPyTorch('t.py', hyperparameters=h)\n"
    )
    assert read(tmp_path / "s.py").estimators[0]["hyperparameters"] == {"a": 1}


def test_each_of_two_estimators_has_its_own_values(tmp_path):
    (tmp_path / "s.py").write_text(
        f"{HEAD}h = {{'a': 1}}\ne = PyTorch('t.py', hyperparameters=h)\ne.fit({{'train': 'x'}})\nh['a'] = 2\n"
        "e = PyTorch('t.py', hyperparameters=h)\ne.set_hyperparameters(b=3)\ne.fit('y')\n"
    )
    first, second = read(tmp_path / "s.py").estimators
    assert (first["hyperparameters"], first["fit"]) == ({"a": 1}, {"inputs": {"train": "x"}})
    assert (second["hyperparameters"], second["fit"]) == ({"a": 2, "b": 3}, {"inputs": "y"})


CELLS = [
    "%pip install sagemaker\nimport os\nfrom sagemaker.pytorch import PyTorch\nmodel_type = 'llama_v2'\nfsx = False",
    "%store -r place\nmock = place",
    "bucket = <your bucket>\n",
    "degree = 1\nsteps = 10\nhyperparameters = {'fp8': 1, 'bf16': 1, 'max_steps': 15, 'checkpoint_freq': steps,\n"
    " 'model_type': model_type, 'train_batch_size': 2, 'use_smp_implementation': 1, 'checkpoint_dir': '/opt/ml/checkpoints'}\n"
    "if fsx:\n    hyperparameters['train_batch_size'] = 64",
    "configs = {'llama_v2': {7: {'hidden_width': 512, 'max_context_width': 2048, 'num_heads': 8, 'num_layers': 2}}}\n"
    "found = configs.get(model_type, {}).get(7)\nif found is None:\n    raise RuntimeError(f'{7:02d}')\n"
    "hyperparameters.update(found)",
    "kwargs = {'subnets': []} if fsx else {}\ndistribution = {'torch_distributed': {'enabled': True}, 'smdistributed':\n"
    " {'modelparallel': {'enabled': True, 'parameters': {'tensor_parallel_degree': degree, 'hybrid_shard_degree': 8}}}}\n"
    "job = PyTorch(entry_point='train.py', hyperparameters=hyperparameters, instance_type='ml.p5.48xlarge', instance_count=2,\n"
    " distribution=distribution, **kwargs)\njob.fit(inputs={'train': mock})",
    "hyperparameters['resume_from_checkpoint'] = os.path.join(hyperparameters['checkpoint_dir'], 'x')\n"
    "job = PyTorch(entry_point='train.py', hyperparameters=hyperparameters, instance_type='ml.p5.48xlarge', instance_count=2,\n"
    " distribution=distribution, **kwargs)\njob.fit(inputs={'train': mock})",
]


def _notebook(path, cells):
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]}))
    return read(path)


def test_a_notebook_of_cells_that_update_dictionaries_becomes_a_run_file(tmp_path):
    script = _notebook(tmp_path / "n.ipynb", CELLS)
    text = run_file([script])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert (config.train.steps, config.train.micro_batch, config.data.sequence_length) == (15, 2, 2048)
    assert config.model.config["hidden_size"] == 512
    assert config.fp8.enabled
    assert config.parallel.hybrid_shard_degree == 8
    assert "from the last of 2 calls of an estimator, which differ in resume_from_checkpoint" in text
    assert "n.ipynb: code cell 3 is not read, line 1" in text
