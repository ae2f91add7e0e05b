"""Interprets a script without running it. Other modules use it through `octavo.compat.migrate.values`."""
