"""Collective calls of a user's script: if a single rank makes one, it gets an error instead of a hang until the timeout.

`if rank == 0: octavo.save(…)` is the usual way to hang a job. So the rare calls that every rank makes (save, load, export,
transform) begin with a rendezvous at the job's key-value store. It costs a few round trips, and no collective. A waiting rank
learns there that another rank makes a different call, has ended, or is blocked in a collective that waits for this one. All
ranks then raise the same error. A rank that only computes for a long time is waited for; a warning names it after a minute.

Each rank has a thread that polls for queries twice in five seconds, and answers with the place of its main thread.
`octavo.clip_grad_norm_`, which a step calls, has no rendezvous: its name is noted, and the thread warns if it takes too long.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import linecache
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from octavo.errors import InputError, OctavoError, warn
from octavo.process import process

_POLL_SECONDS = (0.001, 0.1)
"""First and longest pause of a rank that waits for the others."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks for missing ranks."""
_ASK_SECONDS = 5.0
"""Seconds until missing ranks are queried for their place."""
_ANSWER_SECONDS = 2.0
_BLOCKED_SECONDS = 20.0
"""Time in one collective after which a rank counts as blocked: longer than the transfer of a large tensor."""
_WARN_SECONDS = 60.0
_GO = "go"
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")
_DISPATCH = ("torch._ops", "torch._library", "torch.autograd.function", "torch.utils._contextlib")
"""Between a collective as a custom operator, such as the wait in `DTensor.full_tensor`, and the frame that blocks."""
_WAITING = ("torch.distributed.", "octavo.parallel.", "octavo.collectives.")


class _Meetings:
    """The calls of one world of ranks, counted alike on each of them."""

    def __init__(self, world: Any) -> None:
        self.world, self.rank, self.size = world, dist.get_rank(), dist.get_world_size()
        default: Any = _get_default_store()  # `clone` is annotated only in some versions of torch
        self.store: Store = PrefixStore(f"octavo-calls-{next(process.meetings)}", default.clone())
        self.inside: tuple[str, float] | None = None  # the call of the main thread, and its begin
        self._number = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="octavo-calls", daemon=True)
        self._thread.start()

    def meet(self, call: str) -> None:
        """Return once every rank makes this call.

        Raises:
            InputError: some rank will not make this call; raised on every rank.
            OctavoError: the store of the ranks is lost.
        """
        number, self._number = self._number, self._number + 1
        with self._explaining(call):
            first, _, rank = self._first(f"{number}/call", f"{call} {self.rank}").rpartition(" ")
            if first != call:
                self._first(
                    f"{number}/verdict", f"rank {rank} calls {first}, and rank {self.rank} calls {call}. {_remedy(first)}"
                )
            self.store.set(f"{number}/at/{self.rank}", "")
            if self.store.add(f"{number}/count", 1) == self.size:
                self._first(f"{number}/verdict", _GO)
            verdict = self._verdict(number, call)
        if verdict != _GO:
            raise InputError(f"{call}: {verdict}")

    def _verdict(self, number: int, call: str) -> str:
        """The joint decision about a call: continue, or raise this text."""
        began, pause, looked, warned = time.monotonic(), _POLL_SECONDS[0], 0.0, False
        while not self.store.check([f"{number}/verdict"]):
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
            waited = time.monotonic() - began
            if waited - looked < _LOOK_SECONDS:
                continue
            looked = waited
            missing = [rank for rank in range(self.size) if not self.store.check([f"{number}/at/{rank}"])]
            states = self._why_not(missing, ask=waited > _ASK_SECONDS)
            text = f"rank {self.rank} has called it, and {ranks_text(missing)} not within {waited:.0f} s{_places(states)}"
            hopeless = any(each.get("ended") for each in states.values()) or (
                len(states) == len(missing) and all(each.get("blocked", 0.0) > _BLOCKED_SECONDS for each in states.values())
            )
            if missing and (hopeless or waited > process.patience):
                self._first(f"{number}/verdict", f"{text}. {_remedy(call)}")
            elif missing and waited > _WARN_SECONDS and not warned:
                warned = True
                warn(f"{call}: {text}. Rank {self.rank} waits on. {_remedy(call)}")
        return self.store.get(f"{number}/verdict").decode()

    def _why_not(self, missing: list[int], *, ask: bool) -> dict[int, dict[str, Any]]:
        """The state of each missing rank: it has ended, or where it is and for how long it has been blocked there."""
        states: dict[int, dict[str, Any]] = {}
        for rank in missing:
            if self.store.check([f"ended/{rank}"]):
                states[rank] = {"ended": self.store.get(f"ended/{rank}").decode()}
            elif ask and self.store.check([f"place/{rank}"]):
                states[rank] = json.loads(self.store.get(f"place/{rank}"))
        if ask:
            self.store.add("asked", 1)
        return states

    def _first(self, key: str, value: str) -> str:
        """The value that the first rank has set for a key, which is this rank's if it is the first."""
        return self.store.compare_set(key, "", value).decode()

    @contextlib.contextmanager
    def _explaining(self, call: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            line = str(error).strip().partition("\n")[0]
            raise OctavoError(
                f"{call}: rank {self.rank} cannot reach the store of the ranks ({line}): the process that serves it, rank 0 or "
                f"torchrun, has ended. {_remedy(call)}"
            ) from None

    def _answer(self) -> None:
        """The thread: answers where the main thread is, each time that a rank asks; and warns of a long call."""
        main, answered, last, since, told = threading.main_thread().ident, 0, None, 0.0, None
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._ended.wait(_ANSWER_SECONDS):
                asked = self.store.add("asked", 0)
                inside, now = self.inside, time.monotonic()
                if inside is not None and now - inside[1] > _WARN_SECONDS:
                    told = self._tell_of_long_call(inside, told)
                if asked == answered:
                    continue
                answered = asked
                frame = sys._current_frames().get(main or 0)
                here = None if frame is None else (id(frame), frame.f_lasti)
                if here != last:
                    last, since = here, now
                place = {"at": _place(frame), "blocked": now - since if frame is not None and _is_blocked(frame) else 0.0}
                place |= {"call": None if inside is None else inside[0]}
                self.store.set(f"place/{self.rank}", json.dumps(place))

    def _tell_of_long_call(self, inside: tuple[str, float], told: object) -> object:
        """Warn once of a long call without a rendezvous, after a query for the places of the other ranks."""
        if told is inside:
            return told
        states = self._why_not([rank for rank in range(self.size) if rank != self.rank], ask=True)
        if time.monotonic() - inside[1] < _WARN_SECONDS + 3 * _ANSWER_SECONDS and len(states) < self.size - 1:
            return told
        missing = {rank: each for rank, each in states.items() if each.get("call") != inside[0]}
        if missing:
            text = f"rank {self.rank} is in it for {time.monotonic() - inside[1]:.0f} s, and {ranks_text(list(missing))} not"
            warn(f"{inside[0]}: {text}{_places(missing)}. {_remedy(inside[0])}")
        return inside

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one makes no more calls."""
        if not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(RuntimeError):
                self.store.set(f"ended/{self.rank}", reason)
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)


def begin(patience: datetime.timedelta | None = None) -> None:
    """Take part in the rendezvous of this world from now on; no-op on one rank. patience: longest wait for other ranks."""
    if patience is not None:
        process.patience = patience.total_seconds()
    _meetings()


def leave(reason: str) -> None:
    """This rank makes no more calls in this world; reason: for the others' message."""
    if process.calls is not None:
        process.calls.leave(reason)
        process.calls = None


def _meetings() -> _Meetings | None:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    current: _Meetings | None = process.calls
    if current is None or current.world is not dist.group.WORLD:
        if current is None:
            atexit.unregister(leave)
            atexit.register(leave, "its process has ended")
        else:
            current.leave("it has destroyed its process groups")
        current = process.calls = _Meetings(dist.group.WORLD)
    return current


@contextlib.contextmanager
def together(call: str) -> Iterator[None]:
    """A call that every rank makes: the block begins once all have arrived. A nested call has no rendezvous.

    Raises:
        InputError: some rank will not arrive: it makes another call, has ended, or is blocked in a collective that waits for
            this one.
    """
    meetings = _meetings()
    if meetings is None or meetings.inside is not None:
        yield
        return
    meetings.inside = (call, float("inf"))  # no warning by the thread
    try:
        meetings.meet(call)
        yield
    finally:
        meetings.inside = None


@contextlib.contextmanager
def noted(call: str) -> Iterator[None]:
    """A call of each step: no rendezvous, no traffic. The thread warns if it takes too long; errors of lost ranks name it.

    Raises:
        OctavoError: replaces a RuntimeError of a process group.
    """
    meetings: _Meetings | None = process.calls
    if meetings is None or meetings.inside is not None:
        yield
        return
    meetings.inside = (call, time.monotonic())
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OctavoError) or not any(word in str(error).lower() for word in ("gloo", "nccl", "timed out")):
            raise
        raise OctavoError(
            f"{call}: rank {meetings.rank} of {meetings.size} lost the others: {str(error).strip().partition(chr(10))[0]}. "
            f"{_remedy(call)}"
        ) from error
    finally:
        meetings.inside = None


