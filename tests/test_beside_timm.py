"""The example with timm's vision transformer under DistributedDataParallel, where timm is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo

ROOT = Path(__file__).parent.parent
timm = pytest.importorskip("timm", exc_type=ImportError)


def run(tmp_path, *options):
    """The example's output; in a process that can import torchvision on a torch for CPUs."""
    (tmp_path / "sitecustomize.py").write_text((ROOT / "tests" / "torchvision_shim.py").read_text())
    path = os.pathsep.join([str(tmp_path), str(Path(timm.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / "vit_own_loop.py"), *options]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


RANKS = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
SHORT = ("--gpus", str(RANKS), "--steps", "20", "--warmup", "5", "--batch", "4")


@pytest.mark.parametrize("options", [["--blocks", "block_fn"], ["--blocks", "transform"], ["--graph"]], ids=" ".join)
def test_replicas_stay_the_same(tmp_path, options):
    done = run(tmp_path, *SHORT, *options)
    assert done.returncode == 0, done.stderr
    assert re.search(r"FP8, delayed: loss [\d.]+, [\d.]+ s a step", done.stdout), done.stdout
    assert done.stdout.endswith("replicas are the same\n")


def test_a_recipe_and_bf16_can_be_asked_for(tmp_path):
    done = run(tmp_path, *SHORT, "--recipe", "current")
    assert "FP8, current: loss" in done.stdout
    done = run(tmp_path, *SHORT, "--bf16")
    assert "bf16: loss" in done.stdout


@pytest.mark.parametrize("options", [("--steps", "5"), ("--gpus", "0"), ("--batch", "0"), ("--warmup", "-1")], ids=" ".join)
def test_sizes_without_a_measured_step_are_refused(tmp_path, options):
    done = run(tmp_path, *options)
    assert done.returncode == 2
    assert "--steps is above --warmup" in done.stderr


def test_what_the_block_does_not_compute_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from vit_own_loop import Block

    for change in ({"qkv_bias": False}, {"qk_norm": True}, {"drop_path": 0.1}, {"init_values": 1e-5}, {"scale_mlp_norm": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: this block does not have it"):
            Block(64, 4, **{"qkv_bias": True, **change})


def test_the_hash_of_a_replica_has_its_scales(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from vit_own_loop import TINY, Block, VisionTransformer, digest

    model, before = VisionTransformer(**TINY, block_fn=Block), set()
    for size in (1, 100):
        before.add(digest(model))
        with octavo.fp8_autocast():
            loss = model(size * torch.randn(2, 3, 32, 32)).sum()
        loss.backward()
    assert len({*before, digest(model)}) == 3
