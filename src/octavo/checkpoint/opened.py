"""Open files of a checkpoint, verified and read through the same descriptors.

A path may name another file at its next use: another job saves under the same name, or an old checkpoint is removed. So a
folder is opened once, each file in it once, and both stay open. Bytes are read, not mapped: a file truncated by another process
is then an error, not a signal. A file overwritten in place is detected by its stamp, which the kernel maintains.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import stat
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.errors import OctavoError
from octavo.process import process

_BLOCK = 1 << 20  # bytes per read for a checksum
_LARGEST_READ = 1 << 30  # the kernel reads at most 2 GiB at once
_SETTLED = 2_000_000_000  # ns: coarsest file system clock, within which a file may change without a new stamp
_SPARE_DESCRIPTORS = 256  # for other files of the process


class Damaged(OctavoError):
    """A checkpoint differs from its manifest, or contradicts itself; the message names the file and the difference."""


class Stamp(NamedTuple):
    """The kernel's record of a file's content, the same on all hosts of a file system; times in ns."""

    inode: int
    size: int
    modified: int
    changed: int


class OpenFolder:
    """A folder and its files, each opened at first use and closed with the folder; a context manager.

    Raises:
        Damaged: the folder, or in a method a file, is missing or of the wrong type.
        OctavoError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests: dict[Stamp, str] = {}
        descriptors: dict[str, int] = {}
        self._descriptors = descriptors
        self._close = weakref.finalize(self, _close, descriptors)
        with _explaining(path):
            descriptors["."] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def opened(self) -> list[str]:
        """Names of the open files."""
        return [name for name in self._descriptors if name != "."]

    def names(self) -> list[str]:
        """Names of all files and folders inside, sorted."""
        with _explaining(self.path), os.scandir(self._descriptors["."]) as entries:
            return sorted(entry.name for entry in entries)

    def stamp(self, name: str) -> Stamp:
        """The current stamp of a file."""
        with _explaining(self.path / name):
            status = os.fstat(self._descriptor(name))
        return Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def read(self, name: str) -> bytes:
        """A whole file."""
        content = bytearray(self.stamp(name).size)
        self.read_into(name, memoryview(content), 0)
        return bytes(content)

    def read_into(self, name: str, block: memoryview, start: int) -> None:
        """Fill a block with the bytes of a file from `start` on."""
        self.read_runs(name, block, len(block), [start])

    def read_runs(self, name: str, block: memoryview, length: int, starts: Iterable[int]) -> None:
        """Fill a block with runs of `length` bytes that begin at `starts` in a file."""
        with _explaining(self.path / name):
            descriptor = self._descriptor(name)
            for number, start in enumerate(starts):
                run = block[number * length : (number + 1) * length]
                done = 0
                while done < length:
                    count = os.preadv(descriptor, [run[done : done + _LARGEST_READ]], start + done)
                    if count == 0:
                        raise Damaged(f"{self.path / name} ends before byte {start + length:,}")
                    done += count

    def sha256(self, name: str) -> str:
        """The hexadecimal SHA-256 of a file, computed once per stamp."""
        stamp, now = self.stamp(name), time.time_ns()
        digest = self._digests.get(stamp) or process.digests.get(stamp) or self._hash(name, stamp.size)
        self._digests[stamp] = digest
        if now - max(stamp.modified, stamp.changed) > _SETTLED:
            process.digests[stamp] = digest
        return digest

    def _hash(self, name: str, size: int) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(min(_BLOCK, size)))
        for start in range(0, size, _BLOCK):
            part = block[: min(_BLOCK, size - start)]
            self.read_into(name, part, start)
            digest.update(part)
        return digest.hexdigest()

    def known(self) -> dict[Stamp, str]:
        """The known SHA-256 of open files by stamp, for `trust` on other ranks."""
        stamps = [self.stamp(name) for name in self.opened]
        return {stamp: process.digests[stamp] for stamp in stamps if stamp in process.digests}

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the last flag: no wait for the writer of a pipe
            descriptor = os.open(name, flags, dir_fd=self._descriptors["."])
            if self._descriptors.setdefault(name, descriptor) != descriptor:  # another thread was faster
                os.close(descriptor)
            elif not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Damaged(f"{self.path / name} is not a file")
        return self._descriptors[name]


def trust(known: dict[Stamp, str]) -> None:
    """Reuse the SHA-256 of files that another rank has hashed."""
    process.digests.update(known)


def allow_open_files(number: int) -> None:
    """Raise the soft limit of open files, at most to the hard limit, by `number` files."""
    needed = number + _SPARE_DESCRIPTORS
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit not in (unlimited, most) and limit < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if most == unlimited else min(needed, most), most))


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # a ValueError: a name with a null byte
        raise OctavoError(f"{path} cannot be read: {error}") from None


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
