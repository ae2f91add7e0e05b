"""The folder of a run: layout, lock, and the record of each start.

A start that is refused leaves nothing: a folder that it created is removed unless something was recorded in it.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.checkpoint.manifest import step_folders
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.provenance import code_version, version
from octavo.storage import FolderLock, write_atomic

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy", "tokenizers", "datasets")


class RunFolder:
    """Paths in the folder of a run; `bf16` inside it has the same layout, for the run without FP8 of train.compare_bf16."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.toml"  # the resolved run file: `octavo train` on it continues or reproduces the run
        self.choices = path / "choices.json"  # layers that fp8.enabled = "auto" excludes from FP8
        self.environment = path / "environment.json"  # versions, device, code and command of each start
        self.metrics = path / "metrics.jsonl"  # one object a step
        self.checkpoints = path / "checkpoints"  # step-N/
        self.model = path / "model"  # Hugging Face's config and generation config, for an export without model.source
        self.tokenizer = path / "tokenizer"  # a copy, for an export without the prepared data

    @property
    def has_checkpoints(self) -> bool:
        """True if there is a checkpoint, whole or not."""
        return bool(step_folders(self.checkpoints))

    def config(self) -> RunConfig | None:
        """The configuration of the last start; None for a folder without a run.

        Raises:
            InputError: there are checkpoints but no run file.
        """
        if self.run_file.is_file():
            return RunConfig.from_file(self.run_file, recorded=True)
        if self.has_checkpoints:
            raise InputError(
                f"{self.checkpoints} has checkpoints, but {self.run_file} is missing: put it back, or set another train.output."
            )
        return None

    def record(self, config: RunConfig, hf_config: Any, tokenizer: Path | None, device: str) -> None:
        """Write the run file, the Hugging Face config, the source's generation config, the environment and the tokenizer."""
        from octavo.models.sources import load_generation_config  # imports transformers, which a finished run does not need

        write_atomic(self.run_file, config.to_toml())
        self.model.mkdir(exist_ok=True)
        write_atomic(self.model / "config.json", hf_config.to_json_string())
        generation = load_generation_config(config.model.source)
        if generation is not None:
            write_atomic(self.model / "generation_config.json", generation.to_json_string())
        starts = json.loads(self.environment.read_text())["starts"] if self.environment.is_file() else []
        write_atomic(self.environment, json.dumps({"starts": [*starts, _environment(device)]}, indent=1) + "\n")
        if tokenizer is not None and not self.tokenizer.exists():
            temporary = self.path / ".tmp-tokenizer"
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
            shutil.copytree(tokenizer, temporary)
            temporary.rename(self.tokenizer)


@contextmanager
def locked(path: Path) -> Iterator[RunFolder]:
    """The run folder at `path`, locked by this process.

    Raises:
        InputError: another process has the lock (the message names it), or the folder cannot be written.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(path))
        except OSError as error:
            raise InputError(f"train.output = {str(path)!r} cannot be used: {error.strerror}. Name another folder.") from None
        try:
            yield RunFolder(path)
        except BaseException:
            if made and {entry.name for entry in path.iterdir()} <= {".lock"}:  # created here and still empty
                (path / ".lock").unlink(missing_ok=True)
                with suppress(OSError):
                    for folder in made:
                        folder.rmdir()
            raise


def _environment(device: str) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "octavo": __version__,
        "code": code_version(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": device,
    }
