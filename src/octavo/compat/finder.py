"""The import finder: maps module names of the replaced libraries to Octavo's modules, in a process and those that it spawns.

A shim is a table: module of the library → Octavo's modules and the names imported from each. Such a module has a spec but no
code of its own, and its names keep their `__module__`. Nothing is written into installed packages. Loads no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.compat.missing import MissingModule, MissingName, way_of
from octavo.errors import InputError

REPLACE = "OCTAVO_COMPAT_REPLACE"
"""Environment variable: 1 lets the shims replace installed packages."""
Names = Mapping[str, str]
"""Module of Octavo → names imported from it, separated by spaces."""


@dataclass(frozen=True)
class Shim:
    """The names of one replaced library.

    Attributes:
        root: its package, such as "torch.sagemaker".
        library: its name in messages.
        modules: each of its modules → the names in it.
        ways: absent name → what to use instead; dotted names apply to all names below.
        absent: other packages of the library, which have no shim; `ways` has the remedy for each.
        begin: a module whose `apply` runs when the root is imported, and returns the function that undoes it.
        before: submodules that the root imports, so that they are its attributes.
        version: a module with the `__version__` of the installed package that it stands for; None for a part of another.
        absent_only: an installed package of this name has precedence over the shim.
        hidden: with that, `importlib.util.find_spec` does not find the shim, so that libraries do not mistake it for the whole
            package.
    """

    root: str
    library: str
    modules: Mapping[str, Names]
    ways: Mapping[str, str]
    absent: Sequence[str] = ()
    begin: str | None = None
    before: Sequence[str] = ()
    version: str | None = None
    absent_only: bool = False
    hidden: bool = True

    def real(self) -> str | None:
        """The location of the real package; None if it is not installed."""
        parent, _, _ = self.root.rpartition(".")
        path: list[str] | None = None
        if parent:
            parent_spec = PathFinder.find_spec(parent)
            if parent_spec is None or parent_spec.submodule_search_locations is None:
                return None
            path = list(parent_spec.submodule_search_locations)
        spec = PathFinder.find_spec(self.root, path)
        if spec is None:
            return None
        return spec.origin or str(next(iter(spec.submodule_search_locations or ["?"])))

    def check(self, *, replace: bool) -> None:
        """Raise an InputError if the real package is installed, unless the shim may replace it."""
        if self.absent_only:
            return
        where = self.real()
        if where is not None and not (replace or os.environ.get(REPLACE) == "1"):
            raise InputError(
                f"{self.root} is installed here ({where}), and Octavo's compatibility layer would hide it. Run the script "
                f"directly to use {self.library}; to use Octavo instead: python -m octavo.compat --replace-installed SCRIPT, "
                f"or {REPLACE}=1, or install(replace_installed=True)."
            )


class _Metadata(Distribution):
    """Distribution metadata of a shim, by which libraries look up a package."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim

    def read_text(self, filename: str) -> str | None:
        """The metadata; there are no other files."""
        if filename != "METADATA" or self._shim.version is None:
            return None
        version = importlib.import_module(self._shim.version).__version__
        return f"Metadata-Version: 2.1\nName: {self._shim.root}\nVersion: {version}\n"

    def locate_file(self, path: Any) -> Any:
        """Required by Distribution; the package has no files."""
        return Path(path)


