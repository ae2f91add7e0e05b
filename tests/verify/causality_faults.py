"""Faults by which a token's logits depend on what they may not, planted in the running code of a layout's ranks.

Each is (owner, name, what makes the fault of the true one), the run that meets it, and the change that finds it.
"""

import dataclasses
from unittest import mock

import torch

from faults import CONTEXT, EXPERT, RING, TENSOR, _of_next_row, _without_documents
from octavo.collectives import attention, causal, experts
from octavo.collectives.tensor import TensorGroup
from octavo.fp8.buffers import Slot
from octavo.fp8.quantizer import LinearQuantizer
from octavo.fp8.recipe import Operand
from octavo.kernels.attention.pattern import Pattern
from octavo.models import decoder
from octavo.nn import attend


@dataclasses.dataclass(frozen=True)
class Leak:
    owner: object
    name: str
    fault: object
    found_by: tuple
    degrees: dict = dataclasses.field(default_factory=dict)
    source: str = "llama-1b"
    kind: str = "plain"


LATER, SEQUENCES, RANKS, DOCUMENT = "later tokens", "other sequences", "samples of other ranks", "the document before"


def _a_key_more(true):
    """Each query sees the key after it."""

    def sdpa(q, k, v, mask, is_causal, scale, dropout):
        if is_causal:
            mask, is_causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(1), False
        return true(q, k, v, mask, is_causal, scale, dropout)

    return sdpa


def _the_last_first(true):
    """The chunk before a rank's early one is the last of the sequence, which is later."""

    def in_sequence(gathered, split):
        found = true(gathered, split).clone()
        last = gathered[0, :, :, split.chunk :]  # rank 0 has it
        found[:, :, : split.chunk] = last
        return found

    return in_sequence


def _the_last_in_the_first(true):
    """The first token's result has a part of the last one's, which no other place sees."""

    def sdpa(*arguments):
        found = true(*arguments).clone()
        found[:, 0] += 1e-3 * found[:, -1]
        return found

    return sdpa


def _a_chunk_later(true):
    def fetch(self, kv):
        pending, own = true(self, kv), kv.chunk(2, 2)

        def chunks():
            found = pending.wait()
            return [
                own[1] if number not in self.split.chunks() and len(part[0, 0]) else part for number, part in enumerate(found)
            ]

        return attention.Pending([], chunks)

    return fetch


def _whole_chunks(true):
    """A rank's chunks of a ring see themselves without a mask."""
    return lambda *given: tuple(span._replace(causal=False) for span in true(*given))


def _one_document(true):
    return lambda position_ids, *arguments, **options: true(None, *arguments, **options)


def _keys_of_neighbours(true):
    return lambda q, k, v, *rest, **options: true(q, k.roll(1, 0), v, *rest, **options)


def _a_row_late(true):
    """A tensor rank's tokens arrive a place late, the last of them in the first place."""
    return lambda self, rows: true(self, rows.roll(1, 0))


def _by_now(true):
    """Delayed scaling casts an input by its largest number of now."""
    present = Slot.present

    def input_(self, producer, **options):
        if self.recipe is None:
            return true(self, producer, **options)
        scale = self._current_scale(Operand.INPUT, producer, self.recipe.casts[Operand.INPUT])
        with mock.patch.object(Slot, "present", lambda slot: (scale, present(slot)[1])):
            return true(self, producer, **options)

    return input_


LEAKS = {
    "a mask shifted by one": Leak(attend, "_sdpa", _a_key_more, (LATER,)),
    "the last token in the first": Leak(attend, "_sdpa", _the_last_in_the_first, (LATER,)),
    "a mask shifted by one, with tensor ranks": Leak(attend, "_sdpa", _a_key_more, (LATER,), TENSOR),
    "a later chunk in the place of an earlier one": Leak(causal, "in_sequence", _the_last_first, (LATER,), CONTEXT),
    "a later chunk is exchanged": Leak(attention._Chunks, "fetch", _a_chunk_later, (LATER, DOCUMENT), CONTEXT, "mistral-7b"),
    "chunks of a ring without their mask": Leak(attention, "ring", _whole_chunks, (LATER,), RING),
    "documents are one": Leak(decoder, "pattern_of", _one_document, (DOCUMENT,), CONTEXT, "mistral-7b"),
    "documents see each other": Leak(Pattern, "bounds", _without_documents, (DOCUMENT,), CONTEXT, "mistral-7b"),
    "keys of another sequence": Leak(attend, "_sdpa", _keys_of_neighbours, (SEQUENCES,)),
    "rows of a tensor rank arrive a place late": Leak(TensorGroup, "_gathering", _a_row_late, (LATER,), TENSOR),
    "results of experts come back to the next token": Leak(
        experts.Exchange, "collect", _of_next_row, (LATER, SEQUENCES, RANKS), EXPERT, "mixtral-8x7b"
    ),
    "delayed scaling by the amax of now": Leak(LinearQuantizer, "input", _by_now, (LATER,), TENSOR, kind="fp8"),
}
"""By name; none is found without its fault."""
