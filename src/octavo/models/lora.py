"""LoRA on Octavo's decoder: adapters beside its frozen matrices, and PEFT's folders of them, in both directions.

Each of Hugging Face's matrices has an A and a B of its own, also where Octavo holds several as one parameter. A folder has
PEFT's names and layout, bit for bit: `adapter_config.json` and `adapter_model.safetensors`. Checkpoints hold what is trained
and name the frozen weights by a fingerprint of their values.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.collectives.blocks import Block, Indices, Part, declare, indices, parameters_of, shape_of, share_out, with_block
from octavo.collectives.tensor import TensorGroup
from octavo.collectives.whole import whole_tensor
from octavo.config.lora import ALL_LINEAR, LoRA
from octavo.errors import InputError, nearest, some
from octavo.models.convert import Conversion, conversion
from octavo.models.decoder import Decoder
from octavo.models.families import PEFT_PREFIX, Join, adapter_module, leaf_of
from octavo.models.tensor_parallel import part_of_rank
from octavo.nn.expert_lora import RouterAdapters, StackedAdapters
from octavo.nn.experts import StackedExperts
from octavo.nn.linear import LayerNormLinear, Linear, NormedLayer
from octavo.nn.lora import Adapter, Adapters, is_adapter
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import LayerNormMoE
from octavo.nn.plain_names import stored_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of PEFT's folder."""
_ATTACHED, _NOTED = "octavo_lora", "octavo_lora_base"
_FUSED = r".*\.gate_up_proj"
"""PEFT's pattern of the matrices that stand for two, whose rank and alpha are doubled."""
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
"""Names of each expert's matrices, as PEFT takes them: those of gate and up are one of twice the rank."""
_CHUNK = 1 << 22
_MIX, _GOLDEN = -0x40A7B892E31B1A47, -0x61C8864680B583EB  # odd, as signed 64-bit integers
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "layers_to_transform": (None,),
    "layers_pattern": (None,),
    "exclude_modules": (None, []),
    "megatron_config": (None,),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
}
"""Keys of PEFT's config that change what adapters compute → the values under which they do not."""


@dataclass(frozen=True)
class Adapted:
    """What a model with adapters trains.

    Attributes:
        options: those that the model was built with.
        targets: Hugging Face's names of the modules with adapters.
        whole: those of the modules that are trained whole.
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
        return _doubled(self.options) if self.fused and matrix.endswith(".experts.gate_up_proj") else self.options

    @property
    def record(self) -> dict[str, Any]:
        """For the state of a checkpoint."""
        return {
            "base": self.base,
            "rank": self.options.rank,
            "scale": self.options.scale,
            "stored": self.options.base,
            "targets": list(self.targets),
            "save_whole": list(self.whole),
            **({"experts": "twice the rank of gate and up"} if self.fused else {}),
        }


def _doubled(options: LoRA) -> LoRA:
    return dataclasses.replace(options, rank=2 * options.rank, alpha=2 * options.scale_factor)


def adapted(model: nn.Module) -> Adapted | None:
    """What a model with Octavo's adapters trains; None for one without."""
    return vars(model).get(_ATTACHED)


def adapt(model: Decoder, options: LoRA) -> None:
    """Put adapters beside the matrices of a decoder on the meta device, and freeze all else but the modules to save whole.

    Raises:
        InputError: a pattern matches nothing, or a matrix that takes no adapter; the rank is larger than a matrix.
    """
    way = conversion(model.spec)
    held = way if model.tensor is None else conversion(part_of_rank(model.spec, model.tensor.size))  # by this rank
    places = _places(model, way)
    stacked = _places_of_experts(model)
    chosen, fused = _chosen(model, way, places, stacked, options)
    whole = _whole(model, way, options.save_whole)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if _module(way.names(name)[0]) in whole:
            parameter.requires_grad_(True)
    found = Adapted(options, tuple(chosen), tuple(whole), fused=fused)
    _check_rank(model, way, [*places, *stacked], found)
    for name, (layer, attribute) in places.items():
        sources = [_module(source) for source in way.names(name)]
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
            # As PEFT's, float32 beside weights of 16 bits: an update of B is smaller than bfloat16's steps.
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
        if _module(source) in chosen:
            _adapt_experts(model, name, owner, attribute, source, found)
    vars(model)[_ATTACHED] = found


