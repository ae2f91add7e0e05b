"""Fused layers with random weights, how they are called on a residual stream, and the same by hand in float64."""

from __future__ import annotations

import functools
from typing import NamedTuple

import plain
import torch

import octavo
from octavo.nn.attention import split_qkv
from octavo.nn.mlp import deinterleave
from octavo.nn.rotary import Rotation

RECIPES = {
    "none": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=2),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}
FP8 = [name for name in RECIPES if name != "none"]
NORMS = ["RMSNorm", "LayerNorm"]
ACTIVATIONS = ["gelu", "gelu_exact", "srelu", "silu", "qgelu", "swiglu", "geglu", "geglu_exact", "qgeglu", "sreglu", "glu"]
EPS = 1e-3


class Sizes(NamedTuple):
    """Of a layer and of what it is called on."""

    batch: int = 2
    tokens: int = 7
    hidden: int = 48
    ffn: int = 40
    heads: int = 4
    groups: int = 2
    head: int = 12

    @property
    def shape(self):
        return self.batch, self.tokens, self.hidden

    @property
    def joint(self):
        return (self.heads + 2 * self.groups) * self.head


SMALL = Sizes()


def curve(name, x):
    if name in ("srelu", "sreglu"):
        return x.clamp(min=0).square()
    if name in ("qgelu", "qgeglu", "glu"):
        sigmoid = 1 / (1 + (-x if name == "glu" else -1.702 * x).exp())
        return sigmoid if name == "glu" else x * sigmoid
    if name in ("gelu", "geglu"):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return plain.silu(x) if name in ("silu", "swiglu") else plain.gelu(x)


def linear_by_hand(p, h, kind):
    normed = plain.norm(kind, h, p["layer_norm_weight"], p.get("layer_norm_bias"), EPS)
    return plain.linear(normed, p["weight"], p.get("bias"))


def mlp_by_hand(p, h, kind, activation):
    normed = plain.norm(kind, h, p["layer_norm_weight"], p.get("layer_norm_bias"), EPS)
    hidden = plain.linear(normed, p["fc1_weight"], p.get("fc1_bias"))
    if "glu" in activation:
        gate, up = (part.movedim(0, -1) for part in deinterleave(hidden.movedim(-1, 0)))
        hidden = curve(activation, gate) * up
    else:
        hidden = curve(activation, hidden)
    return plain.linear(hidden, p["fc2_weight"], p.get("fc2_bias"))


def split_by_hand(p, h, kind, heads, groups, angles, norms=None):
    """norms: parameters of the norms of queries and keys, before the rotation."""
    normed = plain.norm(kind, h, p["layer_norm_weight"], p.get("layer_norm_bias"), EPS)
    biases = split_qkv(p["bias"], heads, groups) if "bias" in p else (None, None, None)
    weights = split_qkv(p["weight"], heads, groups)
    dim = weights[1].shape[0] // groups
    q, k, v = (plain.linear(normed, w, b).unflatten(-1, (-1, dim)) for w, b in zip(weights, biases, strict=True))
    if norms is not None:
        q, k = (plain.norm("RMSNorm", x, norms[f"{name}.weight"], None, EPS) for name, x in (("q_norm", q), ("k_norm", k)))
    return (plain.rotate(q, *angles), plain.rotate(k, *angles), v) if angles else (q, k, v)


def part_of(p, prefix):
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def layer_by_hand(p, x, pending, *, kind, activation, heads, groups, angles, allowed, normed=False, parallel=False):
    """What a transformer layer hands on: stream and delta, or of a parallel one their sum."""
    h = x + pending
    norms = part_of(p, "self_attention.") if normed else None
    q, k, v = split_by_hand(part_of(p, "self_attention.layernorm_qkv."), h, kind, heads, groups, angles, norms)
    proj = part_of(p, "self_attention.proj.")
    attended = plain.linear(plain.attention(q, k, v, allowed), proj["weight"], proj.get("bias"))
    if parallel:
        return (h + attended + mlp_by_hand(part_of(p, "layernorm_mlp."), h, kind, activation),)
    h = h + attended
    return h, mlp_by_hand(part_of(p, "layernorm_mlp."), h, kind, activation)


