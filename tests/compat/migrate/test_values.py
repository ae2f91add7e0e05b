"""Values of a script followed in the order of its statements: compared with what Python itself computes."""

import json
import re
import tomllib

import pytest
from transformers import GPTNeoXConfig, LlamaConfig, MistralConfig, MixtralConfig

from octavo import launch
from octavo.compat import finder
from octavo.compat.migrate.known import UNKNOWN
from octavo.compat.migrate.report import lines
from octavo.compat.migrate.run_file import run_file
from octavo.compat.migrate.script import read
from octavo.compat.sdk import SHIM as SDK
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.sources import load_config

RANKS = {"torch_distributed": {"enabled": True}}
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
    "m = {'a': 1, 'b': 2}\nh = {}\nfor k, v in m.items():\n    h[k] = v",
    "h = {}\nfor n, k in enumerate(sorted(['b', 'a']), 1):\n    h[k] = n",
    "k = ['a']\nk.append('b')\nk += ['c']\nh = {'n': len(k), 'last': k[-1]}\nfor each in k:\n    h[each] = 1",
    "t = 'ml.p5.48xlarge'\nh = {'t': t.split('.')[1] + t.split('.')[2][:2], 'u': t.upper()}",
    "import os\nh = {'p': os.path.join('/opt', 'ml', f'{1}')}",
    "def make(**kw):\n    return kw\nh = make(a=1, **{'b': 2})",
    "h = dict([('a', 1), ('b', 2)])\nh = dict(h.items())",
    "l = [1, 2]\nl[0] = 5\nh = {'a': l[0], 'b': l + [3]}",
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
        "a = b = c = 1\nwhile ask():\n    a = b\n    b = c\n    c = 2\nh = {'a': a}",
        "k = ['a']\nchange(k)\nh = {'a': len(k)}",
        "k = ['a']\nif ask():\n    k.append('b')\nh = {'a': len(k)}",
        "k = ['a']\nk.sort(key=ask)\nh = {'a': k[0]}",
        "i = {'b': 1}\nchange({'c': i})\nh = {'a': i['b']}",
        "h = {'a': 1}\nexec('h[\"a\"] = 2')",
        "h = {'a': 1}\nglobals()['h'] = {'a': 2}",
        "h = {'a': f'{ask()}'}",
    ],
)
def test_what_a_run_may_change_is_unknown(tmp_path, text):
    (tmp_path / "s.py").write_text(f"{HEAD}{text}\nPyTorch('t.py', hyperparameters=h).fit()\n")
    found = read(tmp_path / "s.py").estimators[0]["hyperparameters"]
    assert found is UNKNOWN or found["a"] is UNKNOWN


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


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("import multiprocessing\ndef go(each):\n each.fit()\nmultiprocessing.Process(target=go, args=(e,)).start()", [1, 2]),
        ("start(e)", [UNKNOWN, 2]),
        # a thread runs beside what follows it, and may find the second estimator under the name of the first
        ("def go():\n e.fit()\nimport threading\nthreading.Thread(target=go).start()", [UNKNOWN, 2]),
    ],
)
def test_an_estimator_that_starts_elsewhere_has_the_values_of_its_start(tmp_path, start, found):
    made = "e = PyTorch('t.py', hyperparameters=h)\n"
    (tmp_path / "s.py").write_text(f"{HEAD}h = {{'a': 1}}\n{made}{start}\nh['a'] = 2\n{made}e.fit()\n")
    assert [each["hyperparameters"]["a"] for each in read(tmp_path / "s.py").estimators] == found


THREAD = "import threading\nt = threading.Thread(target=go)\nt.daemon = True\nt.start()\nprint(t)\n"


@pytest.mark.parametrize(
    ("go", "later", "found"),
    [
        ("def go():\n e.fit(inputs=c)", "", 1),
        ("go = lambda: e.fit(c)", "h = {}\nt.join()", 1),
        ("def go():\n e.fit(c)", "h['a'] = 2\nh['a'] = 1", UNKNOWN),  # between the two it may start
        ("def go():\n e.fit(c)", "if ask():\n    h['a'] = 2", UNKNOWN),
        ("def go():\n e.fit(c)", "class E:\n def fit(self, c):\n  h['a'] = 2\ne = E()", UNKNOWN),
        ("def go():\n e.fit(c)", "def f():\n global e\n e = made(h)\nf()", UNKNOWN),
        ("def go():\n if later:\n  h['a'] = 2\n e.fit(c)", "later = True", UNKNOWN),
        ("def go():\n e.fit(change(h))", "", UNKNOWN),
    ],
)
def test_an_estimator_of_a_thread_starts_at_any_time_from_its_start(tmp_path, go, later, found):
    (tmp_path / "s.py").write_text(
        f"{HEAD}h = {{'a': 1}}\nlater = False\nc = {{'train': 'x'}}\ne = PyTorch('t.py', hyperparameters=h)\n"
        f"{go}\n{THREAD}{later}\n"
    )
    given = read(tmp_path / "s.py").estimators[0]
    assert given["hyperparameters"]["a"] == found
    assert found is UNKNOWN or given["fit"] == {"inputs": {"train": "x"}}