def _adapt_experts(
    model: Decoder, name: str, owner: StackedExperts | LayerNormMoE, attribute: str, source: str, found: Adapted
) -> None:
    """Put adapters beside a stacked parameter of experts, or beside a router's. source: Hugging Face's name of it."""
    parameter, options = model.get_parameter(name), found.of(_module(source))
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
        adapters.by_columns = not block.own.has_whole_rows
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
    """Declare this rank's part of each adapter of a parameter of which tensor ranks hold parts.

    block: of the parameter, with this name. ways: of the whole decoder, and of one of a rank's parts. shared: rows of the
    parameter, the last, that other ranks hold too.
    """
    assert block is not None
    adapters.tensor, adapters.by_columns = tensor, not block.own.has_whole_rows
    way, held = ways
    leaves = list(adapters.rows)
    rows = [_rows_of_sources(way, held, name, block.shape[0], part) for part in block.parts]
    if shared:  # of keys and values, or of the matrix that ends with them
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
    return torch.arange(rows).view(-1, 1)


def _rows_of_sources(way: Conversion, held: Conversion, name: str, height: int, part: Part) -> list[Indices]:
    """Rows of each of the source's matrices that a rank with this part of a parameter holds, in the order of its adapters."""
    own = torch.cat([torch.arange(run.start, run.stop) for run in part.indices[0].ranges]).view(-1, 1)
    found = []
    for whole, mine in zip(way.split(name, _numbers(height)).values(), held.split(name, own).values(), strict=True):
        places = torch.full((height,), -1)
        places[whole.flatten()] = torch.arange(len(whole))
        rows = places[mine.flatten()]
        first = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
        found.append(indices(*((int(rows[a]), int(rows[b - 1]) + 1) for a, b in itertools.pairwise(first))))
    return found


def _check_rank(model: Decoder, way: Conversion, places: Iterable[str], found: Adapted) -> None:
    """Raise an InputError for a rank above the smaller dimension of a matrix, by the smallest of all.

    A router, with few rows, has the rank of all others, as PEFT's.
    """
    least: tuple[int, str, list[int]] | None = None
    blocks, rank, chosen = parameters_of(model), found.options.rank, set(found.targets)
    for name in places:
        rows, columns = shape_of(model.get_parameter(name), blocks)
        for source, size in zip(map(_module, way.names(name)), _sizes(way, name, rows), strict=True):
            most = min(size, columns) * rank // found.of(source).rank  # of which gate and up have twice as much
            if source in chosen and not _is_router(source) and (least is None or most < least[0]):
                least = most, source, [size, columns]
    if least is not None and rank > least[0]:
        raise InputError(
            f"lora.rank = {rank}, but {least[1]} is {least[2]}, where a rank above {least[0]} adds nothing: set lora.rank = "
            f"{least[0]} or less."
        )


def _places(model: Decoder, way: Conversion) -> dict[str, tuple[nn.Module, str]]:
    """Name of each parameter that can have adapters → the layer that computes with it, and the name of its adapters there."""
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
    """As `_places`, of stacked parameters and routers, which PEFT adapts as parameters."""
    owners: dict[Tensor, tuple[StackedExperts | LayerNormMoE, str]] = {}
    for module in model.modules():
        if isinstance(module, LayerNormMoE):
            owners[module.router_weight] = (module, "lora_router")
        elif isinstance(module, StackedExperts):
            owners |= {module.fc1_weight: (module, "lora_fc1"), module.fc2_weight: (module, "lora_fc2")}
    return {name: owners[parameter] for name, parameter in model.named_parameters() if parameter in owners}


def _sizes(way: Conversion, name: str, rows: int) -> list[int]:
    """Rows of each of the source's matrices of a parameter."""
    shape = torch.empty(rows, 1, device="meta")
    return [part.shape[-2] for part in way.split(name, shape).values()]


