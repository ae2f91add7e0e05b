"""Which shapes pay in FP8: the verdict, the table that a machine keeps, and that both kinds time the same three products."""

import json

import pytest
import torch
import triton

from octavo.fp8.recipe import RECIPES, CurrentScaling, DelayedScaling
from octavo.plan.fp8_auto import (
    LinearShape,
    Setting,
    Timing,
    cache_folder,
    cached_timings,
    fp8_products,
    high_precision_products,
    reason_to_exclude,
)

SMALL, LARGE = LinearShape(512, 256, 128), LinearShape(8192, 4096, 4096)
SETTING = Setting("NVIDIA H200", torch.bfloat16, torch.float32)
RECIPE = DelayedScaling()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "octavo"


@pytest.fixture
def timer():
    """A machine on which casts cost 20 µs and FP8 halves the time of products; it counts what it is asked."""
    asked = []

    def time(shape, recipe):
        asked.append((shape, recipe))
        wide = shape.tokens * shape.rows * shape.columns / 1e8
        return Timing(wide, 20 + wide / 2)

    time.asked = asked
    return time


def test_a_small_product_stays_out_with_both_timings_and_a_large_one_does_not(timer):
    found = cached_timings([(SMALL, RECIPE), (LARGE, RECIPE)], SETTING, timer)
    reason = reason_to_exclude(SMALL, found[SMALL, RECIPE], torch.bfloat16)
    assert reason == "bf16 is faster here: 0.2 µs against 20.1 µs in FP8 at 512 × 256 × 128"  # noqa: RUF001
    assert reason_to_exclude(SMALL, Timing(1234.5, 2345.6), torch.float16).startswith("fp16 is faster here: 1,23")
    assert reason_to_exclude(LARGE, found[LARGE, RECIPE], torch.bfloat16) == ""
    assert reason_to_exclude(SMALL, Timing(15, 15), torch.bfloat16)  # nothing is gained


def test_a_shape_is_measured_once_a_machine(timer):
    first = cached_timings([(SMALL, RECIPE), (SMALL, RECIPE)], SETTING, timer)
    assert timer.asked == [(SMALL, RECIPE)]
    assert cached_timings([(SMALL, RECIPE)], SETTING, timer) == first
    assert len(timer.asked) == 1
    both = cached_timings([(SMALL, RECIPE), (LARGE, RECIPE)], SETTING, timer)
    assert timer.asked[1:] == [(LARGE, RECIPE)]
    assert both[SMALL, RECIPE] == first[SMALL, RECIPE]
    cached_timings([(SMALL, DelayedScaling(amax_history_len=3, margin=2))], SETTING, timer)  # which cost no time
    assert len(timer.asked) == 2


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [
        (CurrentScaling(), SETTING),
        (DelayedScaling(fast_accumulation=True), SETTING),
        (DelayedScaling(fast_accumulation=False), SETTING),
        (RECIPE, SETTING._replace(gpu="NVIDIA L40S")),
        (RECIPE, SETTING._replace(weight_dtype=torch.bfloat16)),
        (RECIPE, SETTING._replace(dtype=torch.float16)),
    ],
)
def test_what_timings_depend_on_is_measured_anew(timer, recipe, setting):
    cached_timings([(SMALL, RECIPE)], SETTING, timer)
    cached_timings([(SMALL, recipe)], setting, timer)
    assert len(timer.asked) == 2


def test_so_it_is_for_other_versions(timer, monkeypatch):
    cached_timings([(SMALL, RECIPE)], SETTING, timer)
    for module in (torch, triton):
        monkeypatch.setattr(module, "__version__", "99.0")
        cached_timings([(SMALL, RECIPE)], SETTING, timer)
    assert len(timer.asked) == 3


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"key": 1}', "other"])
def test_a_file_that_is_damaged_or_of_another_key_is_as_none(timer, cache, content):
    cached_timings([(SMALL, RECIPE)], SETTING, timer)
    (file,) = cache.iterdir()
    if content == "other":
        held = json.loads(file.read_text())
        content = json.dumps(held | {"key": held["key"] | {"gpu": "another"}})
    file.write_text(content)
    cached_timings([(SMALL, RECIPE)], SETTING, timer)
    assert len(timer.asked) == 2
    cached_timings([(SMALL, RECIPE)], SETTING, timer)
    assert len(timer.asked) == 2


def test_a_cache_that_cannot_be_written_costs_a_measurement(timer, cache):
    cache.write_text("a file where the folder should be")
    assert len(cached_timings([(SMALL, RECIPE)], SETTING, timer)) == 1


def test_without_a_setting_the_cache_is_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "octavo"


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_both_kinds_compute_the_layers_three_products(recipe):
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(shape) for shape in ((48, 32), (64, 32), (48, 64)))
    x, dy = x.bfloat16(), dy.bfloat16()
    wanted = (x.float() @ weight.t(), dy.float() @ weight, dy.float().t() @ x.float())
    wide, fp8 = high_precision_products(x, weight, dy), fp8_products(x, weight, dy, recipe(), torch.ones(2))
    for name, a, b, exact in zip(("y", "dx", "dw"), wide, fp8, wanted, strict=True):
        assert a.dtype == b.dtype == (torch.float32 if name == "dw" else torch.bfloat16)
        assert (a.float() - exact).norm() < 0.01 * exact.norm()
        assert 1e-3 * exact.norm() < (b.float() - exact).norm() < 0.1 * exact.norm()
