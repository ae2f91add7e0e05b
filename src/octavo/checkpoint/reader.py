"""Reads a checkpoint: the state into a model and an optimizer, or weights one by one.

Every file is compared with the manifest and read through the same descriptors, and all ranks read the same save. The state is
read into separate memory, checked against the model, and installed once every rank has read all of its part: a checkpoint that
is damaged or does not fit changes nothing. During a restore weights take twice their memory, as later with their gradients.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from octavo.checkpoint import manifest, optimizer_state, shard_io
from octavo.checkpoint.manifest import OpenCheckpoint, first_fault
from octavo.checkpoint.opened import Damaged, Stamp, trust
from octavo.checkpoint.original_code import Converted, as_model_has_it
from octavo.checkpoint.rng_state import check_random, restore_random, seed_new_rank, source_of, without_tracked
from octavo.checkpoint.stored import StoredTensors, open_tensors
from octavo.checkpoint.writer import rank_file_name, spec_record, weights
from octavo.errors import InputError, OctavoError
from octavo.fp8 import recipe as recipes
from octavo.fp8.scaling import check_state_records, load_state_records, reset_states, states_of
from octavo.models.lora import adapted
from octavo.nn.plain_names import stored_names
from octavo.parallel.coordination import Ranks
from octavo.parallel.world import state as world


def read_state(path: Path) -> dict[str, Any]:
    """The scalars of a checkpoint."""
    with OpenCheckpoint(path) as checkpoint:
        return _state_of(checkpoint)


def read_rank_file(path: Path, name: str, rank: int) -> bytes:
    """This rank's file of a checkpoint; rank 0's for ranks that the saved run did not have. Empty if there is none.

    Raises:
        Damaged: it differs from the manifest.
    """
    with OpenCheckpoint(path) as checkpoint:
        ranks = checkpoint.manifest.ranks or 1
        name_of_rank = rank_file_name(name, rank if rank < ranks else 0)
        if name_of_rank not in checkpoint.manifest.files:
            return b""
        content = checkpoint.folder.read(name_of_rank)
        checkpoint.verify_opened()
        return content


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ranks: Ranks,
    opened: Callable[[Path], OpenCheckpoint] = OpenCheckpoint,
    *,
    fresh: Collection[str] = (),
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, random states last; returns its scalars. Collective.

    fresh: layers that do not load their FP8 state from the checkpoint.

    Raises:
        InputError: it is of another model or optimizer; nothing was changed.
        OctavoError: it is damaged, or is being replaced; nothing was changed.
    """
    with contextlib.ExitStack() as closing:
        with ranks.sharing_errors():
            checkpoint = closing.enter_context(opened(path))
        _agree(checkpoint, ranks)
        pieces = ranks.on_rank_0(lambda: open_tensors(checkpoint).pieces)
        with ranks.sharing_errors():
            loaded = _Loaded(checkpoint, StoredTensors(checkpoint.folder, pieces), model, optimizer, ranks.rank, fresh)
        with ranks.sharing_errors():
            loaded.read()
            checkpoint.verify_opened()  # after the reads: the bytes read are the bytes verified
    with ranks.sharing_errors():
        loaded.install()
    return loaded.state


def _agree(checkpoint: OpenCheckpoint, ranks: Ranks) -> None:
    """Verify the files on rank 0; raise on every rank if the ranks have opened different saves."""
    if len(set(ranks.all_gather(checkpoint.manifest.sha256))) > 1:
        raise OctavoError(f"checkpoint {checkpoint.path} was replaced while the ranks opened it: load it once more.")

    def verify() -> dict[Stamp, str]:
        checkpoint.verify()
        return checkpoint.folder.known()

    trust(ranks.on_rank_0(verify))