def _module(weight: str) -> str:
    """The module of a parameter, by Hugging Face's names; of a stacked one, which has none to itself, the parameter."""
    return weight.removesuffix(".weight").removesuffix(".bias")


def _matches(module: str, pattern: str) -> bool:
    """True if a pattern matches the name of a module, or the end of it behind a dot."""
    return fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*.{pattern}")


def _chosen(
    model: Decoder, way: Conversion, places: Iterable[str], stacked: Iterable[str], options: LoRA
) -> tuple[dict[str, None], bool]:
    """The modules with adapters, in the model's order, by Hugging Face's names; and whether gate and up have twice the rank.

    "all-linear" is in a model with experts what PEFT makes of it: attention, router, and experts by the names of each.
    """
    named = {name: list(map(_module, way.names(name))) for name in [*places, *stacked]}
    possible = [module for name, _ in model.named_parameters() for module in named.get(name, ())]
    matrices = {module for name in stacked for module in named[name] if _of_experts(module)}
    if options.targets == ALL_LINEAR:
        _check_dropout(options, matrices)
        return dict.fromkeys(possible), bool(matrices)
    others = dict.fromkeys(_module(source) for name, _ in model.named_parameters() for source in way.names(name))
    found: set[str] = set()
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
        found |= set(hits)
    fused = {module for module, named_halves in halves.items() if module not in whole and named_halves}
    _check_experts(found, fused, halves, matrices)
    _check_dropout(options, [module for module in found if module in matrices or _is_router(module)])
    return {module: None for module in possible if module in found}, bool(fused)


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


def _of_experts(module: str) -> bool:
    return ".experts." in module


def _is_router(module: str) -> bool:
    return module.endswith(".mlp.gate")


def _half_of(module: str, pattern: str) -> set[bool] | None:
    """What a pattern of the name of each expert's matrices matches of a stack of them; None for nothing.

    Of gate and up {False} for the gate, {True} for the other or both; empty for down, which stands for itself.
    """
    container, _, leaf = module.rpartition(".")

    def matched(names: Sequence[str]) -> bool:
        return any(_matches(f"{container}.{name}", pattern) for name in names)

    if leaf == "gate_up_proj":
        halves = {number == 1 for number, names in enumerate((_GATES, _UPS)) if matched(names)}
        return halves or None
    return set() if matched(_DOWNS) else None


def _check_experts(found: set[str], fused: set[str], halves: Mapping[str, set[bool]], matrices: set[str]) -> None:
    """Refuse adapters of experts that PEFT has not: of a gate alone, of one matrix of two, of several ranks."""
    for module in sorted(fused):
        if len(halves[module]) == 1:
            missing = _GATES if True in halves[module] else _UPS
            raise InputError(
                f"lora.targets: gate and up of experts are one matrix ({module}), and the targets name one of both: add "
                f"{' or '.join(map(repr, missing))}."
            )
    for module in sorted(matrices & found):
        container, _, leaf = module.rpartition(".")
        other = f"{container}.{'down_proj' if leaf == 'gate_up_proj' else 'gate_up_proj'}"
        if other not in found:
            raise InputError(
                f"lora.targets: both matrices of experts have adapters, or none: {module} is named, and {other} is not. Add "
                f"{other.rpartition('.')[2]!r}."
            )
    if fused and (plain := sorted(one for one in matrices & found if one.endswith("gate_up_proj") and one not in fused)):
        raise InputError(
            f"lora.targets: {min(fused)} has twice the rank, by the names of gate and up, and {plain[0]} has not. Give "
            "'gate_up_proj' or 'gate_proj' and 'up_proj' for all layers."
        )


def _check_dropout(options: LoRA, adapted: Iterable[str]) -> None:
    """Refuse dropout beside parameters, of which PEFT has none."""
    if options.dropout and (one := next(iter(sorted(adapted)), None)) is not None:
        raise InputError(
            f"lora.dropout = {options.dropout}: PEFT has no dropout with adapters of experts and routers, such as {one}. Set "
            'lora.dropout = 0, or lora.targets to matrices of the attention, such as ["q_proj", "k_proj", "v_proj", "o_proj"].'
        )


