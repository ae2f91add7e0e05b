"""PEFT's folders of adapters, in both directions, bit for bit: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.config.lora import LoRA
from octavo.config.peft_settings import (
    CONFIG,
    FUSED,
    PEFT_PREFIX,
    WEIGHTS,
    check_weights,
    is_of_experts,
    is_router,
    peft_settings,
)
from octavo.errors import InputError, some
from octavo.models.convert import Conversion, conversion
from octavo.models.decoder import Decoder
from octavo.models.families import Join, adapter_module
from octavo.models.lora import Adapted, doubled, module_of
from octavo.nn.lora import is_adapter


def config_of(adapters: Adapted, way: Conversion, names: Iterable[str], source: str | None) -> dict[str, Any]:
    """`adapter_config.json`; names: Octavo's names of all parameters. source: where the base comes from."""
    modules = {module_of(theirs) for name in names if not is_adapter(name) for theirs in way.names(name)}
    options = adapters.options
    stacked = [one for one in adapters.targets if is_of_experts(one) or is_router(one)]
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
        "target_modules": _shortened([one for one in adapters.targets if one not in stacked], modules),
        **(_of_parameters(adapters, stacked, modules) if stacked else {}),
        "modules_to_save": list(adapters.whole) or None,
    }


def _of_parameters(adapters: Adapted, stacked: Sequence[str], modules: Iterable[str]) -> dict[str, Any]:
    """The keys of `adapter_config.json` for adapted parameters, which PEFT also names by suffix."""
    others = set(modules) - set(stacked)
    short: dict[str, None] = {}
    for one in stacked:
        end = one[one.index(".mlp.") + 1 :]
        name = one if any(other.endswith(f".{end}") for other in others) else end
        short[name if is_of_experts(one) else f"{name}.weight"] = None
    twice = doubled(adapters.options)
    patterns = {"rank_pattern": {FUSED: twice.rank}, "alpha_pattern": {FUSED: twice.scale_factor}} if adapters.fused else {}
    return {"target_parameters": list(short), **patterns}


