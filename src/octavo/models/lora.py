"""LoRA on Octavo's decoder: which frozen matrices get adapters, and which parameters are trained.

Each of Hugging Face's matrices has an A and a B, even if Octavo fuses several into one parameter. `peft_folder` reads and
writes them; checkpoints hold the trained parameters and identify the frozen weights by their `fingerprint`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.collectives.blocks import Block, Indices, Part, declare, indices, parameters_of, shape_of, share_out
from octavo.collectives.tensor import TensorGroup
from octavo.config.lora import LoRA
from octavo.config.peft_settings import ALL_LINEAR, DOWNS, GATES, UPS, is_of_experts, is_router
from octavo.errors import InputError, nearest, some
from octavo.models.convert import Conversion, conversion
from octavo.models.decoder import Decoder
from octavo.models.families import leaf_of
from octavo.models.fingerprint import fingerprint
from octavo.models.tensor_parallel import part_of_rank
from octavo.nn.expert_lora import RouterAdapters, StackedAdapters
from octavo.nn.experts import StackedExperts
from octavo.nn.linear import LayerNormLinear, Linear, NormedLayer
from octavo.nn.lora import Adapter, Adapters
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import LayerNormMoE

_ATTACHED = "octavo_lora"


@dataclass(frozen=True)
class Adapted:
    """The trained parameters of a model with adapters.

    Attributes:
        options: the options that the model was built with.
        targets: Hugging Face's names of the modules with adapters.
        whole: Hugging Face's names of the modules that are trained whole.
        base: fingerprint of the frozen weights; empty for a model without values.
        fused: gate and up of experts have one adapter of twice the rank and alpha.
    """

    options: LoRA
    targets: tuple[str, ...]
    whole: tuple[str, ...]
    base: str = ""
    fused: bool = False

    def of(self, matrix: str) -> LoRA:
        """The options with the rank and alpha of one of Hugging Face's matrices."""
        return doubled(self.options) if self.fused and matrix.endswith(".experts.gate_up_proj") else self.options

    @property
    def record(self) -> dict[str, Any]:
        """The entry in a checkpoint's state."""
        return {
            "base": self.base,
            "rank": self.options.rank,
            "scale": self.options.scale,
            "stored": self.options.base,
            "targets": list(self.targets),
            "save_whole": list(self.whole),
            **({"experts": "twice the rank of gate and up"} if self.fused else {}),
        }


def doubled(options: LoRA) -> LoRA:
    """The options with twice the rank and alpha, for a matrix that fuses two."""
    return dataclasses.replace(options, rank=2 * options.rank, alpha=2 * options.scale_factor)


def adapted(model: nn.Module) -> Adapted | None:
    """The `Adapted` of a model with Octavo's adapters; None without adapters."""
    return vars(model).get(_ATTACHED)


def adapt(model: Decoder, options: LoRA) -> None:
    """Add adapters to the matrices of a decoder on the meta device, and freeze all else but the modules in `save_whole`.

    Raises:
        InputError: a pattern matches nothing, or a matrix without support for adapters; the rank is larger than a matrix.
    """
    way = conversion(model.spec)
    held = way if model.tensor is None else conversion(part_of_rank(model.spec, model.tensor.size))  # by this rank
    places = _places(model, way)
    stacked = _places_of_experts(model)
    chosen, fused = _chosen(model, way, places, stacked, options)
    whole = _whole(model, way, options.save_whole)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if module_of(way.names(name)[0]) in whole:
            parameter.requires_grad_(True)
    settings = Adapted(options, tuple(chosen), tuple(whole), fused=fused)
    _check_rank(model, way, [*places, *stacked], settings)
    for name, (layer, attribute) in places.items():
        sources = [module_of(source) for source in way.names(name)]
        if not any(source in chosen for source in sources):
            continue
        parameter = model.get_parameter(name)
        rows, columns = parameter.shape
        leaves = [source.rpartition(".")[2] for source in sources]
        if isinstance(layer, NormedLayer):
            layer.adapted = True
        adapters = Adapters(
            dict(zip(leaves, _sizes(held, name, rows), strict=True)),
            [leaf for leaf, source in zip(leaves, sources, strict=True) if source in chosen],
            held.repetition(name, rows),
            in_features=columns,
            rank=options.rank,
            scale=options.scale,
            dropout=options.dropout,
            # As in PEFT, float32 beside 16-bit weights: updates of B are below bfloat16's resolution.
            dtype=torch.promote_types(parameter.dtype, torch.float32),
            device=parameter.device,
        )
        layer.add_module(attribute, adapters)
        if model.tensor is not None:
            _share_out(
                adapters, model.tensor, parameters_of(model)[parameter], name, (way, held), getattr(layer, "shared_rows", 0)
            )
    for name, (owner, attribute) in stacked.items():
        (source,) = way.names(name)
        if module_of(source) in chosen:
            _adapt_experts(model, name, owner, attribute, source, settings)
    vars(model)[_ATTACHED] = settings


