"""Checkpoints: one folder, whole or absent.

    checkpoints/step-120/
        shard-00001-….safetensors   model.<name> · optimizer.<state>.<name> · fp8.<module>.<operand>.… · random.<rank>.<device>
        state.json                  step, hash of the data, device and threads, numbers of the optimizer, generators, recipe
        manifest.json               written last: every file's size and sha256 (`octavo.train.manifest`)

A checkpoint is written under a temporary name beside its place, synced and renamed, so that a kill at any moment leaves the
old ones and perhaps a temporary folder, which the next run removes. It costs a second copy of everything on disk while it
is written. Names are those of Octavo's parameters, never positions, so any layout of ranks reads it.

`save` and `load` are the same format for a training loop of the user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.errors import InputError
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import check_state_records, load_state_records, state_records, states_of
from octavo.storage import fsync_folder, fsync_tree, write_atomic
from octavo.train import manifest, tensors
from octavo.train.failpoints import failpoint
from octavo.train.randomness import random_scalars, random_tensors, restore_random

STATE = "state.json"
_RANK = 0  # of the random states: one rank trains in this version


@dataclass
class Checkpointer:
    """The `checkpoints/` folder of a run, of which the caller holds the lock.

    Args:
        folder: where the `step-N` folders are.
        keep: newest checkpoints that are kept.
        report: takes one message for each damaged checkpoint.
    """

    folder: Path
    keep: int
    report: Callable[[str], None]
    _damaged: list[Path] = field(default_factory=list)

    def clean(self) -> None:
        """Remove what an interrupted write or removal left behind."""
        for path in self.folder.glob(".tmp-*"):
            shutil.rmtree(path)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, None if there never was one; damaged newer ones are reported and later replaced.

        Raises:
            OctavoError: there are checkpoints, but none is whole.
        """
        path, self._damaged = manifest.newest_whole(self.folder, self.report)
        return path

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]) -> Path:
        """Write `step-N` and remove the checkpoints that are no longer kept.

        Raises:
            OctavoError: the disk is full; earlier checkpoints are intact and nothing is left behind.
        """
        path = self.folder / f"step-{step}"
        write_checkpoint(path, model, optimizer, {"step": step, **state}, step=step)
        self._prune(step)
        return path

    def _prune(self, step: int) -> None:
        whole = [path for number, path in manifest.step_folders(self.folder) if number <= step and path not in self._damaged]
        for path in [*whole[self.keep :], *(p for p in self._damaged if p.exists() and p.name != f"step-{step}")]:
            remove_checkpoint(path, step)
        self._damaged = []


def write_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any], *, step: int | None = None
) -> None:
    """Write one checkpoint so that `path` is whole or as it was before; `state` is JSON-able.

    Raises:
        OctavoError: the disk is full.
    """
    record = {
        **state,
        "random": random_scalars(),
        "groups": _group_scalars(optimizer),
        "optimizer": _state_scalars(model, optimizer),
        "recipe": _recipe_record(model),
    }
    content = collect(model, optimizer)
    text = json.dumps(record, allow_nan=False, indent=1)
    temporary = path.parent / f".tmp-{path.name}-{os.getpid()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    replaced: Path | None = None
    with tensors.space_checked(path.parent, tensors.bytes_needed(content) + 2 * len(text)):
        try:
            temporary.mkdir()
            tensors.write_tensors(temporary, content, step)
            failpoint("after-shards", step)
            write_atomic(temporary / STATE, text)
            failpoint("before-manifest", step)
            manifest.write_manifest(temporary, step)
            fsync_tree(temporary)
            failpoint("before-rename", step)
            replaced = _set_aside(path) if path.exists() else None
            temporary.rename(path)
            fsync_folder(path.parent)
            failpoint("after-rename", step)
            if replaced:
                shutil.rmtree(replaced)
        except BaseException:
            if replaced is not None and not path.exists():
                replaced.rename(path)
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def remove_checkpoint(path: Path, step: int | None = None) -> None:
    """Remove a checkpoint, out of sight first: a half-removed folder must not look like a damaged checkpoint."""
    doomed = _set_aside(path)
    (doomed / manifest.MANIFEST).unlink(missing_ok=True)
    failpoint("while-pruning", step)
    shutil.rmtree(doomed)


def _aside(path: Path) -> Path:
    return path.parent / f".tmp-old-{path.name}"


def _set_aside(path: Path) -> Path:
    aside = _aside(path)
    if aside.exists():
        shutil.rmtree(aside)
    path.rename(aside)
    return aside


def _temporaries(path: Path) -> list[tuple[Path, int]]:
    """Temporary folders of writes to `path`, with the process that began each."""
    name = re.compile(rf"\.tmp-{re.escape(path.name)}-(\d+)")
    if not path.parent.is_dir():
        return []
    return [(entry, int(match[1])) for entry in path.parent.iterdir() if (match := name.fullmatch(entry.name))]


