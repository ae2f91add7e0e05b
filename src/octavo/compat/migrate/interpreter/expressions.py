"""The interpreter's expressions: names, dictionaries, lists, comparisons, texts, comprehensions."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from octavo.compat.migrate.heap import (
    ABSENT,
    MAYBE,
    Builtin,
    Fixed,
    Function,
    Imported,
    Items,
    Job,
    Names,
    Table,
    View,
    children,
    is_same,
    pairwise,
    plain,
)
from octavo.compat.migrate.interpreter.core import (
    GOES_ON,
    MOST_STEPS,
    Interpreter,
    Outcome,
    is_key,
    is_poison,
    is_scalar,
    truth_of,
)
from octavo.compat.migrate.known import (
    COMPARISONS,
    LONGEST,
    MORE,
    MOST_ITEMS,
    REST,
    UNKNOWN,
    calculated,
)
from octavo.compat.migrate.scopes import ANY_FRAME, ANY_NAME

_LAZY = ("zip", "enumerate", "reversed", "range")
_RESULTS = ("fit", "latest_training_job", "model_data", "jobs", "sagemaker_session", "name")
"""Attributes of an estimator without access to its arguments."""


class End(Exception):
    """Raised when the items of a loop are not known, or no longer."""


class Expressions(Interpreter):
    """The interpreter of expressions."""

    # expressions

    def of(self, node: ast.AST | None) -> Any:
        """The value of an expression, or UNKNOWN. Calls in it are followed."""
        self._steps += 1
        if self._steps > MOST_STEPS and not self._blind:
            return self._poison()
        if isinstance(node, ast.Constant):
            return node.value
        follow = self._EXPRESSIONS.get(type(node))
        if follow is None:
            return UNKNOWN if node is None or self._blind else self._give_up(node)
        return follow(self, node)

    def _of_name(self, node: ast.Name) -> Any:
        value = self._name(node.id)
        if node.id == "__builtins__":
            return self._poison()
        if isinstance(value, Builtin) and (value.name in ANY_NAME or value.name == "vars"):
            return self._poison()
        if not isinstance(value, Imported):
            return value
        dotted = self._dotted(node)
        return False if dotted == "typing.TYPE_CHECKING" else value

    def _of_attribute(self, node: ast.Attribute) -> Any:
        dotted = self._dotted(node)
        owner = self.of(node.value)
        if dotted == "typing.TYPE_CHECKING":
            return False
        if dotted is not None and ".recipe.Format." in dotted:
            return f"Format.{node.attr}"
        if node.attr in ANY_FRAME or (node.attr == "__dict__" and isinstance(owner, Imported | Function)):
            return self._poison()
        if isinstance(owner, Imported):
            whole = f"{owner.dotted}.{node.attr}"
            return self._poison() if is_poison(whole) else Imported(whole) if self._is_intact(whole) else UNKNOWN
        if isinstance(owner, Builtin):
            return Builtin(f"{owner.name}.{node.attr}")
        if isinstance(owner, Job):
            if node.attr in owner.given:
                self._heap.lose(owner.given[node.attr])
            elif node.attr not in _RESULTS:
                self._heap.lose(owner)
            return UNKNOWN
        self._heap.lose(owner)  # a bound method, which may be called anywhere
        return UNKNOWN

    def _of_dict(self, node: ast.Dict) -> Table:
        table = Table()
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self._heap.put(table, self._entries(self.of(value)))
            else:
                name = self.of(key)
                self._store(table, name, self.of(value))
        return table

    def _store(self, table: Table, key: Any, value: Any) -> None:
        """Set an entry whose key may be unknown."""
        if is_key(key):
            self._heap.put(table, {key: value})
        else:
            self._heap.lose(value)
            self._heap.lose(key)
            self._heap.put(table, {REST: UNKNOWN})

    def _entries(self, value: Any) -> dict[Any, Any]:
        """The entries of `**value` or `dict(value)`."""
        if isinstance(value, Table):
            return value
        self._heap.lose(value)
        return {REST: UNKNOWN}

    def _of_list(self, node: ast.List | ast.Tuple) -> Any:
        items = self._several(node.elts)
        if items is None:
            return UNKNOWN if isinstance(node, ast.Tuple) else Items([MORE])
        return Fixed(items) if isinstance(node, ast.Tuple) else Items(items)

    def _several(self, nodes: Sequence[ast.expr]) -> list[Any] | None:
        """Values in order, with those of `*each`. If their number is not known: None, and all are lost."""
        values: list[Any] = []
        known = True
        for each in nodes:
            if isinstance(each, ast.Starred):
                items = self._all(each.value)
                known &= items is not None
                values += items or []
            else:
                values.append(self.of(each))
        if not known:
            for value in values:
                self._heap.lose(value)
        return values if known else None

    def _of_set(self, node: ast.Set) -> Any:
        for each in node.elts:
            self._heap.lose(self.of(each.value if isinstance(each, ast.Starred) else each))
        return UNKNOWN

    def _of_walrus(self, node: ast.NamedExpr) -> Any:
        value = self.of(node.value)
        frame = self._frames[-1]
        while frame.kind == "comprehension" and frame.outer is not None:
            frame = frame.outer
        self._bind(self._module if node.target.id in frame.shared else frame, node.target.id, value)
        return value

    def _of_subscript(self, node: ast.Subscript) -> Any:
        table = self.of(node.value)
        if not isinstance(node.slice, ast.Slice):
            return self._item(table, self.of(node.slice))
        ends = [None if each is None else self.of(each) for each in (node.slice.lower, node.slice.upper, node.slice.step)]
        whole = isinstance(table, str | Fixed) or (isinstance(table, Items) and table.is_whole)
        if not whole or not all(each is None or type(each) is int for each in ends) or ends[2] == 0:
            self._lose_inside(table)
            for each in ends:
                self._heap.lose(each)
            return UNKNOWN
        part = table[slice(*ends)]
        return part if isinstance(table, str) else type(table)(part)

    def _lose_inside(self, value: Any) -> None:
        """Lose the values in an object: unseen code may now hold any of them."""
        if isinstance(value, Table | Items | Fixed | View):
            for each in list(children(value)):
                self._heap.lose(each)
            if isinstance(value, Table | Items) and any(not is_scalar(each) for each in children(value)):
                self._heap.leak(value)
        else:
            self._heap.lose(value)

    def _item(self, table: Any, key: Any, default: Any = ABSENT) -> Any:
        """An entry; the default for a key that a dictionary does not have."""
        if isinstance(table, Table) and is_key(key):
            if key in table:
                return UNKNOWN if table[key] is MAYBE else table[key]
            return UNKNOWN if REST in table or default is ABSENT else default
        whole = isinstance(table, str | Fixed) or (isinstance(table, Items) and table.is_whole)
        if whole and isinstance(key, int) and -len(table) <= key < len(table):
            return table[key]
        self._lose_inside(table)
        self._heap.lose(key)
        return UNKNOWN

    def _of_unary(self, node: ast.UnaryOp) -> Any:
        value = self.of(node.operand)
        if isinstance(node.op, ast.Not):
            return UNKNOWN if (truth := truth_of(value)) is None else not truth
        self._heap.lose(value)
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN

    def _of_binary(self, node: ast.BinOp) -> Any:
        left = self.of(node.left)
        return self._calculated(node.op, left, self.of(node.right))

    def _calculated(self, kind: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(kind, ast.BitOr) and isinstance(left, Table) and isinstance(right, Table):
            merged = Table()
            self._heap.put(merged, left)
            self._heap.put(merged, right)
            return merged
        if isinstance(kind, ast.Add) and type(left) is type(right) and isinstance(left, Items | Fixed):
            if MORE in left or MORE in right:
                self._lose_inside(left)
                self._lose_inside(right)
                return Items([MORE])
            return type(left)([*left, *right])
        boxes = isinstance(left, list | dict) or isinstance(right, list | dict)
        result = UNKNOWN if boxes else calculated(kind, left, right)
        if result is UNKNOWN:
            self._heap.lose(left)
            self._heap.lose(right)
        return result

    def _of_comparison(self, node: ast.Compare) -> Any:
        left, result = self.of(node.left), True
        for number, (kind, other) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.of(other)
            truth = self._compared(kind, left, right)
            if truth is UNKNOWN:
                rest = node.comparators[number + 1 :]
                self._fork(lambda rest=rest: self._each(rest), lambda: GOES_ON)  # type: ignore[misc]
                return UNKNOWN
            if not truth:
                return False
            left, result = right, truth
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(kind, ast.In | ast.NotIn) and isinstance(right, Table | View) and is_key(left):
            table = right if isinstance(right, Table) else right.table
            if isinstance(right, Table) or right.kind == "keys":
                there = None if table.get(left) is MAYBE or (left not in table and REST in table) else left in table
                return UNKNOWN if there is None else there == isinstance(kind, ast.In)
        if isinstance(kind, ast.Is | ast.IsNot):
            known = (is_scalar(left) or isinstance(left, Table | Items)) and (
                is_scalar(right) or isinstance(right, Table | Items)
            )
            single = any(each is None or each is True or each is False for each in (left, right))
            if not known or not (single or (isinstance(left, Table | Items) and isinstance(right, Table | Items))):
                return UNKNOWN
            return (left is right) == isinstance(kind, ast.Is)
        try:
            return COMPARISONS[type(kind)](plain(left), plain(right))
        except (TypeError, ValueError, RecursionError):
            if UNKNOWN in (left, right) or isinstance(left, Function) or isinstance(right, Function):
                self._heap.lose(left)  # a comparison method gets both operands
                self._heap.lose(right)
            return UNKNOWN

    def _of_boolean(self, node: ast.BoolOp) -> Any:
        for number, each in enumerate(node.values):
            last = self.of(each)
            truth = truth_of(last)
            rest = node.values[number + 1 :]
            if truth is None and rest:
                self._heap.lose(last)
                self._fork(lambda rest=rest: self._each(rest), lambda: GOES_ON)  # type: ignore[misc]
                return UNKNOWN
            if truth == isinstance(node.op, ast.Or):
                break
        return last

    def _each(self, nodes: Iterable[ast.AST]) -> Outcome:
        """Evaluate expressions and lose their values."""
        for node in nodes:
            self._heap.lose(self.of(node))
        return GOES_ON

    def _of_choice(self, node: ast.IfExp) -> Any:
        truth = truth_of(self.of(node.test))
        if truth is not None:
            return self.of(node.body if truth else node.orelse)
        values: list[Any] = []

        def take(part: ast.expr) -> Outcome:
            values.append(self.of(part))
            return GOES_ON

        self._fork(lambda: take(node.body), lambda: take(node.orelse))
        return self._one_of(values)

    def _one_of(self, values: list[Any]) -> Any:
        """The value if all are the same; otherwise UNKNOWN, and all are lost."""
        if values and all(is_same(values[0], each) for each in values[1:]):
            return values[0]
        for each in values:
            self._heap.lose(each)
        return UNKNOWN

    def _of_text(self, node: ast.JoinedStr) -> Any:
        parts: list[str | None] = []
        for each in node.values:
            value = self.of(each.value) if isinstance(each, ast.FormattedValue) else self.of(each)
            form = self.of(each.format_spec) if isinstance(each, ast.FormattedValue) and each.format_spec else ""
            plain_form = isinstance(form, str) and len(form) <= 8
            if not plain_form or not isinstance(value, str | int | float) or getattr(each, "conversion", -1) != -1:
                parts.append(None)
                continue
            try:
                parts.append(format(value, form))
            except ValueError:
                parts.append(None)
        known = [part for part in parts if part is not None]
        whole = "".join(known)
        return whole if len(known) == len(parts) and len(whole) <= LONGEST else UNKNOWN

    def _of_lambda(self, node: ast.Lambda) -> Any:
        return self._function(node)

    def _of_comprehension(self, node: ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp) -> Any:
        if isinstance(node, ast.ListComp | ast.DictComp):
            elements = self._elements(node)
            if elements is not None and isinstance(node, ast.ListComp):
                return Items(elements)
            if elements is not None:
                table = Table()
                for key, value in elements:
                    self._store(table, key, value)
                return table
        return UNKNOWN if self._blind else self._give_up(node)

    def _elements(self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp) -> list[Any] | None:
        """The elements of a comprehension, pairs for a dictionary; None if it cannot be followed to its end."""
        elements: list[Any] = []
        frame = Names(self._frames[-1], "comprehension")

        def go(depth: int) -> None:
            if depth == len(node.generators):
                if isinstance(node, ast.DictComp):
                    key = self.of(node.key)
                    elements.append((key, self.of(node.value)))
                else:
                    elements.append(self.of(node.elt))
                if len(elements) > MOST_ITEMS:
                    raise End
                return
            part = node.generators[depth]
            if part.is_async:
                raise End
            for item in self._live(part.iter):
                if frame not in self._frames:
                    self._frames.append(frame)
                self._assign(part.target, item)
                for test in part.ifs:
                    truth = truth_of(self.of(test))
                    if truth is None:
                        raise End
                    if not truth:
                        break
                else:
                    go(depth + 1)

        frames = list(self._frames)
        try:
            go(0)
        except End:
            for each in elements:
                for value in each if isinstance(each, tuple) else [each]:
                    self._heap.lose(value)
            return None
        finally:
            self._frames = frames
        return elements

    # iteration

    def _live(self, node: ast.AST) -> Iterable[Any]:
        """The items of an expression, one by one: the loop's body may change it. Raises End at an unknown item."""
        if not self._is_lazy(node):
            yield from self._live_value(self.of(node))
            return
        sources: list[Any] = []
        items = self._lazy(node, sources)
        before = [list(children(each)) for each in sources]
        for item in self._live_value(items):
            if any(not pairwise(was, list(children(each))) for was, each in zip(before, sources, strict=True)):
                self._lose_inside(items)
                raise End
            yield item
        if any(not pairwise(was, list(children(each))) for was, each in zip(before, sources, strict=True)):
            raise End

    def _live_value(self, value: Any) -> Iterable[Any]:
        if self._steps > MOST_STEPS:
            raise End
        if isinstance(value, Items):
            number = 0
            while number < len(value):
                if not value.is_whole or number >= MOST_ITEMS:
                    self._lose_inside(value)
                    raise End
                yield value[number]
                number += 1
            return
        if isinstance(value, Fixed | str | list) and len(value) <= MOST_ITEMS:
            yield from list(value)
            return
        table = value.table if isinstance(value, View) else value
        if not isinstance(table, Table) or not table.is_whole or len(table) > MOST_ITEMS:
            self._lose_inside(value)
            raise End
        kind, keys = value.kind if isinstance(value, View) else "keys", list(table)
        for key in keys:
            if not table.is_whole or list(table) != keys:
                self._lose_inside(value)
                raise End
            yield key if kind == "keys" else table[key] if kind == "values" else Fixed([key, table[key]])

    def _all(self, node: ast.AST) -> list[Any] | None:
        """All items of an expression. If they are not known: None, and they are lost."""
        try:
            return list(self._live(node))
        except End:
            return None

    def _is_lazy(self, node: ast.AST) -> bool:
        if isinstance(node, ast.GeneratorExp):
            return True
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _LAZY
            and isinstance(self._name(node.func.id), Builtin)
            and not any(isinstance(each, ast.Starred) for each in node.args)
        )

    def _lazy(self, node: ast.AST, sources: list[Any]) -> Any:
        """All items of a `zip`, `enumerate`, `reversed`, `range` or generator, or UNKNOWN. sources: gets the lists it reads."""
        if isinstance(node, ast.GeneratorExp):
            elements = self._elements(node)
            return UNKNOWN if elements is None and self._blind else self._give_up(node) if elements is None else elements
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        name, words = node.func.id, {word.arg: self.of(word.value) for word in node.keywords}
        self._remember(node, [UNKNOWN for _ in node.args], dict(words.items()))  # type: ignore[arg-type]
        if name == "range":
            ends = [self.of(each) for each in node.args]
            if words or not ends or not all(type(each) is int for each in ends) or (len(ends) == 3 and ends[2] == 0):
                return UNKNOWN
            return list(range(*ends)) if len(ends) <= 3 and len(range(*ends)) <= MOST_ITEMS else UNKNOWN
        parts: list[list[Any] | None] = []
        lists_of = node.args[:1] if name == "enumerate" else node.args
        values = [self._lazy(each, sources) if self._is_lazy(each) else self.of(each) for each in lists_of]
        start = self.of(node.args[1]) if name == "enumerate" and len(node.args) > 1 else words.pop("start", 0)
        sources += values
        for value in values:
            try:
                parts.append(list(self._live_value(value)))
            except End:
                parts.append(None)
        lists = [each for each in parts if each is not None]
        if words or len(lists) < len(parts) or not parts or type(start) is not int:
            for some in lists:
                for value in some:
                    self._heap.lose(value)
            return UNKNOWN
        if name == "reversed":
            return list(reversed(lists[0]))
        if name == "enumerate":
            return [Fixed(each) for each in enumerate(lists[0], start)]
        return [Fixed(each) for each in zip(*lists, strict=False)]

    _EXPRESSIONS: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Name: _of_name, ast.Attribute: _of_attribute, ast.Dict: _of_dict, ast.List: _of_list, ast.Tuple: _of_list,
        ast.Set: _of_set, ast.Call: lambda self, node: self._call(node), ast.Subscript: _of_subscript,
        ast.NamedExpr: _of_walrus, ast.UnaryOp: _of_unary,
        ast.BinOp: _of_binary, ast.Compare: _of_comparison, ast.BoolOp: _of_boolean, ast.IfExp: _of_choice,
        ast.JoinedStr: _of_text, ast.Lambda: _of_lambda, ast.ListComp: _of_comprehension, ast.DictComp: _of_comprehension,
        ast.SetComp: _of_comprehension, ast.GeneratorExp: _of_comprehension,
    }  # fmt: skip
