"""What is known of values without a run: dictionaries and lists in part, sums and texts of constants."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class _Unknown:
    """The type of `UNKNOWN`, which copies share."""

    def __deepcopy__(self, memo: Any) -> _Unknown:
        return self

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
"""A value known only at run time."""
OPTIONAL = _Unknown()
"""A value known only at run time, which may be None."""
MORE = _Unknown()
"""The one item of a list of which nothing is known, its length included."""
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
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max, "round": round, "abs": abs,
    "list": list, "tuple": list,
}  # fmt: skip
LISTS: dict[str, Callable[..., Any]] = {
    "sorted": sorted, "reversed": lambda items: list(reversed(items)),
    "enumerate": lambda items, start=0: [list(each) for each in enumerate(items, start)],
    "zip": lambda *lists: [list(each) for each in zip(*lists, strict=False)],
    "range": lambda *ends: list(range(*ends)) if len(range(*ends)) <= MOST_ITEMS else [MORE],
}  # fmt: skip
_OF_TEXT = ("split", "strip", "lstrip", "rstrip", "lower", "upper", "title", "replace", "startswith", "endswith", "format",
            "removeprefix", "removesuffix")  # fmt: skip
"""Methods of text whose results are known."""


@dataclass(frozen=True)
class Job:
    """An estimator as a value; `number` is that of its call."""

    number: int


@dataclass(frozen=True)
class Function:
    """A function of the script as a value; `node` is its definition."""

    node: ast.FunctionDef | ast.AsyncFunctionDef

    def __deepcopy__(self, memo: Any) -> Function:
        return self


@dataclass(frozen=True)
class Made:
    """An object of a recipe as a value: its class, and the arguments of its call."""

    dotted: str
    args: list[Any]
    words: dict[str, Any]

    def __repr__(self) -> str:
        return f"{self.dotted.rpartition('.')[2]}(…)"


def put(table: dict[Any, Any], given: dict[Any, Any]) -> None:
    """Set entries of a dictionary in place; further ones that only a run knows may replace any."""
    if REST in given:
        for key in table:
            table[key] = UNKNOWN
    table.update(given)
    if REST in table:
        table[REST] = UNKNOWN


def item_of(table: Any, key: Any, default: Any) -> Any:
    """An entry of a dictionary, list or text; `default` for a key that a dictionary does not have."""
    if isinstance(table, dict) and isinstance(key, str | int):
        return table.get(key, UNKNOWN if REST in table else default)
    whole = isinstance(table, str) or (isinstance(table, list) and MORE not in table)
    if whole and isinstance(key, int) and -len(table) <= key < len(table):
        return table[key]
    return UNKNOWN


def parts_known(value: Any) -> int:
    """The number of known parts of a value, itself included."""
    if isinstance(value, dict | list):
        return 1 + sum(map(parts_known, value.values() if isinstance(value, dict) else value))
    return int(not isinstance(value, _Unknown))


def of_list(items: list[Any], name: str, args: list[Any]) -> Any:
    """A method of a list; one that is not known leaves nothing known of it."""
    if MORE not in items:
        if name == "append" and len(args) == 1:
            items.append(args[0])
            return None
        if name == "extend" and len(args) == 1 and isinstance(args[0], list):
            items.extend(args[0])
            return None
        if name in ("copy", "index", "count"):
            try:
                return getattr(items, name)(*args)
            except (TypeError, ValueError):
                return UNKNOWN
    forget(items)
    return UNKNOWN


def of_text(text: str, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
    """A method of text."""
    if name == "join" and len(args) == 1 and isinstance(args[0], list) and all(isinstance(each, str) for each in args[0]):
        return text.join(args[0])[:LONGEST]
    plain = all(isinstance(each, str | int | float) for each in (*args, *keywords.values()))
    if name not in _OF_TEXT or not plain or (name == "format" and re.search(r":[^}]{4}", text)):
        return UNKNOWN
    try:
        found = getattr(text, name)(*args, **keywords)
    except (TypeError, ValueError, LookupError, AttributeError):
        return UNKNOWN
    return found if not isinstance(found, str) or len(found) <= LONGEST else UNKNOWN


def forget(value: Any) -> None:
    """Make the entries of a dictionary or list unknown that something unseen may have changed, and those inside of them."""
    if isinstance(value, dict):
        inside, changed = list(value.values()), REST not in value or any(map(is_known, value.values()))
        if changed:
            put(value, {REST: UNKNOWN})
    elif isinstance(value, list):
        inside, changed = list(value), value != [MORE]
        value[:] = [MORE]
    else:
        return
    if changed:
        for each in inside:
            forget(each)


def merge(left: dict[Any, Any], right: dict[Any, Any], memo: dict[int, Any]) -> None:
    """Leave in `left` what both have; the rest is unknown."""
    if id(left) in memo:
        return
    memo[id(left)] = left
    for key in [*left, *(key for key in right if key not in left)]:
        if isinstance(key, str) and key.startswith("<") and (key not in left or key not in right):
            left[key] = left.get(key, right.get(key))  # an estimator of one branch
        elif key in left and key in right and isinstance(left[key], dict) and isinstance(right[key], dict):
            merge(left[key], right[key], memo)
        elif key not in left or key not in right or not same(left[key], right[key]):
            left[key] = UNKNOWN


def same(left: Any, right: Any) -> bool:
    """True for equal values of one type."""
    return type(left) is type(right) and bool(left == right)


def truth_of(value: Any) -> bool | None:
    """Truth of a value; None if it is not known."""
    if isinstance(value, dict):
        return True if set(value) - {REST} else None if REST in value else False
    if isinstance(value, list) and MORE in value:
        return None
    return None if isinstance(value, _Unknown | Function | Job) else bool(value)


def is_known(value: Any) -> bool:
    """True for a value of which every part is known without a run."""
    if isinstance(value, dict):
        return all(map(is_known, value.values()))
    if isinstance(value, list):
        return all(map(is_known, value))
    if isinstance(value, Made):
        return is_known(value.args) and is_known(value.words)
    return not isinstance(value, _Unknown | Function)


def converted(kind: str, args: list[Any]) -> Any:
    """The result of a function of `CONVERSIONS` or `LISTS`."""
    if not all(is_known(each) and isinstance(each, str | int | float | list | dict) for each in args):
        return UNKNOWN
    try:
        return (CONVERSIONS | LISTS)[kind](*args)
    except (ArithmeticError, ValueError, TypeError):  # int of infinity, len of a number
        return UNKNOWN


def entries(value: Any) -> dict[Any, Any]:
    """The entries of a dictionary; for an unknown value `REST`."""
    return value if isinstance(value, dict) else {REST: UNKNOWN}


def calculated(kind: ast.operator, left: Any, right: Any) -> Any:
    """A sum, product, … of two values; of large ones none, since a script may be anything."""
    if isinstance(kind, ast.BitOr) and isinstance(left, dict) and isinstance(right, dict):
        return left | right
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
    texts = isinstance(kind, ast.Add) and isinstance(left, str) and isinstance(right, str)
    if isinstance(kind, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return [MORE] if MORE in left or MORE in right else left + right
    if not (numbers or texts) or type(kind) not in _OPERATORS:
        return UNKNOWN
    if numbers and (abs(left) > _LARGEST or abs(right) > _LARGEST or (isinstance(kind, ast.Pow) and abs(right) > 64)):
        return UNKNOWN
    if texts and len(left) + len(right) > LONGEST:
        return UNKNOWN
    try:
        found = _OPERATORS[type(kind)](left, right)
    except (ArithmeticError, ValueError):
        return UNKNOWN
    return UNKNOWN if isinstance(found, complex) else found
