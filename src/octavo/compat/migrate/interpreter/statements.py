"""The interpreter's statements, and the ways in which a block may end: next, return, break, continue, raise."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from octavo.compat.migrate import heap as objects
from octavo.compat.migrate.heap import (
    ABSENT,
    BIND,
    Builtin,
    Imported,
    Items,
    Names,
    Table,
    Task,
)
from octavo.compat.migrate.interpreter.calls import Calls
from octavo.compat.migrate.interpreter.core import (
    BREAK,
    CONTINUE,
    GOES_ON,
    MOST_STEPS,
    NEXT,
    RAISE,
    RAISES,
    RETURN,
    Outcome,
    is_key,
    is_poison,
    truth_of,
)
from octavo.compat.migrate.interpreter.expressions import End
from octavo.compat.migrate.known import (
    MOST_ITEMS,
    REST,
    UNKNOWN,
    RecipeValue,
)
from octavo.compat.migrate.scopes import ANY_FRAME, bound, declared

_MOST_ROUNDS = 40
_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_NO_SUPPRESSION = (
    "contextlib.nullcontext",
    "torch.no_grad",
    "torch.autocast",
    "torch.inference_mode",
    "contextlib.redirect_stdout",
)
"""Contexts that do not suppress exceptions."""


class Statements(Calls):
    """The interpreter of statements, calls and expressions."""

    # statements

    def _block(self, body: Sequence[ast.stmt]) -> Outcome:
        """Follow statements; returns the ways in which they may end."""
        left: Outcome = frozenset()
        last = GOES_ON
        pending: list[tuple[int, int]] = []
        for node in body:
            out = self._statement(node)
            if NEXT not in out:
                last = out
                break
            if out - {NEXT, RAISE}:  # the rest may not run
                left |= out - GOES_ON
                pending.append(self._pend())
        return self._settle(pending, left, last)

    def _pend(self) -> tuple[int, int]:
        """Begin statements that may not run; returns (mark in the heap, serial)."""
        return self._heap.mark(), next(objects._SERIAL)

    def _settle(self, pending: list[tuple[int, int]], left: Outcome, last: Outcome) -> Outcome:
        """End the statements that `_pend` began: merge all states in which the block may end."""
        for mark, born in reversed(pending):
            if last == RAISES:
                self._heap.rollback(mark)
            else:
                self._heap.join(mark, {}, born)
            self._heap.release()
        return left if pending and last == RAISES else left | last

    def _statement(self, node: ast.stmt) -> Outcome:
        self._visited.add(id(node))
        follow = self._STATEMENTS.get(type(node))
        if follow is None:
            self._give_up(node)
            inside = {type(each) for each in ast.walk(node)}
            if ast.Return in inside and self._returns:
                self._returns[-1].append(UNKNOWN)
            ways = {RETURN: ast.Return, BREAK: ast.Break, CONTINUE: ast.Continue}
            return GOES_ON | {way for way, kind in ways.items() if kind in inside}
        out = follow(self, node)
        if self._threads and not self._blind:
            self._watch()
        return out

    def _do_expression(self, node: ast.Expr) -> Outcome:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        exits = function is not None and self._dotted(function) in _EXITS
        self.of(node.value)
        return RAISES if exits else GOES_ON

    def _do_assign(self, node: ast.Assign | ast.AnnAssign) -> Outcome:
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self.of(node.value))
            if self._frames[-1].kind != "function":
                self._annotations([node.annotation])
            return GOES_ON
        value = self.of(node.value)
        for target in node.targets:
            self._assign(target, value)
        return GOES_ON

    def _assign(self, target: ast.AST, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, ast.Subscript):
            table = self.of(target.value)
            self._store_item(table, target.slice, value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value)
        elif isinstance(target, ast.Attribute):
            owner = self.of(target.value)
            if isinstance(owner, Task) and target.attr == "daemon":
                return
            self._heap.lose(value)
            if isinstance(owner, Imported):
                self._replace(f"{owner.dotted}.{target.attr}")
            elif target.attr in ANY_FRAME:
                self._poison()
            else:
                if owner is UNKNOWN:  # it may be a module
                    self._replace(f".{target.attr}")
                self._heap.lose(owner)

    def _store_item(self, table: Any, where: ast.expr, value: Any) -> None:
        if isinstance(where, ast.Slice):
            self._each(each for each in (where.lower, where.upper, where.step) if each is not None)
            key: Any = UNKNOWN
        else:
            key = self.of(where)
        if isinstance(table, Table):
            self._store(table, key, value)
        elif isinstance(table, Items) and table.is_whole and type(key) is int and -len(table) <= key < len(table):
            self._heap.change(table)
            if table.leaky or table.lost:
                self._heap.lose(value)
            table[key] = value
        else:
            self._heap.lose(table)
            self._heap.lose(value)
            self._heap.lose(key)

    def _unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        try:
            parts: list[Any] | None = list(self._live_value(value))
        except End:
            parts = None
        stars = [number for number, each in enumerate(target.elts) if isinstance(each, ast.Starred)]
        count = len(target.elts)
        if parts is not None and stars and len(parts) >= count - 1:
            at, after = stars[0], count - 1 - stars[0]
            middle = Items(parts[at : len(parts) - after])
            parts = [*parts[:at], middle, *parts[len(parts) - after :]]
        if parts is None or len(parts) != count:
            for each in parts or []:
                self._heap.lose(each)
            parts = [UNKNOWN] * count
        for each, part in zip(target.elts, parts, strict=True):
            self._assign(each, part)

    def _do_change(self, node: ast.AugAssign) -> Outcome:
        target = node.target
        if isinstance(target, ast.Name):
            self._set(target.id, self._changed(node, self._name(target.id)))
        elif isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice):
            table, key = self.of(target.value), self.of(target.slice)
            value = self._changed(node, self._item(table, key))
            if isinstance(table, Table):
                self._store(table, key, value)
            else:
                self._store_item(table, ast.Constant(key) if type(key) is int else ast.Constant(None), value)
        else:
            self._each(each for each in ast.iter_child_nodes(target) if isinstance(each, ast.expr))
            self._heap.lose(self.of(node.value))
        return GOES_ON

    def _changed(self, node: ast.AugAssign, before: Any) -> Any:
        value = self.of(node.value)
        if isinstance(node.op, ast.BitOr) and isinstance(before, Table):
            self._merge(before, value)
            return before
        if isinstance(node.op, ast.Add) and isinstance(before, Items):
            self._extend(before, value)
            return before
        if isinstance(before, Items):
            self._heap.lose(before)
            return UNKNOWN
        return self._calculated(node.op, before, value)

    def _do_delete(self, node: ast.Delete) -> Outcome:
        for target in node.targets:
            self._delete(target)
        return GOES_ON

    def _delete(self, target: ast.AST) -> None:
        if isinstance(target, ast.Name):
            frame = self._module if target.id in self._frames[-1].shared else self._frames[-1]
            self._bind(frame, target.id, ABSENT if frame.kind in ("module", "class") else UNKNOWN)
        elif isinstance(target, ast.Subscript):
            table = self.of(target.value)
            key = UNKNOWN if isinstance(target.slice, ast.Slice) else self.of(target.slice)
            if isinstance(target.slice, ast.Slice):
                self._each(each for each in (target.slice.lower, target.slice.upper, target.slice.step) if each is not None)
            if isinstance(table, Table) and is_key(key) and REST not in table and not table.lost:
                self._heap.change(table)
                table.pop(key, None)
            else:
                self._heap.lose(table)
        elif isinstance(target, ast.Attribute):
            owner = self.of(target.value)
            if isinstance(owner, Imported):
                self._replace(f"{owner.dotted}.{target.attr}")
            else:
                self._heap.lose(owner)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._delete(each)

    def _do_if(self, node: ast.If) -> Outcome:
        truth = truth_of(self.of(node.test))
        if truth is None:
            return self._fork(lambda: self._block(node.body), lambda: self._block(node.orelse))
        if (len(self._frames) == 1 and not self._rounds) or self._is_fixed(node.test):
            left_out = node.orelse if truth else node.body
            self._skipped |= {id(each): (each, node.test.lineno) for each in left_out}
        return self._block(node.body if truth else node.orelse)

    def _is_fixed(self, test: ast.expr) -> bool:
        """True for a test of imported names and constants only, the same in every call of a function."""
        names = [each for each in ast.walk(test) if isinstance(each, ast.Name)]
        return all(self._called(each) is not None or each.id == "hasattr" for each in names)

    def _fork(self, first: Callable[[], Outcome], second: Callable[[], Outcome]) -> Outcome:
        """Follow both branches from the same state and merge them. A branch that raises does not count."""
        if self._blind:
            return first() | second()
        heap = self._heap
        mark = heap.mark()
        born = next(objects._SERIAL)
        frames = list(self._frames)
        one = first()
        self._frames = frames[:]
        after = heap.rollback(mark)
        middle = heap.mark()
        other = second()
        self._frames = frames[:]
        if other == RAISES and one != RAISES:
            heap.rollback(middle)
            heap.restore(after)
        elif one != RAISES:
            heap.join(middle, after, born)
        heap.release()
        heap.release()
        if one == RAISES or other == RAISES:
            return one if other == RAISES else other
        return one | other

    def _do_for(self, node: ast.For) -> Outcome:
        left: Outcome = frozenset()
        last: Outcome = GOES_ON
        pending: list[tuple[int, int]] = []
        try:
            for item in self._live(node.iter):
                self._assign(node.target, item)
                out = self._block(node.body)
                left |= out & {RETURN}
                if not out & {NEXT, CONTINUE}:
                    last = GOES_ON if BREAK in out else out - {RETURN}
                    break
                if out & {BREAK, RETURN}:  # the loop may have ended here
                    left |= GOES_ON
                    pending.append(self._pend())
            else:
                last = self._block(node.orelse)
        except End:
            last = self._again(node, lambda: self._assign(node.target, UNKNOWN))
        return self._settle(pending, left, last or left)

    def _again(self, node: ast.For | ast.AsyncFor | ast.While, start: Callable[[], Any]) -> Outcome:
        """Follow a loop with an unknown number of iterations: repeat it until another iteration changes no known value."""
        outs: Outcome = frozenset()

        def once() -> Outcome:
            nonlocal outs
            start()
            outs |= self._block(node.body)
            return GOES_ON

        self._rounds += 1
        for _ in range(1 if self._poisoned else _MOST_ROUNDS):
            mark, born = self._heap.mark(), next(objects._SERIAL)
            self._fork(once, lambda: GOES_ON)
            steady = self._blind or self._heap.is_steady(mark, born)
            self._heap.release()
            if steady:
                break
        else:
            self._poison()
        if isinstance(node, ast.While):
            self.of(node.test)
        self._rounds -= 1
        ended = self._fork(lambda: self._block(node.orelse), lambda: GOES_ON) if BREAK in outs else self._block(node.orelse)
        return ended | (outs & {RETURN})

    def _do_while(self, node: ast.While) -> Outcome:
        left: Outcome = frozenset()
        last: Outcome | None = None
        pending: list[tuple[int, int]] = []
        for _ in range(MOST_ITEMS):
            truth = truth_of(self.of(node.test)) if self._steps <= MOST_STEPS else None
            if truth is None:
                break
            if not truth:
                last = self._block(node.orelse)
                break
            out = self._block(node.body)
            left |= out & {RETURN}
            if not out & {NEXT, CONTINUE}:
                last = (GOES_ON if BREAK in out else out - {RETURN}) or left
                break
            if out & {BREAK, RETURN}:
                left |= GOES_ON
                pending.append(self._pend())
        if last is None:
            last = self._again(node, lambda: self.of(node.test))
        return self._settle(pending, left, last)

    def _do_with(self, node: ast.With) -> Outcome:
        return self._contexts(node, 0)

    def _contexts(self, node: ast.With, number: int) -> Outcome:
        if number == len(node.items):
            return self._block(node.body)
        item = node.items[number]
        dotted = self._dotted(item.context_expr.func) if isinstance(item.context_expr, ast.Call) else None
        opens = isinstance(item.context_expr, ast.Call) and isinstance(item.context_expr.func, ast.Name)
        opens = opens and self._name(item.context_expr.func.id) == Builtin("open")  # type: ignore[attr-defined]
        value = self.of(item.context_expr)
        plainly = opens or (dotted is not None and (dotted in _NO_SUPPRESSION or self._is_library(dotted)))
        if not isinstance(value, RecipeValue):
            self._heap.lose(value)

        def inside() -> Outcome:
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value if isinstance(value, RecipeValue) else UNKNOWN)
            return self._contexts(node, number + 1)

        return inside() if plainly else self._caught(inside, lambda: GOES_ON)

    def _caught(
        self, body: Callable[[], Outcome], handler: Callable[[], Outcome], more: Callable[[], Outcome] | None = None
    ) -> Outcome:
        """Follow code that may raise after any of its steps, and `handler`; `more` follows without an exception."""
        if self._blind:
            return body() | handler()
        heap = self._heap
        snapshots: list[Any] = []

        def through() -> Outcome:
            mark = heap.mark()
            out = body()
            snapshots.append(heap.anywhere(mark))
            heap.release()
            if more is not None and NEXT in out:
                out = (out - GOES_ON) | (self._fork(more, lambda: GOES_ON) if out - GOES_ON else more())
            return out

        def out_of() -> Outcome:
            states, lost = snapshots[0]
            heap.restore(states)
            for value in lost:
                heap.lose(value)
            return handler()

        return self._fork(through, out_of)

    def _do_try(self, node: ast.Try) -> Outcome:
        def handle(number: int) -> Outcome:
            if number == len(node.handlers):
                return RAISES
            handler = node.handlers[number]
            if handler.type is not None and not isinstance(handler.type, ast.Name | ast.Attribute | ast.Tuple):
                self._each([handler.type])
            return self._fork(lambda: self._handler(handler), lambda: handle(number + 1))

        if node.handlers:
            out = self._caught(
                lambda: self._block(node.body), lambda: handle(0), (lambda: self._block(node.orelse)) if node.orelse else None
            )
        elif any(isinstance(each, ast.Return | ast.Break | ast.Continue) for part in node.finalbody for each in ast.walk(part)):
            out = self._caught(lambda: self._block([*node.body, *node.orelse]), lambda: GOES_ON)  # `return` discards it
        else:
            out = self._block([*node.body, *node.orelse])
        last = self._block(node.finalbody)
        return (last - GOES_ON) | out if NEXT in last else last

    def _handler(self, handler: ast.ExceptHandler) -> Outcome:
        if handler.name:
            self._set(handler.name, UNKNOWN)
        out = self._block(handler.body)
        if handler.name:
            frame = self._module if handler.name in self._frames[-1].shared else self._frames[-1]
            self._bind(frame, handler.name, ABSENT if frame.kind in ("module", "class") else UNKNOWN)
        return out

    def _do_match(self, node: ast.Match) -> Outcome:
        self._heap.lose(self.of(node.subject))
        outs: Outcome = GOES_ON
        for case in node.cases:

            def follow(case: ast.match_case = case) -> Outcome:
                self._each(each for each in ast.walk(case.pattern) if isinstance(each, ast.Call))
                for name in bound([case.pattern]):
                    self._set(name, UNKNOWN)
                if case.guard is not None:
                    self._each([case.guard])
                return self._block(case.body)

            outs |= self._fork(follow, lambda: GOES_ON)
        return outs

    def _do_define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Outcome:
        self._set(node.name, self._function(node))
        return GOES_ON

    def _do_class(self, node: ast.ClassDef) -> Outcome:
        for each in (*node.decorator_list, *node.bases, *(word.value for word in node.keywords)):
            self._heap.lose(self.of(each))
        here = self._frames[-1]
        frame = Names(here if here.kind != "class" else here.outer, "class")
        frame.shared = declared(node.body, ast.Global)
        frames = self._frames
        self._frames = [*frames, frame]
        out = self._block(node.body)
        self._frames = frames
        for value in list(frame.values()):
            self._heap.lose(value)
        self._give_up_names(declared(node.body, ast.Nonlocal))
        self._set(node.name, UNKNOWN)
        return RAISES if out == RAISES else GOES_ON

    def _give_up_names(self, names: Iterable[str]) -> None:
        for name in names:
            self._heap.give(self._home(name, self._frames[-1]), name, BIND)

    def _do_import(self, node: ast.Import | ast.ImportFrom) -> Outcome:
        for alias in node.names:
            if isinstance(node, ast.Import):
                dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                if is_poison(alias.name) and alias.name != "ctypes":
                    self._poison()
                self._set(alias.asname or dotted, Imported(dotted))
            elif alias.name == "*":
                self._star = True
                for name in list(self._frames[-1]):
                    self._set(name, UNKNOWN) if not name.startswith("__") else None
            else:
                whole = f"{node.module}.{alias.name}"
                if not node.level and is_poison(whole):
                    self._poison()
                self._set(alias.asname or alias.name, UNKNOWN if node.level else Imported(whole))
        return GOES_ON

    def _do_return(self, node: ast.Return) -> Outcome:
        value = self.of(node.value) if node.value is not None else None
        if self._returns:
            self._returns[-1].append(value)
        return frozenset({RETURN})

    def _do_raise(self, node: ast.Raise) -> Outcome:
        self._each(each for each in (node.exc, node.cause) if each is not None)
        return RAISES

    def _do_assert(self, node: ast.Assert) -> Outcome:
        truth = truth_of(self.of(node.test))
        message = node.msg
        if message is not None and truth is not True:
            self._fork(lambda: self._each([message]), lambda: GOES_ON)
        return GOES_ON

    def _do_async_for(self, node: ast.AsyncFor) -> Outcome:
        self._heap.lose(self.of(node.iter))
        return self._again(node, lambda: self._assign(node.target, UNKNOWN))

    _STATEMENTS: ClassVar[dict[type, Callable[[Any, Any], Outcome]]] = {
        ast.Expr: _do_expression, ast.Assign: _do_assign, ast.AnnAssign: _do_assign, ast.AugAssign: _do_change,
        ast.Delete: _do_delete, ast.If: _do_if, ast.For: _do_for, ast.While: _do_while, ast.With: _do_with, ast.Try: _do_try,
        ast.Match: _do_match, ast.FunctionDef: _do_define, ast.AsyncFunctionDef: _do_define, ast.ClassDef: _do_class,
        ast.Import: _do_import, ast.ImportFrom: _do_import, ast.Return: _do_return, ast.Raise: _do_raise,
        ast.Assert: _do_assert, ast.AsyncFor: _do_async_for, ast.Pass: lambda self, node: GOES_ON,
        ast.Global: lambda self, node: GOES_ON, ast.Nonlocal: lambda self, node: GOES_ON,
        ast.Break: lambda self, node: frozenset({BREAK}), ast.Continue: lambda self, node: frozenset({CONTINUE}),
    }  # fmt: skip
