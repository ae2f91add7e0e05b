"""Profiles of training steps: kernel times by kind, and the timeline of a trace."""
