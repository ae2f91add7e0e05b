"""The request for a job, shared by the estimator and the trainer.

`Request.check` checks everything that can be checked without a job folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker import code
from octavo.compat.sagemaker.checkpoints import Checkpoints, checkpoints_of
from octavo.compat.sagemaker.distribution import Layout, fit_layout
from octavo.compat.sagemaker.environment import TOOLKIT, Encoding
from octavo.compat.sagemaker.keys import ESTIMATOR, Keys
from octavo.errors import InputError, nearest
from octavo.launch import addresses
from octavo.launch.job import JOBS


@dataclass
class Request:
    """A job to start.

    Attributes:
        entry: the script.
        source_dir: the folder that is copied into the job; None: only the script.
        hyperparameters: of the script, checked.
        environment: further variables, checked.
        instance_type: AWS's name, "local" or "local_gpu".
        instance_count: instances of this type.
        distributed: True for several ranks.
        parameters: SMP's, checked; None without SMP.
        notes: on libraries that are replaced.
        processes: ranks on each instance; None: one for each GPU.
        output: the folder of jobs, or a remote address for results; None: ./jobs.
        base_job_name: beginning of the job's name; None: the script's name.
        dependencies: files and folders beside the script.
        ignored: patterns of names in `source_dir` that are left out.
        requirements: a file of packages in source_dir; a message says that a job does not install them.
        max_run: limit in seconds.
        checkpoints: the address of checkpoints.
        checkpoint_path: their folder below /opt/ml.
        keys: names in messages.
        encoding: conversions of hyperparameters to text.
    """

    entry: str
    source_dir: str | None
    hyperparameters: dict[str, Any]
    environment: dict[str, str]
    instance_type: str
    instance_count: int
    distributed: bool
    parameters: Mapping[str, Any] | None
    notes: Sequence[str] = ()
    processes: int | None = None
    output: str | None = None
    base_job_name: str | None = None
    dependencies: Sequence[str] = field(default_factory=list)
    ignored: Sequence[str] = ()
    requirements: str | None = "requirements.txt"
    max_run: float | None = None
    checkpoints: str | None = None
    checkpoint_path: str | None = None
    keys: Keys = ESTIMATOR
    encoding: Encoding = TOOLKIT

    def check(self) -> None:
        """Check the arguments of the call.

        Raises:
            InputError: the first fault.
        """
        seconds = self.max_run
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
            raise InputError(f"{self.keys.runtime} = {seconds!r} is not a number of seconds above 0.")
        self.script()
        self.layout()
        jobs_of(self.output, self.keys.output)
        self.checkpoint_folder()
        code.check_dependencies(self.dependencies)

    def script(self) -> tuple[Path, Path]:
        """(source_dir, or the script's folder; the script's path).

        Raises:
            InputError: one of them does not exist, or the script is not a .py file.
        """
        entry, folder_name = self.keys.entry, self.source_dir
        if folder_name is not None and (":" in folder_name.partition("/")[0] or folder_name.endswith(".tar.gz")):
            raise InputError(f"source_dir = {folder_name!r}: give a folder of this machine.")
        folder = addresses.expanded(folder_name or ".", "source_dir")
        if not folder.is_dir():
            raise InputError(f"source_dir = {folder_name!r} is not a folder. Give the one that holds {self.entry!r}.")
        script = folder / addresses.expanded(self.entry, entry)
        if script.suffix != ".py":
            raise InputError(f"{entry} = {self.entry!r} is not a Python script: give a .py file.")
        if not script.is_file():
            near = nearest(script.name, [path.name for path in script.parent.glob("*.py")])
            hint = f" Did you mean {near!r}?" if near else ""
            raise InputError(f"{entry} = {self.entry!r} is not in {str(script.parent)!r}.{hint}")
        if folder_name is None:
            return script.parent.absolute(), script.absolute()
        if not script.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{entry} = {self.entry!r} lies outside of source_dir = {folder_name!r}.")
        return folder.absolute(), script.absolute()

    def layout(self) -> Layout:
        """The processes on this machine.

        Raises:
            InputError: arguments that contradict each other or do not fit this machine.
        """
        return fit_layout(
            self.instance_type,
            self.instance_count,
            self.hyperparameters,
            distributed=self.distributed,
            parameters=self.parameters,
            processes=self.processes,
            keys=self.keys,
        )

    def checkpoint_folder(self) -> Checkpoints:
        """The folder and address of checkpoints.

        Raises:
            InputError: they cannot be used.
        """
        return checkpoints_of(self.checkpoints, self.checkpoint_path, self.keys)


def jobs_of(output: str | Path | None, key: str = ESTIMATOR.output) -> tuple[Path, str | None]:
    """(folder of jobs, remote address for results or None) for an `output_path`. key: its name in messages.

    Raises:
        InputError: it is empty, or has an unknown scheme.
    """
    if output is None:
        return JOBS, None
    address = str(output)
    if not address:
        raise InputError(f"{key} is empty: give a folder, or leave it out for ./jobs.")
    local = addresses.local_path(address, key)
    if local is None:
        addresses.check_address(address, f"{key} = {address!r}")
        return JOBS, address
    return local, None
