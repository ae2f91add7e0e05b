"""Check of a model with its original code, before its first step: causal, separate documents, loss over the step's targets.

Octavo's decoder has these properties by its tests. Other code may attend to later tokens, ignore `position_ids` or normalise
its loss differently: training would run, with a wrong objective. Dependence is measured by gradients, which are exactly zero
without dependence, for any initial weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.data.packing import IGNORED
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast
from octavo.run.sample import evaluating

_TOKENS = 64
_LOSS_TOLERANCE = 0.01
_DEPENDENCE = 1e-6
"""A gradient up to this share of the largest one counts as zero."""


def check_own_code(model: nn.Module, *, vocab_size: int, sequence_length: int, documents: bool, device: torch.device) -> None:
    """Refuse a causal language model that would train wrongly. Every rank calls it; weights and random states do not change.

    Args:
        documents: position ids restart at each document of a sequence, and attention must not cross the restart.

    Raises:
        InputError: names the property that the model lacks, and the key to change.
    """
    name = type(model).__name__
    tokens = min(_TOKENS, sequence_length) // 2 * 2
    if tokens < 4:  # each half of the sequence needs a token with a target
        return
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, tokens), generator=generator).to(device)
    with fp8_autocast(enabled=False), torch.enable_grad(), evaluating(model):  # without dropout
        _check_causal(model, name, ids)
        if documents:
            _check_documents(model, name, ids)
        _check_loss(model, name, ids)


def _check_causal(model: nn.Module, name: str, ids: Tensor) -> None:
    half = ids.shape[1] // 2
    if _depends(model, ids, None, predictions=slice(0, half), inputs=slice(half, None)):
        config = getattr(model, "config", None)
        key = next((key for key in ("is_causal", "is_decoder") if getattr(config, key, None) is False), None)
        remedy = f"Set model.config.{key} = true (for pretrained weights, in config.json), or use" if key else "Use"
        raise InputError(
            f"model.source: {name} is not causal: it predicts tokens from later ones, so that the loss falls without learning. "
            f"{remedy} a causal language model."
        )


def _check_documents(model: nn.Module, name: str, ids: Tensor) -> None:
    half = ids.shape[1] // 2
    position_ids = torch.arange(half, device=ids.device).repeat(2)[None]
    try:
        crosses = _depends(model, ids, position_ids, predictions=slice(half, None), inputs=slice(0, half))
    except (TypeError, ValueError):  # no such argument
        crosses = True
    if crosses:
        raise InputError(
            f'data.packing = "documents": {name} ignores position_ids, so that a document would attend to earlier ones. '
            'Set data.packing = "join", or use another model.'
        )


def _check_loss(model: nn.Module, name: str, ids: Tensor) -> None:
    labels = ids.clone()
    labels[:, : ids.shape[1] // 4] = IGNORED
    count = ids.shape[1] + 5  # different from the number of targets
    with torch.no_grad():
        try:
            output = model(input_ids=ids, labels=labels, num_items_in_batch=count)
        except TypeError as error:
            raise InputError(f"model.source: {name} takes no num_items_in_batch ({error}): use another model.") from error
        logits = output.logits.float()
        expected = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=IGNORED, reduction="sum").item() / count
    # Its coefficient is often below the tolerance.
    extra = getattr(output, "aux_loss", None) is not None and getattr(model.config, "router_aux_loss_coef", None) != 0.0
    if not extra and abs(output.loss.item() - expected) <= _LOSS_TOLERANCE * expected:
        return
    if extra:
        raise InputError(
            f"model.source: {name} adds its experts' balancing loss by itself, which is weighted differently with several "
            "micro-batches or ranks. Set model.config.output_router_logits = false."
        )
    raise InputError(
        f"model.source: the loss of {name} is {output.loss.item():.4f} where the mean cross entropy of the next tokens is "
        f"{expected:.4f}: it is not divided by the targets of the whole step. "
        "Use another model, or a training loop of your own."
    )


def _depends(model: nn.Module, ids: Tensor, position_ids: Tensor | None, *, predictions: slice, inputs: slice) -> bool:
    """True if these predictions have a gradient with respect to the embeddings of these inputs."""
    embedded: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embedded.append(output if output.requires_grad else output.requires_grad_())  # the embedding may be frozen
        return output

    hook = model.get_input_embeddings().register_forward_hook(keep)  # type: ignore[operator]
    try:
        logits = model(input_ids=ids, position_ids=position_ids).logits[:, predictions].float()
    finally:
        hook.remove()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits.device)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), embedded[0])
    magnitude = gradient.abs()
    return bool(magnitude[:, inputs].max() > _DEPENDENCE * magnitude.max())
