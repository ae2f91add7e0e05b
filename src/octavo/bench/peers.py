"""Entries of the one-GPU suite: a table of models, each with its training step.

Every entry does the same work on the same tokens: forward, backward, AdamW on parameters and states in bfloat16 (Octavo's own;
for the peers PyTorch's fused one), gradients set to None. Entries differ in the precision of the blocks' linear layers; the
output head is in bfloat16 except in entries with `head` in their name. Vision transformers train by SGD with momentum on
float32 weights under autocast.

A peer is imported when its entry is built: a missing one is a row with an error, and no entry waits for another's imports.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from octavo.bench.cases import AnyCase, Case, VisionCase
from octavo.bench.plain import PlainLlama
from octavo.bench.vision import Classifier, in_blocks, replace_blocks, timm_model, under_autocast

if TYPE_CHECKING:
    from octavo.fp8.recipe import FastAccumulation, Recipe
    from octavo.parallel.fsdp import Sharding

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "fused": True}
SEED = 0
ENVIRONMENT = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0"}
"""For Transformer Engine: cuDNN's attention, even where another one is installed."""
PEERS = {"bf16": "torch-", "torchao": "ao-", "te": "te-"}
"""Groups of peers (`--peers`) and the prefix of their entries' names."""


class Trainer(Protocol):
    """A model with its training step: the result of a builder.

    Attributes:
        graph: whether its steps replay a CUDA graph.
    """

    graph: bool

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch (token ids, or images with classes); returns the loss, a scalar, without a wait for the device."""


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        name: in the results.
        layers: precision of the blocks' linear layers, "bf16" or "fp8".
        head: precision of the output head.
        head_forward: precision of its forward product, if another.
        build: makes the trainer for (case, device, whether to compile); keyword `seed` of the weights.
        package: the distribution whose version is recorded; None: Octavo or PyTorch itself.
        vision: makes the trainer for a vision case; None: unsupported.
    """

    name: str
    layers: str
    head: str
    build: Callable[..., Trainer]
    package: str | None = None
    vision: Callable[..., Trainer] | None = None
    head_forward: str | None = None

    def builder(self, case: AnyCase) -> Callable[..., Trainer] | None:
        """The builder for this case; None: unsupported."""
        return self.vision if isinstance(case, VisionCase) else self.build


class Training:
    """A model, its optimizer (by default PyTorch's fused AdamW) and the context manager around its forward.

    graph: forward and backward are one CUDA graph.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        graph: bool = False,
    ) -> None:
        self.model = model
        self.loss = loss
        self.around = around
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW) if optimizer is None else optimizer
        self.graph = graph
        self.gradients: Callable[[Tensor, Tensor], Tensor] = self._gradients
        if graph:
            from octavo.train.graphed import graphed

            self.gradients = graphed(self._loss, model.parameters())

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward, optimizer; gradients are freed."""
        loss = self.gradients(inputs, labels)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with self.around():
            return self.loss(inputs, labels)

    def _gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss(inputs, labels)
        loss.backward()
        return loss.detach()


def build_plain(case: Case, device: torch.device, compiled: bool, *, float8: str | None = None, seed: int = SEED) -> Training:
    """The plain PyTorch model, its linear layers converted by torchao where `float8` names one of its recipes."""
    torch.manual_seed(seed)
    with device:
        model: nn.Module = PlainLlama(case).to(torch.bfloat16)
    if float8 is not None:
        _to_float8(model, float8, lambda module, name: name != "lm_head")
    # `fullgraph`, so that no unnoticed graph break slows the peer.
    return Training(model, torch.compile(model, fullgraph=True) if compiled else model)


def build_timm(
    case: VisionCase, device: torch.device, compiled: bool, *, float8: str | None = None, seed: int = SEED
) -> Training:
    """timm's model, the linear layers of its blocks converted by torchao where `float8` names one of its recipes."""
    model = timm_model(case, device, seed)
    if float8 is not None:
        _to_float8(model, float8, in_blocks)
    classifier: nn.Module = Classifier(model)
    loss = torch.compile(classifier, fullgraph=True) if compiled else classifier
    return Training(model, loss, under_autocast(device), torch.optim.SGD(model.parameters(), **SGD))


def _to_float8(model: nn.Module, recipe: str, where: Callable[[nn.Module, str], bool]) -> None:
    """Convert the linear layers for which `where(module, name)` is true, by torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=where)


def build_te(case: Case, device: torch.device, compiled: bool, *, recipe: str | None = None, seed: int = SEED) -> Training:
    """Transformer Engine's layers, in FP8 where `recipe` names one of `octavo.bench.te`."""
    os.environ.update(ENVIRONMENT)
    from octavo.bench import te

    torch.manual_seed(seed)
    model = te.TeLlama(case, device, compiled=compiled)
    return Training(model, model, te.autocast(recipe))


