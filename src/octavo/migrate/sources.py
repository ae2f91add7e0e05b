"""Names and arguments in the source of installed modules, read and never imported: what a script may call.

A module that builds its names at run time (`__getattr__`, `import *`), and a function with `**kwargs`, is not told: None.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from octavo.migrate.values import Values

_TE_LAYERS = ("octavo.compat.te.layers", "octavo.compat.te.attention")
_ALIASES = {"RMSNorm": "LayerNorm"}


@cache
def _tree(module: str) -> ast.Module | None:
    root, _, rest = module.partition(".")
    try:
        spec = importlib.util.find_spec(root)  # the root alone: nothing is imported
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder, *rest.split(".")) if rest else Path(folder)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                try:
                    return ast.parse(file.read_bytes())
                except (OSError, SyntaxError, ValueError):
                    return None
    return None


def has_name(module: str, name: str) -> bool | None:
    """True if an installed module has a name; None if its source does not tell."""
    tree = _tree(module)
    if tree is None or _tree(f"{module}.{name}") is not None:
        return None if tree is None else True
    found: set[str] = set()
    for node in _outermost(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    if name in found:
        return True
    return None if {"*", "__getattr__"} & found else False


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that are not inside a function or a class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _outermost(child)


def arguments_of(module: str, name: str) -> tuple[str, ...] | None:
    """The arguments of a function or class of Octavo, in their order; None if its source does not tell."""
    if module in _TE_LAYERS:
        return _te_arguments().get(_ALIASES.get(name, name))
    tree = _tree(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if name == (alias.asname or alias.name) and node.module.startswith("octavo."):
                    return arguments_of(node.module, alias.name)
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _names(node, skip=0)
        if isinstance(node, ast.ClassDef) and node.name == name:
            inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
            if inits:
                return _names(inits[0], skip=1)
            fields = [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            is_data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
            return tuple(fields) if is_data and not node.bases else None
    return None


def _names(node: ast.FunctionDef, *, skip: int) -> tuple[str, ...] | None:
    if node.args.kwarg is not None or node.args.vararg is not None:
        return None
    return tuple(each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs][skip:])


@cache
def _te_arguments() -> dict[str, tuple[str, ...]]:
    """Layer → arguments, from the table of Transformer Engine's signatures."""
    tree = _tree("octavo.compat.te.signatures")
    texts = Values(tree).last("_TEXTS") if tree is not None else None
    if not isinstance(texts, dict):
        return {}
    return {
        name: tuple(part.partition("=")[0] for part in text.split()) for name, text in texts.items() if isinstance(text, str)
    }
