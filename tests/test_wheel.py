"""The wheel, installed in a fresh environment without the repository: what is in it, and that its demo trains there.

Its dependencies are this environment's, by a path file: without the files that an editable install of Octavo has there.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason="the extra dev has it")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("octavo-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """`installed(*arguments)` runs `octavo` of the fresh environment, in a folder that has nothing of the repository."""
    place = tmp_path_factory.mktemp("place")
    folder = place / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    paths = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site / "dependencies.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}) + "\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=place)
    assert done.returncode == 0, done.stderr

    def run(*arguments):
        command = [str(folder / "bin" / "octavo"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=place)

    run.place, run.site, run.python, run.variables = place, site, python, variables
    return run


def test_the_wheel_has_the_package_and_its_presets_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"octavo", f"octavo-{importlib.metadata.version('octavo')}.dist-info"}
    assert {f"octavo/presets/{path.name}" for path in (ROOT / "presets").iterdir()} <= set(names)
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "octavo/py.typed" in names


def test_the_demo_of_the_wheel_trains(installed):
    code = "import octavo, pathlib; print(pathlib.Path(octavo.__file__).resolve())"
    where = subprocess.run(
        [str(installed.python), "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=installed.variables,
        cwd=installed.place,
    )
    assert Path(where.stdout.strip()).is_relative_to(installed.site.resolve())
    done = installed("train", "presets/demo.toml", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["run"]["steps"], result["bf16"]["steps"], result["ended_early"]) == (380, 380, "")
    assert abs(result["gap_percent"]) < 5
    assert (installed.place / "runs" / "demo").is_dir()


def test_the_wheel_says_that_other_suites_are_in_a_clone(installed):
    done = installed("bench", "one-gpu", "--peers", "te")
    assert done.returncode == 2
    assert done.stderr == (
        "octavo: the suite one-gpu is not in the package, which has layers and kernels. "
        "Run it in a clone of Octavo: python -m benchmarks one-gpu --peers te\n"
    )
    done = installed("bench", "layers", "--cases", "linear", "--steps", "1", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (installed.place / "layers.json").is_file()
