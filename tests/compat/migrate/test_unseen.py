"""`octavo migrate` says "runs unchanged" only of what it has resolved, and lists the rest."""

import pytest
import torch

from octavo.cli import main
from octavo.compat.migrate.names import canonical, find, unknown_argument
from octavo.compat.migrate.report import lines, runs_unchanged
from octavo.compat.migrate.script import WITHOUT_GPU, read
from octavo.compat.migrate.sources import arguments_of
from octavo.compat.sdk import SHIM as SDK
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE
from octavo.compat.te.signatures import SIGNATURES


def _read(tmp_path, text):
    (tmp_path / "s.py").write_text(text)
    return read(tmp_path / "s.py", [tmp_path / "s.py"])


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("name = input()\ngetattr(te, name)(1, 2)", "getattr on transformer_engine.pytorch asks for a name"),
        ("te.Linear(**given())", "arguments of transformer_engine.pytorch.Linear are computed at run time"),
        ("build(te)", "transformer_engine.pytorch is given to build: its uses there are not seen"),
        ("import importlib\nimportlib.import_module(input())", "import_module imports a module that is known only at run time"),
        ("import functools\nfunctools.partial(te.Linear, nonsense=1)", "transformer_engine.pytorch.Linear is given to partial"),
        ("from elsewhere import *", "names that import * takes from elsewhere are not seen"),
        ("from .part import thing", ".part is a separate module"),
        ("import beside", "beside is a separate module"),
        ("L = {'te': te.Linear}\nL['te'](8, 8, nonsense=1)", "transformer_engine.pytorch.Linear is one of several"),
        ("class C:\n    kind = te.Linear\nC.kind(8)", "Linear is the value of an attribute or an entry"),
        ("def f(kind=te.Linear):\n    kind(8)", "transformer_engine.pytorch.Linear is the default of an argument"),
        ("globals()['te'].nothing()", "globals() gives names whose uses are not seen"),
        ("import sys\nsys.modules['transformer_engine'].nothing()", "sys.modules gives modules whose uses are not seen"),
        ("te.Linear = other", "transformer_engine.pytorch.Linear is replaced"),
        ("def f(te):\n    te.nothing()", "transformer_engine.pytorch.nothing may be something else"),
    ],
)
def test_what_is_not_seen_is_listed(tmp_path, text, note):
    (tmp_path / "beside.py").write_text("import transformer_engine.pytorch.ops\n")
    script = _read(tmp_path, f"import transformer_engine.pytorch as te\nte.Linear(16, 16)\n{text}\n")
    assert [each for each in script.notes if note in each], script.notes
    assert not any(line.startswith("It runs unchanged") for line in lines(script))


def test_modules_that_are_given_too_need_no_note(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "s.py").write_text("import beside\nimport torch.sagemaker as tsm\ntsm.init()\n")
    assert read(tmp_path / "s.py", [tmp_path / "s.py", tmp_path / "beside.py"]).notes == []


def test_a_module_is_not_said_to_run(tmp_path):
    script = _read(tmp_path, "import torch.sagemaker as tsm\ndef start():\n    tsm.init()\n")
    assert lines(script)[-1] == "Every name is there. It is a module: run the script that imports it."


