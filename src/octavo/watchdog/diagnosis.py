"""Diagnosis: which rank has failed, as a function of the ranks' heartbeats.

It uses no clock, process or network: the heartbeat thread gathers the evidence and acts on the result. A rank that waits for
another looks like one that hangs. Collectives keep the ranks' steps and phases in the same order, so all ranks wait for the one
with the least progress.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from octavo.errors import InputError, OctavoError

START = "start"
_WARM_UP = frozenset({"forward", "backward", "optimizer"})  # compile and connect in the first step
_LONG = frozenset({START, "checkpoint", "validation"})  # no time limit unless a rank waits for another
_PACKED = struct.Struct("<qqq24s")
_DETAIL_CHARACTERS = 1500

Kind = Literal["failed", "input", "killed", "silent", "lost", "stuck", "left", "store"]


@dataclass(frozen=True)
class Progress:
    """The position of a rank's main thread."""

    training: int = 0  # number of the training in this process; a second one restarts its steps at 1
    step: int = 0
    phases: int = 0  # number of phases entered in this step
    phase: str = START  # or "data", "forward", "backward", "optimizer", "checkpoint", "validation", another word
    first: bool = True  # the first step of this training in this process
    since: float = 0.0  # beginning of the phase, on this process's monotonic clock

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: larger is further."""
        return self.training, self.step, self.phases

    def write(self, memory: mmap.mmap | bytearray) -> None:
        """Pack into the first bytes of a shared page, without a system call."""
        _PACKED.pack_into(memory, 0, *self.order, self.phase.encode()[:24])

    @classmethod
    def read(cls, memory: mmap.mmap | bytearray) -> Progress:
        """Unpack from a shared page."""
        training, step, phases, phase = _PACKED.unpack_from(memory)
        return cls(training, step, phases, phase.rstrip(b"\0").decode(errors="replace"))

    def __str__(self) -> str:
        return f"in {self.phase} of step {self.step}" if self.step else f"in {self.phase}, before the first step"


@dataclass(frozen=True)
class Heartbeat:
    """A rank's record in the store, renewed about once a second."""

    count: int  # number of this heartbeat: a new one is recognised without comparing clocks
    progress: Progress
    seconds: float  # that the main thread has spent in this phase
    ended: str  # reason for a regular end of the training; empty while it runs
    host: str
    pid: int
    started: int
    page: int  # descriptor of the process's shared page

    @classmethod
    def from_json(cls, text: bytes | str) -> Heartbeat:
        """Parse a record from the store."""
        values = json.loads(text)
        return cls(**values | {"progress": Progress(**values["progress"])})


