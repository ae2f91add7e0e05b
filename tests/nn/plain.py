"""Layers written by hand in float64, and how Octavo's float32 ones are compared with them, gradients included."""

import torch
from torch.nn import functional


def fresh(*shape, seed=0, size=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def randomise(module, seed=0):
    """Random values in every parameter: norms around 1, the rest around 0."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw) * 0.3
            is_norm = name.endswith("layer_norm_weight") or (name == "weight" and parameter.dim() == 1)
            parameter.copy_(noise + 1 if is_norm else noise)
    return module


def norm(kind, x, weight, bias, eps):
    if kind == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def attention(q, k, v, allowed, scale=None):
    """q [B, T, H, D], k and v [B, T, G, D], allowed bool [B or 1, T, T] → [B, T, H·D], one head at a time."""
    heads, per_group = q.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    contexts = []
    for head in range(heads):
        keys, values = k[:, :, head // per_group], v[:, :, head // per_group]
        scores = (q[:, :, head] @ keys.transpose(1, 2) * scale).masked_fill(~allowed, -torch.inf)
        contexts.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ values)
    return torch.cat(contexts, -1)


def causal(tokens):
    return torch.ones(1, tokens, tokens, dtype=torch.bool).tril()


def rotate(x, cos, sin):
    """The first columns of x [B, T, H, D] as complex numbers of their two halves, turned by the angles [B, T, columns]."""
    columns = cos.shape[-1]
    half = columns // 2
    turned = torch.complex(x[..., :half], x[..., half:columns]) * torch.complex(cos, sin)[:, :, None, :half]
    return torch.cat([turned.real, turned.imag, x[..., columns:]], -1)


def angles(batch, tokens, dim):
    at = torch.arange(tokens, dtype=torch.float64)[:, None] * 100.0 ** (-torch.arange(0, dim, 2) / dim)
    at = torch.cat([at, at], -1).expand(batch, tokens, dim)
    return at.cos(), at.sin()


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def silu(x):
    return x / (1 + (-x).exp())


def linear(x, weight, bias=None):
    return functional.linear(x, weight, bias)


def assert_equals_float64(module, by_hand, *inputs, tolerance=2e-5, zero=1e-9):
    """Output and every gradient of `module(*inputs)` are those of `by_hand(parameters, *inputs)` in float64.

    Errors are relative to the largest entry of each tensor; `zero` is the rounding of a gradient that is none.
    """
    parameters = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output, wanted = module(*inputs), by_hand(parameters, *exact)
    assert output.shape == wanted.shape
    cotangent = fresh(*wanted.shape, seed=99)
    output.backward(cotangent)
    wanted.backward(cotangent.double())
    pairs = {"output": (output, wanted)}
    pairs |= {f"input {i}": (x.grad, e.grad) for i, (x, e) in enumerate(zip(inputs, exact, strict=True))}
    pairs |= {name: (p.grad, parameters[name].grad) for name, p in module.named_parameters()}
    for name, (found, expected) in pairs.items():
        assert found is not None, name
        error = (found.double() - expected).abs().max()
        assert error <= tolerance * expected.abs().max() + zero, f"{name}: off by {error}, largest {expected.abs().max()}"
