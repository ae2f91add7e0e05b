"""The layers suite: errors of outputs and gradients against float64, for Octavo's layers and Transformer Engine's.

Both libraries' layers have the same arguments, random bfloat16 weights, inputs and output gradients. The error of a tensor is
‖found − exact‖ / ‖exact‖, norms over all elements in float64; exact is `octavo.bench.exact` on the same rounded values.
Under delayed scaling forward and backward first repeat on the same tensors until the history holds only their amaxes. The
median over the seeds counts. On a GPU the time of Octavo's forward and backward is measured too, by each recipe in turns.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import octavo.nn
from octavo.bench import exact
from octavo.errors import InputError, recorded
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import CurrentScaling, DelayedScaling
from octavo.nn.mlp import deinterleave, interleave

HISTORY = 16
"""Steps."""
SETTLING = HISTORY + 4
"""Steps until the history has no amax from a step with unsettled scales."""
RECIPES = {
    "bf16": None,
    # Precise, as in Transformer Engine by default.
    "delayed": DelayedScaling(amax_history_len=HISTORY, fast_accumulation=False),
    "current": CurrentScaling(fast_accumulation=False),
}
ROPE_BASE = 500_000.0
HIDDEN_STEP = 256
"""Features of a group of four heads."""

Tensors = dict[str, Tensor]
Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Creates the context manager around a forward."""


