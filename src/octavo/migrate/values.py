"""Values of a script that are known without running it: constants, and dictionaries, sums and texts of them.

Statements are followed in their order, functions where the script calls them. A known test takes its branch; after an unknown
one, a value is known only if both branches leave the same. A loop over a known list is followed item by item; values that the
body of another loop changes are unknown. After `exec` or `globals()` nothing is known. Omitted: comprehensions, closures,
attributes of objects.
"""

from __future__ import annotations

import ast
import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from octavo.migrate.known import (
    COMPARISONS,
    CONVERSIONS,
    LISTS,
    LONGEST,
    MORE,
    MOST_ITEMS,
    REST,
    UNKNOWN,
    Function,
    Job,
    Made,
    calculated,
    converted,
    entries,
    forget,
    is_known,
    item_of,
    merge,
    of_list,
    of_text,
    parts_known,
    put,
    same,
    truth_of,
)

_MOST_STEPS = 100_000
_DEEPEST = 8
_READERS = ("print", "pprint", "dumps", "dump", "info", "debug", "warning", "error", "isinstance", "type", "sorted", "repr",
            "display", "items", "keys", "values", "get", "join", "append", "fit", "train", "len")  # fmt: skip
"""Functions that leave the dictionaries they are given as they are."""
_EXITS = ("exit", "_exit", "quit")
_ANY_NAME = ("exec", "eval", "globals", "locals", "vars", "run_line_magic", "run_cell_magic")
"""Calls that may set any name."""


