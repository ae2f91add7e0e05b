"""FP8 weights of published folders: finds the bytes and scales of each matrix from the folder's config and files.

Two layouts are read: `quant_method = "fp8"`, as DeepSeek and Qwen publish blocks of 128 × 128, and compressed-tensors'
"float-quantized". A weight is E4M3 bytes with float scales that dequantise them by multiplication. An unknown scheme, a key
with unknown meaning, and scales that do not fit their weight are refused: the values would be silently wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from octavo.errors import InputError, some
from octavo.kernels.reference import BLOCK

QUANTIZED_KEYS = ("quantization_config", "compression_config")
"""Config keys with the format of quantised weights."""
DEQUANTISE = (
    'Octavo reads FP8 weights of quant_method "fp8" and of compressed-tensors\' "float-quantized", from a folder whose '
    "config.json says so. Dequantise others with transformers (from_pretrained(folder).dequantize() for bitsandbytes,"
    " quantization_config=FineGrainedFP8Config(dequantize=True) for FP8), save_pretrained to a new folder, and give that; or"
    " give the original model in bf16."
)
Shape = Literal["tensor", "channel", "block"]
"""The weights that share a scale: all, those of an output channel, or those of a block."""
SCALES = ("weight_scale", "weight_scale_inv")
_ACTIVATION_SCALES = ("input_scale", "activation_scale")
_CACHE_SCALE = re.compile(r"\.(k_scale|v_scale|q_scale|kv_scale|prob_output_scale|[kv]_proj\.output_scale)$")
"""Scales of attention's KV cache, not of weights."""
_E4M3_MAX, _LARGEST = 448.0, 4096.0
"""The largest E4M3 value, and an implausible weight: trained ones are below 100."""
_FP8, _E4M3 = "fp8", "F8_E4M3"
_COMPRESSED = "compressed-tensors"
_BYTES_ALONE = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors with one byte a weight."""
_NEUTRAL_KEYS = frozenset(
    (
        *("quant_method", "version", "run_compressed", "dequantize", "use_optimized_inference", "global_compression_ratio"),
        *(
            "is_checkpoint_fp8_serialized",
            "modules_to_convert",
            "activation_scheme",
            "kv_cache_scheme",
            "kv_cache_quant_method",
        ),
    )
)
"""Keys without effect on a weight's value."""
_PRESETS: Mapping[str, Shape] = {"FP8": "tensor", "FP8_DYNAMIC": "channel", "FP8_BLOCK": "block"}
"""Names of compressed-tensors' schemes of FP8 weights."""