class Case(NamedTuple):
    """A layer, how it is called on x and pending, and the same by hand; both give tuples."""

    module: torch.nn.Module
    call: object
    by_hand: object


def norm_case(kind="RMSNorm", bias=True, sizes=SMALL):
    module = plain.randomise({"RMSNorm": octavo.nn.RMSNorm, "LayerNorm": octavo.nn.LayerNorm}[kind](sizes.hidden, eps=EPS))
    with torch.no_grad():
        module.weight.copy_(plain.fresh(sizes.hidden, seed=3) + 1)

    def by_hand(p, x, pending):
        return (plain.norm(kind, x + pending, p["weight"], p.get("bias"), EPS),)

    return Case(module, lambda m, x, pending: (m(x, pending),), by_hand)


def linear_case(kind="RMSNorm", bias=True, sizes=SMALL):
    module = plain.randomise(octavo.nn.LayerNormLinear(sizes.hidden, sizes.ffn, eps=EPS, bias=bias, normalization=kind))
    return Case(
        module,
        lambda m, x, pending: m.forward_residual(x, pending),
        lambda p, x, pending: (x + pending, linear_by_hand(p, x + pending, kind)),
    )


def split_case(kind="RMSNorm", bias=True, rotate=True, sizes=SMALL):
    module = plain.randomise(octavo.nn.LayerNormLinear(sizes.hidden, sizes.joint, eps=EPS, bias=bias, normalization=kind))
    angles = plain.angles(sizes.batch, sizes.tokens, sizes.head) if rotate else None

    def call(m, x, pending):
        return m.forward_residual(
            x, pending, rotation=Rotation(sizes.heads, sizes.groups, *(tables_for(angles, x) or (None, None)))
        )

    def by_hand(p, x, pending):
        return x + pending, *split_by_hand(p, x + pending, kind, sizes.heads, sizes.groups, angles)

    return Case(module, call, by_hand)


def mlp_case(kind="RMSNorm", bias=True, activation="swiglu", sizes=SMALL, again=False):
    module = octavo.nn.LayerNormMLP(
        sizes.hidden, sizes.ffn, eps=EPS, bias=bias, normalization=kind, activation=activation, checkpoint=again
    )
    return Case(
        plain.randomise(module),
        lambda m, x, pending: m.forward_residual(x, pending),
        lambda p, x, pending: (x + pending, mlp_by_hand(p, x + pending, kind, activation)),
    )


def layer_case(
    kind="RMSNorm", bias=True, masked="causal", rotate=True, activation="swiglu", sizes=SMALL, *, normed=False, parallel=False
):
    """masked: "causal", "no_mask", or "mask" for a random one. Scores are of size 1: a softmax between one key and all.

    normed: queries and keys go through an RMSNorm before the rotation. In a parallel layer a part of each head rotates.
    """
    module = octavo.nn.TransformerLayer(
        sizes.hidden,
        sizes.ffn,
        sizes.heads,
        num_gqa_groups=sizes.groups,
        kv_channels=sizes.head,
        layernorm_epsilon=EPS,
        normalization=kind,
        bias=bias,
        activation=activation,
        self_attn_mask_type="causal" if masked == "mask" else masked,
        parallel_attention_mlp=parallel,
        qk_norm_type="RMSNorm" if normed else None,
        qk_norm_eps=EPS,
        qk_norm_before_rope=True,
    )
    plain.randomise(module)
    with torch.no_grad():
        module.self_attention.layernorm_qkv.weight.mul_(2 / sizes.hidden**0.5)
    allowed, mask = torch.ones(1, sizes.tokens, sizes.tokens, dtype=torch.bool), None
    if masked == "causal":
        allowed = plain.causal(sizes.tokens)
    if masked == "mask":
        random = torch.rand(sizes.batch, *allowed.shape[1:], generator=torch.Generator().manual_seed(4)) < 0.5
        allowed = random | torch.eye(sizes.tokens, dtype=torch.bool)
        mask = allowed[:, None]
    angles = plain.angles(sizes.batch, sizes.tokens, rotated_columns(sizes, parallel)) if rotate else None
    how = {"kind": kind, "activation": activation, "heads": sizes.heads, "groups": sizes.groups}
    how |= {"normed": normed, "parallel": parallel}

    def call(m, x, pending):
        handed_on = m.forward_residual(x, pending, None if mask is None else mask.to(x.device), tables_for(angles, x))
        return tuple(one for one in handed_on if one is not None)

    return Case(module, call, functools.partial(layer_by_hand, angles=angles, allowed=allowed, **how))