class _State(BaseModel):
    """The entries of `state.json` that every checkpoint has, with their types."""

    model_config = ConfigDict(strict=True)
    step: int | None = None
    random: dict[str, Any]
    groups: list[dict[str, Any]]
    optimizer: dict[str, dict[str, bool | int | float | Literal["inf", "-inf", "nan"] | None]] = {}
    optimizer_class: str | None = None
    group_names: list[list[str]] = []
    recipe: dict[str, Any] | None
    fp8_head: bool | Literal["backward"] | None = None
    spec: dict[str, Any] | None = None
    blocks: str | None = None
    tensor_ranks: int | None = Field(None, ge=1)
    lora: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


def _state_of(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    """The scalars, which rank 0 saved."""
    path = checkpoint.path / manifest.STATE
    state: dict[str, Any] = checkpoint.json(manifest.STATE)
    try:
        known = _State.model_validate(state)
    except ValidationError as error:
        raise Damaged(f"{path} is not the state of a checkpoint: {first_fault(error)}") from None
    if "step" in state and known.step != checkpoint.manifest.step:
        raise Damaged(f"{path} is for step {known.step}, but its manifest for step {checkpoint.manifest.step}")
    return state


class _Loaded:
    """The state of a checkpoint: checked against a model and its optimizer, read, then installed.

    Raises:
        InputError: it belongs to another model or optimizer.
        Damaged: it contradicts itself.
    """

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        stored: StoredTensors,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        rank: int,
        fresh: Collection[str] = (),
    ) -> None:
        path, self.state = checkpoint.path, _state_of(checkpoint)
        self._model, self._optimizer, self._rank = model, optimizer, rank
        named = {theirs: name for name, theirs in stored_names(model).items()}
        stored = stored.renamed(named)
        self._stored = as_model_has_it(stored, model, self.state.pop("blocks", None))
        self._groups = self.state.pop("groups")
        self._scalars: optimizer_state.Scalars = {
            named.get(name, name): values for name, values in self.state.pop("optimizer", {}).items()
        }
        if isinstance(self._stored, Converted):
            self._scalars = self._stored.scalars(self._scalars)
        self._recipe = _recipe_from(path, self.state.pop("recipe"))
        head = self.state.pop("fp8_head", None)
        if "head" not in fresh:
            _compare_heads(path, model, head)
        _compare_specs(path, model, self.state.pop("spec", None))
        _compare_adapters(path, model, self.state.pop("lora", None))
        layout = self._stored.layout
        tensors = weights(model)
        shard_io.check_layout(path, shard_io.subset(layout, "model."), shard_io.layout_of(tensors))
        if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
            raise InputError(f"{empty[0]} has no values yet, so none can be loaded into it: materialise the model first.")
        self._weights = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        self._states: dict[str, torch.Tensor] = {}
        kind, names = self.state.pop("optimizer_class", None), self.state.pop("group_names", [])
        names = [[named.get(name, name) for name in group] for group in names]
        if optimizer is not None:
            optimizer_state.check_class(path, optimizer, kind, self._groups)
            if self._stored is stored:  # with the model's own names
                optimizer_state.check_groups(path, model, optimizer, names)
            saved = shard_io.subset(layout, "optimizer.")
            self._states = optimizer_state.allocate_states(path, model, optimizer, saved, self._groups, self._scalars)
            self._groups = optimizer_state.settings_of(path, optimizer, self._groups)
        self._tensor = self._saved_tensor_degree()
        saved_ranks = {0, *checkpoint.manifest.random_ranks}
        self._random_rank, self._draws_anew = source_of(rank, saved_ranks, self._tensor)
        records = shard_io.subset(layout, "fp8.").items()
        self._fresh = frozenset(fresh)
        continued = {name: each for name, each in records if name.rsplit(".", 2)[0] not in self._fresh}
        self._fp8 = shard_io.empty_tensors(continued)
        self._experts = {name: state.experts for name, state in states_of(model)}
        self._random = shard_io.empty_tensors(shard_io.subset(layout, f"random.{self._random_rank}."))
        if self._recipe is not None:
            check_state_records(model, self._fp8)
        self._random_scalars = self.state.pop("random")
        if self._random_rank:
            self._random_scalars = checkpoint.json(f"random-{self._random_rank}.json")
        self._path = path

    def read(self) -> None:
        """Read all tensors, and check FP8 and random states."""
        random = f"random.{self._random_rank}"
        sections = {"model": self._weights, "optimizer": self._states, "fp8": self._fp8, random: self._random}
        into = {f"{section}.{name}": tensor for section, held in sections.items() for name, tensor in held.items()}
        self._stored.read(into)
        for name in {name.rpartition(".")[0] for name in self._fp8}:
            scale, history = (self._fp8.get(f"{name}.{kind}") for kind in ("scale", "amax_history"))
            experts = self._experts.get(name.rpartition(".")[0])
            shape = () if experts is None else (experts,)
            begun = self._fp8.get(f"{name}.begun", scale)  # missing in older checkpoints
            fits = scale is not None and history is not None and scale.shape == shape == history.shape[1:]
            if history is None or begun is None or not fits or not len(history) or begun.shape != shape:
                sizes = ("[]", "[length]") if experts is None else (f"[{experts}]", f"[length, {experts}]")
                raise Damaged(f"{self._path} has no scale {sizes[0]} and amax history {sizes[1]} of {name}")
        try:
            check_random(self._random, self._random_scalars)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise Damaged(f"the random states of {self._path} are invalid ({error})") from None

    def install(self) -> None:
        """Install the state that was read in model and optimizer, and restore the random states."""
        with torch.no_grad():
            for name, tensor in weights(self._model).items():
                tensor.copy_(self._weights.pop(name))
        reset_states(self._model)
        if self._recipe is not None:
            load_state_records(self._model, self._fp8, self._recipe, fresh=self._fresh)
        if self._optimizer is not None:
            optimizer_state.install_states(self._model, self._optimizer, self._states, self._groups, self._scalars)
        restore_random(without_tracked(self._random, self._rank, self._tensor), self._random_scalars)
        if self._draws_anew:
            seed_new_rank(self._random, self._rank)

    def _saved_tensor_degree(self) -> int:
        """The tensor-parallel degree of the save; for older checkpoints the run's, else the present one."""
        layout = self.state.get("layout")
        of_run = layout.get("tensor_parallel_degree") if isinstance(layout, dict) else None
        degree = self.state.pop("tensor_ranks", None) or of_run
        return degree if isinstance(degree, int) and degree > 0 else world.tp_size