@pytest.mark.parametrize("later", ["c = {'test': 'y'}", "c['train'] = 'y'", "if ask():\n    c = None"])
def test_channels_that_change_beside_a_thread_are_unknown(tmp_path, later):
    call = "e = PyTorch('t.py', hyperparameters={'a': 1})\ndef go():\n e.fit(c)\n"
    (tmp_path / "s.py").write_text(f"{HEAD}c = {{'train': 'x'}}\n{call}{THREAD}{later}\n")
    given = read(tmp_path / "s.py").estimators[0]
    assert given["hyperparameters"] == {"a": 1}
    inputs = given["fit"]["inputs"]
    assert inputs is UNKNOWN or inputs["train"] is UNKNOWN


def test_a_validation_of_no_batch_and_a_model_that_is_not_known_leave_their_places_open(tmp_path):
    call = f"PyTorch('t.py', hyperparameters=h, instance_type='ml.p5.48xlarge', distribution={RANKS})"
    more = "'validation_batches': -1, 'validation_freq': 10, 'hf_pretrained_model_name_or_dir': NAME"
    (tmp_path / "s.py").write_text(f"{HEAD}h = {{'max_context_width': 64, {more}}}\n{call}\n")
    text = run_file([read(tmp_path / "s.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert (config.model.source, config.model.load, config.train.validate_every) == ("PRETRAINED-MODEL", True, 0)
    assert "# no validation, as there: validation_batches = -1 is no batch." in text
    assert "is known only at run time: give its name or folder" in text


def test_tensor_parallelism_takes_smps_model_and_divides_the_samples(tmp_path):
    smp = RANKS | {"smdistributed": {"modelparallel": {"enabled": True, "parameters": {"tensor_parallel_degree": 2}}}}
    values = {"max_context_width": 64, "train_batch_size": 4}
    call = f"PyTorch('t.py', hyperparameters={values}, instance_type='ml.p5.48xlarge', distribution={smp})"
    (tmp_path / "s.py").write_text(f"{HEAD}{call}\n")
    text = run_file([read(tmp_path / "s.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert "4 data-parallel ranks" in text
    assert (config.parallel.tensor_parallel_degree, config.train.global_batch, config.fp8.enabled) == (2, 16, True)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("parameters", 'In the script hybrid_shard_degree is in distribution["smdistributed"]["modelparallel"]["parameters"]'),
        ("hyperparameters", "In the script hybrid_shard_degree is in hyperparameters"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_the_keys_of_the_script(tmp_path, place, told):
    degree = {"hybrid_shard_degree": 3}
    smp = RANKS | {"smdistributed": {"modelparallel": {"enabled": True, "parameters": degree if place == "parameters" else {}}}}
    values = {"max_context_width": 64} | (degree if place == "hyperparameters" else {})
    call = f"PyTorch('t.py', hyperparameters={values}, instance_type='ml.p5.48xlarge', instance_count=2, distribution={smp})"
    (tmp_path / "s.py").write_text(f"{HEAD}{call}\n")
    with pytest.raises(InputError) as error:
        run_file([read(tmp_path / "s.py")])
    text = str(error.value)
    assert told in text
    assert "the 16 ranks are those of instance_type = 'ml.p5.48xlarge' and instance_count = 2" in text
    assert "Change hybrid_shard_degree to" in text
    assert not re.search(r"parallel\.[a-z]|--ranks", text)
    with pytest.raises(InputError, match="the 4 ranks are those of --world-size"):
        run_file([read(tmp_path / "s.py")], world_size=4)


SHAPES = {
    "llama_v2": {"rotary_emb_base": 20000, "llama_intermediate_size": 704, "num_key_value_heads": 4},
    "llama_v3": {"rotary_emb_base": 500000, "llama_intermediate_size": 704},
    "llama_v3 scaled": {"rotary_emb_base": 500000, "llama_intermediate_size": 704, "rope_scaling_type": "llama3"},
    "llama_v3 by four": {
        "rope_scaling_type": "llama3", "rope_scaling_factor": 4.0, "rope_scaling_low_freq_factor": 2.0,
        "rope_scaling_high_freq_factor": 8.0, "rope_scaling_original_max_position_embeddings": 1024,
    },
    "mistral": {"intermediate_size": 704},
    "mistral narrow": {"intermediate_size": 704, "sliding_window": 128},
    "mixtral": {"intermediate_size": 704, "num_local_experts": 4},
    "gpt_neox": {"rotary_emb_base": 20000, "rotary_pct": 0.5},
}  # fmt: skip


def _of_the_example(kind, given):
    """The config that SMP's example builds of its arguments, in the parts that decide what the model computes."""
    inner = given.get("llama_intermediate_size", 11008) if kind.startswith("llama") else given.get("intermediate_size", 14336)
    theta = float(given.get("rotary_emb_base", 10000))
    found = {"num_key_value_heads": given.get("num_key_value_heads", 8), "intermediate_size": inner, "rms_norm_eps": 1e-5}
    plain = {"rope_type": "default", "rope_theta": theta}
    if kind == "gpt_neox":
        rope = plain | {"partial_rotary_factor": given["rotary_pct"]}
        return GPTNeoXConfig(intermediate_size=4 * 512, rope_parameters=rope, hidden_act="gelu")
    if kind.startswith("llama"):
        scaled = {
            "rope_type": "llama3", "rope_theta": theta, "factor": given.get("rope_scaling_factor", 8.0),
            "low_freq_factor": given.get("rope_scaling_low_freq_factor", 1.0),
            "high_freq_factor": given.get("rope_scaling_high_freq_factor", 4.0),
            "original_max_position_embeddings": given.get("rope_scaling_original_max_position_embeddings", 8192),
        }  # fmt: skip
        return LlamaConfig(**found, rope_parameters=scaled if "rope_scaling_type" in given else plain)
    if kind == "mistral":
        return MistralConfig(**(found | {"rms_norm_eps": 1e-6}), sliding_window=given.get("sliding_window"))
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralConfig(**found, **experts, sliding_window=None, rope_parameters=plain | {"rope_theta": 1e6})


@pytest.mark.parametrize("case", SHAPES)
def test_a_model_of_a_run_file_is_the_one_that_the_example_builds(tmp_path, case):
    kind, given = case.partition(" ")[0], SHAPES[case]
    values = given | {"max_context_width": 256, "hidden_width": 512, "num_heads": 8, "num_layers": 2, "model_type": kind}
    call = f"PyTorch('t.py', hyperparameters={values}, instance_type='ml.p5.48xlarge', distribution={RANKS})"
    (tmp_path / "s.py").write_text(f"{HEAD}{call}\n")
    text = run_file([read(tmp_path / "s.py")])
    assert "no key for" not in text
    model = RunConfig.from_dict(tomllib.loads(text)).model
    built, wanted = load_config(model.source, model.config), _of_the_example(kind, given)
    keys = ["intermediate_size", "rope_parameters", "hidden_act"]
    keys += ["layer_norm_eps", "use_parallel_residual"] if kind == "gpt_neox" else ["rms_norm_eps", "num_key_value_heads"]
    for key in keys:
        assert getattr(built, key) == getattr(wanted, key), key
    window = getattr(wanted, "sliding_window", None)
    seen = getattr(built, "sliding_window", None)
    assert seen == window or (window is None and seen >= values["max_context_width"])  # no window, or one of all positions


def test_folders_of_a_channel_are_those_of_this_machine(tmp_path):
    inside = "/opt/ml/input/data/train"
    values = {"max_context_width": 64, "training_dir": f"{inside}/text", "hf_pretrained_model_name_or_dir": f"{inside}/llama/"}
    values |= {"test_dir": "/opt/ml/input/data/other/val", "zipped_data": 0}
    call = f"PyTorch('t.py', hyperparameters={values}, instance_type='ml.p5.48xlarge', distribution={RANKS})"
    (tmp_path / "s.py").write_text(f"{HEAD}e = {call}\ne.fit({{'train': 'file://{tmp_path}'}})\n")
    text = run_file([read(tmp_path / "s.py")])
    config = RunConfig.from_dict(tomllib.loads(text))
    assert config.data.source == f"{tmp_path}/text/*.json"
    assert config.model.source == f"{tmp_path}/llama"
    assert config.data.validation_source == "other/val/*.json"
    assert "; the channel other: give its folder" in text
    assert "the channel train" not in text


def test_a_rotary_scaling_that_the_example_does_not_have_is_refused(tmp_path):
    values = {"max_context_width": 64, "model_type": "llama_v3", "rope_scaling_type": "yarn"}
    call = f"PyTorch('t.py', hyperparameters={values}, instance_type='ml.p5.48xlarge', distribution={RANKS})"
    (tmp_path / "s.py").write_text(f"{HEAD}{call}\n")
    with pytest.raises(InputError, match="rope_scaling_type = 'yarn' is not in SMP's example: 'llama3' is"):
        run_file([read(tmp_path / "s.py")])


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


@pytest.mark.parametrize(
    ("cell", "known"),
    [
        ("%pip install x\n!ls\n%matplotlib inline\n%store h", True),
        ("%%bash\necho", True),
        ("%%capture\nprint(1)", True),
        ("%time h.update(a=1)", True),
        ("%timeit h.update(a=2)", False),
        ("%%timeit\nh['a'] = 2", False),
        ("%%python\nh = {'a': 2}", False),
        ("%run other.py", False),
        ("%store -r", False),
        ("%mymagic h", False),
        ("%%mymagic\nh", False),
        ("%%bash --out h\necho", False),
        ("get_ipython().run_line_magic('run', 'x.py')", False),
        ("get_ipython().run_line_magic('matplotlib', 'inline')", True),
        ("get_ipython().system('ls')", True),
        ("get_ipython().user_ns['h'] = {'a': 2}", False),
    ],
)
def test_values_before_a_command_are_known_after_it_if_it_leaves_them(tmp_path, cell, known):
    last = "from sagemaker.pytorch import PyTorch\nPyTorch('t.py', hyperparameters=h).fit()"
    found = _notebook(tmp_path / "n.ipynb", ["h = {'a': 1}", cell, last]).estimators[-1].get("hyperparameters", UNKNOWN)
    assert (found == {"a": 1}) == known
    assert known or found is UNKNOWN or found["a"] is UNKNOWN


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        (
            "if kind == 'llama_v3.1':\n    sizes = {'num_layers': 2}",
            "In line 3:1: sizes has no value, since the test in line 2:1",
        ),
        ("if kind == 'llama_v3.1':\n    sizes = {}\n%store -r sizes", None),
        ("if kind == 'llama_v3.1':\n    sizes = {}\nelse:\n    sizes = unknown()", None),
        ("if kind == other():\n    sizes = {}", None),
    ],
)
def test_a_name_without_a_value_is_named_where_values_are_unknown_by_it(tmp_path, cell, told):
    """A published notebook compares its kind of model with another spelling than it has set."""
    call = f"PyTorch('t.py', hyperparameters=h, instance_type='ml.p5.48xlarge', distribution={RANKS})"
    cells = [
        f"{HEAD}kind = 'llama_v3'\nh = {{'max_context_width': 64}}",
        cell,
        "for k, v in sizes.items():\n    h[k] = v",
        call,
    ]
    with pytest.raises(InputError, match="the hyperparameters are computed at run time") as error:
        run_file([_notebook(tmp_path / "n.ipynb", cells)])
    assert told in str(error.value) if told else "has no value" not in str(error.value)


def test_commands_of_a_notebook_hide_nothing_behind_them(tmp_path):
    cells = [
        "%run beside.py\n",
        "!pip install \\\n  x && \\\n  y\nimport transformer_engine.pytorch as te\nte.Linear(8, 8)",
        "%timeit te.nothing()\nif te:\n    %time te.other()\n    !ls\n",
        "get_ipython().run_line_magic('run', 'x.py')",
    ]
    script = _notebook(tmp_path / "n.ipynb", cells)
    absent = [(script.place(use.line), use.name.rpartition(".")[2]) for use in script.uses if use.row.status == "absent"]
    assert absent == [("3:1", "nothing"), ("3:3", "other")]
    assert "code cell 1: what %run beside.py runs is not seen" in script.notes
    assert any("run_line_magic runs text" in note for note in script.notes)


def test_a_notebook_that_is_not_there_is_not_called_one_of_the_wrong_kind(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.ipynb")


def test_a_notebook_of_which_cells_are_not_read_is_not_said_to_have_nothing(tmp_path):
    first = lines(_notebook(tmp_path / "n.ipynb", ["%%writefile t.py\nimport transformer_engine\n"]))[0]
    assert first.endswith("SageMaker's SDK, as far as it is read.")


def test_the_first_cell_that_is_told_gives_the_names_of_the_sdk(tmp_path):
    script = _notebook(tmp_path / "n.ipynb", ["from sagemaker.pytorch import PyTorch\nPyTorch('t.py', instance_type='local')"])
    told = lines(script)[-1].partition("first cell: ")[2]
    space: dict = {}
    try:
        exec(f"{told}\nfrom sagemaker.pytorch import PyTorch", space)
    finally:
        finder.uninstall(SDK)
    assert issubclass(space["PyTorch"], launch.PyTorch)
