"""Export a run, or a model in memory, to a folder that Hugging Face loads.

Parameters are exported in the dtype of training, bit for bit. The run's folder suffices: model.source and data may be deleted.
Weights are read, or gathered from the ranks, for one output file at a time: the whole model need not fit in memory.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.build import BuildOptions, build_model
from octavo.checkpoint.manifest import newest_whole, step_folders
from octavo.checkpoint.reader import StoredWeights, read_state
from octavo.checkpoint.shard_io import empty_tensors, layout_of
from octavo.checkpoint.writer import weights
from octavo.collectives.whole import whole_tensor
from octavo.config.run import RunConfig
from octavo.data.special_tokens import ROLES, SpecialTokens
from octavo.data.tokenizer import other_beside
from octavo.dtypes import torch_dtype
from octavo.errors import InputError, first_line, nearest, some, unknown, warn
from octavo.models.convert import (
    Conversion,
    Encode,
    check_decoder,
    conversion,
    conversion_of,
    new_folder,
    other_model,
    warn_of_other_weights,
    write_pretrained,
    write_weights,
)
from octavo.models.decoder import Decoder
from octavo.models.families import decoder_spec, with_moe
from octavo.models.fingerprint import fingerprint_of
from octavo.models.generation import FILE, GenerationFile, from_model_config, load_generation_config
from octavo.models.lora import Adapted, adapted
from octavo.models.peft_folder import merged, peft_tensors, write_folder
from octavo.models.sources import load_config, weights_folder
from octavo.models.structure import difference_from, tensors_of, warn_of_hooks
from octavo.models.vision import check_blocks
from octavo.models.weight_loader import WeightLoader, folder_weights
from octavo.nn.derived import written_class
from octavo.nn.lora import is_adapter
from octavo.nn.plain_names import stored_names
from octavo.parallel.calls import together
from octavo.parallel.coordination import Ranks, writing_ranks
from octavo.parallel.deferred_init import delayed_init
from octavo.parallel.saving import WHOLE_STATE
from octavo.run.folder import RunFolder
from octavo.storage import local_path


def export(model_or_path: nn.Module | str | Path, folder: str | Path) -> None:
    """Write a model, or the newest whole checkpoint of a run, for `AutoModelForCausalLM.from_pretrained`.

    For timm's vision transformer with Octavo's blocks, weights have timm's names, for `load_state_dict`.
    All ranks call it and rank 0 writes; the parameters of a sharded model are gathered one by one.

    Args:
        model_or_path: a transformed model, or the folder of a run, from which the tokenizer is copied too.
        folder: a new or empty folder.

    Raises:
        InputError: the path is not a run, the folder is not empty or cannot be written, the model is not transformers', or some
            rank does not call this.
        OctavoError: no checkpoint of the run is complete, or the disk is full; no folder is left.
    """
    to = local_path(folder, "octavo.export: folder")
    source = model_or_path
    if not isinstance(source, nn.Module):
        source = local_path(source, "octavo.export: model_or_path")
    with together("octavo.export"):
        _export(source, to, writing_ranks())


def _export(model_or_path: nn.Module | Path, to: Path, ranks: Ranks) -> None:
    if not isinstance(model_or_path, nn.Module):
        ranks.on_rank_0(lambda: export_run(model_or_path, to))
        return
    if (adapters := adapted(model_or_path)) is not None:
        _export_adapters(model_or_path, adapters, to, ranks)
        return
    config, way = getattr(model_or_path, "config", None), conversion_of(model_or_path)
    own_code = model_or_path if isinstance(model_or_path, PreTrainedModel) and way is None else None
    if own_code is not None:
        _check_of_transformers(own_code)
    else:
        config = config if hasattr(config, "save_pretrained") else None
        if way is None:
            _check_own_code(model_or_path, config)
    check_decoder(model_or_path)
    check_blocks(model_or_path)
    ranks.on_rank_0(lambda: check_empty(to))
    generation = getattr(model_or_path, "generation_config", None)
    write_gathered(weights(model_or_path), config, own_code or way, to, ranks, generation)


def _export_adapters(model: nn.Module, adapters: Adapted, to: Path, ranks: Ranks) -> None:
    """Write the adapters of a model in memory as a PEFT folder; they are small and gathered together."""
    ranks.on_rank_0(lambda: check_empty(to))
    whole = {name: whole_tensor(tensor).cpu() for name, tensor in weights(model).items()}
    names = [name for name, _ in model.named_parameters()]
    source = str(getattr(model.config, "_name_or_path", "")) or None

    def write() -> None:
        with new_folder(to) as new:
            write_folder(whole, adapters, conversion(model.spec), names, new, source)  # type: ignore[arg-type]

    ranks.on_rank_0(write)


def _check_own_code(model: nn.Module, config: Any) -> None:
    """Raise an InputError for a model whose weight names differ from those of its config's transformers model."""
    kind = type(model).__name__.removeprefix("FSDP")
    if hasattr(model, "merge_and_unload"):
        raise InputError(
            f"octavo.export: {kind} has adapters: model.save_pretrained(folder) writes only these, octavo.export("
            "model.merge_and_unload(), folder) the whole model with them."
        )
    remedy = "save model.state_dict(), its weights under the model's names, by safetensors.torch.save_model(model, file)."
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        remedy = f"save its weights under the model's names: {WHOLE_STATE}, for safetensors.torch.save_file there."
    if config is None:
        raise InputError(
            f"octavo.export: {kind} has no Hugging Face config (model.config), so Hugging Face could not load it; {remedy}"
        )
    try:
        with delayed_init():
            reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    except ValueError:  # not a causal language model
        reference = None
    theirs, ours = ({} if m is None else tensors_of(m) for m in (reference, model))
    if other := [name for name in ours if name not in theirs or theirs[name][0] != ours[name][0]]:
        raise InputError(
            f"octavo.export: {kind} is not a transformers model, and {some(other)} of it not in the model that its config"
            f" describes ({getattr(config, 'model_type', '?')}); {remedy}"
        )
    if reference is not None and (different := difference_from(model, reference, root=False)):
        raise other_model(different)
    warn_of_hooks(model)


