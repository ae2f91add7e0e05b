"""Export a run, or a model in memory, to a folder that Hugging Face loads.

Parameters keep the dtype in which they were trained, bit for bit. The run's folder is enough: model.source and data may be
gone. Weights are read, or gathered from the ranks, for one output file at a time: the whole model need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from octavo.checkpoint.manifest import newest_whole
from octavo.checkpoint.reader import StoredWeights
from octavo.checkpoint.shard_io import empty_tensors, layout_of
from octavo.checkpoint.writer import weights
from octavo.data.special_tokens import SpecialTokens
from octavo.errors import InputError, nearest, warn
from octavo.models.convert import Conversion, conversion_of, write_pretrained, write_weights
from octavo.models.sources import load_config, load_generation_config
from octavo.parallel.coordination import Ranks, writing_ranks
from octavo.run.folder import RunFolder
from octavo.storage import write_atomic


def export(model_or_path: nn.Module | str | Path, folder: str | Path) -> None:
    """Write a model, or the newest whole checkpoint of a run, for `AutoModelForCausalLM.from_pretrained`.

    Of timm's vision transformer with Octavo's blocks the weights are written under timm's names, for `load_state_dict`.
    All ranks call it and rank 0 writes; the parameters of a sharded model are gathered one by one.

    Args:
        model_or_path: a transformed model, or the folder of a run, whose tokenizer is copied too.
        folder: a new or empty folder.

    Raises:
        InputError: the path is no run, the folder is not empty, or the model has no Hugging Face config.
        OctavoError: no checkpoint of the run is whole.
    """
    ranks, to = writing_ranks(), Path(folder)
    if not isinstance(model_or_path, nn.Module):
        run = Path(model_or_path)
        ranks.on_rank_0(lambda: export_run(run, to))
        return
    config, way = getattr(model_or_path, "config", None), conversion_of(model_or_path)
    if not hasattr(config, "save_pretrained"):
        if way is None:
            raise InputError(
                "octavo.export: the model has no Hugging Face config (model.config), so Hugging Face could not load it."
            )
        config = None
    ranks.on_rank_0(lambda: _check_empty(to))
    own_code = model_or_path if isinstance(model_or_path, PreTrainedModel) else None
    _write_gathered(weights(model_or_path), config, own_code or way, to, ranks)


def _write_gathered(
    tensors: Mapping[str, torch.Tensor], config: Any, way: Conversion | PreTrainedModel | None, to: Path, ranks: Ranks
) -> None:
    """Write on rank 0. It broadcasts the name of each tensor, so that all ranks join the gather, and None at the end."""
    shapes = empty_tensors(layout_of(tensors), "meta")

    def gathered(name: str) -> torch.Tensor:
        ranks.on_rank_0(lambda: name)
        return _whole(tensors[name])

    def write() -> str | None:
        if config is None:
            write_weights(shapes, to, way, read=gathered)
        else:
            write_pretrained(shapes, config, to, read=gathered, model=way if isinstance(way, PreTrainedModel) else None)
        return None

    while (name := ranks.on_rank_0(write)) is not None:  # on rank 0, `write` returns None at the end
        _whole(tensors[name])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def export_run(run: Path, to: Path) -> Path:
    """Write the newest whole checkpoint of `run` to the folder `to`; returns the checkpoint.

    Raises:
        InputError: `run` is no run, or `to` is not an empty folder.
        OctavoError: no checkpoint is whole.
    """
    folder = RunFolder(run)
    config = folder.config() if run.is_dir() else None
    if config is None:
        guess = nearest(run.name, [p.parent.name for p in run.parent.glob("*/run.toml")])
        hint = f" Did you mean {run.parent / guess}?" if guess else " Give the folder that octavo train printed at its end."
        raise InputError(f"{str(run)!r} is not the folder of a run: it has no run.toml.{hint}")
    _check_empty(to)
    checkpoint, _ = newest_whole(folder.checkpoints, warn)
    if checkpoint is None:
        raise InputError(f"{run} has no checkpoint yet: run octavo train {folder.run_file} first.")
    if (folder.model / "config.json").is_file():
        hf_config = load_config(str(folder.model))
    else:  # a run of an older version
        hf_config = load_config(config.model.source, config.model.config)
    tokenizer = folder.tokenizer if folder.tokenizer.is_dir() else None
    generation = _fit_token_ids(hf_config, load_generation_config(str(folder.model)), tokenizer)
    stored = StoredWeights(checkpoint)
    write_pretrained(empty_tensors(stored.layout, "meta"), hf_config, to, tokenizer, read=stored.__getitem__)
    write_atomic(to / "generation_config.json", generation.to_json_string())  # save_pretrained refuses some of the Hub's
    return checkpoint


def _fit_token_ids(config: Any, generation: Any | None, tokenizer: Path | None) -> Any:
    """Give a config the ids of the run's tokenizer; returns the generation config, with the same ids."""
    if tokenizer is None:
        return GenerationConfig.from_model_config(config) if generation is None else generation
    tokens = SpecialTokens.of(tokenizer)
    tokens.fit(config)
    if generation is None or not tokens.owns(generation):  # another vocabulary has other ids to stop at
        return GenerationConfig.from_model_config(config)
    tokens.fit(generation)
    return generation


def _check_empty(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{str(to)!r} exists and is not empty: export writes a new folder. Give another path.")
