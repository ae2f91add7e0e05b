"""The version of Transformer Engine that the shim reports; the part after + is Octavo's version."""

from __future__ import annotations

from octavo._version import __version__ as _octavo

__version__ = f"2.20.0+octavo.{_octavo}"