def _whole(model: Decoder, way: Conversion, patterns: Sequence[str]) -> dict[str, None]:
    """The modules that are trained whole, by Hugging Face's names."""
    inside = {name for name, _ in model.named_parameters() if name.startswith("layers.")}
    possible = dict.fromkeys(_module(way.names(name)[0]) for name, _ in model.named_parameters() if name not in inside)
    ends = [_module(way.names(name)[0]) for name in ("embedding.weight", "head.weight")] if model.spec.tied else []
    possible |= dict.fromkeys(ends)
    found: dict[str, None] = {}
    for pattern in patterns:
        hits = [module for module in possible if _matches(module, pattern)]
        if not hits:
            guess = nearest(pattern.replace("*", ""), [each for one in possible for each in (one.rpartition(".")[2], one)])
            hint = f" The nearest is {guess!r}." if guess else ""
            raise InputError(f"lora.save_whole: {pattern!r} matches none of {some(list(possible), 8)}.{hint}")
        found |= dict.fromkeys(hits)
    if tied := [one for one in found if one in ends]:
        raise InputError(
            f"lora.save_whole: {' and '.join(ends)} are one matrix (tie_word_embeddings), and a folder of adapters would hold "
            f"one of both. Leave {tied[0]} out, or untie them in the model's config.json."
        )
    return found


# Values ---------------------------------------------------------------------------------------------------------------------


Pieces = Iterable[tuple[Tensor, Callable[[int, int], Tensor]]]
"""Tensors, each with the numbers of its flattened elements, from a start to a stop, in the flattened whole."""


def fingerprint(model: nn.Module) -> str:
    """A hash of the frozen parameters of a model, the same however they are sharded: names, shapes, dtypes and values.

    Collective. One parameter at a time is whole on each rank. Of a weight that is stored in FP8 it is of the values before.
    """
    stored, noted, blocks = stored_names(model), vars(model).get(_NOTED, {}), parameters_of(model)
    lines = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            own = stored.get(name, name)
            lines[own] = noted[own] if own in noted else _line(own, whole_tensor(with_block(parameter, blocks[parameter])))
    return _hash(lines)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """`fingerprint` of frozen parameters by their stored names, whose values `read` gives one by one."""
    return _hash({name: _line(name, read(name)) for name in names})


def noting(model: nn.Module) -> Callable[[str, tuple[int, ...], Pieces, Callable[[Tensor], None]], None]:
    """A function that takes note of a frozen parameter before its cast to FP8, for the model's fingerprint.

    It takes the stored name, the shape of the whole, this rank's pieces, and a function that adds up a tensor of all ranks.
    """
    noted = vars(model).setdefault(_NOTED, {})

    def note(name: str, shape: tuple[int, ...], pieces: Pieces, add_up: Callable[[Tensor], None]) -> None:
        total = dtype = None
        for piece, numbers in pieces:
            total, dtype = _sum(piece, numbers) + (0 if total is None else total), piece.dtype
        assert total is not None
        add_up(total)
        noted[name] = _text(name, shape, dtype, total)

    return note


