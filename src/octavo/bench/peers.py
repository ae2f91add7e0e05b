"""What is compared on one GPU: a table of entries, each a model with a step that trains it.

Every entry does the same work on the same tokens: forward, backward, PyTorch's fused AdamW on parameters and states in
bfloat16, gradients set to None. The output head multiplies in bfloat16 in all of them; what differs is how the linear layers
of the blocks do. A peer is imported when its entry is built, so that one that is not installed is a row with an error, and none
waits for another's imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from octavo.bench.cases import Case
from octavo.bench.plain import PlainLlama

if TYPE_CHECKING:
    from octavo.parallel.fsdp import Sharding

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
SEED = 0


class Trainer(Protocol):
    """What a builder returns."""

    def step(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch (B × T token ids) and return its loss, a scalar on the device that is not waited for."""


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        name: as the results name it.
        layers: precision in which the blocks' linear layers multiply on a device that can: "bf16" or "fp8".
        head: precision of the output head.
        build: makes the trainer for (case, device, whether to compile), its weights by the keyword `seed`.
        package: the distribution whose version is recorded beside the figures; None: Octavo or PyTorch itself.
    """

    name: str
    layers: str
    head: str
    build: Callable[..., Trainer]
    package: str | None = None


class Training:
    """A model, its optimizer and what surrounds its forward."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.loss = loss
        self.around = around
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward, AdamW; gradients do not outlive the step."""
        with self.around():
            loss = self.loss(input_ids, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build_plain(case: Case, device: torch.device, compiled: bool, *, float8: str | None = None, seed: int = SEED) -> Training:
    """The plain PyTorch model, its linear layers converted by torchao where `float8` names one of its recipes."""
    torch.manual_seed(seed)
    with device:
        model: nn.Module = PlainLlama(case).to(torch.bfloat16)
    if float8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(float8),
            module_filter_fn=lambda module, name: name != "lm_head",
        )
    # A whole graph or an error: a peer must not lose its speed to a graph break that nobody sees.
    return Training(model, torch.compile(model, fullgraph=True) if compiled else model)


def build_octavo(
    case: Case,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    params_dtype: torch.dtype = torch.bfloat16,
    sharding: Sharding | None = None,
    seed: int = SEED,
) -> Training:
    """Octavo's model, in FP8 where `recipe` names one of `octavo.recipe`."""
    from octavo.fp8.autocast import fp8_autocast
    from octavo.fp8.recipe import RECIPES
    from octavo.transform import build_model

    scaling = RECIPES[recipe]() if recipe else None
    model = build_model(
        case.hf_config(),
        dtype=torch.bfloat16,
        params_dtype=params_dtype,
        device=device,
        seed=seed,
        compile=compiled,
        sharding=sharding,
    )

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=input_ids, labels=labels).loss

    return Training(model, loss, lambda: fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling))


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-bf16", "bf16", "bf16", build_octavo),
        Entry("octavo-delayed", "fp8", "bf16", partial(build_octavo, recipe="delayed")),
        Entry("octavo-current", "fp8", "bf16", partial(build_octavo, recipe="current")),
        Entry("octavo-rowwise", "fp8", "bf16", partial(build_octavo, recipe="rowwise")),
        Entry("octavo-block", "fp8", "bf16", partial(build_octavo, recipe="block")),
        Entry("torch-bf16", "bf16", "bf16", build_plain),
        Entry("ao-tensorwise", "fp8", "bf16", partial(build_plain, float8="tensorwise"), "torchao"),
        Entry("ao-rowwise", "fp8", "bf16", partial(build_plain, float8="rowwise"), "torchao"),
    )
}
