"""Muon for a model's hidden matrices and AdamW for the rest, as one optimizer, correct for any sharding.

The update is `torch.optim.Muon`'s: momentum (`lerp`) and Nesterov's step, five steps of Newton and Schulz's iteration,
decoupled weight decay, and a rate scaled by the matrix's shape. Momentum is elementwise, sharded like its parameter:
checkpoints store it like weights, and load it at any degrees. Whole matrices of the model (`octavo.models.hidden`) are
orthogonalised, never shards, tensor-parallel parts or joined parameters.

With several ranks each matrix is computed once: parameters, and slices of stacked experts, are assigned to all ranks by FLOPs.
A step gathers each update to the rank that computes it, and broadcasts the result: about twice the traffic of one all-gather of
the weights in bf16. Newton-Schulz steps run in bf16 on a GPU, as in PyTorch, and in float32 (float64 for float64 weights) on a
CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.collectives.blocks import local_of, part_of
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError, some
from octavo.groups import factors_of, parameter_groups
from octavo.models.hidden import HiddenParameter, hidden_parameters
from octavo.parallel.fsdp import settle
from octavo.parallel.shards import LocalShard, like
from octavo.plan.muon import STEPS, iteration_flops
from octavo.train.adamw import AdamW

RATE_KEYS = ("octavo.muon: rates", "octavo.muon: layer_decay")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration, as in `torch.optim.Muon`."""
EPS = 1e-7
"""Lower bound of the norm by which a matrix is divided."""

Scale = Literal["match_rms_adamw", "original"]
"""Dependence of the rate on a matrix's shape [rows, columns], as `adjust_lr_fn` of `torch.optim.Muon`."""


def scale_of(scale: Scale, rows: int, columns: int) -> float:
    """Factor of the rate: 0.2 · sqrt(max(rows, columns)), or sqrt(max(1, rows / columns))."""
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


