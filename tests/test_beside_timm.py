"""The example with timm's vision transformer under DistributedDataParallel, where timm is installed, and where it is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "vit_own_loop.py"
WITHOUT_TIMM = """\
import sys

class Without:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "timm":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without)
"""


@pytest.fixture
def timm():
    """timm, where it is installed."""
    return pytest.importorskip("timm", exc_type=ImportError)


@pytest.fixture
def run(timm, tmp_path):
    """`run(*options)` is the example, in a process that can import torchvision on a torch for CPUs."""

    def example(*options):
        (tmp_path / "sitecustomize.py").write_text((ROOT / "tests" / "torchvision_shim.py").read_text())
        return in_folders([tmp_path, Path(timm.__file__).parent.parent], *options)

    return example


def in_folders(folders, *options):
    """The example with these folders on the path of modules."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


RANKS = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
SHORT = ("--gpus", str(RANKS), "--steps", "20", "--warmup", "5", "--batch", "4")


@pytest.mark.parametrize("options", [["--blocks", "block_fn"], ["--blocks", "transform"], ["--graph"]], ids=" ".join)
def test_replicas_stay_the_same(run, options):
    done = run(*SHORT, *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"FP8, delayed: loss [\d.]+, [\d.]+ s a step", done.stdout), done.stdout
    assert done.stdout.endswith("replicas are the same\n")


def test_a_recipe_and_bf16_can_be_asked_for(run):
    done = run(*SHORT, "--recipe", "current")
    assert "FP8, current: loss" in done.stdout
    done = run(*SHORT, "--bf16")
    assert "bf16: loss" in done.stdout


@pytest.mark.parametrize("options", [("--steps", "5"), ("--gpus", "0"), ("--batch", "0"), ("--warmup", "-1")], ids=" ".join)
def test_sizes_without_a_measured_step_are_refused(run, options):
    done = run(*options)
    assert done.returncode == 2
    assert "--steps is above --warmup" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU any number of ranks runs")
def test_more_ranks_than_gpus_are_refused(run):
    done = run("--gpus", str(torch.cuda.device_count() + 1))
    assert done.returncode == 2
    assert f"Use --gpus {torch.cuda.device_count()}" in done.stderr


def test_without_timm_the_example_says_how_to_install_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TIMM)
    done = in_folders([tmp_path])
    assert done.returncode == 2
    assert (done.stdout, done.stderr) == (
        "",
        "timm is not installed, and the model is timm's. Install it by pip install 'octavo[bench]' (in a clone of Octavo: "
        "pip install -e '.[bench]').\n",
    )


def test_what_the_block_does_not_compute_is_refused(timm, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from vit_own_loop import Block

    for change in ({"qkv_bias": False}, {"qk_norm": True}, {"drop_path": 0.1}, {"init_values": 1e-5}, {"scale_mlp_norm": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: this block does not have it"):
            Block(64, 4, **{"qkv_bias": True, **change})


def test_the_hash_of_a_replica_has_its_scales(timm, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from vit_own_loop import TINY, Block, VisionTransformer, digest

    model, before = VisionTransformer(**TINY, block_fn=Block), set()
    for size in (1, 100):
        before.add(digest(model))
        with octavo.fp8_autocast():
            loss = model(size * torch.randn(2, 3, 32, 32)).sum()
        loss.backward()
    assert len({*before, digest(model)}) == 3
