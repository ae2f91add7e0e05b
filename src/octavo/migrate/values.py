"""Values of a script that are known without running it: constants, and dictionaries and sums of them.

Assignments are read from top to bottom. A value that a condition or a loop may change is not known.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

UNKNOWN = object()
"""A value known only at run time."""
REST = "**"
"""Key of a dictionary, with the value UNKNOWN, for further entries known only at run time."""
_LARGEST = 10**12
_LONGEST = 10_000
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class Values:
    """Values of the names of a script, as they are after its last line."""

    def __init__(self, tree: ast.AST) -> None:
        self.names: dict[str, Any] = {}
        self._unsure = _maybe_run(tree)
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr))
        for node in sorted(nodes, key=lambda node: node.lineno):
            self._read(node)

    def of(self, node: ast.AST | None) -> Any:
        """The value of an expression, or UNKNOWN."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Dict):
            return self._dictionary(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.of(each) for each in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.of(node.operand)
            return -value if isinstance(value, int | float) else UNKNOWN
        if isinstance(node, ast.BinOp):
            return _calculate(node.op, self.of(node.left), self.of(node.right))
        if isinstance(node, ast.Subscript):
            table, key = self.of(node.value), self.of(node.slice)
            return table.get(key, UNKNOWN) if isinstance(table, dict) and isinstance(key, str | int) else UNKNOWN
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("dict", "int", "float", "str"):
            return self._converted(node, node.func.id)
        return UNKNOWN

    def _dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.of(value)
            if key is None:
                found |= entries(inner)
            elif isinstance(name := self.of(key), str | int):
                found[name] = inner
        return found

    def _converted(self, node: ast.Call, kind: str) -> Any:
        if kind == "dict":
            return (entries(self.of(node.args[0])) if node.args else {}) | self.keywords(node)
        value = self.of(node.args[0]) if len(node.args) == 1 else UNKNOWN
        if not isinstance(value, str | int | float):
            return UNKNOWN
        try:
            return {"int": int, "float": float, "str": str}[kind](value)
        except (ArithmeticError, ValueError):  # int of infinity
            return UNKNOWN

    def is_unsure(self, node: ast.AST) -> bool:
        """True for a statement that depends on a condition, a loop or an exception."""
        return id(node) in self._unsure

    def keywords(self, call: ast.Call) -> dict[str, Any]:
        """The keyword arguments of a call, those of `**table` too."""
        found: dict[str, Any] = {}
        for word in call.keywords:
            found |= entries(self.of(word.value)) if word.arg is None else {word.arg: self.of(word.value)}
        return found

    def _read(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr) -> None:
        if isinstance(node, ast.Expr):
            self._read_update(node)
            return
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return
        unsure = self.is_unsure(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            value = self.of(node.value)
            if isinstance(node, ast.AugAssign):
                value = _calculate(node.op, self.of(target), value)
            if isinstance(target, ast.Name):
                changed = unsure and self.names.get(target.id, value) != value
                self.names[target.id] = UNKNOWN if changed else dict(value) if isinstance(value, dict) else value
            elif isinstance(target, ast.Subscript):
                key = self.of(target.slice)
                self._put(self.of(target.value), {key if isinstance(key, str | int) else REST: value}, unsure=unsure)

    def _read_update(self, node: ast.Expr) -> None:
        """`table.update(…)`."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
            return
        given = (entries(self.of(call.args[0])) if call.args else {}) | self.keywords(call)
        self._put(self.of(call.func.value), given, unsure=self.is_unsure(node))

    def _put(self, table: Any, given: dict[Any, Any], *, unsure: bool) -> None:
        """Set entries of a known dictionary; `unsure`: a run may or may not set them."""
        if not isinstance(table, dict):
            return
        for key, value in given.items():
            changed = unsure and (key not in table or table[key] != value)
            table[key] = UNKNOWN if changed or key == REST else value


def entries(value: Any) -> dict[Any, Any]:
    """The entries of a dictionary; for an unknown value `REST`."""
    return value if isinstance(value, dict) else {REST: UNKNOWN}


def _maybe_run(tree: ast.AST) -> set[int]:
    """The nodes (`id`) that depend on a condition, a loop or an exception."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not _is_main(node.test):
            inside: list[ast.AST] = [*node.body, *node.orelse]
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case):
            inside = [*node.body, *getattr(node, "orelse", [])]
        else:
            continue
        found.update(id(each) for statement in inside for each in ast.walk(statement))
    return found


def _is_main(test: ast.AST) -> bool:
    """True for the condition of `if __name__ == "__main__":`."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _calculate(kind: ast.operator, left: Any, right: Any) -> Any:
    """A sum, product, … of two values; of large ones none, since a script may be anything."""
    if isinstance(kind, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
        return left | right
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
    texts = isinstance(kind, ast.Add) and isinstance(left, str) and isinstance(right, str)
    if not (numbers or texts) or type(kind) not in _OPERATORS:
        return UNKNOWN
    if numbers and (abs(left) > _LARGEST or abs(right) > _LARGEST or (isinstance(kind, ast.Pow) and abs(right) > 64)):
        return UNKNOWN
    if texts and len(left) + len(right) > _LONGEST:
        return UNKNOWN
    try:
        found = _OPERATORS[type(kind)](left, right)
    except (ArithmeticError, ValueError):
        return UNKNOWN
    return UNKNOWN if isinstance(found, complex) else found