@dataclass(frozen=True)
class Group:
    """Matrices with one kind of scales; None takes it from the scales' shape. targets: matched as in compressed-tensors."""

    shape: Shape | None
    block: tuple[int, int] = (BLOCK, BLOCK)
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class Fp8Scheme:
    """The storage of weights according to a folder's config.

    Attributes:
        method: the config's `quant_method`.
        groups: a matrix belongs to the first group with a matching target.
        ignored: modules that are not quantised.
        cache: the config quantises attention's cache.
    """

    method: str
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    cache: bool = False

    def group(self, module: str) -> Group | None:
        """The group of a linear layer, ignoring `ignored`."""
        for target in ("name", "class"):
            for group in self.groups:
                if any(one == "Linear" if target == "class" else _matches(module, one) for one in group.targets):
                    return group
        return None

    def ignores(self, module: str) -> bool:
        """True for a module that the config leaves in high precision."""
        return any(_matches(module, one) for one in self.ignored)


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight in FP8: names of its tensors in the files, and the weights that share a scale.

    Attributes:
        weight, scale: names of the bytes and of the scales.
        shape: of the weight, [N, K].
        group: (rows, columns) that share a scale, (1, K) for one per output channel; None: one scale for all.
    """

    weight: str
    scale: str
    shape: tuple[int, int]
    group: tuple[int, int] | None

    @property
    def is_block(self) -> bool:
        """True if each 128 × 128 block has a scale."""
        return self.group == (BLOCK, BLOCK)

    def check_scales(self, scales: Tensor, owner: str) -> Tensor:
        """Scales as float32 [] or [⌈N/rows⌉, ⌈K/columns⌉]; an InputError for one that is not a finite number above 0."""
        values = scales.float()
        faulty = values[~(values.isfinite() & (values > 0))]
        if len(faulty):
            raise InputError(
                f"{owner}: {self.scale} has the scale {faulty[0].item():g} ({len(faulty)} of {values.numel()} are invalid): a "
                "scale is a finite number above 0. The folder is damaged, or was quantised wrongly: copy it again, or give the "
                "original model."
            )
        if float(values.median()) * _E4M3_MAX > _LARGEST:
            raise InputError(
                f"{owner}: {self.scale} is about {float(values.median()):g}, so the largest weights would be about "
                f"{float(values.median()) * _E4M3_MAX:.3g}: it seems to be the reciprocal, which divides the bytes. A scale "
                "multiplies the bytes, also under the name weight_scale_inv: write 1 / scale."
            )
        return values.reshape(()) if self.group is None else values.reshape(self.grid)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the scales."""
        if self.group is None:
            return ()
        return tuple(-(-size // one) for size, one in zip(self.shape, self.group, strict=True))

    def rows(self, data: Tensor, scales: Tensor, start: int, owner: str) -> Tensor:
        """bytes × scales in float32, of rows from `start` on, each rounded once; scales: from `check_scales`."""
        values = data.float()
        if bool(values.isnan().any()):
            raise InputError(f"{owner}: {self.weight} has bytes that are NaN (0x7F, 0xFF): copy the folder again.")
        if self.group is None:
            return values.mul_(scales)
        height, width = self.group
        at = torch.arange(start, start + len(values), device=values.device) // height
        for row in at.unique().tolist():  # one row of blocks at a time: expanded scales never have the size of the matrix
            values[at == row] *= scales[row].repeat_interleave(width)[: values.shape[1]]
        return values


def scheme_of(config: Mapping[str, Any], owner: str) -> Fp8Scheme | None:
    """The scheme of a folder's config.json; None for one without quantised weights.

    Raises:
        InputError: a scheme other than FP8 weights with scales, by its name, or a key of it that is not known.
    """
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), Mapping) and any(config[part].get(key) for key in QUANTIZED_KEYS):
            raise InputError(f"{owner}: config.json has {part}.quantization_config, for one part of the model. {DEQUANTISE}")
    keys = [key for key in QUANTIZED_KEYS if config.get(key)]
    if not keys:
        return None
    values = config[keys[0]]
    if not isinstance(values, Mapping):
        raise _refused(owner, f"a {keys[0]} of {values!r}")
    if len(keys) > 1 and config[keys[1]] != values:
        raise _refused(owner, f"{keys[0]} and {keys[1]}, which differ")
    method = values.get("quant_method")
    if method == _FP8:
        return _fp8_scheme(values, owner)
    if method == _COMPRESSED or (method is None and "config_groups" in values):
        return _compressed_scheme(values, owner)
    detail = _detail(values)
    raise _refused(owner, f"quant_method {method!r}{f' ({detail})' if detail else ''}")


def _refused(owner: str, scheme: str) -> InputError:
    return InputError(
        f"{owner}: config.json says that its weights are quantised by {scheme}, which Octavo does not read. {DEQUANTISE}"
    )


def _detail(values: Mapping[str, Any]) -> str:
    """The values that distinguish schemes of one method, for a message."""
    keys = ("quant_algo", "quant_type", "bnb_4bit_quant_type", "load_in_4bit", "load_in_8bit", "bits", "w_bit", "group_size")
    nested = values.get("quantization")
    tables = [values, nested] if isinstance(nested, Mapping) else [values]
    detail = {key: one[key] for one in tables for key in keys if one.get(key)}
    return ", ".join(f"{key} {value}" for key, value in detail.items() if not isinstance(value, Mapping))


def _only(values: Mapping[str, Any], known: Iterable[str], owner: str, where: str) -> None:
    """Refuse unknown keys with a value, which may say, for example, that weights are rotated."""
    if strange := [key for key, value in values.items() if key not in known and value not in (None, [], {}, False, "")]:
        raise _refused(owner, f"{where} with {strange[0]} = {str(values[strange[0]])[:80]}")


