"""Values of a script that are known without running it: constants, and dictionaries and sums of them.

Assignments are read from top to bottom, those in both branches of a condition too: the last one wins, as for most scripts.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

UNKNOWN = object()
"""A value that only a run would tell."""
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
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr))
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
                found |= inner if isinstance(inner, dict) else {}
            elif isinstance(name := self.of(key), str | int):
                found[name] = inner
        return found

    def _converted(self, node: ast.Call, kind: str) -> Any:
        if kind == "dict":
            start = self.of(node.args[0]) if node.args else {}
            return (start if isinstance(start, dict) else {}) | {
                word.arg: self.of(word.value) for word in node.keywords if word.arg
            }
        value = self.of(node.args[0]) if len(node.args) == 1 else UNKNOWN
        if not isinstance(value, str | int | float):
            return UNKNOWN
        try:
            return {"int": int, "float": float, "str": str}[kind](value)
        except ValueError:
            return UNKNOWN

    def _read(self, node: ast.Assign | ast.AnnAssign | ast.Expr) -> None:
        if isinstance(node, ast.Expr):
            self._read_update(node.value)
            return
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            value = self.of(node.value)
            if isinstance(target, ast.Name):
                self.names[target.id] = dict(value) if isinstance(value, dict) else value
            elif isinstance(target, ast.Subscript):
                table, key = self.of(target.value), self.of(target.slice)
                if isinstance(table, dict) and isinstance(key, str | int):
                    table[key] = value

    def _read_update(self, call: ast.AST) -> None:
        """`table.update(…)`."""
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"):
            return
        table = self.of(call.func.value)
        if isinstance(table, dict):
            given = self.of(call.args[0]) if call.args else {}
            table |= given if isinstance(given, dict) else {}
            table |= {word.arg: self.of(word.value) for word in call.keywords if word.arg}


def _calculate(kind: ast.operator, left: Any, right: Any) -> Any:
    """A sum, product, … of two values; of large ones none, since a script may be anything."""
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
