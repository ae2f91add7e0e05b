"""Trainings without two costs that are a third of a tiny one's; importing this module before the trainer is enough.

- Losses become a figure that nobody draws, and a file of its name. `plot_run.__wrapped__` draws.
- Files are not synced to the disk: tests kill processes, and no test cuts the power.
"""

import functools
import os

from octavo.run import plots

_plot_run = plots.plot_run


@functools.wraps(_plot_run)
def _plot_run_undrawn(folder):
    from matplotlib.figure import Figure

    drawn = Figure.savefig
    Figure.savefig = lambda self, path, **options: path.touch()
    try:
        return _plot_run(folder)
    finally:
        Figure.savefig = drawn


plots.plot_run = _plot_run_undrawn
os.fsync = lambda descriptor: None
