"""The folder of a run: layout, lock, and the record of each start.

A refused start leaves no trace: a folder that it created is removed unless something was recorded in it. A folder with files
that are not a run's is refused, since a run writes names such as run.toml, model/config.json and metrics.jsonl.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from octavo._version import __version__
from octavo.checkpoint.manifest import step_folders
from octavo.config.run import RunConfig
from octavo.errors import InputError, OctavoError, some
from octavo.run.provenance import code_version, version
from octavo.storage import NO_SPACE, FolderLock, folder_fault, free_bytes, why_unusable, write_atomic

_PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy", "tokenizers", "datasets")


_BEFORE_A_RUN = (
    *(".lock", ".*.tmp", ".tmp-tokenizer", "choices.json", "tensorboard", "wandb"),  # of a start that was killed
    *("*.log", "*.out", "*.err", "lost+found", ".nfs*"),  # created by schedulers and shells before the run
)
"""Names that may be in a folder before `environment.json`, which the first start writes before its other files."""


class RunFolder:
    """Paths in the folder of a run; `bf16` inside it has the same layout, for the run without FP8 of train.compare_bf16."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.toml"  # the resolved run file: `octavo train` on it continues or reproduces the run
        self.choices = path / "choices.json"  # layers that fp8.enabled = "auto" excludes from FP8
        self.environment = path / "environment.json"  # versions, device, code and command of each start
        self.metrics = path / "metrics.jsonl"  # one JSON object per step
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

    @property
    def ranks(self) -> int | None:
        """Number of ranks of the last start; None before the first start, and if the folder's record has none."""
        last = self._starts()[-1:]
        return next((each.get("ranks") for each in last if isinstance(each, dict)), None)

    def record(
        self,
        config: RunConfig,
        hf_config: Any,
        tokenizer: Path | None,
        device: str,
        ranks: int,
        turn_ends: Sequence[int] = (),
    ) -> None:
        """Write the run file, the Hugging Face config, the source's generation config, the environment and the tokenizer.

        turn_ends: tokens that end a turn in the data, at which generation stops too.

        Raises:
            OctavoError: the disk is full or fails.
        """
        try:
            # Imported here: transformers, which a finished run does not need.
            from octavo.models.generation import load_generation_config, with_ends

            starts = [*self._starts(), _environment(device, ranks)]
            # First: this file marks the folder as a run's.
            write_atomic(self.environment, json.dumps({"starts": starts}, indent=1) + "\n")
            write_atomic(self.run_file, config.to_toml())
            self.model.mkdir(exist_ok=True)
            write_atomic(self.model / "config.json", hf_config.to_json_string())
            if not self.has_checkpoints:  # left by a start with other settings that saved nothing
                (self.model / "generation_config.json").unlink(missing_ok=True)
                shutil.rmtree(self.tokenizer, ignore_errors=True)
            generation = with_ends(load_generation_config(config.model.source), hf_config, turn_ends)
            if generation is not None:
                write_atomic(self.model / "generation_config.json", generation.text)
            if tokenizer is not None and not self.tokenizer.exists():
                temporary = self.path / ".tmp-tokenizer"
                shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
                shutil.copytree(tokenizer, temporary)
                temporary.rename(self.tokenizer)
        except OSError as error:  # shutil.copytree raises a subclass without an errno
            raise _no_space(self.path, error) from None

    def _starts(self) -> list[Any]:
        """The records of earlier starts."""
        if not self.environment.is_file():
            return []
        try:
            starts = json.loads(self.environment.read_text(encoding="utf-8"))["starts"]
            return [*starts]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.environment} is damaged: it has no record of the run's starts. Remove it to continue."
            ) from None


def _no_space(path: Path, error: OSError) -> OctavoError:
    return OctavoError(
        f"the run's files could not be written to {path}: {error.strerror or 'a copy failed'}; {free_bytes(path):,} bytes are "
        "free. Checkpoints are intact: free some space, or move the run's folder and set train.output; then run it again."
    )


def check_output(path: Path) -> None:
    """Refuse a path that is not a folder, cannot be written, or holds files that are not a run's; writes nothing.

    Raises:
        InputError: names the fault, the path and the key to change.
    """
    fault = folder_fault(path)
    try:
        if not fault and path.is_dir() and not (RunFolder(path).environment.is_file() or RunFolder(path).has_checkpoints):
            fault = _foreign(path)
    except OSError as error:
        fault = why_unusable(error)
    if fault:
        raise InputError(f"train.output = {str(path)!r} cannot be used: {fault}")


def _foreign(path: Path) -> str:
    """The fault of a folder with foreign files; "" for an empty one, or one with a run's first files."""
    names = [entry.name + "/" * entry.is_dir() for entry in sorted(path.iterdir())]
    others = [name for name in names if not any(fnmatch(name.rstrip("/"), known) for known in _BEFORE_A_RUN)]
    if not others:
        return ""
    return (
        f"it holds files that are not a run's ({some(others)}), which the run might overwrite. Give a new or an empty "
        f"folder, such as {str(path / 'run')!r}."
    )


@contextmanager
def locked(path: Path) -> Iterator[RunFolder]:
    """The run folder at `path`, locked by this process.

    Raises:
        InputError: another process has the lock (the message names it), the folder cannot be written, or holds other files.
    """
    check_output(path)
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    with ExitStack() as stack:
        try:
            stack.enter_context(FolderLock(path))
        except OSError as error:
            if error.errno in NO_SPACE:
                raise _no_space(path, error) from None
            raise InputError(f"train.output = {str(path)!r} cannot be used: {why_unusable(error)}") from None
        try:
            yield RunFolder(path)
        except BaseException:
            if created and {entry.name for entry in path.iterdir()} <= {".lock"}:  # created here and still empty
                (path / ".lock").unlink(missing_ok=True)
                with suppress(OSError):
                    for folder in created:
                        folder.rmdir()
            raise


def _environment(device: str, ranks: int) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [str(argument) for argument in sys.argv],
        "octavo": __version__,
        "code": code_version(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "device": device,
        "ranks": ranks,
    }