def _compare_heads(path: Path, model: nn.Module, saved: bool | str | None) -> None:
    """Warn if different products of the head were in FP8. None: an older checkpoint, or a model without this setting."""
    current = getattr(model, "fp8_head", None)
    if None not in (current, saved) and current != saved:
        warnings.warn(
            f"checkpoint {path} was trained with fp8_head={saved!r}, and this model has {current!r}: the loss curve may change"
            f" here. octavo.transform(fp8_head={saved!r}) continues as before.",
            stacklevel=6,
        )


def _compare_specs(path: Path, model: nn.Module, saved: dict[str, Any] | None) -> None:
    """Refuse weights with other heads; warn about another rotation or norm, as for a longer context, or weighting of experts.

    saved: None if not recorded.
    """
    current = spec_record(model)
    if current is None or saved is None:
        return
    changed = {
        key: f"{key} was {saved[key]!r} and is {current[key]!r}"
        for key in current
        if saved.get(key, current[key]) != current[key]
    }
    if wrong := [text for key, text in changed.items() if key not in ("rotary", "norm_eps", "sinkhorn")]:
        raise InputError(f"checkpoint {path} belongs to another model: {'; '.join(wrong)}. Build the model that was saved.")
    if changed:
        warnings.warn(f"checkpoint {path} continues in another model: {'; '.join(changed.values())}.", stacklevel=6)


