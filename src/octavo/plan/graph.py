"""`train.graph`: the runs that CUDA graphs repeat to the bit, and the refusal of all others before a GPU is touched."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from octavo.config.recompute import recomputes_block
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.decoder import Decoder
from octavo.parallel.graphed import WARM_UP


def check_graph(config: RunConfig, model: nn.Module, world: int) -> None:
    """Check a run with `train.graph`; model: on any device, for reading alone.

    Raises:
        InputError: names the setting that a graph does not repeat, and what to set instead.
    """
    if config.train.graph and (why := next(_reasons(config, model, world), None)):
        raise InputError(f"train.graph = true: {why}, or train.graph = false.")


def _reasons(config: RunConfig, model: nn.Module, world: int) -> Iterator[str]:
    if world > 1:
        yield f"no collectives are recorded, and the run has {world} ranks. Start it on 1 rank"
    if not isinstance(model, Decoder):
        yield (
            f"{type(model).__name__} runs by its original code, which may read values on the host. Take a model of a "
            "family with Octavo's blocks (octavo describe)"
        )
        return
    spec = model.spec
    if spec.experts:
        yield "routers of experts decide on the host how products are split. Take a model without experts"
    if config.data.packing == "documents" and spec.attention_dropout:
        yield (
            f"no kernel of packed documents whose boundaries stay on the GPU drops values, and attention_dropout = "
            f'{spec.attention_dropout:g}. Set model.config.attention_dropout = 0 or data.packing = "join"'
        )
    if config.offloads:
        key = "train.offload" if config.train.offload else "parallel.sm_activation_offloading"
        yield f"{key} = true copies activations on separate streams, which are not recorded. Set {key} = false"
    if config.model.dtype == "float16":
        yield 'the loss scale of model.dtype = "float16" changes on the host. Set model.dtype = "bfloat16"'
    if config.fp8.schedule and config.fp8.enabled is not False:
        yield "fp8.schedule moves layers between FP8 and high precision in the middle of a run. Remove fp8.schedule"
    rates = {
        "lora.dropout": config.lora.dropout if config.lora.rank is not None else 0.0,
        "attention_dropout": spec.attention_dropout,
        "hidden_dropout": spec.hidden_dropout,
    }
    drawn = [f"{name} = {rate:g}" for name, rate in rates.items() if rate]
    if drawn and recomputes_block(config.train.recompute):
        yield (
            f"a recomputed block draws the masks of {' and '.join(drawn)} anew, by a state that cannot be read in a recording. "
            "Set train.recompute = false"
        )


def note(kind: str) -> str:
    """How a run with `train.graph` goes on a device of this kind, in one line."""
    if kind == "cpu":
        return "train.graph records nothing on a CPU: steps run eagerly, to the same numbers"
    return (
        f"train.graph: {WARM_UP} eager steps, then forward and backward are CUDA graphs, whose memory stays reserved beside "
        "the optimizer's"
    )
