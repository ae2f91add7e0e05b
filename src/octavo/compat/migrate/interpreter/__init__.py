"""Follows a script without running it; `octavo.compat.migrate.values` is what others use of it."""
