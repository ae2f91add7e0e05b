"""flash-attn-4: the calls with a log-sum-exp, and the two functions of its backward that Octavo replaces.

Its public functions keep their own output and log-sum-exp, of which a split sequence has parts; the sums of its gradients are
rounded to bf16 before their reader sees them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect

import pytest
from private_names import Name, check

from octavo.kernels.attention import flash

NAMES = (
    Name(
        "flash_attn.cute.interface._flash_attn_fwd",
        ("kernels/attention/flash.py",),
        "output and log-sum-exp, without autograd",
        ("q", "k", "v"),
    ),
    Name(
        "flash_attn.cute.interface._flash_attn_bwd",
        ("kernels/attention/flash.py",),
        "gradients from an output and a log-sum-exp over more keys",
        ("q", "k", "v", "out", "dout", "lse"),
    ),
    Name(
        "flash_attn.cute.interface._tile_size_bwd_sm90",
        ("kernels/attention/flash.py",),
        "replaced: one stage for heads of 64 is 2 to 3% faster",
        ("head_dim",),
    ),
    Name(
        "flash_attn.cute.interface._bwd_postprocess_convert",
        ("kernels/attention/flash.py",),
        "replaced: float32 sums are passed on unrounded",
    ),
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn-4, which needs a GPU of Hopper"
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_name(name):
    assert flash.missing() is None
    check(name)


def test_the_forward_takes_what_octavo_passes():
    from flash_attn.cute import interface

    arguments = inspect.signature(interface._flash_attn_fwd).parameters
    assert {"softmax_scale", "return_lse", "causal", "window_size_left", "window_size_right"} <= arguments.keys()
    arguments = inspect.signature(interface._flash_attn_bwd).parameters
    assert {"softmax_scale", "deterministic", "causal", "window_size_left", "window_size_right"} <= arguments.keys()


def test_the_rounding_takes_its_arguments_by_position():
    from flash_attn.cute import interface

    names = list(inspect.signature(inspect.unwrap(interface._bwd_postprocess_convert)).parameters)
    assert len(names) >= 12, names


def test_tiles_have_the_stages_of_the_output_gradient():
    from flash_attn.cute import interface

    tiles = inspect.unwrap(interface._tile_size_bwd_sm90)(64, 64, True, False)
    assert "num_stages_dO" in {field.name for field in dataclasses.fields(tiles)}
