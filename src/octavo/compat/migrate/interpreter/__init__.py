"""Interprets a script without running it, for the values that `octavo migrate` checks.

Public: `octavo.compat.migrate.values`.
"""
