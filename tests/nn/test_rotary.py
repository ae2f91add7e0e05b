"""Gradients from attention to the rotation in front of it, past autograd.

FlashAttention-4 needs a GPU; its sums are made here of the reference's gradients, in its order.
"""

import pytest
import torch

from octavo.fp8.autocast import fp8_autocast
from octavo.kernels.attention import flash, pieces, reference
from octavo.kernels.attention.accumulated import Accumulated
from octavo.nn.attention import MultiheadAttention
from octavo.nn.rotary import Handover, Rotation
from octavo.recipe import DelayedScaling

HIDDEN, HEADS, GROUPS, DIM, TOKENS = 64, 4, 2, 16, 70


def in_order(x, scale):
    """x [B, T, H, D] as sums whose `dense` it is."""
    batch, tokens, heads, dim = x.shape
    padded = torch.nn.functional.pad(x.float() / scale, (0, 0, 0, 0, 0, -tokens % 64))
    blocks = padded.reshape(batch, -1, 4, 2, 8, heads, dim // 8, 4, 2).permute(0, 5, 1, 6, 2, 4, 7, 3, 8)
    return Accumulated(blocks.reshape(batch, heads, -1), scale, tuple(x.shape))


@pytest.fixture
def package(monkeypatch):
    """FlashAttention-4 by the reference, with the sums of queries, or of all; returns what it was asked for."""
    asked = []

    def accumulate(*given, causal, scale, window=None):
        asked.append("sums")
        grads = reference.backward(*given, causal=causal, scale=scale, window=window)
        return tuple(in_order(x, 0.5) for x in grads)

    def backward(*given, causal, scale, window=None):
        asked.append("rounded")
        return reference.backward(*given, causal=causal, scale=scale, window=window)

    monkeypatch.setattr(flash, "takes", lambda q, k, *, causal, window=None: True)
    monkeypatch.setattr(flash, "packing", lambda *given: None)
    monkeypatch.setattr(flash, "forward", reference.forward)
    monkeypatch.setattr(flash, "backward", backward)
    monkeypatch.setattr(flash, "accumulate", accumulate)
    return asked


def layer(**options):
    torch.manual_seed(1)
    return MultiheadAttention(HIDDEN, HEADS, DIM, num_gqa_groups=GROUPS, normalization="RMSNorm", **options)


def run(module, x, d_out, recipe=None, **options):
    """Gradients of x and of all parameters."""
    x = x.detach().requires_grad_()
    turn = torch.linspace(0, 3, TOKENS * DIM).reshape(1, TOKENS, DIM)
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, emulate=True):
        out = module(x, None, (turn.cos(), turn.sin()), **options)
    return torch.autograd.grad(out, [x, *module.parameters()], d_out)


@pytest.fixture
def given():
    return torch.randn(2, TOKENS, HIDDEN), torch.randn(2, TOKENS, HIDDEN)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_same_gradients(package, given, bias, recipe, monkeypatch):
    found = run(layer(bias=bias), *given, recipe)
    assert package == ["sums"]
    monkeypatch.setattr(torch, "is_anomaly_enabled", lambda: True)
    wanted = run(layer(bias=bias), *given, recipe)
    assert package == ["sums", "rounded"]
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


def test_a_graph_that_runs_twice(package, given):
    module = layer()
    x, d_out = given
    turn = torch.linspace(0, 3, TOKENS * DIM).reshape(1, TOKENS, DIM)
    out = module(x, None, (turn.cos(), turn.sin()))
    weight = module.layernorm_qkv.weight
    (first,) = torch.autograd.grad(out, weight, d_out, retain_graph=True)
    (second,) = torch.autograd.grad(out, weight, 2 * d_out)
    assert torch.equal(second, 2 * first)


def watched(kind):
    module = layer()
    hook = {
        "forward": lambda: module.core_attention.register_forward_hook(lambda *given: None),
        "backward": lambda: module.core_attention.register_full_backward_hook(lambda *given: None),
        "projection": lambda: module.layernorm_qkv.register_full_backward_hook(lambda *given: None),
        "everywhere": lambda: torch.nn.modules.module.register_module_forward_hook(lambda *given: None),
    }[kind]()
    return module, hook


@pytest.mark.parametrize("kind", ["forward", "backward", "projection", "everywhere"])
def test_whoever_looks_sees_gradients(package, given, kind):
    wanted = run(layer(), *given)
    module, hook = watched(kind)
    try:
        found = run(module, *given)
    finally:
        hook.remove()
    assert package == ["sums", "rounded"]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_an_attention_of_the_callers(package, given):
    module = layer()
    own = module.core_attention.forward
    module.core_attention.forward = lambda q, k, v, mask=None, attn_mask_type=None: own(q, k, v, mask)
    run(module, *given)
    assert package == ["rounded"]


def test_norms_of_queries_and_keys_read_their_gradients(package, given):
    run(layer(qk_norm_type="RMSNorm"), *given)
    assert package == ["rounded"]


def test_a_frozen_projection(package, given):
    module = layer()
    module.layernorm_qkv.weight.requires_grad_(False)
    x, d_out = given
    out = module(x.requires_grad_(), None)
    (found,) = torch.autograd.grad(out, x, d_out)
    assert package == ["sums"]
    assert found.isfinite().all()


def test_detect_anomaly(package, given):
    with torch.autograd.set_detect_anomaly(True):
        run(layer(), *given)
    assert package == ["rounded"]


def test_another_reader_is_noticed():
    handover = Handover()
    grads = [torch.randn(1, 64, heads, 16) for heads in (2, 1, 1)]
    nothing = handover.give([in_order(x, 1.0) for x in grads], torch.float32)
    assert all(x.isnan().all() for x in nothing)
    rotation = Rotation(2, 1, None, None, handover=handover)
    with pytest.raises(RuntimeError, match="used outside attention"):
        rotation.join([nothing[0] + 1, *nothing[1:]])


def test_a_part_of_the_pattern_is_rounded(package, given):
    """Documents are several kernels' work here, whose gradients are added up."""
    q, k, v = (torch.randn(1, TOKENS, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    spans = [pieces.Span(0, 1, 0, 30, 0, 30, True), pieces.Span(0, 1, 30, TOKENS, 30, TOKENS, True)]
    out, lse = pieces.attention(q, k, v, spans, scale=0.3)
    grads = pieces.accumulated(torch.randn_like(q), q, k, v, out, lse, spans, scale=0.3)
    assert package == ["rounded", "rounded"]
    assert all(isinstance(x, torch.Tensor) for x in grads)
