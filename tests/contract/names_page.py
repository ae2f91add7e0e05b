"""Writes the tables of other libraries' private names on a page, from the contracts of this folder.

Run `python tests/contract/names_page.py docs/private-parts.md` from the repository's root.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))

from private_names import foreign

BEGIN = "<!-- Private names: python tests/contract/names_page.py docs/private-parts.md -->"
END = "<!-- end of private names -->"
TITLES = {
    "pytorch": "PyTorch: products, hooks, files, ranks",
    "autograd": "PyTorch: autograd and activation checkpoints",
    "attention": "PyTorch: attention",
    "transformers": "transformers",
    "flash_attention": "flash-attn-4",
}
"""Contract (`test_<name>.py`) → title of its table."""


def contract(of: str) -> ModuleType:
    """A module of this folder by its file: other folders have tests of the same names."""
    spec = importlib.util.spec_from_file_location(f"page_of_{of}", Path(__file__).with_name(f"test_{of}.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables() -> str:
    """A table for each contract: the name, the files of the package that use it, its purpose."""
    lines = [BEGIN]
    for of, title in TITLES.items():
        module = contract(of)
        rows: dict[tuple[tuple[str, ...], str], list[str]] = {}  # names with the same files and purpose share a row
        for name in module.NAMES:
            if files := _of_package(name.files):
                rows.setdefault((files, name.why), []).append(name.path)
        attributes = getattr(module, "ATTRIBUTES", {}) | getattr(module, "OTHERS", {})
        for name, why in attributes.items():
            rows.setdefault((_of_package(sorted(foreign()[name])), why), []).append(f".{name}")
        for path in getattr(module, "FUNCTIONS", {}):
            rows.setdefault((("models/published.py",), "reads and converts files of weights"), []).append(path)
        lines += ["", f"### {title}", "", "| private name | used in | purpose |", "|---|---|---|"]
        lines += [f"| {_code(names)} | {_code(files)} | {why} |" for (files, why), names in rows.items()]
    return "\n".join([*lines, "", END])


def _of_package(files: Iterable[str]) -> tuple[str, ...]:
    return tuple(file for file in files if not file.startswith("benchmarks/"))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(page: str) -> str:
    """The page with the present tables."""
    before, rest = page.split(BEGIN)
    return before + tables() + rest.split(END)[1]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