def _hash(lines: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def _line(name: str, whole: Tensor) -> str:
    whole = whole.detach()
    return _text(name, tuple(whole.shape), whole.dtype, _sum(whole, functools.partial(torch.arange, device=whole.device)))


def _text(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, total: Tensor) -> str:
    return f"{name} {shape} {dtype} {int(total) % (1 << 64)}"


def _sum(tensor: Tensor, numbers: Callable[[int, int], Tensor]) -> Tensor:
    """A sum of the mixed bits of each element and its number, int64 of which 64 bits count."""
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
        mixed = (bits.to(torch.int64) + numbers(start, start + part.numel()) * _GOLDEN) * _MIX
        mixed = (mixed ^ (mixed >> 31)) * _GOLDEN
        total += (mixed ^ (mixed >> 29)).sum()
    return total


def settle(model: nn.Module) -> None:
    """Note the fingerprint of the frozen weights, which have their values now. Collective."""
    found = adapted(model)
    assert found is not None
    vars(model)[_ATTACHED] = dataclasses.replace(found, base=fingerprint(model))


# PEFT's folder --------------------------------------------------------------------------------------------------------------


def config_of(found: Adapted, way: Conversion, names: Iterable[str], source: str | None) -> dict[str, Any]:
    """`adapter_config.json`; names: of all the model's parameters, by Octavo. source: where the base is from."""
    modules = {_module(theirs) for name in names if not is_adapter(name) for theirs in way.names(name)}
    options = found.options
    stacked = [one for one in found.targets if _of_experts(one) or _is_router(one)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "r": options.rank,
        "lora_alpha": options.scale_factor,
        "lora_dropout": options.dropout,
        "use_rslora": options.rslora,
        "target_modules": _shortened([one for one in found.targets if one not in stacked], modules),
        **(_of_parameters(found, stacked, modules) if stacked else {}),
        "modules_to_save": list(found.whole) or None,
    }


def _of_parameters(found: Adapted, stacked: Sequence[str], modules: Iterable[str]) -> dict[str, Any]:
    """The keys of `adapter_config.json` of adapted parameters, which PEFT names by the end of their names too."""
    others = set(modules) - set(stacked)
    short: dict[str, None] = {}
    for one in stacked:
        end = one[one.index(".mlp.") + 1 :]
        name = one if any(other.endswith(f".{end}") for other in others) else end
        short[name if _of_experts(one) else f"{name}.weight"] = None
    doubled = _doubled(found.options)
    patterns = {"rank_pattern": {_FUSED: doubled.rank}, "alpha_pattern": {_FUSED: doubled.scale_factor}} if found.fused else {}
    return {"target_parameters": list(short), **patterns}


def _shortened(targets: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The targets as PEFT matches them: by the end of their names where that names no other module."""
    others = set(modules) - set(targets)
    short: dict[str, None] = {}
    for target in targets:
        leaf = target.rpartition(".")[2]
        unique = not any(other == leaf or other.endswith(f".{leaf}") for other in others)
        short[leaf if unique else target] = None
    return list(short)


def peft_tensors(tensors: Mapping[str, Tensor], way: Conversion) -> dict[str, Tensor]:
    """Trained tensors under Octavo's names → under those of PEFT's file."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for theirs, part in way.split(name, tensor).items():
            found[theirs if is_adapter(name) else PEFT_PREFIX + theirs] = part.detach().cpu().contiguous()
    return found


def write_folder(
    tensors: Mapping[str, Tensor], found: Adapted, way: Conversion, names: Iterable[str], folder: Path, source: str | None
) -> None:
    """Write PEFT's two files into a folder that exists.

    tensors: whole ones of what is trained, by Octavo's names. names, source: as in `config_of`.
    """
    save_file(peft_tensors(tensors, way), folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config_of(found, way, names, source), indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def from_folder(folder: str | Path) -> LoRA:
    """The options of a folder of PEFT's, which `octavo.transform(model, lora=…)` loads.

    Raises:
        InputError: it is none, or its adapters compute something that Octavo's do not.
    """
    path = Path(folder)
    config = _read_config(path)
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        with _opened(path) as file:
            targets = sorted({_module_of_peft(key) for key in file.keys() if _is_lora(key)})  # noqa: SIM118
        if config.get("target_parameters"):
            targets = [one for one in targets if not (_of_experts(f"{one}.") or _is_router(one))]
    if parameters := _parameters_of(path, config):
        targets = [*(targets or ()), *parameters]
    return LoRA(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        dropout=config.get("lora_dropout", 0.0),
        targets=targets if targets == ALL_LINEAR else tuple(targets or ()),
        rslora=config.get("use_rslora", False),
        save_whole=tuple(config.get("modules_to_save") or ()),
        load=str(path),
    )


def _parameters_of(path: Path, config: Mapping[str, Any]) -> list[str]:
    """The targets of a folder's adapted parameters, and its patterns of ranks, as Octavo names them.

    Raises:
        InputError: other parameters than those of experts and routers, or other ranks and alphas than PEFT's of gate and up.
    """
    parameters = list(config.get("target_parameters") or ())
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    fused = bool(ranks or alphas)
    if fused and (ranks, alphas) != ({_FUSED: 2 * config["r"]}, {_FUSED: 2 * config["lora_alpha"]}):
        key = "rank_pattern" if ranks else "alpha_pattern"
        raise InputError(
            f"{path / CONFIG}: {key} = {config[key]!r} is not supported: adapters have one rank, and those of gate and "
            "up of experts twice as much where PEFT has. Keep the model's own code: "
            "octavo.transform(PeftModel.from_pretrained(model, folder))."
        )
    found: list[str] = []
    for one in sorted(parameters):
        container, _, leaf = one.removesuffix(".weight").rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj", "gate"):
            raise InputError(
                f"{path / CONFIG}: target_parameters = {parameters!r}: {one!r} is no matrix of experts or router. Keep the "
                "model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
        container = container or ("mlp" if leaf == "gate" else "experts")
        halves = (_GATES[0], _UPS[0]) if fused and leaf == "gate_up_proj" else (leaf,)
        found += [f"{container}.{half}" for half in halves]
    return found


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"lora.load = {str(path)!r} is no folder of PEFT's adapters: {CONFIG} cannot be read ({error}). Give the folder "
            "that model.save_pretrained or octavo export has written."
        ) from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or "r" not in config or "lora_alpha" not in config:
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(f"{file}: peft_type = {kind!r}: Octavo loads LoRA alone.")
    for key, neutral in _NEUTRAL.items():
        if key in config and config[key] not in neutral:
            raise InputError(
                f"{file}: {key} = {config[key]!r} is not supported: Octavo's adapters have {key} = {neutral[0]!r}. Keep the "
                "model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        raise InputError(
            f"{file}: init_lora_weights = {config['init_lora_weights']!r} changes the base weights. Save the adapters for the "
            "original weights: model.save_pretrained(folder, path_initial_model_for_weight_conversion=…)."
        )
    return config


def _opened(path: Path) -> Any:
    file = path / WEIGHTS
    if not file.is_file():
        other = path / "adapter_model.bin"
        way = f": convert {other.name} by PeftModel.from_pretrained(…).save_pretrained(…)" if other.is_file() else ""
        raise InputError(f"lora.load: {file} does not exist{way or '. Copy the whole folder again'}.")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"lora.load: {file} cannot be read: {error}. Copy it again.") from None


def _is_lora(key: str) -> bool:
    return key.endswith((".lora_A.weight", ".lora_B.weight"))


def _module_of_peft(key: str) -> str:
    return key.removeprefix(PEFT_PREFIX).rsplit(".", 2)[0]


def check_folder(model: Decoder, options: LoRA) -> None:
    """Compare a folder of PEFT's with the adapters of a model, also on meta; reads no weight.

    Raises:
        InputError: other settings than the options', other names, or other shapes: adapters of another base.
    """
    assert options.load is not None
    path = Path(options.load)
    theirs = from_folder(path)
    for key in ("rank", "scale"):
        if getattr(theirs, key) != getattr(options, key):
            raise InputError(
                f"lora.{'alpha' if key == 'scale' else key}: the adapters in {path} were trained with rank {theirs.rank}, "
                f"alpha {theirs.scale_factor:g}, rslora {theirs.rslora}. Set {_settings_of(theirs)}."
            )
    with _opened(path) as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    way = conversion(model.spec)
    own = {key: tuple(part.shape) for key, part in peft_shapes(model, way).items()}
    differing = [(key, stored[key], own[key]) for key in own if key in stored and stored[key] != own[key]]
    if differing:
        shown = "; ".join(f"{key} is {list(a)} there and {list(b)} here" for key, a, b in differing[:3])
        raise InputError(
            f"lora.load: the adapters in {path} are of another base: {shown}. Give the model that they were trained on "
            f"({_read_config(path).get('base_model_name_or_path')})."
        )
    absent, more = ([one for one in a if one not in b] for a, b in ((own, stored), (stored, own)))
    if absent or more:
        parts = [f"it lacks {some(absent, 3)}"] if absent else []
        parts += [f"it has {some(more, 3)} too"] if more else []
        if whole := [one for one in more if ".layers." in one and ".lora_" not in one]:
            raise InputError(
                f"lora.load: {path} has {some(whole, 3)}, trained whole (modules_to_save); Octavo trains only modules outside "
                "of blocks whole. Keep the model's own code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
        raise InputError(
            f"lora.load: the adapters in {path} are of other matrices: {', and '.join(parts)}. Set "
            f"{_settings_of(theirs)}, or give the model that they were trained on."
        )


def _settings_of(options: LoRA) -> str:
    """All that a run file needs to say of a folder's adapters, so that one message has it."""
    values: dict[str, object] = {"rank": options.rank, "alpha": options.scale_factor, "rslora": options.rslora}
    values |= {"targets": options.targets} if len(options.targets) <= 16 else {}  # more are those of a regular expression
    values |= {"save_whole": options.save_whole} if options.save_whole else {}
    more = "" if "targets" in values else ", and lora.targets to patterns of the target_modules in its adapter_config.json"
    return ", ".join(f"lora.{key} = {json.dumps(value)}" for key, value in values.items()) + more


def other_base(model: Decoder, folder: str | Path) -> str:
    """A sentence if a folder of PEFT's names another base than the model's folder or id; their shapes may be the same."""
    here, there = (
        str(getattr(model.config, "_name_or_path", "") or ""),
        _read_config(Path(folder)).get("base_model_name_or_path"),
    )
    if not here or not there or Path(here).name.lower() == Path(there).name.lower():
        return ""
    return (
        f"lora.load: the adapters in {folder} were trained on {there!r}, and the model is {here!r}. Their shapes are the same; "
        "with other weights the loss begins higher than it ended."
    )


def peft_shapes(model: nn.Module, way: Conversion) -> dict[str, Tensor]:
    """The trained tensors of a model under PEFT's names, on the meta device."""
    blocks = parameters_of(model)
    shapes = {name: shape_of(p, blocks) for name, p in model.named_parameters() if p.requires_grad}
    trained = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {
        theirs if is_adapter(name) else PEFT_PREFIX + theirs: part
        for name, tensor in trained.items()
        for theirs, part in way.split(name, tensor).items()
    }


def reader(model: Decoder, folder: str | Path) -> dict[str, Callable[[Tensor, int], None]]:
    """Trained parameter → a function that fills rows of it, from a first one on, with those of a folder of PEFT's."""
    path, way = Path(folder), conversion(model.spec)

    def reading(name: str, key: str) -> Callable[[Tensor, int], None]:
        def read(out: Tensor, start: int) -> None:
            with _opened(path) as file:
                if way.table.join(name) is Join.EXPERT_B:  # whose rows are columns there
                    whole = way.join(name, (file.get_tensor(key),))
                    out.copy_(whole[start : start + out.shape[0]])
                else:
                    out.copy_(file.get_slice(key)[start : start + out.shape[0]])

        return read

    names: dict[str, Callable[[Tensor, int], None]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (theirs,) = way.names(name)
            names[name] = reading(name, theirs if is_adapter(name) else PEFT_PREFIX + theirs)
    return names


def merged(name: str, weight: Tensor, tensors: Mapping[str, Tensor], way: Conversion, found: Adapted) -> Tensor:
    """A frozen parameter with its adapters: W + scale · B · A in float32, rounded once to the dtype of W.

    name: of the parameter, by its stored name. tensors: the adapters' by PEFT's names.
    """
    parts = way.split(name, weight)
    changed = {}
    for theirs, part in parts.items():
        a, b = (tensors.get(f"{PEFT_PREFIX}{adapter_module(theirs)}.lora_{kind}.weight") for kind in "AB")
        if a is None or b is None:
            changed[theirs] = part
            continue
        a, b = a.float(), b.float()
        if part.dim() == 3:  # of experts
            a, b = a.unflatten(0, (part.shape[0], -1)), b.unflatten(1, (-1, part.shape[0])).permute(2, 0, 1)
        changed[theirs] = (part.float() + found.of(_module(theirs)).scale * (b @ a)).to(part.dtype)
    return way.join(name, tuple(changed.values())) if parts else weight