def _shortened(targets: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The targets in PEFT's form: the suffix of a name, unless it matches another module too."""
    others = set(modules) - set(targets)
    short: dict[str, None] = {}
    for target in targets:
        leaf = target.rpartition(".")[2]
        unique = not any(other == leaf or other.endswith(f".{leaf}") for other in others)
        short[leaf if unique else target] = None
    return list(short)


def peft_tensors(tensors: Mapping[str, Tensor], way: Conversion) -> dict[str, Tensor]:
    """Trained tensors by Octavo's names → by the names of PEFT's file."""
    of_peft: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for theirs, part in way.split(name, tensor).items():
            of_peft[theirs if is_adapter(name) else PEFT_PREFIX + theirs] = part.detach().cpu().contiguous()
    return of_peft


def write_folder(
    tensors: Mapping[str, Tensor], adapters: Adapted, way: Conversion, names: Iterable[str], folder: Path, source: str | None
) -> None:
    """Write PEFT's two files into an existing folder.

    tensors: all trained tensors, whole, by Octavo's names. names, source: as in `config_of`.
    """
    save_file(peft_tensors(tensors, way), folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(config_of(adapters, way, names, source), indent=2, sort_keys=True)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def from_folder(folder: str | Path) -> LoRA:
    """The options of a PEFT folder, dropout included, for `octavo.transform(model, lora=…)`, which loads it.

    Raises:
        InputError: it is not a PEFT folder, or its adapters have settings that Octavo does not support.
    """
    return LoRA(load=str(folder), dropout=peft_settings(folder).dropout)


def _opened(path: Path) -> Any:
    file = check_weights(path)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"lora.load: {file} cannot be read: {error}. Copy it again.") from None


def check_folder(model: Decoder, options: LoRA) -> None:
    """Compare a PEFT folder with the adapters of a model, also on meta; reads no weights.

    Raises:
        InputError: settings differ from the options, or names or shapes differ: adapters of another base.
    """
    assert options.load is not None
    path = Path(options.load).expanduser()
    theirs = from_folder(path)
    if (theirs.rank, theirs.scale) != (options.rank, options.scale):
        ours, there = ({"rank": one.rank, "alpha": one.scale_factor, "rslora": one.rslora} for one in (options, theirs))
        other = ", ".join(
            f"lora.{key} = {json.dumps(ours[key])}, and in the folder {json.dumps(there[key])}"
            for key in ours
            if ours[key] != there[key]
        )
        raise InputError(
            f"lora.load: the adapters in {path} were trained with other settings: {other}. Remove these keys, so that the "
            f"folder's settings apply, or set {_settings_of(theirs)}."
        )
    with _opened(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        stored = {key: tuple(each.get_shape()) for key, each in slices.items()}
        kinds = {key: each.get_dtype() for key, each in slices.items()}
    way = conversion(model.spec)
    own = {key: tuple(part.shape) for key, part in peft_shapes(model, way).items()}
    differing = [(key, stored[key], own[key]) for key in own if key in stored and stored[key] != own[key]]
    if numbers := [f"{key} ({kind})" for key, kind in kinds.items() if not kind.startswith(("F", "BF"))]:
        raise InputError(
            f"lora.load: the adapters in {path} are whole numbers: {some(numbers, 3)}. Octavo knows no scales of them: save "
            "them as float32, float16 or bfloat16."
        )
    if differing:
        shown = "; ".join(f"{key} is {list(a)} there and {list(b)} here" for key, a, b in differing[:3])
        raise InputError(
            f"lora.load: the adapters in {path} are of another base: {shown}. Give the model that they were trained on "
            f"({peft_settings(path).base})."
        )
    absent, more = ([one for one in a if one not in b] for a, b in ((own, stored), (stored, own)))
    if absent or more:
        parts = [f"it lacks {some(absent, 3)}"] if absent else []
        parts += [f"it has {some(more, 3)} too"] if more else []
        if whole := [one for one in more if ".layers." in one and ".lora_" not in one]:
            raise InputError(
                f"lora.load: {path} has {some(whole, 3)}, trained whole (modules_to_save); Octavo trains only modules outside "
                "of blocks whole. Use the model's original code: octavo.transform(PeftModel.from_pretrained(model, folder))."
            )
        raise InputError(
            f"lora.load: the adapters in {path} are of other matrices: {', and '.join(parts)}. Set "
            f"{_settings_of(theirs)}, or give the model that they were trained on."
        )


def _settings_of(options: LoRA) -> str:
    """All keys that a run file needs for a folder's adapters, so that one message names them."""
    values: dict[str, object] = {"rank": options.rank, "alpha": options.scale_factor, "rslora": options.rslora}
    values |= {"targets": options.targets} if len(options.targets) <= 16 else {}  # more come from a regular expression
    values |= {"save_whole": options.save_whole} if options.save_whole else {}
    more = "" if "targets" in values else ", and lora.targets to patterns of the target_modules in its adapter_config.json"
    return ", ".join(f"lora.{key} = {json.dumps(value)}" for key, value in values.items()) + more


def other_base(model: Decoder, folder: str | Path) -> str:
    """A notice if a PEFT folder names another base than the model's folder or id; empty otherwise."""
    here, there = (
        str(getattr(model.config, "_name_or_path", "") or ""),
        peft_settings(folder).base,
    )
    if not here or not there or Path(here).name.lower() == Path(there).name.lower():
        return ""
    return (
        f"lora.load: the adapters in {folder} were trained on {there!r}, and the model is {here!r}. Their shapes are equal; if "
        "the weights differ, the loss begins higher than it ended."
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
    """Trained parameter → a function (out, start) that fills rows from `start` on from a PEFT folder."""
    path, way = Path(folder).expanduser(), conversion(model.spec)

    def reading(name: str, key: str) -> Callable[[Tensor, int], None]:
        def read(out: Tensor, start: int) -> None:
            with _opened(path) as file:
                if way.table.join(name) is Join.EXPERT_B:  # its rows are columns in the file
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


def merged(name: str, weight: Tensor, tensors: Mapping[str, Tensor], way: Conversion, adapters: Adapted) -> Tensor:
    """A frozen parameter with its adapters: W + scale · B · A in float32, rounded once to the dtype of W.

    name: of the parameter, by its stored name. weight: W [N, K], or [E·N, K] of experts. tensors: the adapters', A [r, K] and
    B [N, r], by PEFT's names; r times E for experts.
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
        with torch.autocast(b.device.type, enabled=False):
            product = b @ a
        changed[theirs] = (part.float() + adapters.of(module_of(theirs)).scale * product).to(part.dtype)
    return way.join(name, tuple(changed.values())) if parts else weight
