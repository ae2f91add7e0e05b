"""Faults that are planted in the running code of a layout's ranks, and where `octavo verify` has to find each.

Those of tensor parallelism are in `tensor_faults`, whose comparison with one rank is another.
"""

import contextlib
import dataclasses

import tensor_faults
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from verified import RUN

from octavo.checkpoint import optimizer_state, reader, stored
from octavo.collectives import attention, causal, context, experts
from octavo.collectives.blocks import local_of
from octavo.collectives.work import Pending
from octavo.fp8 import buffers
from octavo.fp8 import stored as fp8_stored
from octavo.kernels.attention.pattern import Pattern
from octavo.models import decoder
from octavo.nn import embedding, lora
from octavo.parallel import offload, world
from octavo.parallel.fsdp2 import direct_reduce, fp8_gather
from octavo.train import step
from octavo.verify import worker

TENSOR, CONTEXT, EXPERT = ({f"{name}_parallel_degree": 2} for name in ("tensor", "context", "expert"))
RING, HEADS = ({**CONTEXT, "cp_comm_type": name} for name in ("p2p", "a2a"))
BESIDE, CONTINUED, ALONE = "beside one rank", "continued in", "continued on one rank"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the run that meets it, and what is named.

    Attributes:
        planted: (owner, name, what makes the fault of the true one) of each place.
        named: beginnings of the first difference, of which one is the right one.
        degrees, world, source, sections, kind: of the run; kind "plain" is without FP8.
        where: the comparison that finds it.
    """

    planted: tuple
    named: tuple
    degrees: dict
    world: int = 2
    source: str = "llama-1b"
    sections: dict = dataclasses.field(default_factory=dict)
    kind: str = "plain"
    where: str = BESIDE


def _nothing(_):
    return lambda *_, **__: None


def _own_share_alone(_):
    def reduce(self, parts, local):
        mine = [
            parts.get(n, local.new_zeros(2, local.shape[1], self.split.chunk, *local.shape[3:])) for n in self.split.chunks()
        ]
        return Pending([], lambda: torch.cat(mine, 2))

    return reduce


def _first_alone(_):
    return lambda into, parts: into.copy_(parts[0])


def _in_order_of_ranks(_):
    return lambda parts, dim: [chunk for part in parts for chunk in part.chunk(2, dim)]


def _not_passed_on(true):
    """Gradients of keys and values (five dimensions, as keys and values) stay at the last rank."""
    calls = []

    def pass_on(context, x):
        calls.append(x)
        return (
            Pending([], lambda: x) if torch._C._current_graph_task_id() != -1 and x.dtype == torch.float64 else true(context, x)
        )

    return pass_on


def _first_copy(true):
    def to_tokens(context, x):
        found = true(context, x)
        if torch._C._current_graph_task_id() != -1:  # a gradient: of copies of a head the first one's, twice
            found[..., 1::2, -1:, :] = found[..., ::2, -1:, :]
        return found

    return to_tokens


def _without_documents(_):
    return lambda self, sample: iter([(0, self.tokens)])


def _a_token_late(true):
    def pattern_of(positions, *arguments, **options):
        late = None if positions is None else positions.roll(1, 1)
        return true(late, *arguments, **options)

    return pattern_of


def _a_key_less(true):
    return lambda self, window: true(self, None if window is None else window - 1)


def _mean_of_ranks(true):
    return lambda self, factor: true(self, 2.0 * factor)


def _shards_alone(true):
    def connect(degrees, timeout):
        true(degrees, timeout)
        world.state.shard_mesh = world.state.mesh["hybrid_shard"]

    return connect


def _own_targets(_):
    def targets(context, batches):
        own = sum(step.count_targets(batch.labels) for batch in batches)
        return max(1, own) * context.group.size()  # the mean of the ranks' means

    return targets


def _without_first_micro_batch(true):
    seen = []

    def backward(context, loss):
        seen.append(loss)
        return true(context, loss * 0 if len(seen) % 2 else loss)

    return backward


def _of_first_step(true):
    calls = []

    def microbatch(first):
        calls.append(first)
        return true(first=len(calls) == 1)

    return microbatch


def _of_next_row(true):
    def collect(self, results):
        pending = true(self, results)
        return Pending([], lambda: pending.wait().roll(1, 0))

    return collect


def _without_first_row(true):
    def dispatch(self, copies, **options):
        if torch._C._current_graph_task_id() != -1:  # gradients of results
            copies = copies.clone()
            copies[0] = 0
        return true(self, copies, **options)

    return dispatch


def _never(_):
    return lambda self: False


def _nowhere(_):
    return lambda group: False


def _half_of_sum(true):
    return lambda self, gradient, dtype: true(self, gradient, dtype).mul_(0.5)


def _as_they_are(_):
    return lambda scales: contextlib.nullcontext()


def _first_of_its_shape(true):
    def take(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        saved = packed.block.tensors
        wanted = saved[packed.place].host
        place = next(n for n, each in enumerate(saved) if (each.host.shape, each.host.dtype) == (wanted.shape, wanted.dtype))
        return true(self, packed._replace(place=place))

    return take


def _from_first_row(true):
    return lambda self, piece, offsets, lengths: true(self, piece, [0, *offsets[1:]] if offsets else offsets, lengths)


def _states(change):
    """States of an optimizer changed after a read; `change(name, tensor)`."""

    def fault(true):
        def install(model, optimizer, tensors, *rest):
            return true(model, optimizer, {name: change(name, tensor) for name, tensor in tensors.items()}, *rest)

        return install

    return fault


def _squares_of_next(name, tensor):
    return tensor.neg() if name == "exp_avg.layers.1.ffn.fc1.weight" else tensor


def _of_muon(name, tensor):
    if name == "momentum_buffer.layers.1.ffn.fc2.weight":
        local_of(tensor).neg_()
    return tensor


def _from_the_first_step(name, tensor):
    return torch.ones_like(tensor) if name.startswith("step.") else tensor


def _without_embedding(_):
    return lambda self, weight: weight.detach()


def _of_shards(_):
    def join(weights):
        for weight in weights:
            weight.largest = weight.amax()

    return join


def _doubled_on_rank_1(true):
    def join(amaxes, group):
        true(amaxes, group)
        if dist.get_rank() == 1:
            amaxes.mul_(2)

    return join


def _changed_behind_each_step(name, rank=None):
    """A parameter that grows by 1e-12 of itself, on this rank alone."""

    def fault(true):
        def train_step(context, number):
            done = true(context, number)
            if rank is None or dist.get_rank() == rank:
                with torch.no_grad():
                    local_of(context.model.get_parameter(name)).mul_(1 + 1e-12)
            return done

        return train_step

    return fault


def _by_own_rows(true):
    """The scale of a stored matrix is that of a shard's rows."""

    def fill(self, *arguments, join=None, **options):
        return true(self, *arguments, join=None if join is None else lambda largest, shared: None, **options)

    return fill