class Size(NamedTuple):
    """Sizes of the layers and of their input: sequences, tokens, features, heads."""

    batch: int
    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int

    def angles(self, device: torch.device) -> Tensor:
        """Rotary angles [T, D], float32."""
        return exact.rotary_angles(self.tokens, self.hidden // self.heads, ROPE_BASE, device)


ON_GPU = Size(2, 1024, 2048, 8192, 32, 8)
"""A layer of Llama-3.2-1B."""
ON_CPU = Size(2, 32, 64, 128, 4, 2)
"""For tests of the suite."""


@dataclass(frozen=True)
class LayerCase:
    """One row of the table.

    Attributes:
        name: name in the results.
        kind: the class, in either library.
        normalization, activation, bias: arguments of the constructor.
        llama: causal attention with rotary embedding and grouped key-value heads (transformer layers).
    """

    name: str
    kind: str
    normalization: str = "LayerNorm"
    activation: str = "gelu"
    bias: bool = True
    llama: bool = False

    def arguments(self, size: Size) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Arguments of the constructor, in either library."""
        how: dict[str, Any] = {"bias": self.bias}
        if self.kind != "Linear":
            how["normalization"] = self.normalization
        if self.kind in ("Linear", "LayerNormLinear"):
            return (size.hidden, size.hidden), how
        how["activation"] = self.activation
        if self.kind == "LayerNormMLP":
            return (size.hidden, size.ffn), how
        how |= {
            "num_gqa_groups": self._groups(size),
            "self_attn_mask_type": "causal" if self.llama else "no_mask",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "fuse_qkv_params": True,
            "attn_input_format": "bshd",
        }
        return (size.hidden, size.ffn, size.heads), how

    def exact(self, parameters: exact.Parameters, x: Tensor, size: Size) -> Tensor:
        """The same function in the dtype of its arguments."""
        if self.kind == "Linear":
            return exact.linear(parameters, x)
        if self.kind == "LayerNormLinear":
            return exact.linear(parameters, exact.norm(parameters, x, self.normalization))
        if self.kind == "LayerNormMLP":
            return exact.mlp(parameters, x, self.normalization, self.activation)
        # Angles are float32 for both libraries: another rounding would be another function.
        angles = size.angles(x.device).to(x.dtype) if self.llama else None
        heads = exact.Heads(size.heads, self._groups(size), angles)
        return exact.block(parameters, x, self.normalization, self.activation, heads)

    def _groups(self, size: Size) -> int:
        return size.groups if self.llama else size.heads


LAYERS: dict[str, LayerCase] = {
    layer.name: layer
    for layer in (
        LayerCase("linear", "Linear"),
        LayerCase("layernorm-linear", "LayerNormLinear"),
        LayerCase("rmsnorm-linear", "LayerNormLinear", "RMSNorm", bias=False),
        LayerCase("mlp-gelu", "LayerNormMLP"),
        LayerCase("mlp-swiglu", "LayerNormMLP", "RMSNorm", "swiglu", bias=False),
        LayerCase("vit-layer", "TransformerLayer"),
        LayerCase("llama-layer", "TransformerLayer", "RMSNorm", "swiglu", bias=False, llama=True),
    )
}


@dataclass(frozen=True)
class Library:
    """A library with its layers.

    Attributes:
        name: prefix of its keys in a row.
        layers: the module with the classes.
        around: from a recipe's name to `Around`.
        interleaved: gate and up alternate in blocks of rows.
    """

    name: str
    layers: Any
    around: Callable[[str], Around]
    interleaved: bool = False

    def make(self, layer: LayerCase, size: Size, device: torch.device) -> nn.Module:
        """The layer, its parameters in bfloat16."""
        sizes, how = layer.arguments(size)
        return getattr(self.layers, layer.kind)(*sizes, **how, params_dtype=torch.bfloat16, device=device)

    @torch.no_grad()
    def fill(self, module: nn.Module, layer: LayerCase, drawn: Tensors) -> None:
        """Copy the drawn parameters, with all rows of gate before those of up."""
        for name, parameter in module.named_parameters():
            value = drawn[name]
            parameter.copy_(interleave(*value.chunk(2)) if self._alternates(name, layer) else value)

    def gradients(self, module: nn.Module, layer: LayerCase) -> Tensors:
        """The gradients of the parameters, in the drawn order of rows."""
        tensors = {}
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            rows = deinterleave(parameter.grad) if self._alternates(name, layer) else (parameter.grad,)
            tensors[f"{name}.grad"] = torch.cat(rows)
        return tensors

    def _alternates(self, name: str, layer: LayerCase) -> bool:
        return self.interleaved and "fc1_" in name and layer.activation == "swiglu"


def _octavo_around(recipe: str) -> Around:
    return partial(fp8_autocast, enabled=RECIPES[recipe] is not None, fp8_recipe=RECIPES[recipe])


OCTAVO = Library("octavo", octavo.nn, _octavo_around, interleaved=True)


def size_of(tokens: int | None, hidden: int | None) -> Size:
    """A layer of Llama's proportions: one sequence of `tokens`, `hidden` features in heads of 64; None: those of `ON_GPU`.

    Raises:
        InputError: heads of 64 features in groups of four do not fill `hidden`.
    """
    hidden = ON_GPU.hidden if hidden is None else hidden
    if hidden % HIDDEN_STEP:
        near = max(HIDDEN_STEP, round(hidden / HIDDEN_STEP) * HIDDEN_STEP)
        raise InputError(f"--hidden {hidden} is not a multiple of {HIDDEN_STEP} (four heads of 64). Nearest: --hidden {near}.")
    batch, length = (ON_GPU.batch, ON_GPU.tokens) if tokens is None else (1, tokens)
    return Size(batch, length, hidden, 4 * hidden, hidden // 64, hidden // HIDDEN_STEP)


def draw(layer: LayerCase, size: Size, device: torch.device, seed: int) -> tuple[Tensors, Tensor, Tensor]:
    """Parameters by name, input and output gradient, all in bfloat16: norms around 1, matrices by 1/√fan_in."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    parameters = {}
    for name, parameter in OCTAVO.make(layer, size, device).named_parameters():
        noise = normal(*parameter.shape)
        if name.endswith("layer_norm_weight"):
            value = 1 + 0.1 * noise
        else:
            value = noise * (0.1 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)
        parameters[name] = value.bfloat16()
    x, grad = (normal(size.batch, size.tokens, size.hidden).bfloat16() for _ in range(2))
    return parameters, x, grad


def exact_tensors(layer: LayerCase, size: Size, parameters: Tensors, x: Tensor, grad: Tensor) -> Tensors:
    """Output and gradients in float64."""
    leaves = {name: value.double().requires_grad_() for name, value in parameters.items()}
    x = x.double().requires_grad_()
    y = layer.exact(leaves, x, size)
    gradients = torch.autograd.grad(y, [x, *leaves.values()], grad.double())
    return dict(zip(("output", "input.grad", *(f"{name}.grad" for name in leaves)), (y.detach(), *gradients), strict=True))


def steps_of(
    library: Library, layer: LayerCase, size: Size, recipe: str, parameters: Tensors, x: Tensor, grad: Tensor
) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    """A library's layer, and its forward and backward: a call gives the output and the gradient of the input."""
    module, around = library.make(layer, size, x.device), library.around(recipe)
    library.fill(module, layer, parameters)
    arguments = {"rotary_pos_emb": size.angles(x.device)[:, None, None]} if layer.llama else {}

    def step() -> tuple[Tensor, Tensor]:
        module.zero_grad(set_to_none=True)
        leaf = x.detach().clone().requires_grad_()
        with around():
            y = module(leaf, **arguments)
        y.backward(grad)
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    return module, step


def found_tensors(
    library: Library, layer: LayerCase, size: Size, recipe: str, parameters: Tensors, x: Tensor, grad: Tensor, settling: int
) -> Tensors:
    """Output and gradients of a library's layer, after `settling` passes over the same tensors."""
    module, step = steps_of(library, layer, size, recipe, parameters, x, grad)
    for _ in range(settling):
        step()
    y, dx = step()
    return {"output": y, "input.grad": dx, **library.gradients(module, layer)}


def error(result: Tensor, expected: Tensor) -> float:
    """‖result − expected‖ / ‖expected‖ in float64."""
    if result.shape != expected.shape:
        raise ValueError(f"shape {list(result.shape)} instead of {list(expected.shape)}")
    far = float((result.double() - expected).norm() / expected.norm())
    if not math.isfinite(far):
        raise ValueError(f"a relative error of {far}")
    return far


def measure_layers(
    layers: Iterable[LayerCase],
    device: torch.device,
    libraries: Sequence[Library],
    *,
    seeds: int,
    settling: int,
    say: Callable[[str], None],
    timer: Callable[..., list[float]] | None = None,
    timed: Size = ON_GPU,
) -> list[dict[str, Any]]:
    """A row per tensor, layer and recipe; a library that fails has None and NAME_failed.

    Without the exact tensors of a layer no library has figures: the row of the output has `exact_failed`.

    Args:
        libraries: Octavo, and Transformer Engine if it runs.
        seeds: draws of weights, inputs and output gradients; the median is reported.
        settling: passes of delayed scaling before the measured one.
        timer: microseconds of each of some calls, which take turns; with one, rows have those of a forward and backward of
            Octavo's layer (`octavo_us`).
        timed: the layers' size for the timer; errors are of `ON_GPU`, on a CPU of `ON_CPU`.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    size = ON_GPU if device.type == "cuda" else ON_CPU
    sizes = {"batch": size.batch, "sequence_length": size.tokens, "hidden_size": size.hidden, "seeds": seeds}
    rows = []
    for layer in layers:
        say(layer.name)
        failed: dict[str, str] = {}
        with recorded(failed, layer.name, say, key="exact_failed"):
            drawn = [draw(layer, size, device, seed) for seed in range(seeds)]
            expected = [exact_tensors(layer, size, *one) for one in drawn]
        if failed:
            nothing: dict[str, Any] = {"tensor": "output", "octavo_error": None, "te_error": None, **failed, **sizes}
            rows += [{"layer": layer.name, "recipe": recipe, **nothing} for recipe in RECIPES]
            continue
        for recipe in RECIPES:
            passes = settling if recipe == "delayed" else 0
            medians: dict[str, dict[str, float]] = {}
            failures: dict[str, str] = {}
            for library in libraries:
                with recorded(failures, f"{layer.name}, {recipe}: {library.name}", say, key=f"{library.name}_failed"):
                    results = (found_tensors(library, layer, size, recipe, *one, passes) for one in drawn)
                    medians[library.name] = _median_errors(results, expected)
            for tensor in expected[0]:
                errors = {f"{name}_error": medians.get(name, {}).get(tensor) for name in ("octavo", "te")}
                rows.append({"layer": layer.name, "recipe": recipe, "tensor": tensor, **errors, **failures, **sizes})
        if timer is not None:
            drawn.clear()
            expected.clear()
            _time(rows, layer, timed, device, timer, say)
    return rows


def _time(
    rows: list[dict[str, Any]],
    layer: LayerCase,
    size: Size,
    device: torch.device,
    timer: Callable[..., list[float]],
    say: Callable[[str], None],
) -> None:
    """Add the times of a layer under each recipe to its rows, or the reason for none."""
    timings: dict[str, Any] = {}
    with recorded(timings, f"{layer.name}: time", say, key="time_failed"):
        drawn = draw(layer, size, device, 0)
        times = timer(*(steps_of(OCTAVO, layer, size, recipe, *drawn)[1] for recipe in RECIPES))
        timings |= dict(zip(RECIPES, times, strict=True))
    for row in rows:
        if row["layer"] == layer.name:
            fault = {key: timings[key] for key in ("time_failed",) if key in timings}
            row |= fault or {"octavo_us": timings[row["recipe"]]}
            row["timed"] = list(size[:3])


def _median_errors(results: Iterable[Tensors], expected: list[Tensors]) -> dict[str, float]:
    """By tensor; both have an item for each seed, and one of `results` is in memory at a time."""
    errors = [
        {name: error(one[name], tensor) for name, tensor in other.items()} for one, other in zip(results, expected, strict=True)
    ]
    return {name: statistics.median(seed[name] for seed in errors) for name in expected[0]}
