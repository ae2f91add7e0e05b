"""Follows a script without running it; `octavo.migrate.values` is what others use of it."""