def rotated_columns(sizes, parallel):
    """Of a head, in a layer."""
    return sizes.head // 4 * 2 if parallel else sizes.head


def tables_for(angles, x):
    return None if angles is None else tuple(table.float().to(x.device) for table in angles)


CASES = {
    "norm": norm_case, "linear": linear_case, "split": split_case, "mlp": mlp_case, "layer": layer_case,
    "mlp again": functools.partial(mlp_case, again=True),
    "normed layer": functools.partial(layer_case, normed=True),
    "parallel layer": functools.partial(layer_case, parallel=True, activation="gelu"),
}  # fmt: skip


def run(case, x, pending, recipe, *, used=None, module=None, dtype=None):
    """Outputs and every gradient by name; `used`: the outputs that anything depends on. `module` stands for the case's own."""
    module = case.module if module is None else module
    device = next(case.module.parameters()).device
    for parameter in case.module.parameters():
        parameter.grad = None
    x, pending = (t.detach().to(device, dtype or t.dtype).requires_grad_(t.requires_grad) for t in (x, pending))
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        outputs = case.call(module, x, pending)
    backward(outputs, used)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)} | {"x": x.grad, "pending": pending.grad}
    return found | {name: p.grad for name, p in case.module.named_parameters()}


def backward(outputs, used):
    used = range(len(outputs)) if used is None else used
    cotangents = [plain.fresh(*y.shape, seed=90 + i).to(y) for i, y in enumerate(outputs)]
    torch.autograd.backward([outputs[i] for i in used], [cotangents[i] for i in used])


def exact(case, x, pending, used=None):
    """The same in float64 by hand, on the CPU."""
    p = {name: value.detach().cpu().double().requires_grad_() for name, value in case.module.named_parameters()}
    x, pending = (t.detach().double().requires_grad_() for t in (x, pending))
    outputs = case.by_hand(p, x, pending)
    backward(outputs, used)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)} | {"x": x.grad, "pending": pending.grad}
    return found | {name: value.grad for name, value in p.items()}


def inputs(size=1.0, shape=SMALL.shape):
    """x and pending."""
    return [plain.fresh(*shape, seed=seed, size=size).requires_grad_() for seed in (21, 22)]


def warm(case, recipe, x=None, pending=None, **options):
    """Delayed scaling knows the scales of these inputs afterwards."""
    x, pending = inputs() if x is None else (x, pending)
    for _ in range(2 if isinstance(recipe, octavo.recipe.DelayedScaling) else 0):
        run(case, x, pending, recipe, **options)


def assert_near(found, wanted, tolerance, *, by_norm):
    """Errors are relative to the norm, or else to the largest entry, of each tensor."""
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        if expected is None:
            assert found[name] is None, name
            continue
        assert found[name] is not None, name
        assert found[name].shape == expected.shape
        error = found[name].cpu().double() - expected.cpu().double()
        size, scale = (error.norm(), expected.norm()) if by_norm else (error.abs().max(), expected.abs().max())
        assert size <= tolerance * scale.item() + 1e-7, f"{name}: off by {size / scale.item():.2g}, allowed {tolerance}"


def same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert (found[name] is None) == (expected is None), name
        assert expected is None or torch.equal(found[name], expected), name


WIDE = 1e-5
"""Of float32, relative to the largest entry of each tensor."""
ROUNDED = {"output": 0.1, "gradient": 0.2}
"""Of FP8, relative norms. E4M3 rounds by up to 1/16 and E5M2 by up to 1/8 of an element: 2.6 and 5.2% of a tensor's norm, and
what a layer gives is the sum of two to eight such errors that do not know of each other."""


def assert_within_format(found, wanted, *, deeper=1.0):
    """`deeper`: for two layers one behind the other, where a softmax's gradient takes near numbers from each other."""
    for kind, tolerance in ROUNDED.items():
        chosen = [name for name in wanted if name.startswith("output") == (kind == "output")]
        assert_near({n: found[n] for n in chosen}, {n: wanted[n] for n in chosen}, tolerance * deeper, by_norm=True)
