"""`train.graph`: which runs CUDA graphs can repeat; others are refused before a GPU is touched.

"auto" records only runs with adapters: without weight gradients their kernels finish faster than Python launches them (8B,
4,096 tokens, one H200: 162 ms of kernels in 310 ms). Full fine-tuning of such a model is bound by its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from octavo.config.recompute import recomputes_block
from octavo.config.run import RunConfig
from octavo.errors import InputError, install_extra
from octavo.kernels.attention import flash, variable
from octavo.models.decoder import Decoder
from octavo.parallel.graphed import WARM_UP


def check_graph(config: RunConfig, model: nn.Module, world: int) -> None:
    """Check a run with `train.graph`; model: on any device, read-only.

    Raises:
        InputError: names the setting that a graph cannot repeat, and what to set instead.
    """
    if config.train.graph is True and (why := next(_reasons(config, model, world), None)):
        raise InputError(f"train.graph = true: {why}, or train.graph = false.")


def records(config: RunConfig, model: nn.Module, world: int, kind: str) -> bool:
    """True if a run's steps are recorded by `octavo.train.graph` on this type of device; model: on any device."""
    if config.train.graph != "auto":
        return config.train.graph
    return _is_candidate(config, kind) and _why_eager(config, model, world) is None


def _why_eager(config: RunConfig, model: nn.Module, world: int) -> str | None:
    """The reason why "auto" runs the steps eagerly; None if it records them."""
    if (reason := next(_reasons(config, model, world), None)) is not None:
        return reason
    if config.data.packing == "documents":
        return "attention of packed documents may take longer in a graph. Set train.graph = true to record them too"
    return None


def _plain_attention(config: RunConfig, model: nn.Module) -> str | None:
    """The reason why a graph would run attention of packed documents in plain PyTorch; None if a kernel computes it."""
    if config.data.packing != "documents" or not isinstance(model, Decoder):
        return None
    absent, dim = flash.missing(), model.spec.head_dim
    if config.train.deterministic and absent is not None:
        return f"train.deterministic = true, and {absent}. {install_extra('flash')}"
    if dim not in variable.HEADS or config.model.dtype != "bfloat16":
        kinds = ", ".join(map(str, variable.HEADS))
        return f"kernels of packed documents support heads of {kinds} in bfloat16, not {dim} in {config.model.dtype}"
    return None


def documents_kernel(config: RunConfig, model: nn.Module, world: int, kind: str) -> str:
    """The kernel of packed documents in recorded steps without FlashAttention-4; empty for steps that are not recorded."""
    if kind != "cuda" or config.data.packing != "documents" or not records(config, model, world, kind):
        return ""
    kernel = "PyTorch's FlashAttention-2" if _plain_attention(config, model) is None else "plain PyTorch"
    return f"{kernel}, all documents of a recorded step in one call"


def _is_candidate(config: RunConfig, kind: str) -> bool:
    """True for runs that "auto" records if there is no obstacle."""
    return config.train.graph == "auto" and config.lora.options is not None and kind == "cuda"


def _reasons(config: RunConfig, model: nn.Module, world: int) -> Iterator[str]:
    if world > 1:
        yield f"collectives are not recorded, and the run has {world} ranks. Start it on 1 rank"
    if not isinstance(model, Decoder):
        yield (
            f"{type(model).__name__} runs its original code, which may read values on the host. Use a model of a "
            "family with Octavo's blocks (octavo describe)"
        )
        return
    spec = model.spec
    if spec.experts:
        yield "routers of experts decide on the host how products are split. Use a model without experts"
    if config.data.packing == "documents" and spec.attention_dropout:
        yield (
            f"no kernel of packed documents with boundaries on the GPU supports dropout, and attention_dropout = "
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
            f"a recomputed block redraws the masks of {' and '.join(drawn)} from a generator state that cannot be read "
            "during a capture. Set train.recompute = false"
        )


def note(config: RunConfig, model: nn.Module, world: int, kind: str) -> str | None:
    """The effect of `train.graph` on this type of device, in one line; None if it has none."""
    if config.train.graph == "auto" and (not _is_candidate(config, kind) or world > 1):
        return None
    if not records(config, model, world, kind):
        why = _why_eager(config, model, world) if config.train.graph == "auto" else None
        return None if why is None else f'train.graph = "auto": steps are eager: {why}'
    if kind == "cpu":
        return "train.graph records nothing on a CPU: steps run eagerly, to the same numbers"
    named = "train.graph" if config.train.graph is True else 'train.graph = "auto"'
    plain = _plain_attention(config, model)
    documents = "" if plain is None else f"; attention of the documents runs in plain PyTorch, slowly: {plain}"
    if config.data.packing is None and config.train.graph == "auto":  # its default follows from data that has not been read yet
        documents += "; of conversations, which are packed documents, steps would be eager"
    return (
        f"{named}: {WARM_UP} eager steps, then forward and backward are CUDA graphs, whose memory stays reserved in addition "
        f"to the optimizer's{documents}"
    )
