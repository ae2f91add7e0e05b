"""Transformer Engine's names: `install()` gives them to this process, `uninstall()` removes them."""

from octavo.compat.te.shim import install, uninstall

__all__ = ["install", "uninstall"]