@pytest.mark.parametrize(
    ("text", "unchanged"),
    [
        ("import torch.sagemaker.state_handler as s\ns.state.cp_size", True),
        ("from torch.sagemaker.state_handler import state\nstate.nothing", False),
        ("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper", True),
        ("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import NoWrapper", False),
        ("from torch.distributed.fsdp import StateDictType", True),
        ("from torch.distributed.fsdp import NoType", False),
        ("import transformer_engine.pytorch as te\nte.Linear(1, 2, bias=False)", True),
        ("import transformer_engine.pytorch as te\nte.Linear(1, 2, bais=False)", False),
        ("import transformer_engine.pytorch as te\nte.autocast(enabled=True, calibration_config=3)", False),
        ("import transformer_engine.pytorch as te\nkw = {'bias': False}\nte.Linear(1, 2, **kw)", True),
        ("import transformer_engine.pytorch as te\nkw = {'nonsense': 1}\nte.Linear(1, 2, **kw)", False),
        ("import transformer_engine.pytorch as te\nkw = {}\nkw.update(nonsense=1)\nte.Linear(1, 2, **kw)", False),
        ("import transformer_engine.pytorch as te\nte.autocast(enabled=False, calibrating=True)", True),
        ("import transformer_engine.pytorch as te\nte.fp8_autocast(False, True)", True),
        ("import transformer_engine.pytorch as te\nte.fp8_autocast(True, True)", True),
        ("import transformer_engine.pytorch as te\ngetattr(te, 'nothing')", False),
        ("from sagemaker.pytorch import PyTorch\nPyTorch('t.py', instance_type='local').fit(wait=True)", True),
        ("from sagemaker.pytorch import PyTorch\nPyTorch('t.py', instance_type='local', wait=False).fit()", True),
        ("from sagemaker.pytorch import PyTorch\nPyTorch('t.py', instance_type='local').deploy()", False),
        ("import sagemaker\ns = sagemaker.session.Session()\ns.upload_data('x')", False),
        ("from accelerate import Accelerator\na = Accelerator()\na.nothing()", False),
        ("from transformer_engine.common.recipe import Format\nFormat.HYBRD", False),
        ("import transformer_engine.pytorch as te\nif hasattr(te, 'nothing'):\n    te.nothing()", True),
        ("import transformer_engine.pytorch as te\ntry:\n    te.nothing()\nexcept AttributeError:\n    pass", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformer_engine.pytorch import nothing", True),
        ("pipe = False\nif pipe:\n    from sagemaker.workflow.steps import TrainingStep", True),
        ("pipe = ask()\nif pipe:\n    from sagemaker.workflow.steps import TrainingStep", False),
        ("def f(pipe):\n    if pipe:\n        from sagemaker.workflow.steps import TrainingStep\nf(False)\ng(f)", False),
    ],
)
def test_names_and_arguments_are_those_of_the_compatibility_layer(tmp_path, text, unchanged):
    assert runs_unchanged(_read(tmp_path, f"{text}\n")) == unchanged


def test_calls_of_cuda_without_a_gpu_are_not_said_to_need_one(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("of a machine without a GPU")
    script = _read(tmp_path, "import torch\nimport transformer_engine\n" + "".join(f"torch.cuda.{n}\n" for n in WITHOUT_GPU))
    assert script.needs_gpu == []
    for name in set(WITHOUT_GPU) - {"amp", "nvtx", "Event"}:
        getattr(torch.cuda, name)(*([0] if name.startswith("manual") else []))
    assert _read(tmp_path, "import torch\ntorch.cuda.set_device(0)\n").needs_gpu == [(2, "torch.cuda.set_device")]


def test_a_script_that_needs_a_gpu_is_said_to_run_on_one(tmp_path):
    script = _read(tmp_path, "import transformer_engine.pytorch as te\nte.Linear(8, 8).cuda()\n")
    assert any(line.startswith("It runs unchanged on a GPU: ") for line in lines(script))


def test_what_needs_another_library_is_not_said_to_run_unchanged(tmp_path):
    script = _read(tmp_path, "from accelerate.utils import AORecipeKwargs\nAORecipeKwargs()\n")
    assert any(line.startswith("As far as it is read, it runs unchanged") for line in lines(script))


@pytest.mark.parametrize(
    ("text", "used"),
    [
        (
            "import lightning\nlightning.Fabric(precision='transformer-engine')",
            'lightning.Fabric(precision="transformer-engine")',
        ),
        (
            "from lightning.fabric import Fabric\nFabric('cpu', 'auto', 1, 1, 'transformer-engine-float16')",
            'lightning.Fabric(precision="transformer-engine-float16")',
        ),
        ("import pytorch_lightning as pl\npl.Trainer(precision='transformer-engine')",
         'lightning.Trainer(precision="transformer-engine")'),
        ("import lightning.pytorch as pl\nhow = {'precision': 'transformer-engine'}\npl.Trainer(**how)",
         'lightning.Trainer(precision="transformer-engine")'),
        ("from composer import Trainer\nTrainer(precision='amp_fp8')", 'composer.Trainer(precision="amp_fp8")'),
        ("from composer.core.precision import Precision\nprint(Precision.AMP_FP8)", "composer.core.Precision.AMP_FP8"),
        (
            "from lightning.fabric.plugins.precision import TransformerEnginePrecision as P\nP(weights_dtype=None)",
            "lightning.fabric.plugins.TransformerEnginePrecision",
        ),
    ],
)  # fmt: skip
def test_a_precision_that_asks_for_transformer_engine_is_seen(tmp_path, text, used):
    assert used in [use.name for use in _read(tmp_path, text).uses]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "import lightning as L, sys\nL.Fabric(precision=sys.argv[1])",
            "the precision of lightning.Fabric is known only at run",
        ),
        ("import lightning as L, sys\nL.Trainer(**dict(sys.argv))", "the precision of lightning.Trainer is known only at run"),
        ("from lightning import Trainer\nclass Mine(Trainer): pass", "Mine is a lightning.Trainer: the precision of its calls"),
        ("import lightning as L\nL.Fabric(precision='transformer-engine', devices=2)", "devices of lightning.Fabric is not"),
    ],
)
def test_a_precision_that_is_not_seen_whole_is_listed(tmp_path, text, note):
    assert any(note in each for each in _read(tmp_path, text).notes)


def test_a_trainer_without_transformer_engine_has_no_row(tmp_path):
    script = _read(
        tmp_path, "import lightning as L\nL.Fabric(precision='bf16-true', devices=2).launch()\nL.Trainer(max_epochs=1)\n"
    )
    assert (script.uses, script.notes) == ([], [])


def test_the_exit_code_tells_a_script_with_something_to_change(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text, code in (("good", "te.Linear(8, 8)", 0), ("bad", "te.nothing()", 1), ("broken", "def", 2)):
        (tmp_path / f"{name}.py").write_text(f"import transformer_engine.pytorch as te\n{text}\n")
        assert main(["migrate", f"{name}.py"]) == code
        assert main(["migrate", "good.py", f"{name}.py", "--json"]) == code
    capsys.readouterr()


def test_arguments_read_from_the_sources_are_those_of_the_signatures():
    for layer, signature in SIGNATURES.items():
        source = next(m for m, names in TE.modules["transformer_engine.pytorch"].items() if layer in names.split())
        assert arguments_of(source, layer) == tuple(signature.parameters), layer


def test_every_name_of_the_layer_resolves_with_each_of_its_arguments():
    for shim in (SMP, TE, SDK):
        for module, parts in shim.modules.items():
            assert find(canonical(module)).status != "absent", module
            for source, names in parts.items():
                for name in names.split():
                    dotted = canonical(f"{module}.{name}")
                    assert find(dotted).status != "absent", dotted
                    for argument in arguments_of(source, name) or ():
                        assert not unknown_argument(f"{module}.{name}", argument)


def test_a_recipe_that_an_autocast_refuses_is_not_said_to_run_unchanged(tmp_path):
    script = _read(tmp_path, "from transformer_engine.common.recipe import MXFP8BlockScaling\n")
    assert any(line.startswith("As far as it is read, it runs unchanged") for line in lines(script))
