"""`checkpoint_s3_uri` of a job: the address of checkpoints, which the script finds in /opt/ml/checkpoints.

A local folder is linked into the job, so that several jobs share it and a job resumes from another's checkpoints. From a remote
address, checkpoints are copied into the job's folder before the script starts, and back when the job ends, even if it fails.
SageMaker copies them continuously.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from octavo.compat.sagemaker.keys import Keys
from octavo.errors import InputError
from octavo.launch import addresses
from octavo.storage import folder_fault

_DEFAULT = PurePosixPath("/opt/ml/checkpoints")


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a job's checkpoints, and their address.

    Attributes:
        inside: the folder, relative to the job's.
        local: the folder of this machine to which it is a link; None without.
        remote: the remote address; None without.
    """

    inside: str = "checkpoints"
    local: Path | None = None
    remote: str | None = None

    def lay(self, folder: Path, key: str) -> None:
        """Create the checkpoint folder inside a job's folder.

        Raises:
            InputError: the address cannot be read, or the linked folder cannot be created.
        """
        target = folder / self.inside
        if self.local is None:
            target.mkdir(parents=True)
            if self.remote is not None:
                addresses.fetch(self.remote, target, f"{key} = {self.remote!r}", may_be_empty=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        self.local.mkdir(parents=True, exist_ok=True)
        target.symlink_to(self.local, target_is_directory=True)


def checkpoints_of(address: str | Path | None, path: str | Path | None, keys: Keys) -> Checkpoints:
    """The checkpoints for the SDK's two arguments. Without an address the path has no effect, as in the SDK.

    Raises:
        InputError: an invalid address, or a path outside of /opt/ml/checkpoints.
    """
    if address is None:
        return Checkpoints()
    requested = PurePosixPath(_DEFAULT if path is None else str(path))
    if not requested.is_relative_to(_DEFAULT) or ".." in requested.parts:
        raise InputError(
            f"{keys.checkpoint_path} = {str(path)!r}: {keys.checkpoints} has its files in {_DEFAULT} of a job, or in a folder "
            "in it. Leave it out, and hand that path to the script."
        )
    inside = requested.relative_to("/opt/ml").as_posix()
    text = str(address)
    if not text:
        raise InputError(f"{keys.checkpoints} is empty: give a folder, or leave it out for one in the job's folder.")
    local = addresses.local_path(text, keys.checkpoints)
    if local is None:
        addresses.check_address(text, f"{keys.checkpoints} = {text!r}")
        return Checkpoints(inside, remote=text)
    if local.exists() and not local.is_dir():
        raise InputError(f"{keys.checkpoints} = {text!r} is not a folder.")
    if fault := folder_fault(local):
        raise InputError(f"{keys.checkpoints} = {text!r} cannot be used: {fault}")
    return Checkpoints(inside, local=local)
