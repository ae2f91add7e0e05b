"""Private names of other libraries in Octavo's source, and the form of a contract about one."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "octavo"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Name(NamedTuple):
    """A private name that Octavo relies on.

    Attributes:
        path: dotted, from the module on.
        files: those that use it, below src/octavo, or of `benchmarks/`.
        why: what it is for, and that no public means serves.
        arguments: names of its first arguments, in order; None: not called, or a builtin without a signature.
        since: the first version that has it, of those that are tested; None: all.
    """

    path: str
    files: tuple[str, ...]
    why: str
    arguments: tuple[str, ...] | None = None
    since: str | None = None

    @property
    def private(self) -> str:
        """The last private part of the path, which the source has."""
        return [part for part in self.path.split(".") if part.startswith("_")][-1]


def resolve(path: str) -> Any:
    """The object of a dotted path; an AttributeError or ImportError names what is missing."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


def check(name: Name) -> None:
    """The name is there, takes its arguments, and is in the files that the contract names."""
    found = resolve(name.path)
    if name.arguments is not None:
        parameters = list(inspect.signature(found).parameters)
        assert tuple(parameters[: len(name.arguments)]) == name.arguments, (name.path, parameters)
    for file in name.files:
        folder = BENCHMARKS.parent if file.startswith("benchmarks/") else SOURCE
        assert name.private in used_in(folder / file), f"{file} does not use {name.path}"


@functools.cache
def used_in(file: Path) -> frozenset[str]:
    """All names with one underscore in front in a file: attributes, imports, and strings that are names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] != "octavo":
            found |= {alias.name for alias in node.names} | set(node.module.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return frozenset(name for name in found if name.startswith("_") and not name.startswith("__") and name != "_")


def files() -> dict[str, Path]:
    """The files of the package, by their names below src/octavo, and those of the benchmark."""
    found = {file.relative_to(SOURCE).as_posix(): file for file in SOURCE.rglob("*.py")}
    return found | {file.relative_to(BENCHMARKS.parent).as_posix(): file for file in BENCHMARKS.rglob("*.py")}


@functools.cache
def defined() -> frozenset[str]:
    """All names that Octavo's source and the benchmark define."""
    found: set[str] = set()
    for file in files().values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return frozenset(found)


@functools.cache
def foreign() -> dict[str, set[str]]:
    """Name → files, of the names that Octavo and the benchmark use and do not define."""
    found = defaultdict(set)
    for name, file in files().items():
        for used in used_in(file) - defined():
            found[used].add(name)
    return dict(found)