def _runs_elsewhere(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _finish_replacement(path: Path) -> None:
    """Put the new checkpoint in its place if a replacement was killed between its two renames.

    Then the old one is aside and the new one is whole under its temporary name. An old one alone is what a kill after both
    renames left: if `path` is gone then, its owner deleted it.
    """
    if path.exists() or not (_aside(path) / manifest.MANIFEST).is_file():
        return
    whole = [entry for entry, _ in _temporaries(path) if (entry / manifest.MANIFEST).is_file()]
    if whole:
        whole[0].rename(path)
        fsync_folder(path.parent)


def read_state(path: Path) -> dict[str, Any]:
    """The scalars of a checkpoint that was verified."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Put a verified checkpoint into a model and its optimizer, random states last; returns its scalars.

    Raises:
        InputError: it is of another model or optimizer; nothing was changed then.
    """
    found = tensors.read_layout(path)
    weights = _weights(model)
    tensors.check_layout(path, _part(found, "model."), tensors.layout_of(weights))
    state = read_state(path)
    groups = state.pop("groups")
    scalars: dict[str, dict[str, Any]] = state.pop("optimizer", {})
    recipe = _recipe_from(state.pop("recipe"))
    moments: dict[str, torch.Tensor] = {}
    if optimizer is not None:
        moments = _allocate_moments(path, model, optimizer, _part(found, "optimizer."), groups)
        _check_scalars(path, model, optimizer, scalars)
    records = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _part(found, "fp8.").items()}
    draws = {n: torch.empty(s, dtype=d) for n, (s, d) in _part(found, f"random.{_RANK}.").items()}
    content = {f"model.{name}": tensor for name, tensor in weights.items()}
    content |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
    content |= {f"fp8.{name}": tensor for name, tensor in records.items()}
    content |= {f"random.{_RANK}.{name}": tensor for name, tensor in draws.items()}
    if recipe is not None:
        check_state_records(model, records)
    tensors.read_tensors(path, content)
    if recipe is not None:
        load_state_records(model, records, recipe)
    if optimizer is not None:
        _install_moments(model, optimizer, moments, groups)
        _install_scalars(model, optimizer, scalars)
    restore_random(draws, state.pop("random"))
    return state


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of a run's state, by the name it has on disk."""
    content = {f"model.{name}": tensor for name, tensor in _weights(model).items()}
    if optimizer is not None:
        for name, states in _states_by_name(model, optimizer).items():
            content |= {f"optimizer.{key}.{name}": v for key, v in states.items() if isinstance(v, torch.Tensor)}
    content |= {f"fp8.{name}": tensor for name, tensor in state_records(model).items()}
    return content | {f"random.{_RANK}.{device}": tensor for device, tensor in random_tensors().items()}


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint under Octavo's parameter names, whole and on the CPU.

    Its files are not compared with its manifest here: `manifest.newest_whole` and `manifest.verify` do that.
    """
    weights = {name: torch.empty(shape, dtype=d) for name, (shape, d) in _part(tensors.read_layout(path), "model.").items()}
    tensors.read_tensors(path, {f"model.{name}": tensor for name, tensor in weights.items()})
    return weights


def save(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> None:
    """Write weights, optimizer state, FP8 scales and histories, random states and JSON-able extras to the folder `path`.

    A checkpoint that is already there is replaced once the new one is whole. What an interrupted `save` to the same path left
    beside it is removed.

    Raises:
        InputError: an extra is not JSON, the optimizer keeps what is neither tensor nor number, or `path` is something other
            than a checkpoint.
        OctavoError: the disk is full.
    """
    path = Path(path).absolute()
    for key, value in extra.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"octavo.save: extra {key!r} cannot be written as JSON ({error}); pass numbers, text, lists or dicts."
            ) from None
    if path.exists() and not (path / manifest.MANIFEST).is_file():
        raise InputError(f"octavo.save: {path} exists and is not a checkpoint; give a folder that does not exist yet.")
    _finish_replacement(path)
    for leftover in [*(entry for entry, pid in _temporaries(path) if not _runs_elsewhere(pid)), _aside(path)]:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(leftover)
    write_checkpoint(path, model, optimizer, {"extra": extra})


def load(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Put what `save` wrote into `model` and `optimizer`, and return the extras.

    FP8 scales and histories and the random states of torch, numpy and Python are restored too, so that a loop continues with
    the same bits.

    Raises:
        InputError: there is no checkpoint at `path`, or it is of another model; nothing was changed then.
        OctavoError: the checkpoint is damaged.
    """
    path = Path(path).absolute()
    _finish_replacement(path)
    if not path.is_dir():
        raise InputError(f"octavo.load: there is no checkpoint at {path}.")
    manifest.verify(path)
    state = restore(path, model, optimizer)
    extra: dict[str, Any] = state.get("extra", {})
    return extra


