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

from octavo import __version__, doctor, libraries, versions
from octavo.doctor import Package, examine, render
from octavo.hardware import Device, lookup
from octavo.kernels.attention import library

pytestmark = pytest.mark.usefixtures("trials_once")


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


def test_an_untested_version_is_said_with_those_that_were(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", tuple(package for package in doctor.PACKAGES if package.name == "triton"))
    assert not [row for row in examine()["missing"] if row["what"] == "triton"]
    monkeypatch.setitem(versions.TESTED, "triton", ((1, 0), (1, 1)))
    (row,) = [row for row in examine()["missing"] if row["what"] == "triton"]
    assert row["why"].endswith("was not tested with Octavo; versions 1.0 to 1.1 were")
    assert row["command"].startswith("pip install 'triton>=")


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
    # To install again what is installed was not tried, and is no remedy.
    assert all(missing[name]["command"] is None and message in missing[name]["why"] for name, (_, message) in BROKEN.items())
    assert "no remedy is known to help here" in text
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


@pytest.mark.long(lambda capability: capability == (8, 9))
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
    there = {"apt-get": "/usr/bin/apt-get"}
    monkeypatch.setattr(doctor.shutil, "which", there.get)
    missing = {item["what"]: item for item in on_gpu("NVIDIA H200", (9, 0), True)["missing"]}
    assert "falls to flash" in missing["cuDNN attention"]["why"]
    assert "is set not to use it" in missing["cuDNN attention"]["why"]
    assert missing["cuDNN attention"]["command"] is None
    assert missing["a C compiler"]["command"] == "apt-get install gcc"
    there.clear()
    missing = {item["what"]: item for item in on_gpu("NVIDIA H200", (9, 0), True)["missing"]}
    assert missing["a C compiler"]["command"] == "install gcc or clang by the system's packages"


def test_a_gpu_too_old_for_the_kernels_is_told(on_gpu):
    (item,) = [item for item in on_gpu("Tesla V100-SXM2-16GB", (7, 0), False)["missing"] if "GPU" in item["what"]]
    assert item["why"] == "its capability is 7.0; products in bf16 and Octavo's kernels need 8.0"


@pytest.fixture
def machine(monkeypatch):
    """Pretend what the system says: driver, its CUDA, torch's build, whether it sees a GPU, what trials print."""

    def pretend(*, driver="580.159.04", cuda="13.0", build="13.0", sees=False, reason=None, trials=lambda code, change: None):
        def cuda_of_driver():
            if cuda is None:
                raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
            return cuda

        def init():
            if reason:
                raise RuntimeError(reason)

        monkeypatch.setattr(doctor, "driver_version", lambda: driver)
        monkeypatch.setattr(libraries, "driver_cuda", cuda_of_driver)
        monkeypatch.setattr(libraries, "trial", trials)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(doctor, "PACKAGES", ())
        monkeypatch.setattr(doctor, "_attention", lambda: {"device": "cuda", "chosen": {}, "allowed": ["cuDNN"], "octavo": "-"})
        monkeypatch.setattr(doctor, "_products", lambda: {"bf16": "cuBLAS"})
        return examine()

    return pretend


def test_a_torch_without_cuda_is_told_with_the_command(machine):
    (item,) = machine(driver="580.10", build=None)["missing"]
    assert item["what"] == "torch with CUDA"
    assert "580.10" in item["why"]
    assert item["why"].endswith("torch is built without CUDA")
    assert "download.pytorch.org/whl/cu130" in item["command"]
    (item,) = machine(driver="550.54.14", cuda="12.4", build=None)["missing"]  # which cu130 would not run on
    assert item["command"] == "install a torch that is built for CUDA 12, or a driver of 580 or newer and torch as usual"
    (item,) = machine(driver=None, cuda="13.0", build=None)["missing"]  # a container without nvidia-smi
    assert "there is an NVIDIA driver (of CUDA 13.0)" in item["why"]


def test_a_driver_older_than_torchs_cuda_is_told_with_the_oldest_that_works(machine):
    found = machine(driver="550.54.14", cuda="12.4", build="13.0", reason="The NVIDIA driver on your system is too old")
    assert found["cuda"]["enough"] is False
    (item,) = found["missing"]
    assert item["what"] == "a driver of 580 or newer"
    assert "the driver supports CUDA up to 12.4, but torch is built for CUDA 13.0" in item["why"]
    assert item["command"] == "install a driver of 580 or newer, or a torch that is built for CUDA 12.4"
    text = rendered(found)
    assert "the driver runs CUDA 12.4 or older; torch's build needs a driver of 580 or newer" in text
    (item,) = machine(driver="470.82.01", cuda="11.4", build="12.6")["missing"]
    assert item["what"] == "a driver of 525.60.13 or newer"
    # A driver runs every minor version of its CUDA.
    assert machine(driver="525.60.13", cuda="12.0", build="12.9", sees=True)["cuda"]["enough"] is True


def test_a_gpu_that_is_hidden_or_fails_is_told_by_its_reason_and_never_by_the_build(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    shown = lambda code, change: str(change.get("CUDA_VISIBLE_DEVICES", "7") is None)  # noqa: E731
    (item,) = machine(trials=shown)["missing"]
    assert (item["what"], item["command"]) == ("a visible GPU", "unset CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES=7 hides it" in item["why"]
    # Where no process sees it either, the variable is not the reason.
    found = machine(trials=lambda code, change: "False", reason="Unexpected error from cudaGetDeviceCount(). Error 802")
    (item,) = found["missing"]
    assert item["why"].endswith(
        "though it is built for CUDA 13.0: RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802"
    )
    assert item["command"] is None
    assert "without CUDA" not in rendered(found)
    (item,) = machine(trials=lambda code, change: "True")["missing"]  # even without a change
    assert item["why"].endswith("which has imported all packages above; one that imports only torch sees it")
    assert item["command"] is None
    assert machine(driver=None, cuda=None)["missing"] == []  # a CPU with a build for CUDA


class Build:
    """torch._C._cudnn of a build for 9.19 whose loader found 9.14."""

    getCompileVersion = staticmethod(lambda: (9, 19, 0))
    getRuntimeVersion = staticmethod(lambda: (9, 14, 0))
    getVersionInt = staticmethod(lambda: 91400)


SYSTEM, WHEEL = "/usr/lib/x86_64-linux-gnu/libcudnn.so.9", "/venv/nvidia/cudnn/lib/libcudnn.so.9"


@pytest.fixture
def two_cudnns(machine, monkeypatch):
    """A GPU that works, under torch built for 9.19, whose loader finds the system's 9.14: PyTorch's check raises, once."""

    def pretend(trials, *, variable=None, loads=()):
        raised = []

        def version():
            if not raised:
                raised.append(True)
                raise RuntimeError(
                    "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found (9, 14, 0)."
                )
            return 91400

        paths = SYSTEM, SYSTEM.replace("libcudnn", "libcudnn_ops")
        maps = "".join(f"7f00-7f01 r-xp 00000000 08:01 42   {path}\n" for path in paths)
        monkeypatch.setattr(libraries, "loaded_cudnn", lambda: libraries.cudnn_of_map(maps))
        monkeypatch.setattr(libraries, "cudnn_on_disk", lambda: {SYSTEM: "ldconfig", WHEEL: "a wheel beside torch"})
        monkeypatch.setattr(libraries, "cudnn_version", {SYSTEM: "9.14.0", WHEEL: "9.19.0"}.get)
        monkeypatch.setattr(torch._C, "_cudnn", Build, raising=False)
        monkeypatch.setattr(torch.backends.cudnn, "version", version)
        monkeypatch.setattr(doctor, "_cudnn_computes", lambda: "ok")
        if variable is None:
            monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        else:
            monkeypatch.setenv("LD_LIBRARY_PATH", variable)
        return machine(sees=True, trials=trials)

    return pretend


def test_another_cudnn_than_torchs_is_told_with_both_and_not_as_a_torch_without_cuda(two_cudnns):
    found = two_cudnns(lambda code, change: None)
    assert {**found["torch"], "nccl": None} == {  # that of this machine's torch
        "cuda": "13.0", "rocm": None, "cudnn": 91400, "nccl": None, "sees_gpu": True, "gpu_error": None
    }  # fmt: skip
    assert found["cudnn"]["loaded"] == [{"path": SYSTEM, "version": "9.14.0", "by": "this process"}]
    assert (found["cudnn"]["compiled"], found["cudnn"]["runtime"]) == ("9.19.0", "9.14.0")
    (item,) = found["missing"]
    assert item["what"] == "cuDNN of torch's build"
    assert f"loaded: 9.14.0 at {SYSTEM}; on disk: 9.14.0 at {SYSTEM} (ldconfig); 9.19.0 at {WHEEL}" in item["why"]
    assert item["why"].endswith("attention by it works nevertheless")
    assert item["command"] is None  # no change of LD_LIBRARY_PATH helped
    text = rendered(found)
    assert "without CUDA" not in text
    assert "force-reinstall" not in text
    assert f"9.14.0 ({SYSTEM}); torch is built for 9.19.0" in text
    json.dumps(found)


def test_a_change_of_the_loaders_path_is_a_remedy_where_it_helped_in_a_trial(two_cudnns):
    folder = WHEEL.rpartition("/")[0]

    def helps(*values):
        return lambda code, change: (
            "91900" if code == doctor.CUDNN_WORKS and change.get("LD_LIBRARY_PATH", "-") in values else None
        )

    (item,) = two_cudnns(helps(None), variable="/usr/lib/x86_64-linux-gnu")["missing"]
    assert item["command"] == "unset LD_LIBRARY_PATH"
    (item,) = two_cudnns(helps(f"{folder}:/opt/lib"), variable="/opt/lib")["missing"]
    assert item["command"] == f"export LD_LIBRARY_PATH={folder}:/opt/lib"
    (item,) = two_cudnns(helps(folder))["missing"]
    assert item["command"] == f"export LD_LIBRARY_PATH={folder}"


def test_a_package_that_brings_another_cudnn_into_this_process_alone_is_named(two_cudnns, monkeypatch):
    packages = [Package("transformer-engine", "json", "tests", "pip install transformer-engine")]
    examined = examine

    def with_package():
        monkeypatch.setattr(doctor, "PACKAGES", packages)
        loaded = iter([[], [SYSTEM]])
        monkeypatch.setattr(libraries, "loaded_cudnn", lambda: next(loaded, [SYSTEM]))
        return examined()

    monkeypatch.setitem(globals(), "examine", with_package)
    found = two_cudnns(lambda code, change: "91900")
    assert found["packages"][0]["loads_cudnn"] == [SYSTEM]
    (item,) = found["missing"]
    assert item["why"].endswith("A process that imports only torch uses 9.19.0; here transformer-engine loaded it")
    assert item["command"] is None


def test_attention_names_the_cudnn_that_runs_where_pytorchs_check_raises(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch._C, "_cudnn", Build, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    assert library.version() == "cuDNN 91400"


def test_the_table_names_importable_modules(found):
    for package in found["packages"]:
        if package["status"] == "ok":
            assert importlib.util.find_spec(package["module"]) is not None