def _fp8_scheme(values: Mapping[str, Any], owner: str) -> Fp8Scheme:
    skipped = ("modules_to_not_convert", "ignored_layers")
    known = (*_NEUTRAL_KEYS, *skipped, "fmt", "weight_block_size", "scale_fmt", "expert_dtype", "weight_format")
    _only(values, known, owner, 'quant_method "fp8"')
    for key, allowed in (("fmt", ("e4m3", "float8_e4m3fn")), ("scale_fmt", ("float", "ue8m0")), ("expert_dtype", ("fp8",))):
        if values.get(key) is not None and str(values[key]).lower() not in allowed:
            raise _refused(owner, f'quant_method "fp8" with {key} = {values[key]!r}')
    block = values.get("weight_block_size")
    ignored = tuple(one for key in skipped for one in values.get(key) or ())
    cache = bool(values.get("kv_cache_scheme") or values.get("kv_cache_quant_method"))
    if block is None:  # null means the whole matrix; libraries differ in the default
        group = Group("tensor") if "weight_block_size" in values else Group(None)
    else:
        group = Group("block", _block(block, owner, "weight_block_size"))
    return Fp8Scheme(_FP8, (group,), ignored, cache)


def _block(value: Any, owner: str, key: str) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
        raise InputError(f"{owner}: config.json has {key} = {value!r}: give rows and columns of a block, such as [128, 128].")
    return value[0], value[1]


def _compressed_scheme(values: Mapping[str, Any], owner: str) -> Fp8Scheme:
    _only(
        values,
        (*_NEUTRAL_KEYS, "config_groups", "format", "quantization_status", "ignore", "sparsity_config", "transform_config"),
        owner,
        _COMPRESSED,
    )
    sparsity, turned = values.get("sparsity_config") or {}, values.get("transform_config") or {}
    if (sparse := sparsity.get("format", "dense")) != "dense":
        raise _refused(owner, f"{_COMPRESSED} with a sparse format {sparse!r}")
    if turned.get("config_groups"):
        raise _refused(owner, f"{_COMPRESSED} with transform_config (rotated weights)")
    if (status := values.get("quantization_status", "compressed")) != "compressed":
        raise _refused(owner, f'{_COMPRESSED} with quantization_status {status!r} in place of "compressed"')
    groups, overall = values.get("config_groups"), values.get("format", "float-quantized")
    if not isinstance(groups, Mapping) or not groups:
        raise _refused(owner, f"{_COMPRESSED} without config_groups")
    if overall not in (*_BYTES_ALONE, "mixed-precision"):
        raise _refused(owner, f"{_COMPRESSED} of format {overall!r}")
    of_groups = tuple(_group(name, group, owner, overall) for name, group in groups.items())
    return Fp8Scheme(_COMPRESSED, of_groups, tuple(values.get("ignore") or ()), bool(values.get("kv_cache_scheme")))


def _group(name: str, group: Any, owner: str, overall: str) -> Group:
    where = f"{_COMPRESSED}' group {name!r}"
    if isinstance(group, Sequence) and not isinstance(group, str):  # the name of a scheme → its targets
        if name not in _PRESETS:
            raise _refused(owner, where)
        return Group(_PRESETS[name], targets=tuple(group))
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise _refused(owner, f"{where} without weights")
    _only(group, ("targets", "weights", "input_activations", "format"), owner, where)
    weights = group["weights"]
    form = group.get("format") or overall
    bits = f"{weights.get('type', 'int')} {weights.get('num_bits', 8)} bits"
    what = f"{form} weights of {bits}, strategy {weights.get('strategy')!r}"
    usual = form in _BYTES_ALONE and weights.get("type") == "float" and weights.get("num_bits", 8) == 8
    if not usual:
        raise _refused(owner, f"{where} ({what})")
    for key, value, wanted in (("symmetric", True, "true"), ("dynamic", False, "false")):
        if weights.get(key, value) not in (value, None):
            raise _refused(
                owner, f"{where} ({what}) with {name}.weights.{key} = {str(weights[key]).lower()} in place of {wanted}"
            )
    strategy, structure = weights.get("strategy") or "tensor", weights.get("block_structure")
    if strategy not in ("tensor", "channel", "block") or (structure is not None) != (strategy == "block"):
        with_structure = (
            "" if structure is None or strategy == "block" else f" with {name}.weights.block_structure = {structure!r}"
        )
        raise _refused(owner, f"{where} ({what}){with_structure}")
    if isinstance(structure, str):  # of older versions
        structure = [int(one) for one in re.findall(r"\d+", structure)]
    block = _block(structure, owner, f"{name}.weights.block_structure") if structure is not None else (BLOCK, BLOCK)
    return Group(cast(Shape, strategy), block, tuple(group.get("targets") or ()))


# Tensors ---------------------------------------------------------------------------------------------------------------------


