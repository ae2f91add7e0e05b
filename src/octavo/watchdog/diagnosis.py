"""Which rank is at fault: what ranks tell of themselves, and what follows from it.

No clock, no process and no network here, so that every verdict can be tested as a function: `octavo.watchdog.watchdog` gathers
what is known and acts on the verdict.

A rank that waits for another looks just like one that hangs. Collectives keep ranks in the same order of steps and phases, so
the one that is behind all others is the one they wait for.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from octavo.errors import InputError, OctavoError

START = "start"
_WARMING = frozenset({"forward", "backward", "optimizer"})  # compile and connect in the first step
_LONG = frozenset({START, "checkpoint", "validation"})  # may take any time as long as nobody waits for another
_PACKED = struct.Struct("<qqq24s")
_TEXT = 1500

Kind = Literal["failed", "input", "killed", "silent", "lost", "stuck", "left", "store"]


@dataclass(frozen=True)
class Place:
    """Where a rank's main thread is.

    Attributes:
        part: trainings that were begun: a run may have a second one, whose steps count from the beginning.
        step: of that training; 0 before the first.
        move: phases that were entered within the step.
        phase: "start", "data", "forward", "backward", "optimizer", "checkpoint", "validation" or another word.
        first: whether this is the first step of this training in this process.
        since: the reading of this process's monotonic clock when it got there.
    """

    part: int = 0
    step: int = 0
    move: int = 0
    phase: str = START
    first: bool = True
    since: float = 0.0

    @property
    def progress(self) -> tuple[int, int, int]:
        """Larger is further on."""
        return self.part, self.step, self.move

    def write(self, memory: object) -> None:
        """Put it into the first bytes of a page; costs no system call."""
        _PACKED.pack_into(memory, 0, self.part, self.step, self.move, self.phase.encode()[:24])  # type: ignore[arg-type]

    @classmethod
    def read(cls, memory: object) -> Place:
        """What `write` put there."""
        part, step, move, phase = _PACKED.unpack_from(memory)  # type: ignore[arg-type]
        return cls(part, step, move, phase.rstrip(b"\0").decode(errors="replace"))

    def __str__(self) -> str:
        return f"in {self.phase} of step {self.step}" if self.step else f"in {self.phase}, before the first step"


@dataclass(frozen=True)
class Beat:
    """What a rank tells about once a second.

    Attributes:
        count: of its beats, so that a new one is told from an old one without comparing clocks.
        seconds: for how long its main thread has been in this place.
        ended: how its training ended in good order; empty while it runs.
        host, pid, started: which process it is, and
        page: where that keeps its place.
    """

    count: int
    place: Place
    seconds: float
    ended: str
    host: str
    pid: int
    started: int
    page: int

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Beat:
        """From the store."""
        values = json.loads(text)
        return cls(**values | {"place": Place(**values["place"])})


@dataclass(frozen=True)
class Cause:
    """Why a job ends.

    Attributes:
        ranks: who is at fault, and `places` where each of them was.
        text: of the error; seconds where something took too long.
        by: rank that found out, and `host` where that was said.
    """

    kind: Kind
    ranks: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    text: str = ""
    by: int = -1
    host: str = ""

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Cause:
        """From the store."""
        values = json.loads(text)
        return cls(**values | {"ranks": tuple(values["ranks"]), "places": tuple(values["places"])})

    def message(self, world: int) -> str:
        """One sentence that names rank and phase, and one that says what follows."""
        if self.kind == "input":
            return f"{self.text} (rank {self.ranks[0]} of {world}, {self.places[0]})"
        who, where = _who(self.ranks, world), _where(self.ranks, self.places)
        one = len(self.ranks) == 1
        have, were, wait = ("has", "was", "and the others wait for it") if one else ("have", "were", "and the others wait")
        if self.kind == "stuck" and len(self.ranks) == world:
            wait = "so a collective hangs: is the network up?"
        again = "The other ranks end now; started again, the run continues from its newest checkpoint."
        return {
            "failed": f"{who} failed {where}: {self.text}",
            "killed": f"{who} {were} killed {where} (SIGKILL by hand, out of memory, or a crash). {again}",
            "silent": f"{who} {have} been silent for {self.text} s {where} (frozen, or the host is lost). {again}",
            "lost": f"{who} {were} lost {where}: no sign of life for {self.text} s, and connections broke. {again}",
            "stuck": f"{who} {have} not moved for {self.text} s {where}, {wait}. {again}",
            "left": f"{who} ended {where} while the others still ran: {self.text}",
            "store": "the launcher's key-value store is gone: the launcher, or the process that kept it, has ended.",
        }[self.kind]


def failure(error: BaseException, rank: int, place: Place) -> Cause:
    """The cause that an exception of this rank is."""
    said = " ".join(str(error).split())[:_TEXT]
    if not isinstance(error, OctavoError):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Cause("input" if isinstance(error, InputError) else "failed", (rank,), (str(place),), said)


def killed(beats: Mapping[int, Beat], dead: Iterable[int], places: Mapping[int, Place]) -> Cause | None:
    """Ranks whose process is gone although they had not ended, nor said that they failed."""
    ranks = sorted(rank for rank in dead if rank in beats and not beats[rank].ended)
    return _cause("killed", ranks, places) if ranks else None


def silent(beats: Mapping[int, Beat], quiet: Mapping[int, float], limit: float, places: Mapping[int, Place]) -> Cause | None:
    """Ranks without a heartbeat for more than `limit` seconds; `quiet` has every other rank's, also one never heard of."""
    ranks = sorted(rank for rank, seconds in quiet.items() if seconds > limit and not (rank in beats and beats[rank].ended))
    return _cause("silent", ranks, places, f"{max(quiet[rank] for rank in ranks):.0f}") if ranks else None


