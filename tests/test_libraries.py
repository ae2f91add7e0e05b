"""NVIDIA's libraries as the system shows them: a small library of cuDNN's name, built here, in place of the real one."""

import ctypes
import os
import shutil
import subprocess
import sys

import pytest

from octavo import libraries

LDCONFIG = """\
2 libs found in cache `/etc/ld.so.cache'
	libcudnn_ops.so.9 (libc6,x86-64) => {folder}/libcudnn_ops.so.9
	libcudnn.so.9 (libc6,x86-64) => {folder}/libcudnn.so.9
	libcudnn.so.8 (libc6,x86-64) => {folder}/gone/libcudnn.so.8
"""


@pytest.fixture
def build(tmp_path):
    """`build(folder, 91400)` is the path of a libcudnn.so.9 that gives this version."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")

    def make(folder, version):
        folder = tmp_path / folder
        folder.mkdir(parents=True)
        source = folder / "cudnn.c"
        source.write_text(f"unsigned long cudnnGetVersion(void) {{ return {version}; }}")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcudnn.so.9", source], check=True)
        return folder / "libcudnn.so.9"

    return make


def test_libraries_are_found_loaded_and_asked_for_their_versions(build, tmp_path, monkeypatch):
    first, wheel, cached = build("lib", 91400), build("site/nvidia/cudnn/lib", 91900), build("cache", 8907)
    (first.parent / "libcudnn.so").symlink_to(first)
    (first.parent / "libcudnn_ops.so.9").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{first.parent}:{tmp_path / 'absent'}:")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(libraries, "_ldconfig", lambda: LDCONFIG.format(folder=cached.parent))
    found = libraries.cudnn_on_disk()
    assert found == {str(first): "LD_LIBRARY_PATH", str(cached): "ldconfig", str(wheel): "a wheel beside torch"}
    assert [libraries.cudnn_version(path) for path in found] == ["9.14.0", "8.9.7", "9.19.0"]
    assert str(first) not in libraries.loaded_cudnn()  # versions are asked for in other processes
    (tmp_path / "lib" / "damaged").mkdir()
    damaged = tmp_path / "lib" / "damaged" / "libcudnn.so.9"
    damaged.write_text("no library")
    assert libraries.cudnn_version(str(damaged)) is None
    ctypes.CDLL(str(wheel))
    assert str(wheel) in libraries.loaded_cudnn()


def test_a_trial_has_the_environment_with_its_changes(monkeypatch):
    monkeypatch.setenv("OCTAVO_TRIAL", "set")
    show = "import os; print(os.environ.get('OCTAVO_TRIAL'), os.environ.get('OCTAVO_OTHER'))"
    assert libraries.trial(show, {}) == "set None"
    assert libraries.trial(show, {"OCTAVO_TRIAL": None, "OCTAVO_OTHER": "new"}) == "None new"
    assert libraries.trial("raise SystemExit(3)", {}) is None
    assert os.environ["OCTAVO_TRIAL"] == "set"


def test_the_drivers_cuda_is_its_librarys(monkeypatch):
    class Driver:
        def __init__(self, number, code=0):
            self.number, self.code = number, code

        def cuDriverGetVersion(self, where):
            where._obj.value = self.number
            return self.code

    for number, text in ((13000, "13.0"), (12090, "12.9"), (12000, "12.0")):
        monkeypatch.setattr(libraries.ctypes, "CDLL", lambda name, number=number: Driver(number))
        assert libraries.driver_cuda() == text
    monkeypatch.setattr(libraries.ctypes, "CDLL", lambda name: Driver(0, 34))
    with pytest.raises(OSError, match="error 34"):
        libraries.driver_cuda()


@pytest.mark.parametrize(
    ("driver", "cuda", "works"),
    [("13.0", "13.1", True), ("13.0", "12.6", True), ("12.9", "13.0", False), ("12.0", "12.9", True), ("11.8", "12.1", False)],
)
def test_a_driver_runs_its_major_version_of_cuda_and_older_ones(driver, cuda, works):
    assert libraries.runs(driver, cuda) is works