def _check_of_transformers(model: PreTrainedModel) -> None:
    """Raise an InputError for a transformers model that `from_pretrained` would not build from its config."""
    cls, config = written_class(model), model.config
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(
            f"octavo.export: {cls.__name__} has adapters: model.save_pretrained(folder) writes only these. For the whole model "
            "add them by get_peft_model, and export its merge_and_unload()."
        )
    known = [base.__name__ for base in cls.__mro__[1:] if _is_model_of_transformers(base)]
    if known and not _is_model_of_transformers(cls) and type(config).__module__.startswith("transformers."):
        raise InputError(
            f"octavo.export: {cls.__name__} is a custom class, and {type(config).__name__} loads as {known[0]}, another "
            f"model: save it by model.save_pretrained(folder), for {cls.__name__}.from_pretrained(folder)."
        )
    try:
        with delayed_init():
            reference = cls._from_config(copy.deepcopy(config))  # type: ignore[attr-defined]
    except Exception as error:  # a model's constructor may raise anything for an edited config
        raise other_model(
            f"{cls.__name__} cannot be built from model.config: {type(error).__name__}: {first_line(error)}"
        ) from None
    if different := difference_from(model, reference):
        raise other_model(different)
    warn_of_hooks(model)


def _is_model_of_transformers(cls: type) -> bool:
    """True for a class that transformers loads, other than a family's base class."""
    return (
        issubclass(cls, PreTrainedModel)
        and cls.__module__.startswith("transformers.models.")
        and not cls.__name__.endswith("PreTrainedModel")
    )