def ranks_text(ranks: list[int]) -> str:
    """ "rank 1 has", "ranks 1, 2 and 5 more have"."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} have" if len(ranks) > 1 else f"rank {shown} has"


def _remedy(call: str) -> str:
    return f"{call} is called by every rank: take it out of an `if rank == 0`."


def _places(states: dict[int, dict[str, Any]]) -> str:
    """The states of ranks, in brackets: "(rank 1: its process has ended; rank 2 is at train.py:31, …)"."""
    texts = []
    for rank, each in itertools.islice(states.items(), 4):
        if "ended" in each:
            texts.append(f"rank {rank}: {each['ended']}")
        else:
            call = f" in {each['call']}" if each.get("call") else ""
            blocked = f", blocked for {each['blocked']:.0f} s" if each.get("blocked") else ""
            texts.append(f"rank {rank} is{call} at {each['at']}{blocked}")
    return f" ({'; '.join(texts)})" if texts else ""


def _outer(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_blocked(frame: FrameType) -> bool:
    """True if a thread is in a collective, or waits for the end of one, by its innermost frames."""
    frames = (each for each in _outer(frame, 20) if not _module(each).startswith(_DISPATCH))
    if any(_module(each) in _COLLECTIVES for each in itertools.islice(frames, 4)):
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return _module(frame).startswith(_WAITING) and ".wait(" in line


def _place(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor Octavo's: "train.py:31 in main"."""
    for each in _outer(frame, 1000):
        package = _module(each).partition(".")[0]
        if package not in ("torch", "octavo", "threading", "contextlib") and not each.f_code.co_filename.startswith("<"):
            return f"{each.f_code.co_filename.rpartition('/')[2]}:{each.f_lineno} in {each.f_code.co_name}"
    return "an unknown line"
