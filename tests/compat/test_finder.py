"""Import finder: specs, pickling by name, refusals beside installed packages, a hidden sitecustomize, and taking it back."""

import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import octavo.compat.smp
import octavo.compat.te
from octavo.compat import finder
from octavo.compat.smp.beside import SHIMS as BESIDE
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE
from octavo.errors import InputError


def test_installed_packages_have_transformer_engine_while_its_names_are_there():
    for name in ("transformer_engine", "Transformer-Engine"):
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
        finder.install(TE)
        try:
            assert importlib.metadata.version(name) == importlib.import_module("transformer_engine").__version__
            assert "transformer_engine" in {found.metadata["Name"] for found in importlib.metadata.distributions()}
            with pytest.raises(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version("transformer_engine_none")
        finally:
            finder.uninstall(TE)


@pytest.mark.parametrize("shim", [TE, SMP], ids=["te", "smp"])
def test_every_name_of_the_tables_is_there_with_a_real_spec(shim):
    finder.install(shim)
    try:
        for name in shim.modules:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            module = importlib.import_module(name)
            assert module.__spec__.name == name
            assert Path(module.__spec__.origin).is_file()
            for one in module.__all__:
                value = getattr(module, one)
                if isinstance(value, type):
                    assert pickle.loads(pickle.dumps(value)) is value  # noqa: S301
        assert importlib.util.find_spec(f"{shim.root}.nothing") is None
        with pytest.raises(ModuleNotFoundError, match=f"{shim.root}.nothing is not in Octavo's"):
            importlib.import_module(f"{shim.root}.nothing")
        for name in shim.absent:
            assert importlib.util.find_spec(name) is None
            with pytest.raises(ModuleNotFoundError, match=rf"{name} is not in Octavo's .* use "):
                importlib.import_module(f"{name}.inside")
    finally:
        finder.uninstall(shim)
    assert importlib.util.find_spec(shim.root) is None
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module(shim.root)


def test_uninstalling_gives_pytorch_back_its_own():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, OffloadWrapper
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy

    owners = (FullyShardedDataParallel, FullStateDictConfig, CheckpointWrapper, OffloadWrapper)
    state = lambda: [{name: value for name, value in vars(owner).items() if name != "__new__"} for owner in owners]  # noqa: E731
    before = state()
    octavo.compat.smp.install()
    octavo.compat.smp.install()  # a second time does nothing
    import torch.sagemaker

    assert state() != before
    octavo.compat.smp.uninstall()
    octavo.compat.smp.uninstall()
    assert state() == before
    assert not hasattr(torch, "sagemaker")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
        )
        assert type(model) is FullyShardedDataParallel
    finally:
        torch.distributed.destroy_process_group()


def test_a_package_that_is_installed_is_hidden_only_when_told(tmp_path, monkeypatch):
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(finder.REPLACE, raising=False)
    with pytest.raises(InputError, match=r"transformer_engine is installed here .*--replace-installed"):
        octavo.compat.te.install()
    octavo.compat.te.install(replace_installed=True)
    octavo.compat.te.uninstall()
    monkeypatch.setenv(finder.REPLACE, "1")
    octavo.compat.te.install()
    octavo.compat.te.uninstall()
    monkeypatch.delenv(finder.REPLACE)
    line = [sys.executable, "-m", "octavo.compat", "-c", "import transformer_engine; print(transformer_engine.__version__)"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert "--replace-installed" in done.stderr
    assert not (tmp_path / "transformer_engine" / "pytorch").exists()
    import transformer_engine

    try:
        with pytest.raises(InputError, match="already imported"):
            octavo.compat.te.install(replace_installed=True)
    finally:
        del sys.modules["transformer_engine"]
    assert transformer_engine.real


def test_the_hidden_sitecustomize_runs_and_the_script_is_itself(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'ran'\n")
    (tmp_path / "beside.py").write_text("value = 3")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside, sitecustomize, subprocess, importlib.util\n"
        "print(__name__, __file__, sys.argv[1:], os.environ['HIDDEN'], beside.value, sitecustomize.__file__)\n"
        "code = 'import importlib.util as u; print(u.find_spec(\"transformer_engine\") is not None)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
        "print('torch' in sys.modules)\n"
        "sys.exit(7)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    line = [sys.executable, "-m", "octavo.compat", str(script), "--flag", "a b"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 7, done.stderr
    lines = done.stdout.split("\n")
    assert "True" in lines  # of the process that it started
    assert "False" in lines  # no torch before the script wants it
    assert f"__main__ {script} ['--flag', 'a b'] ran 3 {tmp_path / 'sitecustomize.py'}" in lines
    isolated = subprocess.run([sys.executable, "-I", "-m", "octavo.compat", str(script)], capture_output=True, text=True)
    assert isolated.returncode != 0


def test_the_table_of_names_is_complete():
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    for shim in (TE, SMP, *BESIDE):
        for module, names in shim.modules.items():
            for one in [one for text in names.values() for one in text.split()]:
                assert f"`{one}`" in text, one
            assert not names or f"{module.rpartition('.')[2]}`" in text, module