def check_weights(path: Path, wanted: tensors.Layout) -> None:
    """Refuse a checkpoint whose weights are not those of the model that `wanted` describes (InputError names them)."""
    tensors.check_layout(path, _part(tensors.read_layout(path), "model."), wanted)


def weights_layout(model: nn.Module) -> tensors.Layout:
    """Names, shapes and dtypes of what a checkpoint of `model` holds as weights; a model on the meta device will do."""
    return tensors.layout_of(_weights(model))


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers; one that is shared (tied embeddings) is there once."""
    kept = model.state_dict().keys()
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if name in kept}


def _part(found: tensors.Layout, prefix: str) -> tensors.Layout:
    return {name.removeprefix(prefix): entry for name, entry in found.items() if name.startswith(prefix)}


def _allocate_moments(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, found: tensors.Layout, groups: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Empty tensors for the optimizer states of the checkpoint, laid out as their parameters are."""
    if not groups:
        raise InputError(f"checkpoint {path} has no optimizer state: load it without the optimizer, or save it with one.")
    if len(groups) != len(optimizer.param_groups):
        raise InputError(
            f"checkpoint {path} has an optimizer of {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}: build it as the saved one was."
        )
    parameters = dict(model.named_parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    moments: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in found.items():
        parameter = parameters.get(name.partition(".")[2])
        if parameter is None or parameter not in held:
            raise InputError(
                f"checkpoint {path} has an optimizer state {name} for a parameter that the optimizer does not hold."
            )
        like = tuple(parameter.shape) == shape
        moments[name] = torch.empty_like(parameter, dtype=dtype) if like else torch.empty(shape, dtype=dtype)
    return moments


def _install_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, torch.Tensor], groups: list[dict[str, Any]]
) -> None:
    parameters = dict(model.named_parameters())
    # A fused or capturable kernel reads its step count on the device of the parameter.
    on_device = {p for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, tensor in moments.items():
        key, _, owner = name.partition(".")
        parameter = parameters[owner]
        value = tensor.to(parameter.device) if parameter in on_device else tensor
        optimizer.state[parameter][key] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved.items()})


def _states_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    strangers = sum(owner not in names for owner in optimizer.state)
    if strangers:
        raise InputError(
            f"the optimizer keeps state for {strangers} tensors that are no parameters of the model: save it with the model "
            "that it trains."
        )
    return {names[parameter]: states for parameter, states in optimizer.state.items()}


def _state_scalars(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """What an optimizer keeps for a parameter besides tensors: numbers and None; JSON has no infinities, so these are text."""
    scalars: dict[str, dict[str, Any]] = {}
    for name, states in _states_by_name(model, optimizer).items() if optimizer is not None else ():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                continue
            if value is not None and not isinstance(value, bool | int | float):
                raise InputError(
                    f"the optimizer's state {key!r} of {name} is of type {type(value).__name__}: a checkpoint keeps tensors, "
                    "numbers and None. Keep it as one of these, or save without the optimizer."
                )
            odd = isinstance(value, float) and not math.isfinite(value)
            scalars.setdefault(name, {})[key] = str(value) if odd else value
    return scalars


def _check_scalars(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scalars: Mapping[str, Mapping[str, Any]]
) -> None:
    parameters = dict(model.named_parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name in scalars:
        if parameters.get(name) not in held:
            raise InputError(f"checkpoint {path} has optimizer states of {name}, a parameter that the optimizer does not hold.")


def _install_scalars(model: nn.Module, optimizer: torch.optim.Optimizer, scalars: Mapping[str, Mapping[str, Any]]) -> None:
    parameters = dict(model.named_parameters())
    for name, values in scalars.items():
        optimizer.state[parameters[name]] |= {k: float(v) if isinstance(v, str) else v for k, v in values.items()}


def _group_scalars(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """What a parameter group says besides its parameters: rates, betas, decay."""
    plain = (bool, int, float, str, tuple, list, type(None))
    groups = optimizer.param_groups if optimizer is not None else []
    return [{k: v for k, v in group.items() if k != "params" and isinstance(v, plain)} for group in groups]


def _recipe_record(model: nn.Module) -> dict[str, Any] | None:
    """The recipe that the model's FP8 state was made under: without it histories could not be given their places again."""
    recipe = next((state.recipe for _, state in states_of(model) if state.recipe is not None), None)
    if recipe is None:
        return None
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
    return {"name": recipe.name, **{k: v.name if isinstance(v, recipes.Format) else v for k, v in fields.items()}}


def _recipe_from(record: dict[str, Any] | None) -> recipes.Recipe | None:
    if record is None:
        return None
    values = {k: recipes.Format[v] if k == "fp8_format" else v for k, v in record.items() if k != "name"}
    return recipes.RECIPES[record["name"]](**values)