class Values:
    """Values at each call of a script.

    Args:
        tree: of the script.
        positional: called expression → names of the positional arguments of an estimator; None for another call.
        called: the full dotted name of an expression, or None.
        has: dotted name of a library → whether it is there; None for others.
        made: called expression → class of a recipe that it makes, or None.
    """

    def __init__(
        self,
        tree: ast.AST,
        positional: Callable[[ast.AST], Sequence[str] | None] = lambda function: None,
        called: Callable[[ast.AST], str | None] = lambda function: None,
        has: Callable[[str], bool | None] = lambda dotted: None,
        made: Callable[[ast.AST], str | None] = lambda function: None,
    ) -> None:
        self._positional, self._called, self._has, self._makes = positional, called, has, made
        self._doubled: dict[int, list[str]] = {}  # call → keywords that it has twice
        self._frames: list[dict[str, Any]] = [{"__name__": "__main__"}]
        self._shared: list[set[str]] = [set()]  # names of each frame that are the module's
        self._given: dict[int, tuple[list[Any], dict[str, Any]]] = {}  # call → arguments
        self._fitted: dict[int, dict[str, Any]] = {}
        self._made: dict[int, dict[str, Any]] = {}
        self._order: list[int] = []
        self._returns: list[list[Any]] = []
        self._running: list[ast.AST] = []
        self._followed: set[int] = set()
        self._steps = 0
        self._visited: set[int] = set()
        self._skipped: dict[int, tuple[ast.stmt, int]] = {}  # statement of the module → line of the test that leaves it out
        self._block(getattr(tree, "body", []))
        for node in ast.walk(tree):  # functions that nothing calls here
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in self._followed:
                self._run(node, {})

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Keyword → value of each call of an estimator, as they are when it starts; the inputs of its `fit` under "fit"."""
        found = [self._fitted.get(number) or self._unfitted(number) for number in self._order]
        return [job for job in found if isinstance(job, dict)]

    def _unfitted(self, number: int) -> Any:
        """An estimator whose `fit` is not seen: it may come at once or at the end, unless there is no later one."""
        job = self._frames[0].get(f"<{number}>")
        if isinstance(job, dict) and number != self._order[-1]:
            job = copy.deepcopy(job)
            merge(job, self._made.get(number, {}), {})
        return job

    @property
    def unreached(self) -> dict[int, int]:
        """Nodes (`id`) of the module that a known test leaves out → the test's line; in functions, a test without variables."""
        left_out = [(node, line) for key, (node, line) in self._skipped.items() if key not in self._visited]
        return {id(each): line for node, line in left_out for each in ast.walk(node)}

    def last(self, name: str) -> Any:
        """The value of a name of the module after its last line."""
        return self._frames[0].get(name, UNKNOWN)

    def arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of a call, those of `**table` too, as the call gets them."""
        if id(call) not in self._given:  # of code that is not followed
            self._frames.append({})
            self._shared.append(set())
            whole, self._frames[0] = self._frames[0], {}
            found = [self.of(each) for each in call.args], self._keywords(call)
            self._frames[0] = whole
            self._frames.pop()
            self._shared.pop()
            return found
        return self._given[id(call)]

    def of(self, node: ast.AST | None) -> Any:
        """The value of an expression, or UNKNOWN; its calls are followed."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            return UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute) and self._called(node) == "typing.TYPE_CHECKING":
            return False
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.Dict):
            return self._dictionary(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.of(each) for each in node.elts]
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.NamedExpr):
            value = self.of(node.value)
            self._set(node.target.id, value)
            return value
        if isinstance(node, ast.Attribute) and ".recipe.Format." in (self._called(node) or ""):
            return f"Format.{node.attr}"
        if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return UNKNOWN
        return self._computed(node)

    def _subscript(self, node: ast.Subscript) -> Any:
        table = self.of(node.value)
        if not isinstance(node.slice, ast.Slice):
            return item_of(table, self.of(node.slice), UNKNOWN)
        ends = [None if each is None else self.of(each) for each in (node.slice.lower, node.slice.upper, node.slice.step)]
        whole = isinstance(table, str) or (isinstance(table, list) and MORE not in table)
        if not whole or not all(each is None or (isinstance(each, int) and each != 0) or each == 0 for each in ends):
            return UNKNOWN
        return table[slice(*ends)] if ends[2] != 0 else UNKNOWN

    def _computed(self, node: ast.AST | None) -> Any:
        """The value of an expression of operators."""
        if isinstance(node, ast.UnaryOp):
            value = self.of(node.operand)
            if isinstance(node.op, ast.Not):
                return UNKNOWN if (truth := truth_of(value)) is None else not truth
            return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN
        if isinstance(node, ast.BinOp):
            return calculated(node.op, self.of(node.left), self.of(node.right))
        if isinstance(node, ast.Compare):
            return self._compared(node)
        if isinstance(node, ast.BoolOp):
            last: Any = UNKNOWN
            for each in node.values:
                last = self.of(each)
                if (truth := truth_of(last)) is None:
                    return UNKNOWN
                if truth == isinstance(node.op, ast.Or):
                    break
            return last
        if isinstance(node, ast.IfExp):
            truth = truth_of(self.of(node.test))
            if truth is not None:
                return self.of(node.body if truth else node.orelse)
            left, right = self.of(node.body), self.of(node.orelse)
            return left if same(left, right) else UNKNOWN
        if isinstance(node, ast.JoinedStr):
            return self._text(node)
        for child in ast.iter_child_nodes(node) if node is not None else ():
            if isinstance(child, ast.expr):
                self.of(child)
        return UNKNOWN

    def _text(self, node: ast.JoinedStr) -> Any:
        parts: list[str] = []
        for each in node.values:
            value = self.of(each.value) if isinstance(each, ast.FormattedValue) else self.of(each)
            form = self.of(each.format_spec) if isinstance(each, ast.FormattedValue) and each.format_spec else ""
            if not isinstance(value, str | int | float) or not isinstance(form, str) or len(form) > 8:
                return UNKNOWN
            if isinstance(each, ast.FormattedValue) and each.conversion != -1:
                return UNKNOWN
            try:
                parts.append(format(value, form))
            except ValueError:
                return UNKNOWN
        return "".join(parts)[:LONGEST]

    def _compared(self, node: ast.Compare) -> Any:
        left = self.of(node.left)
        for kind, other in zip(node.ops, node.comparators, strict=True):
            right = self.of(other)
            if not (is_known(left) and is_known(right)):
                return UNKNOWN
            try:
                if not COMPARISONS[type(kind)](left, right):
                    return False
            except TypeError:
                return UNKNOWN
            left = right
        return True

    def _dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            inner = self.of(value)
            if key is None:
                put(found, entries(inner))
            else:
                name = self.of(key)
                put(found, {name if isinstance(name, str | int) else REST: inner})
        return found

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word in call.keywords:
            given = entries(self.of(word.value)) if word.arg is None else {word.arg: self.of(word.value)}
            twice = [name for name in given if name in found and name != REST]
            if twice:
                self._doubled[id(call)] = sorted({*self._doubled.get(id(call), []), *map(str, twice)})
            found |= given
        return found

    def doubled(self, call: ast.Call) -> list[str]:
        """Keywords that a call gets twice, by their names or by `**`: Python refuses them."""
        return self._doubled.get(id(call), [])

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        owner = self.of(function.value) if isinstance(function, ast.Attribute) else None
        if not isinstance(function, ast.Name | ast.Attribute):
            self.of(function)
        args, keywords = [self.of(each) for each in node.args], self._keywords(node)
        if any(isinstance(each, ast.Starred) for each in node.args):
            args = [UNKNOWN]
        self._remember(node, args, keywords)
        kind = self._makes(function)
        if kind is not None:
            return Made(kind, *copy.deepcopy((args, keywords)))
        names = self._positional(function)
        if names is not None:
            return self._job(node, dict(zip(names, args, strict=False)) | keywords)
        if isinstance(function, ast.Attribute) and isinstance(owner, Job | dict):
            return self._method(owner, function.attr, args, keywords)
        if isinstance(function, ast.Attribute) and isinstance(owner, list):
            return of_list(owner, function.attr, args)
        if isinstance(function, ast.Attribute) and isinstance(owner, str):
            return of_text(owner, function.attr, args, keywords)
        dotted, name = self._called(function), getattr(function, "attr", getattr(function, "id", ""))
        if dotted in ("copy.copy", "copy.deepcopy") and len(args) == 1:
            value = args[0]
            return copy.deepcopy(value) if dotted == "copy.deepcopy" or not isinstance(value, dict | list) else copy.copy(value)
        if name == "hasattr" and len(args) == 2 and isinstance(args[1], str):
            there = self._has(f"{self._called(node.args[0])}.{args[1]}")
            return UNKNOWN if there is None else there
        if name in _ANY_NAME and (name not in ("vars", "locals") or not node.args):
            self._forget_all()
            return UNKNOWN
        if dotted == "os.path.join" and args and all(isinstance(each, str) for each in args):
            return os.path.join(*args)  # noqa: PTH118 - as the script does
        if isinstance(function, ast.Name):
            known = self._name(function.id)
            if isinstance(known, Function):
                return self._inline(known.node, args, keywords)
            if function.id == "dict" and len(args) < 2:
                pairs = args[0] if args else []
                if isinstance(pairs, list) and all(isinstance(each, list) and len(each) == 2 for each in pairs):
                    pairs = {key: value for key, value in pairs if isinstance(key, str | int)}
                found = dict(entries(pairs))
                put(found, keywords)
                return found
            if function.id in LISTS and known is UNKNOWN and not keywords and all(map(is_known, args)):
                return converted(function.id, args)
            if function.id in CONVERSIONS and known is UNKNOWN and not keywords:
                return converted(function.id, args)
        if isinstance(target := keywords.get("target"), Function):  # of a thread or a process
            given = keywords.get("args")
            self._inline(target.node, given if isinstance(given, list) and MORE not in given else [], {})
        if name not in _READERS:
            for value in (*args, *keywords.values()):
                forget(value)
        return UNKNOWN

    def _remember(self, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> None:
        """Keep the arguments of a call; those that differ between two runs of it are unknown."""
        now = copy.deepcopy((args, keywords))
        if id(node) in self._given:
            merge(now[1], self._given[id(node)][1], {})
        self._given[id(node)] = now

    def _job(self, node: ast.Call, given: dict[str, Any]) -> Job:
        number = id(node)
        if number not in self._order:
            self._order.append(number)
        self._fitted.pop(number, None)
        self._frames[0][f"<{number}>"] = given
        self._made[number] = copy.deepcopy(given)
        return Job(number)

    def _method(self, owner: Any, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        """A method of an estimator or of a dictionary."""
        if isinstance(owner, Job):
            job = self._frames[0].get(f"<{owner.number}>")
            if isinstance(job, dict) and name == "fit":
                self._fitted[owner.number] = copy.deepcopy(job) | {
                    "fit": {"inputs": keywords.get("inputs", args[0] if args else None)}
                }
                return None
            if isinstance(job, dict) and name == "set_hyperparameters":
                before = job.get("hyperparameters")
                job["hyperparameters"] = {} if before is None else before if isinstance(before, dict) else entries(before)
                put(job["hyperparameters"], keywords)
                return None
            return UNKNOWN
        if name == "update":
            for value in (*args, keywords):
                put(owner, entries(value))
            return None
        if name in ("items", "keys", "values"):
            if REST in owner:
                return UNKNOWN
            return [list(each) for each in owner.items()] if name == "items" else list(getattr(owner, name)())
        if name == "get" and args:
            return item_of(owner, args[0], args[1] if len(args) > 1 else None)
        if name == "copy":
            return dict(owner)
        if name in ("pop", "setdefault") and args:
            value = item_of(owner, args[0], args[1] if len(args) > 1 else None)
            if not isinstance(args[0], str | int) or value is UNKNOWN:
                forget(owner)
            elif name == "pop":
                owner.pop(args[0], None)
            else:
                owner.setdefault(args[0], value)
            return value
        if name == "clear":
            owner.clear()
        return UNKNOWN

    def _is_fixed(self, test: ast.expr) -> bool:
        """True for a test of imported names and constants alone, which is the same in every call of a function."""
        names = [each for each in ast.walk(test) if isinstance(each, ast.Name)]
        return all(self._called(each) is not None or each.id == "hasattr" for each in names)

    def _forget_all(self) -> None:
        for frame in self._frames:
            for name, value in frame.items():
                forget(value)
                frame[name] = value if name.startswith("<") else UNKNOWN

    def _inline(self, node: ast.FunctionDef | ast.AsyncFunctionDef, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function of the script, followed with its arguments."""
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        defaults = dict(zip(reversed(names), (self.of(each) for each in reversed(node.args.defaults)), strict=False))
        for each, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                defaults[each.arg] = self.of(default)
        given = dict(zip(names, args, strict=False)) | keywords
        if node.args.kwarg is not None:
            own = {*names, *(each.arg for each in node.args.kwonlyargs)}
            given[node.args.kwarg.arg] = {name: given.pop(name) for name in list(given) if name not in own}
        if node.args.vararg is not None and UNKNOWN not in args:
            given[node.args.vararg.arg] = args[len(names) :]
        return self._run(node, defaults | given)

    def _run(self, node: ast.FunctionDef | ast.AsyncFunctionDef, values: dict[str, Any]) -> Any:
        if node in self._running or len(self._running) >= _DEEPEST or self._steps > _MOST_STEPS:
            for value in values.values():
                forget(value)
            return UNKNOWN
        self._followed.add(id(node))
        inside = [each for each in ast.walk(node) if isinstance(each, ast.Global)]
        bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        self._frames.append(dict.fromkeys(bound, UNKNOWN) | values)
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                self._frames[-1].setdefault(each.arg, UNKNOWN)
        self._shared.append({name for each in inside for name in each.names})
        self._returns.append([])
        self._running.append(node)
        ended = self._block(node.body)
        self._running.pop()
        found = self._returns.pop() + ([] if ended else [None])
        self._shared.pop()
        self._frames.pop()
        known = found and all(same(found[0], each) for each in found[1:])
        return found[0] if known and not isinstance(node, ast.AsyncFunctionDef) else UNKNOWN

    def _name(self, name: str) -> Any:
        frame = self._frames[-1]
        if name in frame and name not in self._shared[-1]:
            return frame[name]
        return self._frames[0].get(name, UNKNOWN)

    def _set(self, name: str, value: Any) -> None:
        frame = self._frames[0] if name in self._shared[-1] else self._frames[-1]
        frame[name] = value

    def _block(self, body: Sequence[ast.stmt]) -> str:
        """Follow statements. Returns "raise" if they end the script, "leave" if the block, "" otherwise."""
        for node in body:
            ended = self._statement(node)
            if ended:
                return ended
        return ""

    def _statement(self, node: ast.stmt) -> str:
        self._visited.add(id(node))
        if isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                value = self.of(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, value)
        elif isinstance(node, ast.AugAssign):
            self._change(node)
        elif isinstance(node, ast.Expr):
            self.of(node.value)
            function = node.value.func if isinstance(node.value, ast.Call) else None
            return "raise" if getattr(function, "attr", getattr(function, "id", "")) in _EXITS else ""
        elif isinstance(node, ast.If):
            truth = truth_of(self.of(node.test))
            if truth is not None and (len(self._frames) == 1 or self._is_fixed(node.test)):
                left_out = node.orelse if truth else node.body
                self._skipped |= {id(each): (each, node.test.lineno) for each in left_out}
            return self._either(truth, node.body, node.orelse)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            self._loop(node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self.of(item.context_expr)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, UNKNOWN if value is UNKNOWN else value)
            return self._block(node.body)
        elif isinstance(node, ast.Try):
            return self._try(node)
        elif isinstance(node, ast.Match):
            self.of(node.subject)
            for case in node.cases:
                for name in (each.name for each in ast.walk(case.pattern) if isinstance(each, ast.MatchAs) and each.name):
                    self._set(name, UNKNOWN)
                self._either(None, case.body, [])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._set(node.name, UNKNOWN if node.decorator_list else Function(node))
        elif isinstance(node, ast.ClassDef):
            self._set(node.name, UNKNOWN)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                self._set((alias.asname or alias.name).partition(".")[0], UNKNOWN)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._delete(target)
        elif isinstance(node, ast.Return):
            value = self.of(node.value) if node.value is not None else None
            if self._returns:
                self._returns[-1].append(value)
            return "leave"
        elif isinstance(node, ast.Raise):
            return "raise"
        elif isinstance(node, ast.Break | ast.Continue):
            return "leave"
        return ""

    def _assign(self, target: ast.AST, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, ast.Subscript):
            table, key = self.of(target.value), self.of(target.slice)
            if isinstance(table, dict):
                put(table, {key if isinstance(key, str | int) else REST: value})
            elif isinstance(table, list) and type(key) is int and MORE not in table and -len(table) <= key < len(table):
                table[key] = value
            else:
                forget(table)
        elif isinstance(target, ast.Tuple | ast.List):
            whole = isinstance(value, list) and len(value) == len(target.elts) and MORE not in value
            whole = whole and not any(isinstance(each, ast.Starred) for each in target.elts)
            for each, part in zip(target.elts, value if whole else [UNKNOWN] * len(target.elts), strict=True):
                self._assign(each.value if isinstance(each, ast.Starred) else each, part)
        elif isinstance(target, ast.Attribute) and isinstance(self.of(target.value), Made):
            for frame in self._frames:  # a field that is written later: every name of the object
                for name in [name for name, each in frame.items() if isinstance(each, Made)]:
                    frame[name] = UNKNOWN

    def _change(self, node: ast.AugAssign) -> None:
        before, value = self.of(node.target), self.of(node.value)
        if isinstance(node.op, ast.BitOr) and isinstance(before, dict):
            put(before, entries(value))
        elif isinstance(node.op, ast.Add) and isinstance(before, list):
            of_list(before, "extend", [value])
        else:
            self._assign(node.target, calculated(node.op, before, value))

    def _delete(self, target: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, UNKNOWN)
        elif isinstance(target, ast.Subscript):
            table, key = self.of(target.value), self.of(target.slice)
            if isinstance(table, dict) and isinstance(key, str | int):
                table.pop(key, None)
            else:
                forget(table)

    def _either(self, truth: bool | None, body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> str:
        """Follow one branch, or both of them where the test is unknown."""
        if truth is not None:
            return self._block(body if truth else other)
        before = copy.deepcopy(self._frames)
        first = self._block(body)
        after, self._frames = self._frames, before
        second = self._block(other)
        if first == "raise":
            for frame, left in zip(after, self._frames, strict=True):
                frame.clear()
                frame.update(left)
        elif second != "raise":
            memo: dict[int, Any] = {}
            for frame, left in zip(after, self._frames, strict=True):
                merge(frame, left, memo)
        self._frames = after
        return "" if not (first and second) else "raise" if first == second == "raise" else "leave"

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        items = self.of(node.iter) if not isinstance(node, ast.While) else UNKNOWN
        breaks = any(isinstance(each, ast.Break | ast.Continue | ast.Return) for each in ast.walk(node))
        listed = items if isinstance(items, list) and MORE not in items and len(items) <= MOST_ITEMS else None
        if isinstance(node, ast.For) and listed is not None and not breaks:
            for item in list(listed):
                self._assign(node.target, item)
                self._block(node.body)
        else:
            before: Any = None
            while before != self._known() and self._steps <= _MOST_STEPS:  # until what the body changes is unknown
                before = self._known()
                if isinstance(node, ast.While):
                    self.of(node.test)
                else:
                    self._assign(node.target, UNKNOWN)
                self._either(None, node.body, [])
        self._either(None if breaks else True, node.orelse, [])

    def _known(self) -> list[int]:
        """The number of known values in each frame, which a loop can only lower."""
        return [sum(map(parts_known, frame.values())) for frame in self._frames]

    def _try(self, node: ast.Try) -> str:
        ended = self._either(None, node.body, []) if node.handlers else self._block(node.body)
        # Merged with the state before it: an exception may come after any statement, unless no handler goes on.
        for handler in node.handlers:
            if handler.name:
                self._set(handler.name, UNKNOWN)
            self._either(None, handler.body, [])
        last = self._block(node.orelse) or self._block(node.finalbody)
        return ended or last