def matrices_of(
    scheme: Fp8Scheme | None, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], owner: str
) -> tuple[dict[str, Fp8Matrix], list[str]]:
    """(FP8 matrices by the name of their weight, scales of other things), from the headers of a folder's files.

    dtypes: as safetensors names them.

    Raises:
        InputError: a weight in FP8 without scales, scales without a weight in FP8, or shapes that do not fit the scheme.
    """
    if scheme is None:
        return {}, []
    matrices: dict[str, Fp8Matrix] = {}
    spare: list[str] = []
    for name, dtype in dtypes.items():
        if dtype.startswith(("F8", "F4", "F6")) and not name.endswith((*SCALES, *_ACTIVATION_SCALES)):
            matrices[name] = _matrix(scheme, name, dtype, shapes, dtypes, owner)
    used = {matrix.scale for matrix in matrices.values()}
    if not matrices:
        raise InputError(
            f'{owner}: config.json says quant_method "{scheme.method}", and no weight is in FP8: the files are of another '
            "model. Copy the whole folder again; or, if these are the weights in high precision, remove quantization_config "
            "from config.json."
        )
    for name in shapes:
        module, _, kind = name.rpartition(".")
        if kind in SCALES and name not in used:
            there = dtypes.get(f"{module}.weight")
            raise InputError(
                f"{owner}: {name} is a scale, but {module}.weight is {f'of kind {there}, not FP8' if there else 'not there'}:"
                " its values cannot be known. Copy the whole folder again."
            )
        if (kind in _ACTIVATION_SCALES and f"{module}.weight" in matrices) or _CACHE_SCALE.search(name):
            spare.append(name)
    return matrices, spare


def _matrix(
    scheme: Fp8Scheme,
    name: str,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    owner: str,
) -> Fp8Matrix:
    module, _, kind = name.rpartition(".")
    shape = shapes[name]
    if dtype != _E4M3 or kind != "weight" or len(shape) != 2:
        raise InputError(
            f"{owner}: {name} is {dtype} {list(shape)}: Octavo reads E4M3 matrices (F8_E4M3 [N, K]) named ….weight, experts one"
            f" by one. {DEQUANTISE}"
        )
    group = scheme.group(module)
    if group is None or scheme.ignores(module):
        why = (
            "leaves it out (ignore, modules_to_not_convert)" if group is not None else "has no group with it among its targets"
        )
        raise InputError(
            f"{owner}: {name} is in FP8, and config.json {why}: another library would load its bytes without a scale."
        )
    names = [f"{module}.{one}" for one in SCALES if f"{module}.{one}" in shapes]
    if len(names) != 1:
        what = f"two scales, {some(names)}" if names else f"no scale ({module}.weight_scale or .weight_scale_inv)"
        raise InputError(f"{owner}: {name} is in FP8 and has {what}: its values cannot be known. Copy the whole folder again.")
    if f"{module}.weight_zero_point" in shapes:
        raise InputError(f"{owner}: {name} has a zero point, {module}.weight_zero_point: FP8 weights have none. {DEQUANTISE}")
    (scale,) = names
    if not dtypes[scale].startswith(("F32", "BF16", "F16", "F64", "F8_E8M0")):
        raise InputError(f"{owner}: {scale} is {dtypes[scale]}: scales are float32, float16, bfloat16 or E8M0.")
    return Fp8Matrix(name, scale, (shape[0], shape[1]), _sharing(group, scale, (shape[0], shape[1]), shapes[scale], owner))


def _sharing(group: Group, scale: str, shape: tuple[int, int], scales: tuple[int, ...], owner: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; an InputError where the scales have another shape than the scheme gives them."""
    rows, columns = shape
    fitting: dict[Shape, tuple[tuple[int, ...], ...]] = {
        "tensor": ((), (1,), (1, 1)),
        "channel": ((rows, 1), (rows,)),
        "block": ((math.ceil(rows / group.block[0]), math.ceil(columns / group.block[1])),),
    }
    sizes: dict[Shape, tuple[int, int] | None] = {"tensor": None, "channel": (1, columns), "block": group.block}
    for kind in ("tensor", "block") if group.shape is None else (group.shape,):
        if scales in fitting[kind]:
            return sizes[kind]
    wanted: Shape = group.shape or "block"
    of = f"blocks of {group.block[0]} by {group.block[1]}" if wanted == "block" else f"one a {wanted}"
    raise InputError(
        f"{owner}: {scale} has shape {list(scales)}; for a weight {list(shape)} with scales {of}, as config.json says, it is "
        f"{list(fitting[wanted][0])}. Give the config that belongs to the weights, or copy the whole folder again."
    )
