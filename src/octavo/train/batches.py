"""The data of a run file for a user's training loop: conversations, prompts or text, packed and distributed as in a run.

The global batch of a step depends only on the seed and the step's number, not on ranks and micro-batch. A loop therefore
continues from the number of its next step, without a loader state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from octavo.config.data import DataConfig
from octavo.config.run import RunConfig
from octavo.data import show
from octavo.data.loader import BatchLoader
from octavo.data.packing import Batch
from octavo.data.prepared import PreparedData, check_vocabulary
from octavo.errors import InputError, some
from octavo.models.decoder import Decoder
from octavo.parallel.world import state
from octavo.train.own_code_check import check_own_code
from octavo.train.setup import prepare_on_ranks
from octavo.train.step import count_targets


class Batches:
    """Steps of micro-batches for one rank; `octavo.batches` builds it.

    Attributes:
        prepared: the tokens, with their manifest and tokenizer.
        counts: conversations, tokens, trained share, long and dropped rows, a sentence for each split.
        packing: "documents" or "join", resolved from the data.
    """

    def __init__(self, model: nn.Module, config: DataConfig, global_batch: int, micro_batch: int | None) -> None:
        if config.validation:
            raise InputError(
                f"octavo.batches: validation = {some(config.validation)}: named sets are supported only in runs. "
                "Call octavo.batches for each, with its source as data."
            )
        hf_config = getattr(model, "config", None)
        limit = getattr(hf_config, "max_position_embeddings", None)
        if isinstance(limit, int) and 0 < limit < config.sequence_length:
            raise InputError(
                f"octavo.batches: sequence_length = {config.sequence_length} is longer than the model's {limit} positions: use "
                f"at most {limit}, or load the model with a larger max_position_embeddings and rope_parameters."
            )
        self.prepared: PreparedData = prepare_on_ranks(config, Console(stderr=True), "rebuild")
        self.packing: Literal["join", "documents"] = self.prepared.packing(config)
        self.counts = show.lines_of(self.prepared, config)
        self._config, self._model, self._micro_batch = config, model, micro_batch
        self._device = next(model.parameters()).device
        self._global_batch = global_batch
        size = getattr(hf_config, "vocab_size", None)
        if not isinstance(size, int):
            raise InputError(
                f"octavo.batches: {type(model).__name__} has no Hugging Face config with a vocab_size, against which ids of "
                "the data are checked. Give the model of octavo.transform itself."
            )
        check_vocabulary(self.prepared, size, load=False)
        if not isinstance(model, Decoder):
            apart = self.packing == "documents"
            check_own_code(model, vocab_size=size, sequence_length=config.sequence_length, documents=apart, device=self._device)
        self._loader = self._loader_of("train")

    def _loader_of(self, split: Literal["train", "validation"]) -> BatchLoader:
        config = self._config
        return BatchLoader(
            self.prepared,
            split,
            sequence_length=config.sequence_length,
            packing=self.packing,
            seed=config.seed,
            global_batch=self._global_batch,
            micro_batch=self._micro_batch,
            dp_rank=state.dp_rank,
            dp_size=state.dp_size,
            weights=config.weights,
            overlong=config.overlong,
        )

    def step(self, step: int) -> list[dict[str, Any]]:
        """This rank's micro-batches of a step (the first is 1), as keyword arguments of the model. Collective over ranks.

        `input_ids`, `labels` and, for separate documents, `position_ids` [B, T]; `num_items_in_batch`, the targets of the
        global batch, by which the sum of losses is divided; and, for a decoder with experts, `attention_mask`.
        """
        if step < 1:
            raise InputError(f"octavo.batches: step = {step}: the first step is 1.")
        micro_batches = self._loader.step((step - 1) * self._global_batch)
        targets = torch.tensor(sum(count_targets(batch.labels) for batch in micro_batches), device=self._device)
        if state.world_size > 1 and state.dp_size > 1:
            dist.all_reduce(targets, group=state.dp_process_group)
        targets.clamp_(min=1)
        return [self._arguments(batch, targets) for batch in micro_batches]

    def steps(self, first: int = 1, last: int | None = None) -> Iterator[list[dict[str, Any]]]:
        """`step` for each step from `first` to `last`, endless if that is None. To continue a loop, give its next step."""
        step = first
        while last is None or step <= last:
            yield self.step(step)
            step += 1

    def validation(self, sequences: int) -> Iterator[dict[str, Any]]:
        """Arguments for this rank's part of the first `sequences` sequences of the validation split, each once, in fixed order.

        They have no `num_items_in_batch`: divide the sum of losses over batches and ranks by the sum of their targets.
        """
        for batch in self._loader_of("validation").validation(sequences):
            yield self._arguments(batch, None)

    def sequences_to_epochs(self, steps: int) -> float:
        """Number of epochs in `steps` steps."""
        return self._loader.epoch(steps)

    def _arguments(self, batch: Batch, targets: Tensor | None) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids.to(self._device, non_blocking=True),
            "labels": batch.labels.to(self._device, non_blocking=True),
        }
        if self.packing == "documents":
            # A decoder reads them on the host, without GPU synchronisation.
            own = isinstance(self._model, Decoder)
            arguments["position_ids"] = batch.position_ids if own else batch.position_ids.to(self._device)
        if targets is not None:
            arguments["num_items_in_batch"] = targets
        # Attention ignores padding anyway; router losses and metrics would count it.
        if isinstance(self._model, Decoder) and self._model.spec.experts and (real := batch.real()) is not None:
            arguments["attention_mask"] = real
        return arguments


def batches(
    model: nn.Module, data: Mapping[str, Any] | DataConfig, *, global_batch: int, micro_batch: int | None = None
) -> Batches:
    """The data of a `[data]` section for a user's training loop: prepared, packed, and distributed over the ranks.

        data = {"source": "chats.jsonl", "tokenizer": "chat-model", "sequence_length": 2048}
        found = octavo.batches(model, data, global_batch=16)
        for step in found.steps(1, 100):
            for number, arguments in enumerate(step, 1):
                with octavo.fp8_autocast():
                    loss = model(**arguments).loss
                loss.backward()

    Conversations are masked by the chat template and packed separately by best fit, as in a run. A global batch is divided
    among ranks by the work of attention. Collective over ranks.

    Args:
        model: of `octavo.transform`, or a causal language model with its original code.
        data: the section's keys (docs/run-files.md).
        global_batch: sequences in a step, over all ranks.
        micro_batch: sequences in a forward of one rank; None: its whole share.

    Raises:
        InputError: an unknown or wrong key; a fault in the data, or ids beyond the model's vocabulary; a global batch that
            ranks x micro-batch does not divide; sequences longer than the model's positions; original code that ignores the
            boundaries of documents.
    """
    values = data.model_dump(exclude_unset=True) if isinstance(data, DataConfig) else dict(data)
    # A complete run file, so that keys without effect are refused as in a run.
    sections = {"model": {"source": "llama-1b"}, "data": values, "train": {"steps": 1, "global_batch": global_batch}}
    run = RunConfig.from_dict(sections, where="octavo.batches")
    return Batches(model, run.data, global_batch, micro_batch)
