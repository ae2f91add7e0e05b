"""FlashAttention-4's sums beside its own rounding of them, and layers that read them."""

import pytest
import torch

from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels.attention import flash, pieces
from octavo.kernels.attention.accumulated import Accumulated
from octavo.kernels.quantize.quantized import Quantizer
from octavo.kernels.rope import join_rotated
from octavo.nn.attention import MultiheadAttention
from octavo.recipe import DelayedScaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not flash.serves(torch.cuda.get_device_capability(), 128),
        reason="needs a Hopper GPU and flash-attn-4",
    ),
]

SHAPES = [
    (2, 1000, 8, 2, 64),
    (1, 2048, 4, 4, 64),
    (2, 640, 6, 2, 96),
    (1, 1000, 8, 2, 128),
    (2, 512, 4, 4, 128),
    (1, 65, 2, 1, 128),
]


@pytest.fixture
def repeated():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def backward_of(batch, tokens, heads, groups, dim, **how):
    q, k, v = (torch.randn(batch, tokens, n, dim, device="cuda").bfloat16() for n in (heads, groups, groups))
    out, lse = flash.forward(q, k, v, scale=dim**-0.5, **how)
    return torch.randn_like(out), q, k, v, out, lse


@pytest.mark.parametrize("how", [{"causal": True}, {"causal": True, "window": 100}, {"causal": False}], ids=str)
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
def test_sums_are_what_the_package_rounds(repeated, batch, tokens, heads, groups, dim, how):
    given = backward_of(batch, tokens, heads, groups, dim, **how)
    wanted = flash.backward(*given, scale=dim**-0.5, **how)
    found = flash.accumulate(*given, scale=dim**-0.5, **how)
    shared = heads != groups
    swapped = dim == 128 and not how["causal"]  # its tiles of queries are in another order
    assert [isinstance(x, Accumulated) for x in found] == [not swapped, shared, shared]
    for got, want in zip(found, wanted, strict=True):
        got = got.dense().bfloat16() if isinstance(got, Accumulated) else got
        assert torch.equal(got, want)


@pytest.mark.parametrize("rotated", [None, "all", "quarter"])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_join(batch, tokens, heads, groups, dim, rotated, fmt):
    given = backward_of(batch, tokens, heads, groups, dim, causal=True)
    grads = flash.accumulate(*given, causal=True, scale=dim**-0.5)
    dense = [x.dense() if isinstance(x, Accumulated) else x for x in grads]
    width = {"all": dim, "quarter": dim // 4, None: 0}[rotated]
    turn = torch.randn(batch, tokens, width, device="cuda")
    cos, sin = (turn.cos(), turn.sin()) if width else (None, None)
    scale = torch.tensor(fmt.max / max(x.abs().max().item() for x in dense), device="cuda")
    got, want = (torch.zeros((), device="cuda") for _ in range(2))
    made = join_rotated(*grads, cos, sin, Quantizer(fmt.dtype, fmt.max, scale, got, True, True))
    plain = join_rotated(*dense, cos, sin, Quantizer(fmt.dtype, fmt.max, scale, want, True, True))
    assert torch.equal(got, want)
    assert torch.equal(made.rowwise_data.view(torch.uint8), plain.rowwise_data.view(torch.uint8))
    assert torch.equal(made.columnwise_data.view(torch.uint8), plain.columnwise_data.view(torch.uint8))


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["bf16", "delayed"])
@pytest.mark.parametrize("groups", [2, 8])
def test_layer(repeated, monkeypatch, groups, recipe):
    """Gradients as by the package's rounding, within a rounding of bf16 and, in FP8, of E5M2."""
    torch.manual_seed(0)
    layer = MultiheadAttention(
        512, 8, 64, num_gqa_groups=groups, normalization="RMSNorm", params_dtype=torch.bfloat16, device="cuda"
    )
    x, d_out = (torch.randn(2, 777, 512, device="cuda").bfloat16() for _ in range(2))
    turn = torch.randn(1, 777, 64, device="cuda")
    asked = []
    own = pieces.accumulated
    monkeypatch.setattr("octavo.nn.attend.accumulated", lambda *given, **how: asked.append(1) or own(*given, **how))

    def run():
        given = x.detach().requires_grad_()
        with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            out = layer(given, None, (turn.cos(), turn.sin()))
        return torch.autograd.grad(out, [given, *layer.parameters()], d_out)

    for _ in range(2):  # the scales of the second follow the first
        run()
    found = run()
    assert len(asked) == 3
    monkeypatch.setattr(torch, "is_anomaly_enabled", lambda: True)
    wanted = run()
    assert len(asked) == 3
    for got, want in zip(found, wanted, strict=True):
        error = (got.float() - want.float()).norm() / want.float().norm()
        assert error < (0.01 if recipe is None else 0.05)