def _adapt_experts(
    model: Decoder, name: str, owner: StackedExperts | LayerNormMoE, attribute: str, source: str, settings: Adapted
) -> None:
    """Add adapters to a stacked parameter of experts, or to a router's matrix. source: Hugging Face's name of it."""
    parameter, options = model.get_parameter(name), settings.of(module_of(source))
    how: dict[str, Any] = {"dtype": torch.promote_types(parameter.dtype, torch.float32), "device": parameter.device}
    sizes = parameter.shape[1], parameter.shape[0], options.rank, options.scale
    adapters: StackedAdapters | RouterAdapters
    if isinstance(owner, StackedExperts):
        adapters = StackedAdapters(leaf_of(source), owner.count, *sizes, **how)
    else:
        adapters = RouterAdapters(leaf_of(source), *sizes, **how)
    owner.add_module(attribute, adapters)
    block = parameters_of(model)[parameter]
    if model.tensor is None or block is None:
        return
    adapters.tensor = model.tensor
    sliced = isinstance(adapters, StackedAdapters)  # experts that are whole have no block
    if isinstance(adapters, StackedAdapters):
        adapters.by_columns = not block.local.has_whole_rows
    rank = indices((0, options.rank))
    of_a = indices((0, adapters.adapter.lora_A.shape[0]))
    whole_rows, whole_columns = (indices((0, size)) for size in block.shape)
    for matrix, shape, parts in (
        ("lora_A", (len(of_a), block.shape[1]), [(of_a, part.indices[1] if sliced else whole_columns) for part in block.parts]),
        ("lora_B", (block.shape[0], options.rank), [(part.indices[0] if sliced else whole_rows, rank) for part in block.parts]),
    ):
        declare(adapters.adapter, matrix, share_out(shape, parts, model.tensor._group, model.tensor.rank))


def _share_out(
    adapters: Adapters, tensor: TensorGroup, block: Block | None, name: str, ways: tuple[Conversion, Conversion], shared: int
) -> None:
    """Declare this rank's part of each adapter of a tensor-parallel parameter.

    block: the parameter's, with this name. ways: conversions of the whole decoder, and of one of a rank's parts. shared: the
    last rows of the parameter, if other ranks hold them too.
    """
    assert block is not None
    adapters.tensor, adapters.by_columns = tensor, not block.local.has_whole_rows
    way, held = ways
    leaves = list(adapters.rows)
    rows = [_rows_of_sources(way, held, name, block.shape[0], part) for part in block.parts]
    if shared:  # keys and values, or the matrix that ends with them
        several = len(leaves) > 1
        adapters.shared_rows = dict.fromkeys(leaves[1:] if several else leaves, shared // 2 if several else shared)
    for number, leaf in enumerate(leaves):
        adapter = adapters._modules.get(leaf)
        if not isinstance(adapter, Adapter):
            continue
        rank, height = adapter.lora_A.shape[0], _sizes(way, name, block.shape[0])[number]
        whole = indices((0, rank))
        for matrix, shape, parts in (
            ("lora_A", (rank, block.shape[1]), [(whole, part.indices[1]) for part in block.parts]),
            ("lora_B", (height, rank), [(each[number], whole) for each in rows]),
        ):
            declare(adapter, matrix, share_out(shape, parts, tensor._group, tensor.rank))


def _numbers(rows: int) -> Tensor:
    return torch.arange(rows, device="cpu").view(-1, 1)


def _rows_of_sources(way: Conversion, held: Conversion, name: str, height: int, part: Part) -> list[Indices]:
    """Rows of each source matrix in this rank's part of a parameter, in the order of its adapters."""
    own = torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in part.indices[0].ranges]).view(-1, 1)
    rows_of_sources = []
    for whole, mine in zip(way.split(name, _numbers(height)).values(), held.split(name, own).values(), strict=True):
        places = own.new_full((height,), -1)
        places[whole.flatten()] = torch.arange(len(whole), device="cpu")
        rows = places[mine.flatten()]
        first = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        rows_of_sources.append(indices(*((int(rows[a]), int(rows[b - 1]) + 1) for a, b in itertools.pairwise(first))))
    return rows_of_sources


