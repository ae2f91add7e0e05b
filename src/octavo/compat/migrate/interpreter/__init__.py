"""Interprets a script without running it. Public face: `octavo.compat.migrate.values`."""
