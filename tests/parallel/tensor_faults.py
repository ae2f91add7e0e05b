"""Faults of tensor parallelism, each planted in the running code of a rank, and what a rank then finds."""

import contextlib
import dataclasses
from unittest import mock

import tensor_ranks
import torch
import torch.distributed as dist

from octavo.collectives import amaxes
from octavo.collectives.blocks import local_of
from octavo.collectives.tensor import TensorGroup
from octavo.fp8 import buffers, quantizer
from octavo.fp8 import tensor_parallel as products
from octavo.kernels import cross_entropy_slices
from octavo.models import tensor_parallel as parts
from octavo.nn import word_slices
from octavo.parallel import joined_amaxes, shards

TENSOR = {"tensor_parallel_degree": 2}


def _returned_as_it_is(_):
    return lambda self, parameter: parameter


def _matrices_as_they_are(true):
    return lambda self, p: p if p is not None and p.dim() == 2 else true(self, p)


def _twice(true):
    return lambda self, rows: true(self, rows).mul_(2)


def _bias_before_the_sum(true):
    def output(self, x, w, bias, **options):
        y = true(self, x, w, None, **options)
        return y if bias is None else y + self.tensor.size * bias

    return output


def _nothing(_):
    return lambda *_: None


def _of_own_amax(true):
    return lambda self, amaxes, groups, *format: true(self, amaxes, [], *format)


def _without_others(true):
    def join(weights):
        with mock.patch.object(amaxes.Joins, "largest_", lambda self, own, group: own):
            true(weights)

    return join


def _with_scales_of_others(true):
    @contextlib.contextmanager
    def of_ranks(self):
        with true(self) as found:
            pairs = zip(found, found[::-1], strict=True)
            yield [each._replace(rowwise_scale_inv=other.rowwise_scale_inv) for each, other in pairs]

    return of_ranks


def _half_of_all_rows(_):
    return lambda size, gated, rank, n: parts.indices((2 * size * rank // n, 2 * size * (rank + 1) // n))


def _with_padding(true):
    def statistics(logits, target, words, objective, **options):
        return true(logits, target, dataclasses.replace(words, number=logits.shape[1]), objective, **options)

    return statistics


def _without_first_words(true):
    def own_targets(target, words):
        at, here = true(target, words)
        return at, here & (at > 0)

    return own_targets


def _all_of_each_rank(_):
    return lambda tensor: [local_of(tensor)]


def _over_all_ranks(true):
    return lambda found, _: true(found, dist.group.WORLD)


def _one_stream(_):
    return lambda self, device: contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and the run that meets it.

    Attributes:
        owner, name, fault: what is replaced, and what makes its place of the true one.
        shape, options: of `tensor_ranks.trained`; without options the run is `tensor_ranks.scaled`.
        world: ranks, of which two are a tensor group.
    """

    owner: object
    name: str
    fault: object
    shape: object = "plain"
    options: dict | None = dataclasses.field(default_factory=dict)
    world: int = 2


DROPOUT = {"num_key_value_heads": 4, "attention_dropout": 0.3}
FAULTS = {
    "norms' gradients are not summed": Fault(TensorGroup, "replicated", _returned_as_it_is),
    "a router's gradient is not summed": Fault(TensorGroup, "replicated", _matrices_as_they_are, tensor_ranks.MIXTURE),
    "shared rows of keys and values count twice": Fault(TensorGroup, "sum_shared_", _twice, "one-group"),
    "a bias is added by each rank": Fault(products.RowParallelGemms, "output", _bias_before_the_sum, "all-biases"),
    "amaxes of the histories are not joined": Fault(buffers, "_join", _nothing, options=None),
    "the first amax is not joined": Fault(quantizer.LinearQuantizer, "_join", _nothing, options=None),
    "the amax of a cast is not joined": Fault(
        amaxes.Joins, "scale", _of_own_amax, tensor_ranks.ALIGNED, {"recipe": "current", "dtype": torch.float64}
    ),
    "amaxes of weights are not joined": Fault(
        joined_amaxes, "_join", _without_others, tensor_ranks.ALIGNED, {"recipe": "current", "dtype": torch.float64}
    ),
    "rows are read with another rank's scales": Fault(
        products._Gathering, "parts", _with_scales_of_others, tensor_ranks.ALIGNED, {"recipe": "rowwise"}
    ),
    "gate and up are cut in wrong blocks": Fault(parts, "_fc1_rows", _half_of_all_rows),
    "padding counts as a word": Fault(word_slices, "statistics", _with_padding),
    "a target at a seam is nobody's": Fault(
        cross_entropy_slices, "_local_targets", _without_first_words, options={"given": {"seed": 8}}
    ),
    "replicated parameters count twice in the norm": Fault(shards, "counted_of", _all_of_each_rank),
    "the loss is exchanged over all ranks": Fault(word_slices, "start_gather", _over_all_ranks, world=4),
    "the ranks' heads have one mask of dropout": Fault(TensorGroup, "forked_rng", _one_stream, DROPOUT, {"seed": 3}),
}


def found(name):
    """What a rank finds with a fault: results of `trained`, or of `scaled`."""
    fault = FAULTS[name]
    with mock.patch.object(fault.owner, fault.name, fault.fault(getattr(fault.owner, fault.name))):
        if fault.options is None:
            return tensor_ranks.scaled(TENSOR, [("delayed", "all")])
        return tensor_ranks.trained(fault.shape, TENSOR, **{"steps": 1} | fault.options)