def _compare_adapters(path: Path, model: nn.Module, saved: dict[str, Any] | None) -> None:
    """Refuse adapters with other matrices, scale or base, and a whole model for adapters or the reverse."""
    adapters = adapted(model)
    current = None if adapters is None else adapters.record
    if current == saved:
        return
    if current is None or saved is None:
        holds, has = ("the whole model", "adapters only") if saved is None else ("adapters only", "all weights")
        raise InputError(
            f"checkpoint {path} holds {holds}, and this model trains {has}. Build the model of the save: "
            f"with {'no adapters' if saved is None else 'the same adapters'}."
        )
    changed = [key for key in current if current[key] != saved.get(key)]
    if changed == ["base"]:
        raise InputError(
            f"checkpoint {path} holds adapters of another base: the frozen weights had the hash {str(saved.get('base'))[:12]}, "
            f"and those of this model have {current['base'][:12]}. Give the folder (model.source) and dtypes with which they "
            "were trained."
        )
    shown = "; ".join(f"{key} was {saved.get(key)!r} and is {current[key]!r}" for key in changed if key != "base")
    raise InputError(f"checkpoint {path} holds other adapters: {shown}. Build the model that was saved.")


def _recipe_from(path: Path, record: dict[str, Any] | None) -> recipes.Recipe | None:
    if record is None:
        return None
    try:
        values = {k: recipes.Format[v] if k == "fp8_format" else v for k, v in record.items() if k != "name"}
        return recipes.RECIPES[record["name"]](**values)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} has no recipe that this version knows: {record} ({error})") from None


class StoredWeights(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint by parameter name, each read whole onto the CPU on access; the files are verified.

    Raises:
        Damaged: the checkpoint differs from its manifest.
    """

    def __init__(self, path: Path) -> None:
        checkpoint = OpenCheckpoint(path)
        checkpoint.verify()
        self._checkpoint = checkpoint
        self._stored = open_tensors(checkpoint)
        self.layout = shard_io.subset(self._stored.layout, "model.")

    def __getitem__(self, name: str) -> torch.Tensor:
        (tensor,) = shard_io.empty_tensors({name: self.layout[name]}).values()
        self._stored.read({f"model.{name}": tensor})
        self._checkpoint.verify_opened()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def recipe_of(path: Path) -> recipes.Recipe | None:
    """The recipe of the FP8 layers of a checkpoint; None without FP8 products."""
    return _recipe_from(path, read_state(path).get("recipe"))


def stored_scales(path: Path) -> dict[str, torch.Tensor]:
    """The delayed scales of a checkpoint that have begun, float32, by `<module>.<operand>`."""
    with OpenCheckpoint(path) as checkpoint:
        stored = open_tensors(checkpoint)
        layout = shard_io.subset(stored.layout, "fp8.")
        tensors = shard_io.empty_tensors({name: one for name, one in layout.items() if not name.endswith(".amax_history")})
        stored.read({f"fp8.{name}": tensor for name, tensor in tensors.items()})
        checkpoint.verify_opened()
    return begun_scales(tensors)


def begun_scales(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The delayed scales in the records of a model's FP8 state, in the form of `stored_scales`."""
    scales = {name.removesuffix(".scale"): tensor for name, tensor in tensors.items() if name.endswith(".scale")}
    begun = {name: tensors.get(f"{name}.begun", scale != 1) for name, scale in scales.items()}
    return {name: scale for name, scale in scales.items() if bool(begun[name].all())}


def has_own_code(checkpoints: Path, wanted: shard_io.Layout, ranks: Ranks) -> bool:
    """True if a run's newest readable checkpoint has none of the names `wanted`: it is from the model's original code."""

    def look() -> bool:
        for _, path in manifest.step_folders(checkpoints):
            with contextlib.suppress(OctavoError, OSError):
                return wanted.keys().isdisjoint(_stored_weights(path))
        return False

    return ranks.on_rank_0(look)


def check_stored_weights(path: Path, wanted: shard_io.Layout, ranks: Ranks) -> None:
    """Refuse a checkpoint whose weights differ from a model's in stored names, shapes or dtypes. Collective."""
    shard_io.check_layout(path, ranks.on_rank_0(lambda: _stored_weights(path)), wanted)


def _stored_weights(path: Path) -> shard_io.Layout:
    with OpenCheckpoint(path) as checkpoint:
        return shard_io.subset(open_tensors(checkpoint).layout, "model.")