def _doubled(true):
    return lambda self, *arguments: tuple(2 * gradient for gradient in true(self, *arguments))


TIED = {"model": {"source": "llama-1b", "config": {"tie_word_embeddings": True}}}
ONE_KEY = {"model": {"source": "llama-1b", "config": {"num_key_value_heads": 1}}}
BALANCED = {"moe": {"moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.02}}
ODD = {"model": {"source": "llama-1b", "config": {"vocab_size": 128261}}}  # words that the ranks' rows exceed
CUT = {"model": {"source": "llama-1b", "config": {"intermediate_size": 224}}}  # 3.5 blocks of gate and up a rank
OTHER = {
    "gradients of keys are not given back": Fault(
        ((attention._Chunks, "reduce", _own_share_alone),), ("gradient layers.1.self_attention.qkv",), CONTEXT,
        source="mistral-7b",
    ),
    "gradients of others' keys are lost": Fault(
        ((causal, "add_up", _first_alone),), ("gradient layers.1.self_attention.qkv",), CONTEXT
    ),
    "chunks are in the order of ranks": Fault(
        ((context, "chunks_in_order", _in_order_of_ranks),), ("states after",), CONTEXT
    ),
    "the ring ends before gradients are home": Fault(
        ((attention, "_pass_on", _not_passed_on),), ("gradient layers.1.self_attention.qkv",), RING
    ),
    "copies of a head count once": Fault(
        ((attention, "_to_tokens", _first_copy),), ("gradient layers.1.self_attention.qkv",), HEADS, sections=ONE_KEY
    ),
    "the loss is that of a part of the sequence": Fault(
        ((context.ContextGroup, "sum", lambda _: lambda self, part: part),), ("loss of step 1",), CONTEXT
    ),
    "documents see each other": Fault(
        ((Pattern, "bounds", _without_documents),), ("states after 1 blocks",), CONTEXT, source="mistral-7b"
    ),
    "documents begin a token late": Fault(
        ((decoder, "pattern_of", _a_token_late),), ("states after 1 blocks",), CONTEXT, source="mistral-7b"
    ),
    "a window has a key less": Fault(
        ((Pattern, "with_window", _a_key_less),), ("states after 1 blocks",), CONTEXT, source="mistral-7b"
    ),
    "gradients of shards are averaged": Fault(
        ((FSDPModule, "set_gradient_divide_factor", _mean_of_ranks),), ("gradient norm.weight",), {}
    ),
    "gradients of large parameters are halved": Fault(
        ((direct_reduce._Reduction, "_sum", _half_of_sum),), ("gradient norm.weight",), {}
    ),
    "replicas are not summed": Fault(
        ((world, "_connect", _shards_alone),), ("gradient norm.weight",), {"hybrid_shard_degree": 2}, world=4
    ),
    "a mean of the ranks' means": Fault(((step, "_global_targets", _own_targets),), ("loss of step 1",), {}),
    "the first micro-batch is lost": Fault(
        ((step, "_backward", _without_first_micro_batch),), ("gradient norm.weight",), {}
    ),
    "weights of the first step stay in FP8": Fault(
        ((step, "microbatch", _of_first_step),), ("loss of step 2",), TENSOR, kind="fp8"
    ),
    "results of experts come back to the next token": Fault(
        ((experts.Exchange, "collect", _of_next_row),), ("states after 1 blocks",), EXPERT, source="mixtral-8x7b"
    ),
    "a gradient for an expert is lost": Fault(
        ((experts.Exchange, "dispatch", _without_first_row),), ("gradient layers.1.moe.experts.fc2_weight",), EXPERT,
        source="mixtral-8x7b",
    ),
    "routers balance their own tokens": Fault(
        ((decoder.Decoder, "_joins", _never),), ("loss of step 1",), EXPERT, source="mixtral-8x7b", sections=BALANCED
    ),
    "amaxes of data-parallel ranks are not joined": Fault(
        ((buffers, "_join", _nothing),), ("history layers.0",), {}, kind="fp8", where="beside 2 data-parallel ranks"
    ),
    "amaxes are doubled on a rank": Fault(
        ((buffers, "_join", _doubled_on_rank_1),), ("history layers.0",), {}, kind="fp8", where="beside 2 data-parallel ranks"
    ),
    "a gathered weight's amaxes are its shards'": Fault(
        ((fp8_gather, "_join_amaxes", _of_shards),), ("scale layers.0.self_attention.qkv.weight",), {}, kind="fp8",
        where="beside 2 data-parallel ranks", sections={"fp8": {"recipe": "current"}},
    ),
    "recomputation takes the next scales": Fault(
        ((buffers, "replay", _as_they_are),), ("gradient layers.1",), TENSOR, kind="fp8",
        sections={"train": RUN["train"] | {"recompute": True}},
    ),
    "offloaded tensors of one shape are confused": Fault(
        ((offload._Offloader, "take", _first_of_its_shape),), ("gradient layers.1",), TENSOR,
        sections={"train": RUN["train"] | {"offload": True}},
    ),
    "every rank reads the first rows": Fault(
        ((stored.StoredTensors, "_slice", _from_first_row),), ("parameter embedding.weight",),
        {"hybrid_shard_degree": 1}, where=CONTINUED,
    ),
    "a moment has another sign on resume": Fault(
        ((reader.optimizer_state, "install_states", _states(_squares_of_next)),),
        ("exp_avg layers.1.ffn.fc1.weight",), TENSOR, where=CONTINUED,
    ),
    "Muon's momentum has another sign on resume": Fault(
        ((reader.optimizer_state, "install_states", _states(_of_muon)),),
        ("momentum_buffer layers.1.ffn.fc2.weight",), {}, where=CONTINUED, sections={"optimizer": {"name": "muon"}},
    ),
    "step counts begin anew on resume": Fault(
        ((optimizer_state, "install_states", _states(_from_the_first_step)),), ("step embedding.weight",), {}, where=CONTINUED
    ),
    "histories are not loaded": Fault(
        ((reader, "load_state_records", _nothing),), ("history layers.0.self_attention.qkv.input",), {}, kind="fp8",
        where=CONTINUED,
    ),
    "a rank's copy of a norm drifts": Fault(
        ((worker, "train_step", _changed_behind_each_step("norm.weight", 1)),), ("parameter norm.weight of rank 1",), TENSOR
    ),
    "gradients of adapters are doubled": Fault(
        ((lora.Joint, "gradients", _doubled),), ("gradient layers.1.ffn.lora_fc2",), {}, sections={"lora": {"rank": 4}}
    ),
    "a stored base has a scale a shard": Fault(
        ((fp8_stored.Stored, "fill", _by_own_rows),), ("scale layers.0", "states after 1 blocks"), {}, kind="fp8",
        where="beside 2 data-parallel ranks", sections={"lora": {"rank": 4, "base": "fp8"}},
    ),
    "a tied head gives no gradient": Fault(
        ((embedding.SharedWeight, "of", _without_embedding),), ("gradient embedding.weight",), {}, sections=TIED
    ),
}  # fmt: skip

_TENSOR = {
    "norms' gradients are not summed": ({}, ("gradient norm.weight", "gradient layers.1.ffn.layernorm.weight")),
    "a router's gradient is not summed": ({"source": "mixtral-8x7b"}, ("gradient layers.1.moe.router",)),
    "shared rows of keys and values count twice": ({"sections": ONE_KEY}, ("gradient layers.1.self_attention.qkv.weight",)),
    "a bias is added by each rank": ({"source": "gpt-neox-20b"}, ("states after 1 blocks",)),
    "amaxes of the histories are not joined": ({"kind": "fp8"}, ("history layers.0",)),
    "the first amax is not joined": ({"kind": "fp8"}, ("scale layers.0", "states after 1 blocks")),
    "gate and up are cut in wrong blocks": ({"sections": CUT}, ("states after 1 blocks",)),
    "padding counts as a word": ({"sections": ODD}, ("loss of step 1",)),
    "a target at a seam is nobody's": ({}, ("loss of step 1",)),
    "replicated parameters count twice in the norm": ({}, ("norm of step 1",)),
    "the loss is exchanged over all ranks": ({"world": 4}, ("loss of step 1",)),
}
"""Not of dropout, which `verify` sets to 0, and not of rows with another rank's scales, which the format bounds."""


def _tensor_fault(name):
    options, named = _TENSOR[name]
    fault = tensor_faults.FAULTS[name]
    return Fault(((fault.owner, fault.name, fault.fault),), named, TENSOR, **options)


NOT_COMPARED = {
    "a frozen weight is trained": Fault(((worker, "train_step", _changed_behind_each_step("embedding.weight")),), (), {})
}
"""An error of the ranks themselves."""
FAULTS = OTHER | {name: _tensor_fault(name) for name in _TENSOR}
