"""`octavo`, held in one step until it is asked to stop: the signal of a test comes before the run's end on any machine.

`held.py COMMAND …`, or `held.octavo` in a forked process. HELD_STEP is the step, HELD_RUN "fp8" or "bf16". A run of 20 steps
takes less time than a busy host may leave its test waiting. With UNDER_NOHUP a forked process
ignores SIGHUP, as one of nohup does.
"""

import os
import select
import signal
import sys
import time


def octavo(arguments):
    """The command `octavo`; its step HELD_STEP begins once it has had a signal, or has lost the reader of its output."""
    # Not as the tests have it, which may be under nohup themselves.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if "UNDER_NOHUP" in os.environ else signal.SIG_DFL)
    from octavo.cli import main
    from octavo.train import loop

    train_step = loop.train_step

    def held(context, step, stop):
        run = "bf16" if context.plan.recipe is None else "fp8"
        while (str(step), run) == (os.environ["HELD_STEP"], os.environ["HELD_RUN"]) and not (stop.received or _unread()):
            time.sleep(0.01)
        return train_step(context, step, stop)

    loop.train_step = held
    return main(arguments)


def _unread():
    """True if nobody reads stdout any more; False for a file."""
    poll = select.poll()
    poll.register(1, 0)
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(octavo(sys.argv[1:]))
