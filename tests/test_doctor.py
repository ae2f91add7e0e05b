"""The doctor on this machine, on a machine of broken packages, and what it says of GPUs that are not here."""

from __future__ import annotations

import importlib.util
import io
import json
import platform
import sys

import pytest
import torch
from rich.console import Console

from octavo import __version__, doctor
from octavo.doctor import Package, examine, render
from octavo.hardware import Device, lookup


@pytest.fixture(scope="module")
def found():
    return examine()


@pytest.fixture
def on_gpu(monkeypatch):
    """Pretend that torch sees one GPU of this name and capability; its kernels are not there to be asked."""

    def pretend(name, capability, fp8):
        device = Device(name, lookup(name), capability, 79.0, "cuda")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(doctor, "PACKAGES", ())
        monkeypatch.setattr(doctor, "describe_device", lambda index: device)
        monkeypatch.setattr(doctor, "supports_fp8", lambda index=0: fp8)
        return examine()

    return pretend


def rendered(found) -> str:
    text = io.StringIO()
    render(found, Console(file=text, width=200))
    return text.getvalue()


def test_this_machine_is_plain_json_with_its_versions(found):
    assert json.loads(json.dumps(found)) == found
    assert found["octavo"] == __version__
    assert found["system"]["python"] == platform.python_version()
    assert found["system"]["cores"] >= 1
    packages = {package["name"]: package for package in found["packages"]}
    for name in ("torch", "transformers", "tokenizers", "datasets", "safetensors", "pydantic"):
        assert packages[name]["status"] == "ok", packages[name]
    assert packages["torch"]["version"] in (torch.__version__, torch.__version__.split("+")[0])
    for name in ("torchao", "transformer-engine", "timm", "trackio"):
        assert packages[name]["install"].startswith("pip install")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU does")
def test_a_cpu_emulates_and_misses_nothing(found):
    assert found["gpus"] == []
    assert found["fp8"]["mode"] == "emulated"
    assert found["attention"]["device"] == "cpu"
    assert set(found["attention"]["chosen"].values()) <= {"math", "flash"}
    assert "up to 512 tokens" in found["attention"]["octavo"]
    assert "emulated" in found["products"]["fp8"]
    text = rendered(found)
    assert f"octavo {__version__}" in text
    assert "computes FP8's numbers exactly and slowly" in text
    assert "none" in text


BROKEN = {
    "octavo_raises": ("raise RuntimeError('undefined symbol\\n in libx.so')", "RuntimeError: undefined symbol"),
    "octavo_asserts": ("assert False", "AssertionError: no message"),
    "octavo_exits": ("import sys; sys.exit('no licence [1]')", "SystemExit: no licence [1]"),
    "octavo_imports": ("import octavo_that_is_not_there", "ModuleNotFoundError: No module named 'octavo_that_is_not_there'"),
    "octavo_syntax": ("def", "SyntaxError: invalid syntax (octavo_syntax.py, line 1)"),
}


def test_broken_and_missing_packages_are_findings(tmp_path, monkeypatch, capsys):
    for name, (source, _) in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "octavo_talks.py").write_text("print('hello'); import warnings; warnings.warn('old')")
    monkeypatch.syspath_prepend(tmp_path)
    names = [*BROKEN, "octavo_talks", "octavo_absent"]
    monkeypatch.setattr(doctor, "PACKAGES", [Package(n, n, "tests", f"pip install {n}", required=True) for n in names])
    found = examine()
    status = {package["name"]: package["status"] for package in found["packages"]}
    assert status == {**dict.fromkeys(BROKEN, "broken"), "octavo_talks": "ok", "octavo_absent": "missing"}
    errors = {package["name"]: package.get("error") for package in found["packages"]}
    text = rendered(found)
    for name, (_, message) in BROKEN.items():
        assert errors[name] == message
        assert message in text
    missing = {item["what"]: item for item in found["missing"]}
    assert set(missing) >= {*BROKEN, "octavo_absent"}
    assert missing["octavo_absent"]["command"] == "pip install octavo_absent"
    assert "hello" not in capsys.readouterr().out
    json.dumps(found)


def test_an_optional_package_that_is_absent_is_not_missing(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", [Package("octavo-absent", "octavo_absent", "tests", "pip install octavo-absent")])
    found = examine()
    assert found["packages"][0]["status"] == "missing"
    assert "octavo-absent" not in [item["what"] for item in found["missing"]]


def test_without_torch_everything_else_is_still_told(monkeypatch):
    # Nothing else is imported meanwhile: a package that first met a Python without torch would not find it later.
    monkeypatch.setattr(doctor, "PACKAGES", doctor.PACKAGES[:1])
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examine()
    for part in ("torch", "gpus", "fp8", "attention", "products"):
        assert found[part]["error"].startswith(("ModuleNotFoundError", "ImportError")), part
    assert "torch" in [item["what"] for item in found["missing"]]
    assert found["system"]["cpu"] in rendered(found)


@pytest.mark.parametrize(
    ("name", "capability", "fp8", "mode"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), True, "native"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), False, "bf16"),
        ("NVIDIA GeForce RTX 4090", (8, 9), True, "native"),
    ],
)
def test_what_happens_with_fp8_on_a_gpu(on_gpu, name, capability, fp8, mode):
    found = on_gpu(name, capability, fp8)
    assert found["fp8"]["mode"] == mode
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["capability"], gpu["fp8"]) == (name, list(capability), fp8)
    assert (gpu["fp8_tflops"] is not None) == fp8
    assert f"{name}, capability {capability[0]}.{capability[1]}, 79 GiB" in rendered(found)
    json.dumps(found)


def test_an_unknown_gpu_is_named_and_called_unknown(on_gpu):
    found = on_gpu("NVIDIA X1000", (12, 0), True)
    assert found["gpus"][0]["known"] is None
    assert found["gpus"][0]["bf16_tflops"] is None
    assert "not in Octavo's table" in rendered(found)


def test_a_hopper_without_cudnn_attention_and_without_a_compiler_is_told_so(on_gpu, monkeypatch):
    found = {"device": "cuda", "chosen": {"head_dim 128": "flash"}, "allowed": [], "octavo": "-"}
    monkeypatch.setattr(doctor, "_attention", lambda: found)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    found = on_gpu("NVIDIA H200", (9, 0), True)
    missing = {item["what"]: item for item in found["missing"]}
    assert "falls to flash" in missing["cuDNN attention"]["why"]
    assert missing["a C compiler"]["command"] == "apt-get install gcc"


def test_a_driver_that_torch_cannot_use_is_told_with_the_command(monkeypatch):
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.10")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "PACKAGES", ())
    (item,) = examine()["missing"]
    assert item["what"] == "torch with CUDA"
    assert "580.10" in item["why"]
    assert "download.pytorch.org/whl/cu130" in item["command"]


def test_the_table_names_importable_modules(found):
    for package in found["packages"]:
        if package["status"] == "ok":
            assert importlib.util.find_spec(package["module"]) is not None
