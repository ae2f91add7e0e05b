"""A run's folder: metrics, trackers, progress, summary, comparison, export."""
