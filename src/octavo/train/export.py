"""From a run's folder, or a model in memory, to a folder that Hugging Face loads.

The newest whole checkpoint is read under Octavo's names and handed to `octavo.models.weights`, which knows what Hugging
Face calls them. The parameters are written in the dtype in which they were trained, bit for bit. Everything comes from the
run's own folder: the model and the data that it began with may be gone.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from octavo.errors import InputError, nearest
from octavo.models.weights import load_config, weights_of, write_pretrained
from octavo.train.checkpoint import read_weights
from octavo.train.folder import RunFolder, report
from octavo.train.manifest import newest_whole


def export(model_or_path: nn.Module | str | Path, folder: str | Path) -> None:
    """Write a model, or the newest whole checkpoint of a run, as `AutoModelForCausalLM.from_pretrained` loads it.

    Args:
        model_or_path: a transformed model, or the folder of a run, whose tokenizer is copied too.
        folder: new, or empty.

    Raises:
        InputError: the path is no run, the folder has something in it, or the model has no Hugging Face config.
        OctavoError: no checkpoint of the run is whole.
    """
    if not isinstance(model_or_path, nn.Module):
        export_run(Path(model_or_path), Path(folder))
        return
    config = getattr(model_or_path, "config", None)
    if not hasattr(config, "save_pretrained"):
        raise InputError(
            "octavo.export: the model has no Hugging Face config (model.config), so Hugging Face could not load it."
        )
    _check_empty(Path(folder))
    # Hugging Face's names already: `write_pretrained` renames only what it finds under Octavo's.
    write_pretrained(weights_of(model_or_path), config, folder)


def export_run(run: Path, to: Path) -> Path:
    """Write the newest whole checkpoint of `run` to the folder `to`; returns the checkpoint that was used.

    Raises:
        InputError: `run` is no run, or `to` is a folder with something in it.
        OctavoError: no checkpoint is whole.
    """
    folder = RunFolder(run)
    config = folder.config() if run.is_dir() else None
    if config is None:
        guess = nearest(run.name, [p.parent.name for p in run.parent.glob("*/run.toml")])
        hint = f" Did you mean {run.parent / guess}?" if guess else " Give the folder that octavo train named at its end."
        raise InputError(f"{str(run)!r} is not the folder of a run: it has no run.toml.{hint}")
    _check_empty(to)
    checkpoint, _ = newest_whole(folder.checkpoints, report)
    if checkpoint is None:
        raise InputError(f"{run} has no checkpoint yet: run octavo train {folder.run_file} first.")
    if (folder.model / "config.json").is_file():
        hf_config = load_config(str(folder.model))
    else:  # a run of a version that did not keep it
        hf_config = load_config(config.model.source, config.model.config)
    tokenizer = folder.tokenizer if folder.tokenizer.is_dir() else None
    write_pretrained(read_weights(checkpoint), hf_config, to, tokenizer)
    return checkpoint


def _check_empty(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{str(to)!r} exists and is not empty: export writes a new folder. Give another one.")
