"""Values that are known without running a script: constants, partly known dictionaries and lists, sums and texts."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Unknown:
    """The type of `UNKNOWN`; a deep copy is the same object."""

    def __deepcopy__(self, memo: Any) -> _Unknown:
        return self

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
"""A value known only at run time."""
OPTIONAL = _Unknown()
"""A value known only at run time, which may be None."""
MORE = _Unknown()
"""The only item of a list about which nothing is known, not even its length."""
REST = "**"
"""Key of a dictionary, with the value UNKNOWN, for further entries known only at run time."""
_LARGEST = 10**12
LONGEST = 10_000
MOST_ITEMS = 64
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
    ast.Is: lambda left, right: left == right and (left is None) == (right is None),
    ast.IsNot: lambda left, right: left != right or (left is None) != (right is None),
}  # fmt: skip
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "round": round, "abs": abs,
}  # fmt: skip
_OF_TEXT = ("split", "strip", "lstrip", "rstrip", "lower", "upper", "title", "replace", "startswith", "endswith", "format",
            "removeprefix", "removesuffix")  # fmt: skip
"""Methods of text whose results are known."""


@dataclass
class RecipeValue:
    """A recipe object. dotted: its class. args, words: the arguments of its call. lost: its fields may have changed."""

    dotted: str
    args: list[Any]
    words: dict[str, Any]
    lost: bool = False

    def __repr__(self) -> str:
        return f"{self.dotted.rpartition('.')[2]}(…)"


def of_text(text: str, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
    """The result of a method of text, or UNKNOWN."""
    if name == "join" and len(args) == 1 and isinstance(args[0], list) and all(isinstance(each, str) for each in args[0]):
        result = text.join(args[0])
        return result if len(result) <= LONGEST else UNKNOWN
    plain = all(isinstance(each, str | int | float) for each in (*args, *keywords.values()))
    if name not in _OF_TEXT or not plain or (name == "format" and re.search(r":[^}]{4}|:[^}]*\{", text)):
        return UNKNOWN
    try:
        result = getattr(text, name)(*args, **keywords)
    except (TypeError, ValueError, LookupError, AttributeError):
        return UNKNOWN
    return result if not isinstance(result, str) or len(result) <= LONGEST else UNKNOWN


def merge(left: dict[Any, Any], right: dict[Any, Any], memo: dict[Any, Any]) -> None:
    """Leave in `left` the entries that are the same in both; the others become UNKNOWN."""
    if (id(left), id(right)) in memo:
        return
    memo[id(left), id(right)] = left
    for key in [*left, *(key for key in right if key not in left)]:
        if key in left and key in right and isinstance(left[key], dict) and isinstance(right[key], dict):
            merge(left[key], right[key], memo)
        elif key not in left or key not in right or not same(left[key], right[key]):
            left[key] = UNKNOWN


def same(left: Any, right: Any) -> bool:
    """True for equal values of the same type."""
    return type(left) is type(right) and bool(left == right) and (not isinstance(left, float) or repr(left) == repr(right))


def is_known(value: Any) -> bool:
    """True if every part of a value is known without a run."""
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    if isinstance(value, list):
        return all(map(is_known, value))
    if isinstance(value, RecipeValue):
        return is_known(value.args) and is_known(value.words)
    return not isinstance(value, _Unknown)


def converted(kind: str, args: list[Any]) -> Any:
    """The result of a function of `CONVERSIONS`, or UNKNOWN. kind: its name."""
    if not all(isinstance(each, str | int | float) for each in args):
        return UNKNOWN
    try:
        return CONVERSIONS[kind](*args)
    except (ArithmeticError, ValueError, TypeError):  # int of infinity, len of a number
        return UNKNOWN


def entries(value: Any) -> dict[Any, Any]:
    """A dictionary's entries; `{REST: UNKNOWN}` for any other value."""
    return value if isinstance(value, dict) else {REST: UNKNOWN}


def calculated(kind: ast.operator, left: Any, right: Any) -> Any:
    """The result of a binary operator, or UNKNOWN; limited in size, since a script may compute anything."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
    texts = isinstance(kind, ast.Add) and isinstance(left, str) and isinstance(right, str)
    if not (numbers or texts) or type(kind) not in _OPERATORS:
        return UNKNOWN
    if numbers and (abs(left) > _LARGEST or abs(right) > _LARGEST or (isinstance(kind, ast.Pow) and abs(right) > 64)):
        return UNKNOWN
    if texts and len(left) + len(right) > LONGEST:
        return UNKNOWN
    try:
        result = _OPERATORS[type(kind)](left, right)
    except (ArithmeticError, ValueError):
        return UNKNOWN
    return UNKNOWN if isinstance(result, complex) else result
