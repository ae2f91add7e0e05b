"""Changes to classes and modules of other packages that can be taken back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Changes:
    """Attributes that were replaced, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put all of them back."""
        for owner, name, value in reversed(self._before):
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif name == "__new__":  # Python never goes back to object's, which then refuses the arguments of __init__
                setattr(owner, name, staticmethod(_plain_new))
            else:
                delattr(owner, name)
        self._before.clear()


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)
