"""Corpora without a download: the source files of the running Python installation.

First runs, tests and benchmarks need real text. The standard library's docstrings are a small English corpus (about 2 MB); all
installed packages are a large Python corpus (hundreds of MB). Files are parsed or read, never imported. Another Python version
gives different text, which prepared data detects.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.data.documents import Document

_SITE = frozenset({"site-packages", "dist-packages"})
_TESTS = frozenset({"test", "tests", "idle_test"})


def interpreter() -> str:
    """Version and location of the standard library, which identify the corpus."""
    return f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}:{_stdlib()}"


def stdlib_files() -> list[Path]:
    """The standard library's source files in sorted order, without tests and without installed packages."""
    return _python_files(_stdlib(), skip=_SITE | _TESTS)


def package_files() -> list[Path]:
    """Source files of the standard library and of every package folder on sys.path, in sorted order, each once."""
    sites = sorted({Path(entry).resolve() for entry in sys.path if Path(entry).name in _SITE and Path(entry).is_dir()})
    files = _python_files(_stdlib(), skip=_SITE)
    for site in sites:
        files += _python_files(site, skip=frozenset())
    return list(dict.fromkeys(files))


def docstrings(files: Sequence[Path]) -> Iterator[Document]:
    """One document for each docstring of a module, class or function, without its indentation.

    Files that do not parse are skipped: a standard library may contain templates and older syntax.
    """
    for path in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in third-party code
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text == text.encode(errors="ignore").decode():  # half of a surrogate pair has no UTF-8 form
                    yield Document(text, None, f"{path}, line {node.body[0].lineno}")


def packages(files: Sequence[Path]) -> Iterator[Document]:
    """One document for each file; files that are not UTF-8, and empty ones, are skipped."""
    for path in files:
        try:
            text = path.read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue
        if text:
            yield Document(text, None, str(path))


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _python_files(root: Path, *, skip: frozenset[str]) -> list[Path]:
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skip and name != "__pycache__")
        paths += [Path(folder, name) for name in files if name.endswith(".py") and Path(folder, name).is_file()]
    return sorted(paths)
