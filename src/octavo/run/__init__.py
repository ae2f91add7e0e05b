"""A run's folder: lock, metrics, trackers, progress, summary, resume, comparison, export."""
