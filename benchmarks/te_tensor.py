"""Transformer Engine's tensor and sequence parallelism: its layers hold parts of matrices, as Megatron-LM arranges them.

Each rank of a tensor group has heads / n heads and 1 / n of the MLP in every block, and between products 1 / n of each
sequence. Embedding, last norm and head see only the rank's tokens and are sharded over all ranks (FSDP2), which is faster than
splitting the vocabulary. The gradients of the blocks' norms, of which each rank has the part from its tokens, are summed by
one collective in front of the optimizer.

Shapes: B batch, T tokens of a sequence, n ranks of a tensor group, D hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import te_attention
from benchmarks.te import CHECKED, TeDecoder, check_attention
from octavo.errors import InputError
from octavo.models.spec import ModelSpec

_BUFFERS = {f"ub_{name}": True for name in ("tp_comm_overlap", "overlap_ag", "overlap_rs", "bulk_dgrad", "bulk_wgrad")}


class TeTensorDecoder(TeDecoder):
    """A `TeDecoder` whose blocks are split over `group`; every rank of it passes the same tokens B × T.

    overlap: its userbuffers exchange in pieces beside the products. fp8, others: as of `TeDecoder`.

    Raises:
        InputError: experts, or a sequence that the ranks do not divide.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sequence_length: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        batch: int,
        overlap: bool = False,
        **how: Any,
    ) -> None:
        ranks = dist.get_world_size(group)
        if spec.experts or sequence_length % ranks:
            raise InputError(
                f"Transformer Engine's peer splits dense blocks, and sequences that {ranks} ranks divide, not "
                f"{spec.family} with {sequence_length} tokens."
            )
        if overlap:
            mode = te.module.base.UserBufferQuantizationMode
            modes = [mode.NONE, *([mode.FP8] if how.get("fp8") else [])]  # attention is compared in bf16
            te.module.base.initialize_ub(
                [sequence_length * batch, spec.hidden_size],
                ranks,
                quantization_modes=modes,
                bootstrap_backend="nccl",
            )
        split: dict[str, Any] = {
            "attn_input_format": "sbhd",  # products gather along the first dimension
            "set_parallel_mode": True,
            "sequence_parallel": True,
            "tp_group": group,
            "tp_size": ranks,
            **(_BUFFERS if overlap else {}),
        }
        super().__init__(spec, sequence_length, device, layer_options=split, **how)
        self.group, self.ranks, self.rank, self.overlap = group, ranks, dist.get_rank(group), overlap

    def check_attention(self, batch: int) -> dict[str, float]:
        """As `TeDecoder.check_attention`, of this rank's heads. Collective."""
        whole: Any = self.angles
        angles = whole[: te_attention.MOST_TOKENS]
        width = self.embed_tokens.embedding_dim
        # Its userbuffers take products of one size.
        shape = len(angles) // self.ranks, batch if self.overlap else min(batch, CHECKED), width
        call = partial(self.layers[0], rotary_pos_emb=angles)
        how: dict[str, Any] = {"causal": True, "window": self.window, "tokens_first": True}
        return check_attention(self.layers[0], call, shape, angles.device, **how)

    def shard(self, shard_mesh: DeviceMesh | None) -> None:
        """Shard the blocks over `shard_mesh`, if there is one, and embedding, last norm and head over all ranks."""
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ignored: set[nn.Parameter] = set()
        for block in self.layers:
            if shard_mesh is None:
                ignored |= set(block.parameters())
            else:
                fully_shard(block, mesh=shard_mesh, mp_policy=precision)
        world = dist.get_world_size()
        device: torch.device = self.embed_tokens.weight.device
        how: dict[str, Any] = {"mesh": init_device_mesh(device.type, (world,)), "mp_policy": precision}
        ends: list[Any] = [self]
        if self.lm_head.weight is not self.embed_tokens.weight:  # a tied matrix stays gathered with the root
            ends = [self.embed_tokens, self.norm, self]
            fully_shard(self.embed_tokens, **how)
            fully_shard([self.norm, self.lm_head], reshard_after_forward=False, **how)
        fully_shard(self, ignored_params=ignored, **how)
        for end in ends:  # a sum over the tensor group, and a mean over the groups
            end.set_gradient_divide_factor(world / self.ranks)
            end.set_force_sum_reduction_for_comms(device.type == "cpu")  # gloo has no scaled sums

    def sum_norms(self, *_: Any) -> None:
        """Sum the gradients of parameters that every rank of the group holds whole and applies to its tokens."""
        grads = []
        for block in self.layers:
            for parameter in block.parameters():
                if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
                    grad = parameter.grad
                    grads.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self.group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean cross entropy of each next token, in float32, the same on all ranks of the group.

        Its gradient on a rank is the part from the rank's tokens.
        """
        targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=-100)
        ids, targets = (x.chunk(self.ranks, 1)[self.rank] for x in (ids_BT, targets_BT))
        x_TBD = self.embed_tokens(ids.t().contiguous())
        for layer in self.layers:
            x_TBD = layer(x_TBD, rotary_pos_emb=self.angles)
        part = self.loss_of_part(self.lm_head(self.norm(x_TBD)), targets.t())
        part = part / (labels_BT.shape[0] * (labels_BT.shape[1] - 1))
        whole = part.detach().clone()
        dist.all_reduce(whole, group=self.group)
        return part + (whole - part.detach())