def write_gathered(
    tensors: Mapping[str, torch.Tensor],
    config: Any,
    way: Conversion | PreTrainedModel | None,
    to: Path,
    ranks: Ranks,
    generation: Any,
    encode: Encode | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write on rank 0, which broadcasts each tensor's name, so that all ranks join its gather, and None at the end.

    encode, more: as in `write_pretrained`.
    """
    shapes = empty_tensors(layout_of(tensors), "meta")

    def gathered(name: str) -> torch.Tensor:
        ranks.on_rank_0(lambda: name)
        return whole_tensor(tensors[name])

    def write() -> str | None:
        if config is None:
            write_weights(shapes, to, way, read=gathered)
        else:
            model = way if isinstance(way, PreTrainedModel) else None
            write_pretrained(shapes, config, to, read=gathered, model=model, generation=generation, encode=encode, more=more)
        return None

    while (name := ranks.on_rank_0(write)) is not None:  # on rank 0, `write` returns None at the end
        whole_tensor(tensors[name])


def export_run(run: Path, to: Path, checkpoint: str | None = None, *, merge: bool = False) -> Path:
    """Write a checkpoint of `run` (`step-N`, or the newest whole one) to the folder `to`; returns the checkpoint.

    For a run with adapters a PEFT folder of them; merge: the whole model, with each sum of a weight and its adapters computed
    in float32 and rounded once to the dtype of the frozen weights.

    Raises:
        InputError: `run` is no run, `to` is not an empty folder, or the run has no such checkpoint.
        OctavoError: no checkpoint is whole.
    """
    config = run_config(run)
    check_target(run, to)
    if config.lora.rank is None and merge:
        raise InputError(f"--merge: {run} has no adapters (lora.rank), and its export is the whole model. Leave --merge out.")
    if config.lora.rank is not None and not merge:
        return _export_adapters_of_run(run, config, to, checkpoint)
    opened = open_run(run, config, checkpoint)
    write_run(opened, to)
    return opened.checkpoint


def check_target(run: Path, to: Path) -> None:
    """Raise an InputError for a folder that is not empty, or that the run would delete."""
    if to.resolve().is_relative_to((run / "checkpoints").resolve()):
        raise InputError(
            f"--to {str(to)!r} is among the run's checkpoints, which the run deletes in time. Give another folder."
        )
    check_empty(to)


def write_run(opened: OpenRun, to: Path, encode: Encode | None = None, more: Mapping[str, Any] | None = None) -> None:
    """Write the weights of a checkpoint with config, generation config and tokenizer. encode, more: see `write_pretrained`."""
    generation, refused = opened.generation.accepted()
    for key, reason in refused.items():
        warn(f"{FILE}: {key} = {opened.generation.values[key]!r} is dropped, since transformers refuses it: {reason}")
    if opened.dropped:
        warn(f"{FILE}: {some(opened.dropped)}: dropped, since their ids belong to a tokenizer other than the run's.")
    if opened.tokenizer is not None and (other := other_beside(opened.tokenizer, opened.config)):
        warn(other)
    write_pretrained(
        opened.shapes, opened.config, to, opened.tokenizer, read=opened.read, generation=generation, encode=encode, more=more
    )


def _export_adapters_of_run(run: Path, config: RunConfig, to: Path, name: str | None) -> Path:
    checkpoint, hf_config = _checkpoint_of(run, name), _config_of_run(run, config)
    model = base_on_meta(config, hf_config)
    adapters = adapted(model)
    assert adapters is not None
    _check_scale(checkpoint, adapters)
    stored = StoredWeights(checkpoint)
    names = [name for name, _ in model.named_parameters()]
    with new_folder(to) as new:
        write_folder({**stored}, adapters, conversion(model.spec), names, new, config.model.source)
        for path in sorted((RunFolder(run).tokenizer).iterdir()) if RunFolder(run).tokenizer.is_dir() else ():
            if path.is_file():
                shutil.copyfile(path, new / path.name)
    for said in _other_base(config, hf_config):
        warn(f"{to}: {said} octavo export --merge writes the whole model.")
    return checkpoint


def _other_base(config: RunConfig, hf_config: Any) -> Iterator[str]:
    """Notices about differences between base model and `model.source` that a PEFT folder cannot express."""
    source, vocabulary = config.model.source, hf_config.vocab_size
    if not config.model.load:
        yield f"the adapters were trained on random weights (model.load = false), not on those of {source!r}."
    if config.model.load and config.model.config:
        keywords = ", ".join(f"{key}={getattr(hf_config, key)!r}" for key in config.model.config)
        yield (
            "the adapters were trained with other positions than the base's, which PEFT's format cannot store. Load the base "
            f"by AutoModelForCausalLM.from_pretrained({source!r}, {keywords})."
        )
    if config.model.resize:
        yield (
            f"the adapters were trained with a vocabulary of {vocabulary} tokens (model.resize); the base lacks its new rows. "
            f"Before PeftModel.from_pretrained call model.resize_token_embeddings({vocabulary}, pad_to_multiple_of=None), and "
            "set each new row to the mean of the old ones, unless lora.save_whole has both embedding and head."
        )


def base_on_meta(config: RunConfig, hf_config: Any) -> Decoder:
    """The decoder of a run with adapters, without values."""
    model = build_model(hf_config, _adapter_options(config), device="meta")
    assert isinstance(model, Decoder)
    return model


def _adapter_options(config: RunConfig) -> BuildOptions:
    """Build options of a run with adapters, as far as they affect its weights; no adapter folder is read."""
    lora = config.lora.options
    assert lora is not None
    return BuildOptions(
        dtype=torch_dtype(config.model.dtype),
        params_dtype=torch_dtype(config.model.params_dtype),
        seed=config.train.seed,
        moe=config.moe,
        resize=config.model.resize,
        lora=dataclasses.replace(lora, load=None, base="params_dtype"),
    )


def _check_scale(checkpoint: Path, adapters: Adapted) -> None:
    """Refuse an adapter scale other than that of training: lora.alpha or lora.rslora of the run changed."""
    trained, now = (read_state(checkpoint).get("lora") or {}).get("scale"), adapters.options.scale
    if trained is not None and trained != now:
        raise InputError(
            f"{checkpoint} was trained with adapters scaled by {trained:g}, but the run file gives {now:g}: restore lora.alpha "
            "and lora.rslora."
        )


def _merged(
    checkpoint: Path, config: RunConfig, hf_config: Any, *, exact: bool
) -> tuple[Mapping[str, torch.Tensor], Callable[[str], torch.Tensor]]:
    """(shapes of a run's merged weights by stored name; a function that returns the values of one).

    exact: return merged weights in float32, unrounded.

    Raises:
        InputError: the base is no longer the one that the adapters were trained on.
    """
    model = base_on_meta(config, hf_config)
    names = stored_names(model)
    by_stored_name = {names.get(name, name): name for name, _ in model.named_parameters()}
    frozen = {name for name, theirs in by_stored_name.items() if not model.get_parameter(theirs).requires_grad}
    shapes = {name: model.get_parameter(theirs) for name, theirs in by_stored_name.items() if not is_adapter(name)}
    if config.model.load:
        folder = weights_folder(config.model.source)
        load = WeightLoader(model, folder_weights(folder, model, hf_config, resize=config.model.resize))

        def base(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            out = torch.empty(shapes[name].shape, dtype=dtype or shapes[name].dtype)
            load(by_stored_name[name], out, 0)
            return out
    else:  # initial weights of a seed
        initial = dict(build_model(hf_config, _adapter_options(config), device="cpu").named_parameters())

        def base(name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            return initial[by_stored_name[name]].detach().to(dtype or shapes[name].dtype)

    saved = read_state(checkpoint).get("lora") or {}
    if (now := fingerprint_of(frozen, base)) != saved.get("base"):
        raise InputError(
            f"{checkpoint} holds adapters of another base: the frozen weights had the hash {str(saved.get('base'))[:12]}, and "
            f"those of model.source = {config.model.source!r} have {now[:12]}. Restore the weights; octavo export without "
            "--merge writes only the adapters."
        )
    stored, way, options = StoredWeights(checkpoint), conversion(model.spec), adapted(model)
    assert options is not None
    _check_scale(checkpoint, options)
    adapters = peft_tensors({name: stored[name] for name in stored if is_adapter(name)}, way)

    def read(name: str) -> torch.Tensor:
        if name not in frozen:
            return stored[name]
        # A base in FP8 is exported by its bytes, without a conversion through the parameters' dtype.
        weight = base(name, torch.float32 if config.lora.base == "fp8" else None)
        whole = merged(name, weight.float(), adapters, way, options)
        return whole if exact else whole.to(shapes[name].dtype)

    return shapes, read


@dataclass(frozen=True)
class OpenRun:
    """A checkpoint of a run with the Hugging Face configs of its weights.

    Attributes:
        shapes: the weights under Octavo's names, on the meta device.
        read: returns the values of one.
        tokenizer: its folder; None for a run without one.
        dropped: keys of the source's generation config that `generation` lacks, since their ids belong to another tokenizer.
    """

    checkpoint: Path
    config: Any
    generation: GenerationFile
    tokenizer: Path | None
    shapes: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    dropped: Sequence[str] = ()


def run_config(run: Path) -> RunConfig:
    """The configuration of a run; an InputError for a folder that is not a run."""
    config = RunFolder(run).config() if run.is_dir() else None
    if config is None:
        guess = nearest(run.name, [p.parent.name for p in run.parent.glob("*/run.toml")])
        hint = f" Did you mean {run.parent / guess}?" if guess else " Give the folder that octavo train printed at its end."
        raise InputError(f"{str(run)!r} is not the folder of a run: it has no run.toml.{hint}")
    return config


def open_run(run: Path, config: RunConfig, name: str | None = None, *, exact: bool = False) -> OpenRun:
    """The newest complete checkpoint of a run, or the one named "step-N"; adapters are merged into their base.

    exact: return merged weights in float32, not rounded to the parameters' dtype.

    Raises:
        InputError: there is no checkpoint, or none of that name; or the base is no longer that of the adapters.
        OctavoError: it is damaged, or none is complete.
    """
    folder = RunFolder(run)
    checkpoint, hf_config = _checkpoint_of(run, name), _config_of_run(run, config)
    if config.moe.moe_load_balancing == "sinkhorn" and (spec := with_moe(decoder_spec(hf_config)[0], hf_config, config.moe)):
        warn_of_other_weights(spec)
    tokenizer = folder.tokenizer if folder.tokenizer.is_dir() else None
    generation, dropped = _fit_token_ids(hf_config, load_generation_config(str(folder.model)), tokenizer, config)
    shapes: Mapping[str, torch.Tensor]
    read: Callable[[str], torch.Tensor]
    if config.lora.rank is None:
        stored = StoredWeights(checkpoint)
        shapes, read = empty_tensors(stored.layout, "meta"), stored.__getitem__
    else:
        shapes, read = _merged(checkpoint, config, hf_config, exact=exact)
    return OpenRun(checkpoint, hf_config, generation, tokenizer, shapes, read, dropped)


def _checkpoint_of(run: Path, name: str | None) -> Path:
    """The newest complete checkpoint of a run, or the one named "step-N"; errors as in `open_run`."""
    folder = RunFolder(run)
    if name is None:
        checkpoint, _ = newest_whole(folder.checkpoints, warn)
    else:
        names = [path.name for _, path in step_folders(folder.checkpoints)]
        if names and name not in names:
            raise unknown("checkpoint", name, names, key="--checkpoint")
        checkpoint = folder.checkpoints / name if names else None
    if checkpoint is None:
        raise InputError(f"{run} has no checkpoint yet: run octavo train {folder.run_file} first.")
    return checkpoint


def _config_of_run(run: Path, config: RunConfig) -> Any:
    """The Hugging Face config of a run."""
    folder = RunFolder(run)
    if (folder.model / "config.json").is_file():
        return load_config(str(folder.model))
    return load_config(config.model.source, config.model.config)  # runs of older versions


def _fit_token_ids(
    config: Any, generation: GenerationFile | None, tokenizer: Path | None, run: RunConfig
) -> tuple[GenerationFile, Sequence[str]]:
    """Give a config the ids of the run's tokenizer; returns the generation config with the same ids, and its dropped keys."""
    tokens = None if tokenizer is None else SpecialTokens.of(tokenizer)
    if tokens is not None:
        tokens.fit(config)
    if generation is None:
        return from_model_config(config), ()
    if tokens is None:
        return generation, ()
    ids = SimpleNamespace(**{role: generation.values.get(role) for role in ROLES})
    dropped: list[str] = []
    if run.data.tokenizer == "train" or not tokens.owns(ids):  # another vocabulary has other ids
        dropped = [key for key in generation.ids() if key not in ROLES]
        ids = SimpleNamespace(**{role: getattr(config, role, None) for role in ROLES})
    fitted = {role: one for role, one in tokens.fit(ids).items() if role in generation.values or role == "eos_token_id"}
    return generation.changed({**dict.fromkeys(dropped), **fitted}), dropped


def check_empty(to: Path) -> None:
    """Raise an InputError for a path that exists and is not an empty folder."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{str(to)!r} exists and is not empty: export writes a new folder. Give another path.")