def stuck(beats: Mapping[int, Beat], limit: float) -> Cause | None:
    """Ranks that the others wait for, once somebody has been in one place for more than `limit` seconds."""
    running = {rank: beat for rank, beat in sorted(beats.items()) if not beat.ended}
    late = [beat.seconds for beat in running.values() if beat.seconds > limit and _limited(beat.place)]
    if not late:
        return None
    behind = _behind({rank: beat.place for rank, beat in running.items()})
    places = {rank: running[rank].place for rank in behind}
    if not all(_limited(place) for place in places.values()):
        return None
    if len(behind) == len(running) and any(place.phase in _LONG for place in places.values()):
        return None
    return _cause("stuck", behind, places, f"{max(late):.0f}")


def left(beats: Mapping[int, Beat]) -> Cause | None:
    """Ranks that have ended in good order although this one has not."""
    ranks = sorted(rank for rank, beat in beats.items() if beat.ended)
    return _cause("left", ranks, {rank: beats[rank].place for rank in ranks}, beats[ranks[0]].ended) if ranks else None


def _limited(place: Place) -> bool:
    """Whether time in this place is limited: not while loading, and not while compiling."""
    return place.phase != START and not (place.first and place.phase in _WARMING)


def _behind(places: Mapping[int, Place]) -> list[int]:
    """Those whom the others wait for, or all."""
    least = min(place.progress for place in places.values())
    behind = [rank for rank, place in places.items() if place.progress == least]
    if len(behind) < len(places):
        return behind
    # Equally far, but one rank alone may do what the others do not, such as writing a file.
    phases = Counter(place.phase for place in places.values()).most_common()
    few = phases[-1]
    if len(phases) > 1 and few[1] < phases[-2][1]:
        return [rank for rank, place in places.items() if place.phase == few[0]]
    return behind


def _cause(kind: Kind, ranks: list[int], places: Mapping[int, Place], text: str = "") -> Cause:
    return Cause(kind, tuple(ranks), tuple(str(places.get(rank, Place())) for rank in ranks), text)


def _who(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world:
        return f"all {world} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {world}" if ranks else "no rank"


def _where(ranks: tuple[int, ...], places: tuple[str, ...]) -> str:
    if len(set(places)) <= 1:
        return places[0] if places else ""
    return ", ".join(f"{place} (rank {rank})" for rank, place in zip(ranks, places, strict=True))
