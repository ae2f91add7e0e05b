"""A run's folder: lock, metrics, trackers, progress, summary, resume, comparison, export.

May import checkpoint, watchdog and lower levels.
"""
