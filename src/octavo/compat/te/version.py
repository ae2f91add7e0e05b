"""The version of Transformer Engine whose names the shim has; the part behind + says whose they are."""

from __future__ import annotations

from octavo._version import __version__ as _octavo

__version__ = f"2.20.0+octavo.{_octavo}"
