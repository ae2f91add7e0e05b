"""Octavo's parameters as the matrices of Hugging Face's model, for optimizers that treat a parameter as one matrix.

Octavo stores query, key and value in one parameter, gate and up in another, and all experts of a block in a third; their rows
are interleaved. Elementwise optimizers such as AdamW are not affected. Muon, Shampoo, Adafactor or LAMB orthogonalise,
factorise or measure a whole matrix, and would compute different updates. `matrices` returns Hugging Face's matrices: before a
step each copies its rows of weight and gradient, and afterwards the rows are copied back. An optimizer of a known class with a
joined parameter is refused at its first step (`watch`).

Rows of a part are not a view of the parameter, so each matrix is a copy. On several ranks each matrix belongs to one rank,
which holds the copy and the optimizer's state and computes its update: a step gathers weights and gradients of one parameter at
a time, and broadcasts the new weights. Not supported: optimizer states in `octavo.save`, closures, and loss scaling.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.collectives.blocks import Block, local_of, parameters_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError, some
from octavo.models.convert import Conversion, conversion_of
from octavo.models.families import Join
from octavo.parallel.fsdp import settle
from octavo.parallel.shards import local_shard
from octavo.process import process

_COPY = "octavo_copy_of_a_matrix"
OF_MATRICES = frozenset(
    {
        *("Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam", "AdaMuon", "Dion", "Scion"),
        *("Adafactor", "AdafactorBigVision", "CAME", "Shampoo", "DistributedShampoo", "SOAP", "PSGD", "Kron"),
        *("LAMB", "Lamb", "FusedLAMB", "LARS", "Lars", "NovoGrad", "FusedNovoGrad", "Adam_mini"),
        *("GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor", "APOLLOAdamW"),
    }
)
"""Names of optimizer classes that treat a parameter as one matrix, from PyTorch, transformers and other libraries."""
_OF_ALL = frozenset(
    {"LBFGS", "Prodigy", "DAdaptAdam", "DAdaptAdaGrad", "DAdaptSGD", "DAdaptLion", "DAdaptAdan", "DAdaptAdamIP", "SAM", "GSAM"}
)
"""Optimizer classes with sums over all parameters: of parts, these would differ between tensor-parallel ranks."""


@dataclass(frozen=True)
class _Joined:
    """A parameter of the model, its matrices by name in the order of `_split`, and its block."""

    name: str
    parameter: nn.Parameter
    names: tuple[str, ...]
    block: Block | None

    def tensor(self, values: Tensor) -> Tensor:
        """The parameter or its gradient in the form for `whole_tensor` and `local_shard`."""
        return with_block(values, self.block)


class Matrices(Mapping[str, nn.Parameter]):
    """A model's matrices by Hugging Face's names, as parameters for an optimizer; from `octavo.matrices`.

    On one rank, a matrix that is a parameter of the model by itself is that parameter. All others are copies. On several ranks
    the mapping has only this rank's matrices, with about equally many elements per rank.
    """

    def __init__(self, model: nn.Module, chosen: Sequence[_Joined], way: Conversion | None) -> None:
        self._model, self._chosen, self._way = model, tuple(chosen), way
        self._spread = dist.is_initialized() and dist.get_world_size() > 1
        self.owners = self._share_out()
        """Matrix name → its rank."""
        self._local: dict[str, nn.Parameter] = {}
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        for joined in self._chosen:
            for name, part in self._parts(joined, joined.parameter):
                if self._is_of_this_rank(name):
                    itself = not self._spread and len(joined.names) == 1 and part.shape == joined.parameter.shape
                    itself = itself and joined.block is None
                    itself = itself and self._order_is_kept(joined)
                    self._local[name] = joined.parameter if itself else _copy(part)
        _register()

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._local[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)

    def others(self) -> list[nn.Parameter]:
        """Trained parameters of the model outside the matrices: norms, biases, and unselected ones."""
        taken = {id(joined.parameter) for joined in self._chosen}
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad and id(parameter) not in taken]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer.step()` copy weights and gradients from the model first, and write the weights back afterwards.

        The model's gradients of these parameters are None after a step. On several ranks a step is collective.

        Raises:
            InputError: the optimizer has a parameter that is not a matrix of this object, or lacks some of this rank's.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = {id(parameter): name for name, parameter in self._local.items()}
        if held - names.keys() or names.keys() - held:
            missing = [name for number, name in names.items() if number not in held]
            why = f"it does not hold {some(missing)}" if missing else f"{len(held - names.keys())} of its parameters are others"
            raise InputError(
                f"Matrices.attach: the optimizer must hold exactly the matrices of this object, but {why}. Build it "
                "from matrices.values(), and another optimizer from matrices.others()."
            )
        if self._optimizer is not None and self._optimizer() is not None:
            raise InputError("Matrices.attach: an optimizer is attached already: call octavo.matrices again for another one.")
        self._optimizer = weakref.ref(optimizer)
        vars(optimizer)["octavo_matrices"] = self
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise InputError(
                "a step with a closure computes gradients after octavo.matrices has copied them: call step() without one."
            )
        self.take()

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.write()

    @torch.no_grad()
    def take(self) -> None:
        """Copy the rows of weights and gradients from the model's parameters. Collective over ranks."""
        settle(self._model)
        for joined in self._chosen:
            if self._local.get(joined.names[0]) is joined.parameter:
                continue
            gradient = joined.parameter.grad
            parts = dict(self._parts(joined, joined.parameter))
            gradients = {} if gradient is None else dict(self._parts(joined, gradient))
            for name in joined.names:
                if (parameter := self._local.get(name)) is not None:
                    parameter.copy_(parts[name])
                    parameter.grad = gradients[name].clone(memory_format=torch.contiguous_format) if gradients else None

    @torch.no_grad()
    def write(self) -> None:
        """Write the matrices into the model's parameters, and clear their gradients. Collective over ranks."""
        for joined in self._chosen:
            if self._local.get(joined.names[0]) is joined.parameter:
                continue
            shapes = self._parts_of_shape(joined)
            values: dict[str, Tensor] = {}
            for name, shape in shapes.items():
                parameter = self._local.get(name)
                if not self._spread:
                    assert parameter is not None
                    values[name] = parameter.detach()
                    continue
                local = local_of(joined.parameter)
                values[name] = local.new_empty(shape) if parameter is None else parameter.detach().contiguous()
                dist.broadcast(values[name], self.owners[name])
            whole = joined.tensor(joined.parameter)
            local_shard(whole).copy_from(_join(self._way, joined.name, list(values.values()), tuple(whole.shape)))
            joined.parameter.grad = None
            for name in joined.names:
                if (mine := self._local.get(name)) is not None:
                    mine.grad = None

    def _parts(self, joined: _Joined, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from _split(self._way, joined.name, whole_tensor(joined.tensor(tensor.detach()))).items()

    def _parts_of_shape(self, joined: _Joined) -> dict[str, tuple[int, ...]]:
        shape = torch.empty(joined.tensor(joined.parameter).shape, device="meta")
        return {name: tuple(part.shape) for name, part in _split(self._way, joined.name, shape).items()}

    def _order_is_kept(self, joined: _Joined) -> bool:
        """True if the single matrix has the parameter's rows in the same order."""
        return self._way is None or self._way.table.join(joined.name) is None

    def _is_of_this_rank(self, name: str) -> bool:
        return not self._spread or self.owners[name] == dist.get_rank()

    def _share_out(self) -> dict[str, int]:
        """Assign ranks: the largest matrix first, each to the rank with the fewest elements."""
        sizes = {
            name: torch.Size(shape).numel() for joined in self._chosen for name, shape in self._parts_of_shape(joined).items()
        }
        world = dist.get_world_size() if self._spread else 1
        if len(sizes) < world:
            raise InputError(
                f"octavo.matrices: {len(sizes)} matrices cannot be distributed over {world} ranks, which need at least one "
                "each: choose more of them, or use fewer ranks."
            )
        loads, owners = [0] * world, {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owners[name] = min(range(world), key=loads.__getitem__)
            loads[owners[name]] += sizes[name]
        return {name: owners[name] for name in sizes}


def matrices(model: nn.Module, *patterns: str) -> Matrices:
    """The matrices of a model by Hugging Face's names, for optimizers that treat each parameter as one matrix.

    A parameter that joins several matrices gives each of them: `model.layers.0.self_attn.q_proj.weight` and so on. Stacked
    experts give those of each expert: `….experts.gate_up_proj.3.gate`, `….experts.gate_up_proj.3.up`, `….experts.down_proj.3`.
    Matrices that Hugging Face joins (Phi-3, GPT-NeoX) stay joined, with its order of rows. Collective over ranks.

    Args:
        model: of `octavo.transform`, or any other.
        *patterns: patterns of names (`fnmatch`), such as "model.layers.*"; none: all matrices, including embedding and head.

    Raises:
        InputError: a pattern that matches nothing, patterns that select only some of the matrices of one parameter, or fewer
            matrices than ranks.
    """
    _check_model(model)
    settle(model)
    way = conversion_of(model)
    chosen: list[_Joined] = []
    of_model: list[str] = []
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        block = blocks[parameter]
        names = tuple(_split(way, name, torch.empty(with_block(parameter, block).shape, device="meta")))
        of_model += names
        here = [one for one in names if not patterns or any(fnmatch(one, pattern) for pattern in patterns)]
        if here and len(here) < len(names):
            left = [one for one in names if one not in here]
            raise InputError(
                f"octavo.matrices: {name} joins {some(names)}, and the patterns select {some(here)} without "
                f"{some(left)}: select all of them, or none."
            )
        if here:
            chosen.append(_Joined(name, parameter, names, block))
    for pattern in patterns:
        if not any(fnmatch(one, pattern) for one in of_model):
            raise InputError(f"octavo.matrices: no matrix matches {pattern!r}. Known are {some(of_model)}.")
    if not chosen:
        raise InputError(f"octavo.matrices: {type(model).__name__} has no trained matrix.")
    return Matrices(model, chosen, way)


def _split(way: Conversion | None, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices of a whole parameter, views if strides allow; none for a parameter that is not a matrix."""
    pieces = {name: tensor} if way is None else way.split(name, tensor)
    by_name: dict[str, Tensor] = {}
    for source, piece in pieces.items():
        if piece.ndim == 2:
            by_name[source] = piece
        elif piece.ndim == 3 and ".experts." in source:
            for expert, matrix in enumerate(piece):
                if way is not None and source.endswith("gate_up_proj"):
                    by_name[f"{source}.{expert}.gate"], by_name[f"{source}.{expert}.up"] = matrix.chunk(2)
                else:
                    by_name[f"{source}.{expert}"] = matrix
    return by_name


def _join(way: Conversion | None, name: str, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_split`: a parameter of this shape from its matrices in their order."""
    if way is None or way.table.join(name) is Join.EXPERTS:
        return torch.cat(list(parts)).view(shape)
    return way.join(name, tuple(parts))


def _check_model(model: nn.Module) -> None:
    """Refuse a wrapper around a model of Octavo, whose parameters have other names."""
    for name, module in model.named_modules():
        if module is not model and conversion_of(module) is not None:
            raise InputError(
                f"octavo.matrices: {type(model).__name__} has a model of octavo.transform in {name!r}: give that one. A model "
                'with adapters in it has other parameters: transform it with blocks="own".'
            )
    if (way := conversion_of(model)) is not None:
        for name, _ in model.named_parameters():
            try:
                way.names(name)
            except KeyError:
                raise InputError(
                    f"octavo.matrices: {name} is not a parameter of octavo.transform's model. A model with adapters in it is "
                    'transformed with blocks="own".'
                ) from None


def watch(model: nn.Module) -> None:
    """Refuse optimizers of `OF_MATRICES` at their first step, if they hold a parameter of `model` with several matrices.

    Optimizers with a tensor-parallel part are refused too, then also those that sum over all parameters.
    """
    if conversion_of(model) is None:
        return
    _register()
    process.models_of_matrices.add(model)


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in process.optimizers_of_matrices:
        refuse_unattached(optimizer)
        for model in process.models_of_matrices:
            refuse(model, optimizer)
        process.optimizers_of_matrices.add(optimizer)


def _copy(part: Tensor) -> nn.Parameter:
    copy = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
    vars(copy)[_COPY] = True
    return copy


def refuse_unattached(optimizer: torch.optim.Optimizer) -> None:
    """Raise an InputError for an optimizer of unattached copies, whose steps would not change the model."""
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if "octavo_matrices" not in vars(optimizer) and any(hasattr(parameter, _COPY) for parameter in held):
        raise InputError(
            f"{type(optimizer).__name__} holds copies of octavo.matrices without being attached: its steps would change no "
            "weight of the model. Call attach(optimizer) of the same matrices before the first step."
        )


def refuse(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise an InputError for an optimizer that would treat a joined parameter of `model`, or a part of one, as one matrix."""
    kinds = [each.__name__ for each in type(optimizer).__mro__]
    kind = next((name for name in kinds if name in OF_MATRICES), None)
    way = conversion_of(model)
    if way is None:
        return
    groups = [group["params"] for group in optimizer.param_groups if group.get("use_muon") is not False]
    held = {id(parameter) for group in groups for parameter in group}
    if of_all := kind or next((name for name in kinds if name in _OF_ALL), None):
        _refuse_parts(model, of_all, held, has_remedy=kind is not None)
    if kind is None:
        return
    for name, parameter in model.named_parameters():
        if id(parameter) in held:
            shape = torch.empty(parameter.shape, device="meta")
            try:
                names = tuple(_split(way, name, shape) if parameter.ndim > 1 else way.split(name, shape))
            except KeyError:  # an adapter's parameter
                continue
            if len(names) > 1:
                raise InputError(
                    f"{kind} treats a parameter as one matrix, but {name} joins {len(names)}, with interleaved rows: "
                    f"{some(names)}. {_remedy(kind)}Give {kind} octavo.matrices(model, …).values() and attach it "
                    '(docs/optimizers.md), or use the model\'s original code by octavo.transform(model, blocks="own").'
                )


def _remedy(kind: str) -> str:
    return "Build octavo.muon(model, lr=…) instead, which splits and joins them itself. Or: " if "Muon" in kind else ""


def _refuse_parts(model: nn.Module, kind: str, held: set[int], *, has_remedy: bool) -> None:
    """Raise an InputError for a parameter of `held` of which each tensor-parallel rank has a part.

    has_remedy: `octavo.matrices` can join the matrix's parts.
    """
    blocks = parameters_of(model)
    for name, parameter in model.named_parameters():
        block = blocks[parameter]
        if id(parameter) not in held or block is None or block.is_whole:
            continue
        ways = ["set tensor_parallel_degree = 1"]
        if has_remedy and len(block.shape) > 1:
            ways.insert(0, f"give {kind} octavo.matrices(model, …).values() and attach it (docs/optimizers.md)")
        elif has_remedy:
            ways.insert(0, "leave it to another optimizer, such as AdamW")
        remedy = ", or ".join(ways)
        raise InputError(
            f"{kind} measures a whole parameter, but each of {len(block.parts)} tensor ranks holds a part of {name} "
            f"{list(block.shape)}, {list(block.local.local_shape)} here: {remedy[0].upper()}{remedy[1:]}."
        )