@torch.no_grad()
def orthogonalised(stack: Tensor, dtype: torch.dtype, *, batched: bool | None = None) -> Tensor:
    """U·S'·Vᵀ of each matrix U·S·Vᵀ of a stack [number, rows, columns], with singular values S' near 1, in `dtype`.

    This is the iteration of `torch.optim.Muon`. The result has the input's layout; matrices with more rows than columns are
    transposed for the iteration. Zero stays zero. batched: multiply all matrices at once; None: only on a GPU. One by one, a
    matrix gets the same bits in any stack.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x.to(dtype, copy=True)
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS))
    if len(x) > 1 and (x.device.type != "cpu" if batched is None else batched):
        return _iterated(x, torch.baddbmm, a, b, c, tall)
    return torch.stack([_iterated(matrix, torch.addmm, a, b, c, tall) for matrix in x])


def _iterated(x: Tensor, add_product: Callable[..., Tensor], a: float, b: float, c: float, tall: bool) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        for _ in range(STEPS):
            gram = x @ x.mT
            x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class _Slice:
    """Rows of a parameter that one rank orthogonalises: all, or those of some experts."""

    start: int
    stop: int
    owner: int


class MuonAdamW(AdamW):
    """Muon for a model's hidden matrices and AdamW for all else.

        optimizer = octavo.muon(model, lr=3e-4, weight_decay=0.1)

    Whole matrices of the model are orthogonalised at any degrees of sharding, tensor and expert parallelism. `octavo.save` and
    `octavo.load` support its states. On several ranks a step is collective.

    Args:
        model: from `octavo.transform`, or with its original code; shard it first.
        lr: rate of hidden matrices.
        adamw_lr: rate of all other parameters; None: `lr`, allowed only with `scale` = "match_rms_adamw".
        weight_decay: decoupled weight decay of matrices (`octavo.parameter_groups`).
        momentum: momentum of Muon's gradients.
        nesterov: use Nesterov's momentum.
        scale: `adjust_lr_fn` of `torch.optim.Muon`: "match_rms_adamw", for AdamW's rates, or "original".
        betas: AdamW's betas.
        eps: AdamW's eps.
        dtype: dtype of the Newton-Schulz steps; None: bf16 on a GPU, the wider of float32 and the weight's dtype on a CPU.
        rates: factors of `lr` and `adamw_lr` by pattern of names (`octavo.parameter_groups`).
        layer_decay: factor of both by depth (`octavo.parameter_groups`).

    Raises:
        InputError: the model has no hidden matrix, or one that cannot be split; a setting out of its range; "original" without
            `adamw_lr`; a fault of `rates` or `layer_decay`.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 3e-4,
        *,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: Scale = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        dtype: torch.dtype | None = None,
        rates: Mapping[str, float] | None = None,
        layer_decay: float = 1.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                f"octavo.muon: model is of type {type(model).__name__}: give the model itself, from which octavo.muon forms "
                "its groups. Rates by name and depth: octavo.muon(model, rates=…, layer_decay=…)."
            )
        _check(lr, adamw_lr, momentum, scale)
        hidden = hidden_parameters(model, "octavo.muon")
        own = {one.parameter for one in hidden}
        factors = factors_of(model, {} if rates is None else rates, layer_decay, keys=RATE_KEYS)
        rate = lr if adamw_lr is None else adamw_lr
        of_adamw = parameter_groups(model, weight_decay, lr=rate, rates=rates, layer_decay=layer_decay)
        by_factor: dict[float, list[nn.Parameter]] = {}
        for one in hidden:
            by_factor.setdefault(1.0 if factors is None else factors[one.name], []).append(one.parameter)
        settings: dict[str, Any] = {"weight_decay": float(weight_decay), "muon": True}
        settings |= {"momentum": momentum, "nesterov": nesterov, "scale": scale}
        groups: list[dict[str, Any]] = [
            {"params": by_factor[factor], "lr": lr * factor} | settings | ({} if factors is None else {"lr_scale": factor})
            for factor in sorted(by_factor, reverse=True)
        ]
        for group in of_adamw:
            if rest := [parameter for parameter in group["params"] if parameter not in own]:
                groups.append(group | {"params": rest, "lr_scale": group["lr"] / lr})
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._model, self._dtype = model, dtype
        self._hidden = {one.parameter: one for one in hidden}
        self._spread = dist.is_initialized() and dist.get_world_size() > 1
        self._slices = self._shared_out(hidden)
        self._checked = False
        if self._spread:
            _agree([one.name for one in hidden])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later ones are refused, since matrices are assigned to ranks by then."""
        if "_slices" in vars(self):
            raise InputError(
                "octavo.muon has the parameters of the model that it was built for, and accepts no other group: build it after "
                "the model is complete and requires_grad is set."
            )
        super().add_param_group(param_group)

    def _step_group(self, group: dict[str, Any]) -> None:
        matrices = [each for each in self.param_groups if each.get("muon")]
        if not group.get("muon"):
            super()._step_group(group)
        elif group is matrices[0]:  # groups of other rates too, so that all ranks compute at once
            self._step_matrices(matrices)

    def _shared_out(self, hidden: list[HiddenParameter]) -> dict[nn.Parameter, list[_Slice]]:
        """Each parameter's slices and their ranks: the most FLOPs first, each to the rank with the fewest."""
        world = dist.get_world_size() if self._spread else 1
        pieces: list[tuple[float, nn.Parameter, int, int]] = []
        for one in hidden:
            number = min(one.experts or 1, world)
            count, rows = one.experts or 1, one.shape[0]
            ends = [round(count * part / number) * (rows // count) for part in range(number)] + [rows]
            flops = sum(each * iteration_flops(*shape) for each, *shape in one.matrices)
            for start, stop in itertools.pairwise(ends):
                pieces.append((flops * (stop - start) / rows, one.parameter, start, stop))
        loads, by_matrix = [0.0] * world, dict[nn.Parameter, list[_Slice]]()
        for cost, parameter, start, stop in sorted(pieces, key=lambda piece: -piece[0]):
            owner = min(range(world), key=loads.__getitem__)
            loads[owner] += cost
            by_matrix.setdefault(parameter, []).append(_Slice(start, stop, owner))
        return {parameter: sorted(slices, key=lambda each: each.start) for parameter, slices in by_matrix.items()}

    @torch.no_grad()
    def _step_matrices(self, groups: list[dict[str, Any]]) -> None:
        settle(self._model)
        if not self._checked:
            self._check_held()
        group_of = {parameter: group for group in groups for parameter in group["params"]}
        stepped = self._with_gradients([self._hidden[parameter] for parameter in group_of])
        rank = dist.get_rank() if self._spread else 0
        # All gathers first: a rank then computes its matrices while the others compute theirs.
        taken: list[tuple[HiddenParameter, dict[_Slice, Tensor]]] = []
        for one in stepped:
            whole = whole_tensor(one.tensor(self._direction(one.parameter, group_of[one.parameter])))
            slices = self._slices[one.parameter]
            mine = {each: whole[each.start : each.stop] for each in slices if each.owner == rank}
            if not self._spread:
                self._apply(one, _of_slice(one, mine[slices[0]], whole.dtype), group_of[one.parameter])
                continue
            if len(mine) < len(slices):  # free the matrices of other ranks
                mine = {each: rows.clone() for each, rows in mine.items()}
            taken.append((one, mine))
        for one, mine in taken:
            for each, rows in mine.items():
                mine[each] = _of_slice(one, rows, rows.dtype).contiguous()
        for one, mine in taken:
            parts = []
            for each in self._slices[one.parameter]:
                like_it = self._compute_dtype(one.parameter)
                empty = (each.stop - each.start, one.shape[1])
                rows = mine.pop(each) if each in mine else local_of(one.parameter).new_empty(empty, dtype=like_it)
                dist.broadcast(rows, each.owner)
                parts.append(rows)
            self._apply(one, parts[0] if len(parts) == 1 else torch.cat(parts), group_of[one.parameter])

    def _check_held(self) -> None:
        """Refuse parameters that are no longer the model's: steps would not change the model."""
        held = set(self._model.parameters())
        if lost := [one.name for one in self._hidden.values() if one.parameter not in held]:
            raise InputError(
                f"{some(lost)} of octavo.muon are no longer parameters of its model, which was sharded, converted or loaded "
                "by assign=True afterwards: build the optimizer after that."
            )
        self._checked = True

    def _compute_dtype(self, parameter: Tensor) -> torch.dtype:
        if self._dtype is not None:
            return self._dtype
        if parameter.device.type != "cpu":
            return torch.bfloat16
        return torch.promote_types(torch.float32, parameter.dtype)

    def _with_gradients(self, hidden: list[HiddenParameter]) -> list[HiddenParameter]:
        """Parameters with a gradient, which must agree between ranks; others are skipped, as in PyTorch's optimizers."""
        have = [one.parameter.grad is not None for one in hidden]
        if self._spread and hidden:
            device = hidden[0].parameter.device
            counts = torch.tensor([*have, *(not each for each in have)], dtype=torch.int32, device=device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
            some_have, some_lack = (row.tolist() for row in counts.view(2, -1))
            for one, has, lacks in zip(hidden, some_have, some_lack, strict=True):
                if has and lacks:
                    raise InputError(
                        f"{one.name} has a gradient on some ranks and none on others, and Muon orthogonalises the gradient of "
                        "all: give each rank a loss that depends on it, or freeze it on all of them."
                    )
        return [one for one, has in zip(hidden, have, strict=True) if has]

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Update the momentum of this rank's elements; returns the direction in the iteration's dtype."""
        assert parameter.grad is not None
        gradient = local_of(parameter.grad)
        if self.grad_scale is not None:
            gradient.mul_(self.grad_scale)
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad, memory_format=torch.preserve_format)
        momentum = local_of(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        step = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return like(parameter, step.to(self._compute_dtype(parameter)))

    def _apply(self, one: HiddenParameter, update: Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay and update to this rank's elements, from the whole update."""
        held = one.tensor(one.parameter)
        local, part = local_of(held).detach(), part_of(held)
        if not local.numel():
            return
        own = LocalShard(torch.empty(part.local_shape, dtype=update.dtype, device=update.device), part)
        own.copy_from(update)
        rate = group["lr"]
        factors = [scale_of(group["scale"], rows, columns) for _, rows, columns in one.matrices]
        local.mul_(1 - rate * group["weight_decay"])
        if len(set(factors)) == 1:
            local.add_(own.local.view_as(local), alpha=-(rate * factors[0]))
            return
        # The factor of each of this rank's rows, by its matrix.
        rows = torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in part.indices[0].ranges])
        numbers = [rows.new_full((count, size, 1), index) for index, (count, size, _) in enumerate(one.matrices)]
        of_row = one.join(numbers)[:, 0][rows].to(local.device)
        for index, factor in enumerate(factors):
            chosen = (of_row == index).nonzero()[:, 0]
            local[chosen] = local[chosen].add_(own.local[chosen], alpha=-(rate * factor))


def _agree(names: list[str]) -> None:
    """Refuse ranks with different matrices, whose collectives would hang. Collective."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, names)
    for rank, theirs in enumerate(of_ranks):
        if other := sorted({*theirs} ^ {*of_ranks[0]}):
            raise InputError(
                f"octavo.muon: rank {rank} and rank 0 do not train the same matrices: {some(other)}. Freeze the same "
                "parameters on all ranks."
            )


def _of_slice(one: HiddenParameter, rows: Tensor, dtype: torch.dtype) -> Tensor:
    return one.join([orthogonalised(stack, dtype) for stack in one.split(rows)])


def _check(lr: float, adamw_lr: float | None, momentum: float, scale: str) -> None:
    if scale not in ("match_rms_adamw", "original"):
        raise InputError(f'octavo.muon: scale = {scale!r}: give "match_rms_adamw" or "original".')
    for name, value in (("lr", lr), ("adamw_lr", adamw_lr)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"octavo.muon: {name} = {value!r}: give a rate above 0, such as 3e-4.")
    if not 0 <= momentum < 1:
        raise InputError(f"octavo.muon: momentum = {momentum!r}: give a number from 0 to below 1, such as 0.95.")
    if scale == "original" and adamw_lr is None:
        raise InputError(
            'octavo.muon: scale = "original" needs larger rates (about 0.02) than AdamW, which trains embedding, head, '
            "norms, biases and routers. Give adamw_lr too, such as 3e-4."
        )


muon = MuonAdamW
"""The public function of `octavo`."""
