"""Checks once whether the Hugging Face Hub responds, before anything is looked up there.

Its libraries request one file after another and wait at each address of the Hub, a minute and more if a firewall drops packets.
Not covered: a Hub that stops responding during a lookup.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator

WAIT_SECONDS = 8
"""Longest wait for an answer, unless HF_HUB_ETAG_TIMEOUT is set."""
_HOLDS_SECONDS = 60  # a run looks up several names; a notebook may get its network back


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Around lookups: if the Hub does not respond, only the local cache is used, as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants  # slow to import

    if constants.HF_HUB_OFFLINE or _answers(int(time.monotonic() // _HOLDS_SECONDS)):
        yield
        return
    with contextlib.ExitStack() as restoring:
        for module in (constants, sys.modules.get("datasets.config")):  # `datasets` has a separate copy
            if module is not None:
                restoring.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
                vars(module)["HF_HUB_OFFLINE"] = True
        yield


@functools.lru_cache(maxsize=1)
def _answers(period: int) -> bool:
    """True if the Hub responds at all. In a thread, since nothing else bounds a DNS lookup."""
    from huggingface_hub import constants, get_session

    seconds = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else WAIT_SECONDS
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # of the HTTP library
            get_session().head(constants.ENDPOINT, timeout=seconds)
            answered.set()

    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