class Finder(MetaPathFinder):
    """Finds the modules of one shim."""

    def __init__(self, shim: Shim) -> None:
        self.shim = shim
        self.undo: Callable[[], None] | None = None

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of a module of the shim; MissingModule for an import of another name below the root."""
        absent = fullname in self.shim.absent
        if not absent and fullname != self.shim.root and not fullname.startswith(f"{self.shim.root}."):
            return None
        if self.shim.absent_only and fullname != self.shim.root and not self.owns(self.shim.root):
            return None
        # `importlib.util.find_spec` asks whether a module exists; every other call is an import.
        asked = sys._getframe(2).f_code.co_name == "find_spec"
        if fullname in self.shim.modules:
            return None if asked and self.shim.absent_only and self.shim.hidden else self._spec(fullname)
        if asked or (absent and PathFinder.find_spec(fullname) is not None):
            return None
        if absent:
            raise MissingModule(way_of(fullname, self.shim.ways), fullname)
        known = [name.rpartition(".")[2] for name in self.shim.modules] + self._names(fullname.rpartition(".")[0])
        # The name of the root: for a missing name `from module import name` then raises its usual error.
        raise MissingModule(way_of(fullname, self.shim.ways, known), self.shim.root)

    def owns(self, name: str) -> bool:
        """True if a loaded module belongs to the shim."""
        loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
        return isinstance(loader, _Loader) and loader.finder is self

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        """The package that the shim stands for, if it is requested."""
        asked = None if context is None else context.name
        if self.shim.version is None or (asked or self.shim.root).lower().replace("-", "_") != self.shim.root:
            return ()
        return (_Metadata(self.shim),)

    def _names(self, module: str) -> list[str]:
        return [name for names in self.shim.modules.get(module, {}).values() for name in names.split()]

    def _spec(self, name: str) -> ModuleSpec:
        home = importlib.util.find_spec(next(iter(self.shim.modules[name]), "octavo.compat"))
        origin = None if home is None else home.origin
        # All are packages without a folder, so an import of a missing name from one comes here and is refused by name.
        return ModuleSpec(name, _Loader(self), origin=origin, is_package=True)


class _Loader(Loader):
    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its names."""
        shim, name = self.finder.shim, module.__name__
        if name == shim.root and shim.begin is not None and self.finder.undo is None:
            self.finder.undo = importlib.import_module(shim.begin).apply()
        for home, text in shim.modules[name].items():
            source = importlib.import_module(home)
            module.__dict__.update({one: getattr(source, one) for one in text.split()})
        names = self.finder._names(name)
        module.__dict__["__all__"] = names
        module.__dict__["__getattr__"] = _fallback(shim, name, names)
        module.__dict__["__doc__"] = f"Octavo's {name}: docs/migrating.md says what each name does."
        if name == shim.root:
            for child in shim.before:
                importlib.import_module(child)

    def get_code(self, name: str) -> None:
        """None: the module has no code."""
        return


def _fallback(shim: Shim, module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """`__getattr__` of a module of the shim: its submodules, or MissingName."""
    children = [name.removeprefix(f"{module}.") for name in shim.modules if name.startswith(f"{module}.")]

    def find(name: str) -> Any:
        if f"{module}.{name}" in shim.modules:
            return importlib.import_module(f"{module}.{name}")
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise MissingName(way_of(f"{module}.{name}", shim.ways, [*names, *children]))

    return find


def installed(shim: Shim) -> Finder | None:
    """The finder of a shim in this process."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder) and finder.shim is shim), None)


def install(shim: Shim, *, replace: bool = False) -> None:
    """Give this process the shim's names; a second call has no effect.

    Raises:
        InputError: the real package is installed and may not be replaced, or is imported already.
    """
    if installed(shim) is not None:
        return
    shim.check(replace=replace)
    if shim.root in sys.modules and not shim.absent_only:
        raise InputError(f"{shim.root} is already imported: call install() before its first import.")
    sys.meta_path.insert(len(sys.meta_path) if shim.absent_only else 0, Finder(shim))


def uninstall(shim: Shim) -> None:
    """Remove the shim's names from this process; existing objects stay valid."""
    finder = installed(shim)
    if finder is None:
        return
    sys.meta_path.remove(finder)
    owned = [name for name in sys.modules if finder.owns(name)]
    for name in owned:
        del sys.modules[name]
    parent, _, child = shim.root.rpartition(".")
    if owned and parent in sys.modules:
        vars(sys.modules[parent]).pop(child, None)
    if finder.undo is not None:
        finder.undo()