def build_te_vision(
    case: VisionCase, device: torch.device, compiled: bool, *, recipe: str | None = None, seed: int = SEED
) -> Training:
    """timm's model with Transformer Engine's layers as its blocks."""
    os.environ.update(ENVIRONMENT)
    from octavo.bench import te

    model = timm_model(case, device, seed)
    replace_blocks(model, lambda eps: te.VisionLayer(case, eps, device))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    return Training(model, Classifier(model), under_autocast(device, te.autocast(recipe)), optimizer)


def build_octavo(
    case: Case,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    head: bool | Literal["backward"] = False,
    fast: FastAccumulation = False,
    params_dtype: torch.dtype = torch.bfloat16,
    sharding: Sharding | None = None,
    seed: int = SEED,
) -> Training:
    """Octavo's model and optimizer, in FP8 where `recipe` names one of `octavo.recipe`; head: as `fp8.head`.

    fast: as `fp8.fast_accumulation`. Nothing is compiled: the layers are fused kernels.
    """
    from octavo.build import build_model
    from octavo.fp8.autocast import fp8_autocast
    from octavo.train.adamw import AdamW

    scaling = _scaling(recipe, fast)
    model = build_model(
        case.hf_config(),
        dtype=torch.bfloat16,
        params_dtype=params_dtype,
        device=device,
        seed=seed,
        sharding=sharding,
        fp8_head=head,
    )

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels).loss

    around = partial(fp8_autocast, enabled=scaling is not None, fp8_recipe=scaling)
    return Training(model, loss, around, AdamW(model.parameters(), **ADAMW))


def build_octavo_vision(
    case: VisionCase,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    fast: FastAccumulation = False,
    seed: int = SEED,
) -> Training:
    """timm's model through `octavo.transform`, in FP8 where `recipe` names one; its blocks are fused already.

    Their kernels are shorter than what Python needs to launch them, so that forward and backward are a CUDA graph.
    """
    from octavo.build import transform
    from octavo.fp8.autocast import fp8_autocast

    scaling = _scaling(recipe, fast)
    model = transform(timm_model(case, device, seed), scaling, dtype=torch.bfloat16, params_dtype=torch.float32)
    around = partial(fp8_autocast, enabled=scaling is not None, fp8_recipe=scaling)
    return Training(model, Classifier(model), around, torch.optim.SGD(model.parameters(), **SGD), graph=True)


def _scaling(recipe: str | None, fast: FastAccumulation) -> Recipe | None:
    from octavo.fp8.recipe import RECIPES

    if recipe is None:
        return None
    return RECIPES[recipe](**({"fast_accumulation": fast} if fast else {}))


def _octavo(name: str, layers: str, **how: Any) -> Entry:
    return Entry(name, layers, "bf16", partial(build_octavo, **how), vision=partial(build_octavo_vision, **how))


def _backward_head(name: str, *, fast: FastAccumulation = False) -> Entry:
    """Delayed scaling with an FP8 head in backward."""
    build = partial(build_octavo, recipe="delayed", head="backward", fast=fast)
    return Entry(name, "fp8", "fp8", build, head_forward="bf16")


def _torchao(name: str, recipe: str) -> Entry:
    return Entry(name, "fp8", "bf16", partial(build_plain, float8=recipe), "torchao", vision=partial(build_timm, float8=recipe))


def _te(name: str, layers: str, **how: Any) -> Entry:
    package = "transformer-engine"
    return Entry(name, layers, "bf16", partial(build_te, **how), package, vision=partial(build_te_vision, **how))


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _octavo("octavo-bf16", "bf16"),
        _octavo("octavo-delayed", "fp8", recipe="delayed"),
        _octavo("octavo-delayed-fast", "fp8", recipe="delayed", fast=True),
        _octavo("octavo-delayed-fast-input", "fp8", recipe="delayed", fast="input_gradient"),
        _octavo("octavo-current", "fp8", recipe="current"),
        _octavo("octavo-rowwise", "fp8", recipe="rowwise"),
        _octavo("octavo-block", "fp8", recipe="block"),
        Entry("octavo-delayed-fp8-head", "fp8", "fp8", partial(build_octavo, recipe="delayed", head=True)),
        Entry("octavo-delayed-fast-fp8-head", "fp8", "fp8", partial(build_octavo, recipe="delayed", head=True, fast=True)),
        _backward_head("octavo-delayed-fp8-head-backward"),
        _backward_head("octavo-delayed-fast-fp8-head-backward", fast=True),
        _backward_head("octavo-delayed-fast-input-fp8-head-backward", fast="input_gradient"),
        Entry("torch-bf16", "bf16", "bf16", build_plain, vision=build_timm),
        _torchao("ao-tensorwise", "tensorwise"),
        _torchao("ao-rowwise", "rowwise"),
        _te("te-bf16", "bf16"),
        _te("te-delayed", "fp8", recipe="delayed"),
        _te("te-current", "fp8", recipe="current"),
    )
}