@dataclass(frozen=True)
class Failure:
    """The reason for a job's end."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    positions: tuple[str, ...] = ()  # progress of each of these ranks
    detail: str = ""  # text of the error; seconds if a limit was exceeded
    found_by: int = -1  # the rank that made the diagnosis
    host: str = ""  # of that rank

    @classmethod
    def of_error(cls, error: BaseException, rank: int, progress: Progress) -> Failure:
        """The failure of a rank that raised `error`."""
        text = " ".join(str(error).split())[:_DETAIL_CHARACTERS]
        if not isinstance(error, OctavoError):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return cls("input" if isinstance(error, InputError) else "failed", (rank,), (str(progress),), text)

    @classmethod
    def from_json(cls, text: bytes | str) -> Failure:
        """Parse a record from the store."""
        values = json.loads(text)
        return cls(**values | {"ranks": tuple(values["ranks"]), "positions": tuple(values["positions"])})

    def message(self, world: int) -> str:
        """A sentence with ranks and phases, and one with the consequence."""
        if self.kind == "input":
            return f"{self.detail} (rank {self.ranks[0]} of {world}, {self.positions[0]})"
        ranks, where = _names(self.ranks, world), _where(self.ranks, self.positions)
        one = len(self.ranks) == 1
        have, were, wait = ("has", "was", "and the others wait for it") if one else ("have", "were", "and the others wait")
        if self.kind == "stuck" and len(self.ranks) == world:
            wait = "so a collective hangs: is the network up?"
        restart = "The other ranks end now; after a restart the run continues from its newest checkpoint."
        return {
            "failed": f"{ranks} failed {where}: {self.detail}",
            "killed": f"{ranks} {were} killed {where} (SIGKILL by hand, out of memory, or a crash). {restart}",
            "silent": f"{ranks} {have} been silent for {self.detail} s {where} (frozen, or the host is lost). {restart}",
            "lost": f"{ranks} {were} lost {where}: no sign of life for {self.detail} s, and connections broke. {restart}",
            "stuck": f"{ranks} {have} not moved for {self.detail} s {where}, {wait}. {restart}",
            "left": f"{ranks} ended {where} while the others still ran: {self.detail}",
            "store": "the launcher's key-value store is gone: the launcher, or the process that served it, has ended.",
        }[self.kind]


def to_json(record: Heartbeat | Failure) -> str:
    """JSON for the store."""
    return json.dumps(asdict(record))


def killed(heartbeats: Mapping[int, Heartbeat], dead: Iterable[int], progress: Mapping[int, Progress]) -> Failure | None:
    """Ranks whose process died before the training ended."""
    ranks = sorted(rank for rank in dead if rank in heartbeats and not heartbeats[rank].ended)
    return _failure("killed", ranks, progress) if ranks else None


def silent(
    heartbeats: Mapping[int, Heartbeat], quiet: Mapping[int, float], limit: float, progress: Mapping[int, Progress]
) -> Failure | None:
    """Ranks without a heartbeat for more than `limit` seconds; quiet: seconds since each other rank's last one."""
    ended = {rank for rank, heartbeat in heartbeats.items() if heartbeat.ended}
    ranks = sorted(rank for rank, seconds in quiet.items() if seconds > limit and rank not in ended)
    return _failure("silent", ranks, progress, f"{max(quiet[rank] for rank in ranks):.0f}") if ranks else None


def stuck(heartbeats: Mapping[int, Heartbeat], limit: float) -> Failure | None:
    """The ranks with the least progress, once any rank has been in one phase for more than `limit` seconds."""
    running = {rank: heartbeat for rank, heartbeat in sorted(heartbeats.items()) if not heartbeat.ended}
    late = [each.seconds for each in running.values() if each.seconds > limit and _limited(each.progress)]
    if not late:
        return None
    behind = _behind({rank: heartbeat.progress for rank, heartbeat in running.items()})
    progress = {rank: running[rank].progress for rank in behind}
    if not all(map(_limited, progress.values())):
        return None
    if len(behind) == len(running) and any(each.phase in _LONG for each in progress.values()):
        return None
    return _failure("stuck", behind, progress, f"{max(late):.0f}")


def left(heartbeats: Mapping[int, Heartbeat]) -> Failure | None:
    """Ranks that have ended regularly although this one has not."""
    ranks = sorted(rank for rank, heartbeat in heartbeats.items() if heartbeat.ended)
    progress = {rank: heartbeats[rank].progress for rank in ranks}
    return _failure("left", ranks, progress, heartbeats[ranks[0]].ended) if ranks else None


def _limited(progress: Progress) -> bool:
    """True if the timeout applies in this phase: loading, and compilation in the first step, have no limit."""
    return progress.phase != START and not (progress.first and progress.phase in _WARM_UP)


def _behind(progress: Mapping[int, Progress]) -> list[int]:
    least = min(each.order for each in progress.values())
    behind = [rank for rank, each in progress.items() if each.order == least]
    if len(behind) < len(progress):
        return behind
    # With equal progress, a minority in another phase, such as rank 0 writing a file, makes the others wait.
    phases = Counter(each.phase for each in progress.values()).most_common()
    rarest, count = phases[-1]
    if len(phases) > 1 and count < phases[-2][1]:
        return [rank for rank, each in progress.items() if each.phase == rarest]
    return behind


def _failure(kind: Kind, ranks: list[int], progress: Mapping[int, Progress], detail: str = "") -> Failure:
    return Failure(kind, tuple(ranks), tuple(str(progress.get(rank, Progress())) for rank in ranks), detail)


def _names(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world:
        return f"all {world} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {world}" if ranks else "no rank"


def _where(ranks: tuple[int, ...], positions: tuple[str, ...]) -> str:
    if len(set(positions)) <= 1:
        return positions[0] if positions else ""
    return ", ".join(f"{position} (rank {rank})" for rank, position in zip(ranks, positions, strict=True))
