"""On a GPU with FP8 units a small layer is faster in bf16 and a large one in FP8, as measured here and now."""

import pytest
import torch

from octavo.fp8.recipe import DelayedScaling
from octavo.hardware import supports_fp8
from octavo.plan.fp8_auto import LinearShape, Setting, cached_timings, measure, reason_to_exclude

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and supports_fp8(0)), reason="needs a GPU with FP8 units"),
]


def test_a_small_shape_and_a_large_one_go_each_its_way(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device, recipe = torch.device("cuda", 0), DelayedScaling()
    setting = Setting(torch.cuda.get_device_name(0), torch.bfloat16, torch.bfloat16)
    small, large = LinearShape(256, 256, 256), LinearShape(8192, 4096, 4096)
    wanted = [(small, recipe), (large, recipe)]
    found = cached_timings(wanted, setting, lambda shape, recipe: measure(shape, recipe, device, setting))
    assert "bf16 is faster here" in reason_to_exclude(small, found[small, recipe], torch.bfloat16)
    assert reason_to_exclude(large, found[large, recipe], torch.bfloat16) == ""
    assert (
        1 < found[small, recipe].high_precision < 400 < found[large, recipe].high_precision < 50_000
    )  # microseconds: of 0.8 TFLOP

    def never(shape, recipe):
        raise AssertionError("measured twice")

    assert cached_timings(wanted, setting, never) == found
