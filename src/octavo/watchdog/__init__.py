"""The watchdog of a job: heartbeats, the diagnosis of a fault, and the end of every rank."""
