"""The watchdog of a job: heartbeats, the diagnosis of a failure, the end of every rank.

May import data and lower levels.
"""