def _check_rank(model: Decoder, way: Conversion, places: Iterable[str], adapters: Adapted) -> None:
    """Raise an InputError for a rank above the smallest dimension of all adapted matrices.

    Routers, which have few rows, get the same rank as the others, as in PEFT.
    """
    least: tuple[int, str, list[int]] | None = None
    blocks, rank, chosen = parameters_of(model), adapters.options.rank, set(adapters.targets)
    for name in places:
        rows, columns = shape_of(model.get_parameter(name), blocks)
        for source, size in zip(map(module_of, way.names(name)), _sizes(way, name, rows), strict=True):
            most = min(size, columns) * rank // adapters.of(source).rank  # fused gate and up have twice the rank
            if source in chosen and not is_router(source) and (least is None or most < least[0]):
                least = most, source, [size, columns]
    if least is not None and rank > least[0]:
        raise InputError(
            f"lora.rank = {rank}, but {least[1]} is {least[2]}, where a rank above {least[0]} adds nothing: set lora.rank = "
            f"{least[0]} or less."
        )


def _places(model: Decoder, way: Conversion) -> dict[str, tuple[nn.Module, str]]:
    """Name of each parameter that can have adapters → its layer, and the name of its adapters there."""
    owners: dict[Tensor, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if isinstance(module, LayerNormMLP):
            if model.spec.experts:  # PEFT takes the names of a dense layer's matrices for those of experts
                continue
            owners |= {module.fc1_weight: (module, "lora_fc1"), module.fc2_weight: (module, "lora_fc2")}
        elif isinstance(module, LayerNormLinear) or type(module) is Linear:
            owners[module.weight] = (module, "lora")
    return {name: owners[parameter] for name, parameter in model.named_parameters() if parameter in owners}


def _places_of_experts(model: Decoder) -> dict[str, tuple[StackedExperts | LayerNormMoE, str]]:
    """As `_places`, for stacked parameters and routers, which PEFT adapts as parameters."""
    owners: dict[Tensor, tuple[StackedExperts | LayerNormMoE, str]] = {}
    for module in model.modules():
        if isinstance(module, LayerNormMoE):
            owners[module.router_weight] = (module, "lora_router")
        elif isinstance(module, StackedExperts):
            owners |= {module.fc1_weight: (module, "lora_fc1"), module.fc2_weight: (module, "lora_fc2")}
    return {name: owners[parameter] for name, parameter in model.named_parameters() if parameter in owners}


def _sizes(way: Conversion, name: str, rows: int) -> list[int]:
    """Rows of each source matrix of a parameter."""
    shape = torch.empty(rows, 1, device="meta")
    return [part.shape[-2] for part in way.split(name, shape).values()]


def module_of(weight: str) -> str:
    """The module of a parameter, by Hugging Face's names; for a stacked parameter its own name."""
    return weight.removesuffix(".weight").removesuffix(".bias")


def _matches(module: str, pattern: str) -> bool:
    """True if a pattern matches a module's name, or the end of it after a dot."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")


def _chosen(
    model: Decoder, way: Conversion, places: Iterable[str], stacked: Iterable[str], options: LoRA
) -> tuple[dict[str, None], bool]:
    """The modules with adapters, in the model's order, by Hugging Face's names; and whether gate and up have twice the rank.

    In a model with experts "all-linear" has PEFT's meaning: attention, router, and experts by the names of their matrices.
    """
    named = {name: list(map(module_of, way.names(name))) for name in [*places, *stacked]}
    possible = [module for name, _ in model.named_parameters() for module in named.get(name, ())]
    matrices = {module for name in stacked for module in named[name] if is_of_experts(module)}
    if options.targets == ALL_LINEAR:
        _check_dropout(options, matrices)
        return dict.fromkeys(possible), bool(matrices)
    others = dict.fromkeys(module_of(source) for name, _ in model.named_parameters() for source in way.names(name))
    modules: set[str] = set()
    halves: dict[str, set[bool]] = {}
    whole: set[str] = set()
    for pattern in options.targets:
        hits = [module for module in possible if _matches(module, pattern)]
        whole |= matrices.intersection(hits)
        for module in matrices:
            if (half := _half_of(module, pattern)) is not None:
                hits.append(module)
                halves.setdefault(module, set()).update(half)
        if not hits:
            raise _matches_nothing(pattern, possible, others)
        modules |= set(hits)
    fused = {module for module, named_halves in halves.items() if module not in whole and named_halves}
    _check_experts(modules, fused, halves, matrices)
    _check_dropout(options, [module for module in modules if module in matrices or is_router(module)])
    return {module: None for module in possible if module in modules}, bool(fused)


def _matches_nothing(pattern: str, possible: Sequence[str], others: Iterable[str]) -> InputError:
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in possible))
    if other := [module for module in others if _matches(module, pattern)]:
        dense = "mlp." in other[0]
        return InputError(
            f"lora.targets: {pattern!r} matches {other[0]}, which takes no adapter: {some(leaves, 8)} do. "
            + (
                "In a model with experts PEFT would read the adapter of a dense layer as one of experts."
                if dense
                else "A module outside of the blocks can be trained whole: lora.save_whole."
            )
        )
    guess = nearest(pattern.replace("*", ""), [*leaves, *possible])
    hint = f" The nearest is {guess!r}." if guess else ""
    return InputError(f"lora.targets: {pattern!r} matches no matrix.{hint} Matrices are {some(leaves, 8)}.")


def _half_of(module: str, pattern: str) -> set[bool] | None:
    """The halves of a stack of experts that a pattern of expert matrices' names matches; None for no match.

    For gate and up: {False} for the gate, {True} for up, or both. For down, which has no halves: an empty set.
    """
    container, _, leaf = module.rpartition(".")

    def matched(names: Sequence[str]) -> bool:
        return any(_matches(f"{container}.{name}", pattern) for name in names)

    if leaf == "gate_up_proj":
        halves = {number == 1 for number, names in enumerate((GATES, UPS)) if matched(names)}
        return halves or None
    return set() if matched(DOWNS) else None


def _check_experts(modules: set[str], fused: set[str], halves: Mapping[str, set[bool]], matrices: set[str]) -> None:
    """Refuse adapters of experts that PEFT does not support: of the gate alone, of one matrix of two, of different ranks."""
    for module in sorted(fused):
        if len(halves[module]) == 1:
            missing = GATES if True in halves[module] else UPS
            raise InputError(
                f"lora.targets: gate and up of experts are one matrix ({module}), and the targets name one of the two: add "
                f"{' or '.join(map(repr, missing))}."
            )
    for module in sorted(matrices & modules):
        container, _, leaf = module.rpartition(".")
        other = f"{container}.{'down_proj' if leaf == 'gate_up_proj' else 'gate_up_proj'}"
        if other not in modules:
            raise InputError(
                f"lora.targets: both matrices of experts have adapters, or none: {module} is named, but not {other}. Add "
                f"{other.rpartition('.')[2]!r}."
            )
    if fused and (plain := sorted(one for one in matrices & modules if one.endswith("gate_up_proj") and one not in fused)):
        raise InputError(
            f"lora.targets: {min(fused)} has twice the rank, since gate and up are named, and {plain[0]} has not. Use "
            "'gate_up_proj' or 'gate_proj' and 'up_proj' for all layers."
        )


def _check_dropout(options: LoRA, adapted: Iterable[str]) -> None:
    """Refuse dropout for adapted parameters, which PEFT does not support."""
    if options.dropout and (one := next(iter(sorted(adapted)), None)) is not None:
        raise InputError(
            f"lora.dropout = {options.dropout}: PEFT has no dropout with adapters of experts and routers, such as {one}. Set "
            'lora.dropout = 0, or lora.targets to matrices of the attention, such as ["q_proj", "k_proj", "v_proj", "o_proj"].'
        )


def _whole(model: Decoder, way: Conversion, patterns: Sequence[str]) -> dict[str, None]:
    """The modules that are trained whole, by Hugging Face's names."""
    inside = {name for name, _ in model.named_parameters() if name.startswith("layers.")}
    possible = dict.fromkeys(module_of(way.names(name)[0]) for name, _ in model.named_parameters() if name not in inside)
    ends = [module_of(way.names(name)[0]) for name in ("embedding.weight", "head.weight")] if model.spec.tied else []
    possible |= dict.fromkeys(ends)
    modules: dict[str, None] = {}
    for pattern in patterns:
        hits = [module for module in possible if _matches(module, pattern)]
        if not hits:
            guess = nearest(pattern.replace("*", ""), [each for one in possible for each in (one.rpartition(".")[2], one)])
            hint = f" The nearest is {guess!r}." if guess else ""
            raise InputError(f"lora.save_whole: {pattern!r} matches none of {some(list(possible), 8)}.{hint}")
        modules |= dict.fromkeys(hits)
    if tied := [one for one in modules if one in ends]:
        raise InputError(
            f"lora.save_whole: {' and '.join(ends)} are one matrix (tie_word_embeddings), and a folder of adapters would hold "
            f"one of both. Leave {tied[0]} out, or untie them in the model's config.json."
        )
    return modules


def settle(model: nn.Module) -> None:
    """Record the fingerprint of the frozen weights once they have values. Collective."""
    adapters = adapted(model)
    assert adapters is not None
    vars(model)[_ATTACHED] = dataclasses.replace(adapters, base=fingerprint(model))
