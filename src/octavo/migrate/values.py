"""Values of a script that are known without running it: constants, and dictionaries, sums and texts of them.

Statements are followed in their order, functions where the script calls them. A known test takes its branch; after an unknown
one, a value is known only if both branches leave the same. Each kind of statement and expression that is followed is listed
here; of any other, every name that it may bind is unknown, and every object that it may reach is lost (`heap`). So is what a
call that is not known is given, and what code may use that is called in ways that are not followed: methods, inner functions,
decorated ones, generators. After `exec` or `globals()` nothing is known. Omitted: sets, attributes of objects.
"""

from __future__ import annotations

import ast
import builtins
import copy
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from octavo.migrate import heap as objects
from octavo.migrate.heap import (
    ABSENT,
    BIND,
    LEAK,
    MAYBE,
    Builtin,
    Fixed,
    Function,
    Heap,
    Imported,
    Items,
    Job,
    Names,
    Table,
    Task,
    View,
    children,
    exported,
    is_same,
    pairwise,
    plain,
)
from octavo.migrate.known import (
    COMPARISONS,
    LONGEST,
    MORE,
    MOST_ITEMS,
    REST,
    UNKNOWN,
    Made,
    calculated,
    converted,
    merge,
    of_text,
)
from octavo.migrate.scopes import ANY_FRAME, ANY_NAME, Scopes, arguments, bound, declared, is_plain_function, local_names

_MOST_STEPS = 100_000
_MOST_ROUNDS = 40
_DEEPEST = 8
_READING = ("print", "isinstance", "issubclass", "type", "len", "repr", "str", "id", "callable", "display", "hash", "bool")
"""Functions of Python's own, and Jupyter's, that leave what they are given as it is, and hand nothing of it on."""
_READERS = (
    "json.dumps", "json.dump", "pprint.pprint", "pprint.pformat", "pprint.pp", "yaml.dump", "IPython.display.display",
    "logging.info", "logging.debug", "logging.warning", "logging.error", "copy.copy", "copy.deepcopy",
    *(f"logging.getLogger().{name}" for name in ("info", "debug", "warning", "error", "exception", "log")),
)  # fmt: skip
"""Functions of libraries of which the same holds."""
_SCALARS = ("int", "float", "str", "bool", "round", "abs")
_OF_LISTS = ("list", "tuple", "sorted", "min", "max", "sum", "len", "dict")
_OF_SCALARS: dict[str, Callable[[Any], Any]] = {"sorted": sorted, "min": min, "max": max, "sum": sum}
_LAZY = ("zip", "enumerate", "reversed", "range")
_EXITS = ("sys.exit", "os._exit", "exit", "quit")
_QUIET_MAGICS = (
    "matplotlib",
    "load_ext",
    "reload_ext",
    "env",
    "set_env",
    "pip",
    "conda",
    "cd",
    "config",
    "pylab",
    "autoreload",
)
_SHELL = "IPython.get_ipython()"
_POISON = (
    "__main__", "unittest.mock", "mock", "ctypes", "sys.modules", "sys._getframe", "sys.settrace", "sys.setprofile",
    "pdb.set_trace", "importlib.reload", "inspect.currentframe", "inspect.stack", "inspect.trace", "inspect.getmembers",
    "inspect.getouterframes", "inspect.getinnerframes", "inspect.getmodule", "inspect.getclosurevars", "gc.get_objects",
    "gc.get_referrers", "gc.get_referents", "code.interact", *(f"builtins.{name}" for name in (*ANY_NAME, "vars")),
)  # fmt: skip
"""Names of libraries by which a script may change any name of its own."""
_NO_SUPPRESSION = (
    "contextlib.nullcontext",
    "torch.no_grad",
    "torch.autocast",
    "torch.inference_mode",
    "contextlib.redirect_stdout",
)
"""Contexts that end no exception."""
_PUBLIC = ("logs", "stop", "attach", "hyperparameters", "training_image_uri", "deploy", "model", "create_model", "wait")
"""Methods of an estimator that leave its arguments as they are."""

_RESULTS = ("fit", "latest_training_job", "model_data", "jobs", "sagemaker_session", "name")
"""Attributes of an estimator by which its arguments cannot be changed."""

NEXT, RETURN, BREAK, CONTINUE, RAISE = "next", "return", "break", "continue", "raise"
Outcome = frozenset[str]
_NEXT: Outcome = frozenset({NEXT})
_RAISE: Outcome = frozenset({RAISE})


class _End(Exception):
    """A loop over something that is not known, or not any more."""


class Values:
    """Values at each call of a script.

    Args:
        tree: of the script.
        positional: dotted name → names of the positional arguments of an estimator; None for another.
        called: the full dotted name of an expression, or None where it may be something else.
        maybe: the same, also where it may be something else.
        has: dotted name of a library → whether it is there; None for others.
        made: dotted name → class of a recipe that its call makes, or None.
        is_library: True for a name of a library whose calls leave recipes as they are.
    """

    def __init__(
        self,
        tree: ast.AST,
        positional: Callable[[str], Sequence[str] | None] = lambda dotted: None,
        called: Callable[[ast.AST], str | None] = lambda node: None,
        maybe: Callable[[ast.AST], str | None] = lambda node: None,
        has: Callable[[str], bool | None] = lambda dotted: None,
        made: Callable[[str], str | None] = lambda dotted: None,
        is_library: Callable[[str], bool] = lambda dotted: False,
    ) -> None:
        self._positional, self._called, self._has, self._makes, self._is_library = positional, called, has, made, is_library
        self._maybe = maybe
        self._scopes = Scopes(tree)
        self._heap = Heap()
        self._heap.on_release, self._heap.on_replace = self._release, self._replace
        self._replaced: set[str] = set()  # names of libraries that the script may replace
        self._module = Names(kind="module")
        self._module["__name__"] = "__main__"
        self._frames: list[Names] = [self._module]
        self._returns: list[list[Any]] = []
        self._running: list[ast.AST] = []
        self._doubled: dict[int, list[str]] = {}  # call → keywords that it has twice
        self._given: dict[int, tuple[list[Any], dict[str, Any]]] = {}  # call → arguments
        self._jobs: dict[Any, Job] = {}
        self._idle_jobs: dict[Any, Job] = {}  # of functions that nothing calls here
        self._loose_jobs: dict[Any, Job] = {}  # of those that may be called at any time
        self._rounds = 0  # loops around that are not followed item by item
        self._followed: set[int] = set()
        self._released: set[int] = set()
        self._steps = 0
        self._poisoned = self._poisoning = self._blind = self._star = False
        self._once = False  # only names that are bound once are known
        self._visited: set[int] = set()
        self._skipped: dict[int, tuple[ast.stmt, int]] = {}  # statement of the module → line of the test that leaves it out
        self._scan(tree)
        self._block(getattr(tree, "body", []))
        self._rest(tree)

    # results

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """Keyword → value of each call of an estimator, as they are when it starts; the inputs of its `fit` under "fit".

        Those of functions that nothing calls here come first. Where others may be called at any time, each of theirs may be the
        last one: of that the values are known that all of them have.
        """
        loose = [self._of_job(job) for job in self._loose_jobs.values()]
        found = (
            [self._of_job(job) for job in self._idle_jobs.values()] + loose + [self._of_job(job) for job in self._jobs.values()]
        )
        if loose and len(found) > 1:
            found[-1] = copy.deepcopy(found[-1])
            for each in loose:
                merge(found[-1], each, {})
        return found

    def _of_job(self, job: Job) -> dict[str, Any]:
        """An estimator whose `fit` is not seen may start at once or at the end; a lost one with any hyperparameters."""
        if job.fitted is not None:
            return job.fitted
        now = exported(job.given)
        merge(now, job.made, {})
        if job.lost:
            for value in now.values():
                if isinstance(value, dict):
                    value.update(dict.fromkeys([*value, REST], UNKNOWN))
        return now

    @property
    def unreached(self) -> dict[int, int]:
        """Nodes (`id`) of the module that a known test leaves out → the test's line; in functions, a test without variables."""
        left_out = [(node, line) for key, (node, line) in self._skipped.items() if key not in self._visited]
        return {id(each): line for node, line in left_out for each in ast.walk(node)}

    def last(self, name: str) -> Any:
        """The value of a name of the module after its last line."""
        return exported(self._module.get(name, UNKNOWN))

    def arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of a call, those of `**table` too, as the call gets them."""
        if id(call) not in self._given:  # of code that is not followed
            before, self._blind = self._blind, True
            self._steps = 0
            try:
                args, keywords = self._arguments(call)
            finally:
                self._blind = before
            return exported(args), exported(keywords)
        return self._given[id(call)]

    def doubled(self, call: ast.Call) -> list[str]:
        """Keywords that a call gets twice, by their names or by `**`: Python refuses them."""
        return self._doubled.get(id(call), [])

    # the whole

    def _scan(self, tree: ast.AST) -> None:
        """Give up a script that asks for the names of any frame by a text."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ANY_FRAME:
                parent = self._scopes.parents.get(id(node))
                self._poisoned |= not isinstance(parent, ast.Compare | ast.Expr)

    def _rest(self, tree: ast.AST) -> None:
        """Follow functions that nothing calls here, each by itself and without effect."""
        self._jobs, done = {}, self._jobs
        idle: dict[Any, Job] = {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or id(node) in self._followed:
                continue
            self._steps, self._jobs = 0, {}
            mark = self._heap.mark()
            self._once = id(node) in self._released or not isinstance(self._scopes.parents.get(id(node)), ast.Module)
            flags = self._poisoned, self._star, set(self._replaced)
            self._run(node, {}, self._surroundings(node))
            for job in self._jobs.values():  # as they are in it
                job.fitted = self._of_job(job)
            self._poisoned, self._star, self._replaced = flags
            self._heap.rollback(mark)
            self._heap.release()
            (self._loose_jobs if self._once else idle).update({key: job for key, job in self._jobs.items() if key not in done})
        self._once = False
        self._jobs, self._idle_jobs = done, idle
        self._steps = 0
        for node in ast.walk(tree):  # calls that are not reached by any way that is followed
            if isinstance(node, ast.Call) and self._poisoned and id(node) not in self._given:
                dotted = self._maybe(node.func)
                if dotted is not None and self._positional(dotted) is not None and id(node) not in self._jobs:
                    table = Table({REST: UNKNOWN})
                    self._jobs[id(node)] = Job(table, exported(table))

    def _surroundings(self, node: ast.AST) -> Names:
        """The names around a function that is not followed: those of a function around it are unknown."""
        hidden = Names(self._module)
        around = self._scopes.parents.get(id(node))
        while around is not None:
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
                hidden.update(dict.fromkeys(local_names(around), UNKNOWN))
            around = self._scopes.parents.get(id(around))
        return hidden

    def _poison(self) -> Any:
        """Nothing is known from here on."""
        self._poisoned = self._poisoned or not self._blind
        if self._poisoned and not self._poisoning:
            self._poisoning = True
            for frame in self._frames:
                for value in list(frame.values()):
                    self._heap.lose(value)
            for job in self._jobs.values():
                self._heap.lose(job)
            self._poisoning = False
        return UNKNOWN

    def _replace(self, dotted: str) -> None:
        """A module or a name of one may have other attributes now."""
        if not self._blind:
            self._replaced.add(dotted)
            if dotted.startswith((_SHELL, "builtins")):
                self._poison()

    def _release(self, function: Function) -> None:
        """A function may be called at any time from now on: give up what it uses."""
        self._released.add(id(function.node))
        effects = self._scopes.of_function(function.node)
        self._take(effects.loads, function.scope)
        for name in effects.shared:
            self._heap.give(self._module, name, BIND)
        for name in effects.outer:
            self._heap.give(self._home(name, function.scope), name, BIND)
        if effects.anything:
            self._poison()

    def _take(self, loads: dict[str, int], scope: Names) -> None:
        for name, level in loads.items():
            self._heap.give(self._home(name, scope), name, level)

    def _home(self, name: str, scope: Names | None) -> Names:
        """The names to which a free name of code in a scope belongs."""
        while scope is not None and scope is not self._module:
            if name in scope and name not in scope.shared and scope.kind != "class":
                return scope
            scope = scope.outer
        return self._module

    def _give_up(self, *parts: ast.AST) -> Any:
        """Code in this scope that is not followed: unknown, with all that it may change."""
        effects = self._scopes.of_code(parts)
        here = self._frames[-1]
        for name, level in effects.loads.items():
            home = here if name in here and name not in here.shared else self._home(name, here.outer or here)
            self._heap.give(home, name, level)
        for name in effects.shared:
            self._heap.give(self._module, name, BIND)
        for name in effects.outer:
            self._heap.give(self._home(name, here), name, BIND)
        for name in bound(parts):
            self._set(name, UNKNOWN)
        if effects.anything:
            self._poison()
        return UNKNOWN

    # expressions

    def of(self, node: ast.AST | None) -> Any:
        """The value of an expression, or UNKNOWN; its calls are followed."""
        self._steps += 1
        if self._steps > _MOST_STEPS and not self._blind:
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
            return self._poison() if _is_poison(whole) else Imported(whole) if self._is_intact(whole) else UNKNOWN
        if isinstance(owner, Builtin):
            return Builtin(f"{owner.name}.{node.attr}")
        if isinstance(owner, Job):
            if node.attr in owner.given:
                self._heap.lose(owner.given[node.attr])
            elif node.attr not in _RESULTS:
                self._heap.lose(owner)
            return UNKNOWN
        self._heap.lose(owner)  # a method of it, to be called anywhere
        return UNKNOWN

    def _of_dict(self, node: ast.Dict) -> Table:
        found = Table()
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self._heap.put(found, self._entries(self.of(value)))
            else:
                name = self.of(key)
                self._store(found, name, self.of(value))
        return found

    def _store(self, table: Table, key: Any, value: Any) -> None:
        """Set an entry of which the key may be unknown."""
        if _is_key(key):
            self._heap.put(table, {key: value})
        else:
            self._heap.lose(value)
            self._heap.lose(key)
            self._heap.put(table, {REST: UNKNOWN})

    def _entries(self, value: Any) -> dict[Any, Any]:
        """What `**value` gives, or `dict(value)`."""
        if isinstance(value, Table):
            return value
        self._heap.lose(value)
        return {REST: UNKNOWN}

    def _of_list(self, node: ast.List | ast.Tuple) -> Any:
        found = self._several(node.elts)
        if found is None:
            return UNKNOWN if isinstance(node, ast.Tuple) else Items([MORE])
        return Fixed(found) if isinstance(node, ast.Tuple) else Items(found)

    def _several(self, nodes: Sequence[ast.expr]) -> list[Any] | None:
        """Values in their order, with those of `*each`; None, and nothing of them known, if their number is not."""
        found: list[Any] = []
        known = True
        for each in nodes:
            if isinstance(each, ast.Starred):
                items = self._all(each.value)
                known &= items is not None
                found += items or []
            else:
                found.append(self.of(each))
        if not known:
            for value in found:
                self._heap.lose(value)
        return found if known else None

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
        """One of the values inside of an object may be anywhere now."""
        if isinstance(value, Table | Items | Fixed | View):
            for each in list(children(value)):
                self._heap.lose(each)
            if isinstance(value, Table | Items) and any(not _is_scalar(each) for each in children(value)):
                self._heap.leak(value)
        else:
            self._heap.lose(value)

    def _item(self, table: Any, key: Any, default: Any = ABSENT) -> Any:
        """An entry; the default for a key that a dictionary does not have."""
        if isinstance(table, Table) and _is_key(key):
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
            return UNKNOWN if (truth := _truth(value)) is None else not truth
        self._heap.lose(value)
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN

    def _of_binary(self, node: ast.BinOp) -> Any:
        left = self.of(node.left)
        return self._calculated(node.op, left, self.of(node.right))

    def _calculated(self, kind: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(kind, ast.BitOr) and isinstance(left, Table) and isinstance(right, Table):
            found = Table()
            self._heap.put(found, left)
            self._heap.put(found, right)
            return found
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
                self._fork(lambda rest=rest: self._each(rest), lambda: _NEXT)  # type: ignore[misc]
                return UNKNOWN
            if not truth:
                return False
            left, result = right, truth
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(kind, ast.In | ast.NotIn) and isinstance(right, Table | View) and _is_key(left):
            table = right if isinstance(right, Table) else right.table
            if isinstance(right, Table) or right.kind == "keys":
                there = None if table.get(left) is MAYBE or (left not in table and REST in table) else left in table
                return UNKNOWN if there is None else there == isinstance(kind, ast.In)
        if isinstance(kind, ast.Is | ast.IsNot):
            known = (_is_scalar(left) or isinstance(left, Table | Items)) and (
                _is_scalar(right) or isinstance(right, Table | Items)
            )
            single = any(each is None or each is True or each is False for each in (left, right))
            if not known or not (single or (isinstance(left, Table | Items) and isinstance(right, Table | Items))):
                return UNKNOWN
            return (left is right) == isinstance(kind, ast.Is)
        try:
            return COMPARISONS[type(kind)](plain(left), plain(right))
        except (TypeError, ValueError, RecursionError):
            if UNKNOWN in (left, right) or isinstance(left, Function) or isinstance(right, Function):
                self._heap.lose(left)  # its own comparison gets the other
                self._heap.lose(right)
            return UNKNOWN

    def _of_boolean(self, node: ast.BoolOp) -> Any:
        for number, each in enumerate(node.values):
            last = self.of(each)
            truth = _truth(last)
            rest = node.values[number + 1 :]
            if truth is None and rest:
                self._heap.lose(last)
                self._fork(lambda rest=rest: self._each(rest), lambda: _NEXT)  # type: ignore[misc]
                return UNKNOWN
            if truth == isinstance(node.op, ast.Or):
                break
        return last

    def _each(self, nodes: Iterable[ast.AST]) -> Outcome:
        """Evaluate expressions whose values may go anywhere."""
        for node in nodes:
            self._heap.lose(self.of(node))
        return _NEXT

    def _of_choice(self, node: ast.IfExp) -> Any:
        truth = _truth(self.of(node.test))
        if truth is not None:
            return self.of(node.body if truth else node.orelse)
        found: list[Any] = []

        def take(part: ast.expr) -> Outcome:
            found.append(self.of(part))
            return _NEXT

        self._fork(lambda: take(node.body), lambda: take(node.orelse))
        return self._one_of(found)

    def _one_of(self, values: list[Any]) -> Any:
        """One of several values."""
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
            found = self._elements(node)
            if found is not None and isinstance(node, ast.ListComp):
                return Items(found)
            if found is not None:
                table = Table()
                for key, value in found:
                    self._store(table, key, value)
                return table
        return UNKNOWN if self._blind else self._give_up(node)

    def _elements(self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp) -> list[Any] | None:
        """The elements of a comprehension, pairs of a dictionary's; None if it is not followed to its end."""
        found: list[Any] = []
        frame = Names(self._frames[-1], "comprehension")

        def go(depth: int) -> None:
            if depth == len(node.generators):
                if isinstance(node, ast.DictComp):
                    key = self.of(node.key)
                    found.append((key, self.of(node.value)))
                else:
                    found.append(self.of(node.elt))
                if len(found) > MOST_ITEMS:
                    raise _End
                return
            part = node.generators[depth]
            if part.is_async:
                raise _End
            for item in self._live(part.iter):
                if frame not in self._frames:
                    self._frames.append(frame)
                self._assign(part.target, item)
                for test in part.ifs:
                    truth = _truth(self.of(test))
                    if truth is None:
                        raise _End
                    if not truth:
                        break
                else:
                    go(depth + 1)

        frames = list(self._frames)
        try:
            go(0)
        except _End:
            for each in found:
                for value in each if isinstance(each, tuple) else [each]:
                    self._heap.lose(value)
            return None
        finally:
            self._frames = frames
        return found

    # iteration

    def _live(self, node: ast.AST) -> Iterable[Any]:
        """The items of an expression, one by one, as the script may change it meanwhile. Raises _End where they are unknown."""
        if not self._is_lazy(node):
            yield from self._live_value(self.of(node))
            return
        sources: list[Any] = []
        items = self._lazy(node, sources)
        before = [list(children(each)) for each in sources]
        for item in self._live_value(items):
            if any(not pairwise(was, list(children(each))) for was, each in zip(before, sources, strict=True)):
                self._lose_inside(items)
                raise _End
            yield item
        if any(not pairwise(was, list(children(each))) for was, each in zip(before, sources, strict=True)):
            raise _End

    def _live_value(self, value: Any) -> Iterable[Any]:
        if self._steps > _MOST_STEPS:
            raise _End
        if isinstance(value, Items):
            number = 0
            while number < len(value):
                if not value.is_whole or number >= MOST_ITEMS:
                    self._lose_inside(value)
                    raise _End
                yield value[number]
                number += 1
            return
        if isinstance(value, Fixed | str | list) and len(value) <= MOST_ITEMS:
            yield from list(value)
            return
        table = value.table if isinstance(value, View) else value
        if not isinstance(table, Table) or not table.is_whole or len(table) > MOST_ITEMS:
            self._lose_inside(value)
            raise _End
        kind, keys = value.kind if isinstance(value, View) else "keys", list(table)
        for key in keys:
            if not table.is_whole or list(table) != keys:
                self._lose_inside(value)
                raise _End
            yield key if kind == "keys" else table[key] if kind == "values" else Fixed([key, table[key]])

    def _all(self, node: ast.AST) -> list[Any] | None:
        """The items of an expression that is read to its end; None if they are not known, and then they are lost."""
        try:
            return list(self._live(node))
        except _End:
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
        """The items of an iterator that is read to its end at once, or UNKNOWN. Adds to `sources` the lists that it reads."""
        if isinstance(node, ast.GeneratorExp):
            found = self._elements(node)
            return UNKNOWN if found is None and self._blind else self._give_up(node) if found is None else found
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
            except _End:
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

    # calls

    def _arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call; `[MORE]` for positional ones whose number is not known."""
        args = self._several(call.args)
        return [MORE] if args is None else args, self._keywords(call)

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word in call.keywords:
            value = self.of(word.value)
            given = self._entries(value) if word.arg is None else {word.arg: value}
            twice = [name for name in given if name in found and name != REST]
            if twice:
                self._doubled[id(call)] = sorted({*self._doubled.get(id(call), []), *map(str, twice)})
            for name, each in given.items():
                found[name] = UNKNOWN if each is MAYBE else each
        return found

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else ""
        dotted = self._dotted(function)
        callee, owner = self._callee(function)
        if isinstance(callee, Builtin) and not self._blind:
            if callee.name == "vars" and len(node.args) == 1:
                callee = UNKNOWN
            elif callee.name in (*ANY_NAME, "vars"):
                self._each(node.args)
                return self._poison()
        if (
            isinstance(callee, Builtin)
            and callee.name in _OF_LISTS
            and (found := self._of_list_call(node, callee.name)) is not ABSENT
        ):
            return found
        args, keywords = self._arguments(node)
        self._remember(node, [UNKNOWN] if any(isinstance(each, ast.Starred) for each in node.args) else args, keywords)
        kind = self._makes(dotted) if dotted is not None else None
        if kind is not None:
            return Made(kind, exported(args), exported(keywords))
        maker = dotted or (self._whole(function) or self._maybe(function) if owner is ABSENT else None)
        names = self._positional(maker) if maker is not None else None
        if names is not None:
            given = {REST: UNKNOWN} if MORE in args else dict(zip(names, args, strict=False))
            return self._job(node, given | keywords, sure=dotted is not None)
        if isinstance(function, ast.Attribute) and owner is not ABSENT:
            return self._method(owner, function.attr, args, keywords)
        if isinstance(callee, Function):
            return self._inline(callee, args, keywords)
        if isinstance(callee, Builtin):
            return self._builtin(callee.name, node, args, keywords)
        if dotted is not None and not self._blind:
            found = self._library(dotted, node, args, keywords)
            if found is not ABSENT:
                return found
        if dotted == "os.path.join" and args and all(isinstance(each, str) for each in args):
            return os.path.join(*args)  # noqa: PTH118 - as the script does
        if name == "hasattr" or isinstance(callee, Task):
            return UNKNOWN
        self._hand_on(args, keywords, dotted)
        return UNKNOWN

    def _callee(self, function: ast.expr) -> tuple[Any, Any]:
        """The value of a called expression, and the object of a method that is followed or else ABSENT."""
        if isinstance(function, ast.Attribute):
            dotted = self._dotted(function)
            owner = self.of(function.value)
            if isinstance(owner, Table | Items | Fixed | str | Job | Task | View):
                return UNKNOWN, owner
            if isinstance(owner, Imported):
                whole = f"{owner.dotted}.{function.attr}"
                if _is_poison(whole) or function.attr in ANY_FRAME:
                    self._poison()
                return Imported(whole), ABSENT
            if isinstance(owner, Builtin):
                return Builtin(f"{owner.name}.{function.attr}"), ABSENT
            if function.attr in ANY_FRAME:
                self._poison()
            if dotted is None:
                self._heap.lose(owner)
            return UNKNOWN, ABSENT
        value = self._name(function.id) if isinstance(function, ast.Name) else self.of(function)
        if not isinstance(value, Function | Builtin | Imported):
            self._heap.lose(value)
        return value, ABSENT

    def _hand_on(self, args: Iterable[Any], keywords: dict[str, Any], dotted: str | None) -> None:
        """Arguments of a call that is not followed."""
        for value in (*args, *keywords.values()):
            if not (isinstance(value, Made) and dotted is not None and self._is_library(dotted)):
                self._heap.lose(value)

    def _remember(self, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> None:
        """Keep the arguments of a call; those that differ between two runs of it are unknown."""
        if self._blind:
            return
        now = exported(args), exported(keywords)
        if id(node) in self._given:
            before = self._given[id(node)]
            merge(now[1], before[1], {})
            ahead = dict(enumerate(now[0]))
            merge(ahead, dict(enumerate(before[0])), {})
            now = list(ahead.values()), now[1]
        self._given[id(node)] = now

    def _library(self, dotted: str, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function of a library that is known; ABSENT for others."""
        if dotted in ("copy.copy", "copy.deepcopy") and len(args) == 1 and not keywords:
            return self._copied(args[0], deep=dotted == "copy.deepcopy")
        if dotted == "logging.getLogger":
            return Imported("logging.getLogger()")
        if dotted in ("get_ipython", "IPython.get_ipython"):
            return Imported(_SHELL)
        if dotted in _READERS:
            return UNKNOWN
        if dotted.startswith(f"{_SHELL}."):
            magic = dotted.endswith(("run_line_magic", "magic")) and args and isinstance(args[0], str) and args[0].split()
            quiet = dotted.endswith((".system", ".getoutput")) or (magic and magic[0].lstrip("%") in _QUIET_MAGICS)
            return UNKNOWN if quiet else self._poison()
        if dotted in ("importlib.import_module",):
            return UNKNOWN if args and isinstance(args[0], str) and not _is_poison(args[0]) else self._poison()
        target = keywords.get("target")
        if dotted in ("multiprocessing.Process", "torch.multiprocessing.Process") and isinstance(target, Function):
            given = keywords.get("args", Fixed())
            if isinstance(given, Fixed | Items) and MORE not in given and not args and set(keywords) <= {"target", "args"}:
                return Task(target, list(given))
        return ABSENT

    def _copied(self, value: Any, *, deep: bool, memo: dict[int, Any] | None = None) -> Any:
        """A copy; of an object that is not known nothing is."""
        memo = {} if memo is None else memo
        if id(value) in memo:
            return memo[id(value)]
        if isinstance(value, Table):
            table = memo[id(value)] = Table()
            inside = {key: self._copied(each, deep=True, memo=memo) if deep else each for key, each in value.items()}
            self._heap.put(table, inside)
            table.ordered = value.ordered
            return table
        if isinstance(value, Items):
            items = memo[id(value)] = Items()
            items[:] = [self._copied(each, deep=True, memo=memo) if deep else each for each in value]
            return items
        if isinstance(value, Fixed):
            return Fixed([self._copied(each, deep=True, memo=memo) for each in value]) if deep else value
        if isinstance(value, Made):
            return Made(value.dotted, value.args, value.words, value.lost)
        if _is_scalar(value) or isinstance(value, Imported | Builtin | Function):
            return value
        self._heap.lose(value)
        return UNKNOWN

    def _builtin(self, name: str, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function of Python's own."""
        if name == "hasattr" and len(args) == 2 and isinstance(args[1], str):
            there = self._has(f"{self._dotted(node.args[0])}.{args[1]}")
            return UNKNOWN if there is None else there
        if name in ("exit", "quit"):
            return UNKNOWN
        if name == "get_ipython":
            return Imported(_SHELL)
        if name == "getattr" and len(args) > 1 and isinstance(args[0], Imported) and isinstance(args[1], str):
            whole = f"{args[0].dotted}.{args[1]}"
            self._hand_on(args[2:], keywords, None)
            return self._poison() if _is_poison(whole) or args[1] in ANY_FRAME else Imported(whole)
        if name in _SCALARS and not keywords and all(_is_scalar(each) for each in args):
            return converted(name, args)
        if name in _READING:
            return UNKNOWN
        self._hand_on(args, keywords, None)
        return UNKNOWN

    def _of_list_call(self, node: ast.Call, name: str) -> Any:
        """The result of a function of Python's own that reads all of a list; ABSENT if the call is not one that is followed."""
        if any(isinstance(each, ast.Starred) for each in node.args):
            return ABSENT
        if name == "dict":
            if len(node.args) > 1:
                return ABSENT
            found = Table()
            args = []
            for each in node.args:
                value = self._lazy(each, []) if self._is_lazy(each) else self.of(each)
                args.append(value if not isinstance(value, list) or isinstance(value, Items | Fixed) else UNKNOWN)
                self._merge(found, value)
            words = self._keywords(node)
            self._remember(node, args, words)
            self._heap.put(found, words)
            return found
        if not node.args or node.keywords or (len(node.args) > 1 and name not in ("min", "max")):
            return ABSENT
        if len(node.args) > 1:
            several = [self.of(each) for each in node.args]
            self._remember(node, several, {})
            return self._of_scalars(name, several, several)
        only = node.args[0]
        value = self._lazy(only, []) if self._is_lazy(only) else self.of(only)
        self._remember(node, [value if isinstance(value, Items | Fixed) or not isinstance(value, list) else UNKNOWN], {})
        if name == "len":
            table = value.table if isinstance(value, View) else value
            whole = isinstance(table, str | Fixed) or (isinstance(table, Items | Table) and table.is_whole)
            return len(table) if whole else UNKNOWN
        try:
            items = list(self._live_value(value))
        except _End:
            return Items([MORE]) if name in ("list", "sorted") else UNKNOWN
        if name in ("list", "tuple"):
            return Items(items) if name == "list" else Fixed(items)
        return self._of_scalars(name, items, items)

    def _of_scalars(self, name: str, items: list[Any], lost: list[Any]) -> Any:
        """`sorted`, `min`, `max` or `sum` of constants."""
        if all(_is_scalar(each) for each in items):
            try:
                found = _OF_SCALARS[name](items)
            except (TypeError, ValueError):
                return UNKNOWN
            return Items(found) if name == "sorted" else found
        for each in lost:
            self._heap.lose(each)
        return Items([MORE]) if name == "sorted" else UNKNOWN

    def _merge(self, table: Table, value: Any) -> None:
        """`table.update(value)`: of a dictionary, or of pairs."""
        if isinstance(value, Table):
            self._heap.put(table, dict(value))
            return
        try:
            pairs = list(self._live_value(value))
        except _End:
            self._heap.put(table, {REST: UNKNOWN})
            return
        for pair in pairs:
            if isinstance(pair, Fixed | Items) and len(pair) == 2 and MORE not in pair:
                self._store(table, pair[0], pair[1])
            else:
                self._heap.lose(pair)
                self._heap.put(table, {REST: UNKNOWN})

    # estimators

    def _job(self, node: ast.Call, given: dict[str, Any], *, sure: bool) -> Any:
        """An estimator; one that may be something else is lost at once."""
        if self._blind:
            return UNKNOWN
        number: Any = id(node) if self._rounds else (id(node), len(self._jobs))
        table = Table()
        table.update(given)
        job = Job(table, exported(table))
        self._jobs[number] = job
        if not sure:
            self._heap.lose(job)
            self._hand_on(given.values(), {}, None)
        return job

    def _of_estimator(self, job: Job, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        if name == "fit":
            now = exported(job.given)
            merge(now, job.made, {})
            inputs = keywords.get("inputs", args[0] if args else None)
            if job.lost:
                now = self._of_job(Job(job.given, job.made, lost=True))
            job.fitted = now | {"fit": {"inputs": exported(inputs)}}
            return None
        if name == "set_hyperparameters":
            before = job.given.get("hyperparameters")
            after = Table()
            self._heap.put(after, {} if before is None else dict(self._entries(before)))
            self._heap.put(after, keywords)
            if isinstance(before, Table):  # the SDK sets them in the dictionary that it was given
                self._heap.put(before, dict.fromkeys(keywords, UNKNOWN))
                self._heap.lose(Fixed(keywords.values()))
            self._heap.change(job.given)
            job.given["hyperparameters"] = after
            made = job.made.get("hyperparameters")
            if isinstance(made, dict) or made is None:
                job.made = job.made | {"hyperparameters": {**(made or {}), **exported(keywords)}}
            return None
        if name not in _PUBLIC:
            self._heap.lose(job)
        self._hand_on(args, keywords, None)
        return UNKNOWN

    # methods

    def _method(self, owner: Any, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        """A method of an object that is known."""
        if isinstance(owner, Job):
            return self._of_estimator(owner, name, args, keywords)
        if isinstance(owner, Task):
            return self._of_task(owner, name)
        if isinstance(owner, Table):
            found = self._of_table(owner, name, args, keywords)
        elif isinstance(owner, Items):
            found = self._of_items(owner, name, args) if not keywords else ABSENT
        elif isinstance(owner, str):
            if name == "join" and len(args) == 1 and isinstance(args[0], Items | Fixed | Table | View):
                try:
                    args = [list(self._live_value(args[0]))]
                except _End:
                    return UNKNOWN
            found = of_text(owner, name, args, keywords)
            found = Items(found) if isinstance(found, list) else found
        else:
            found = ABSENT
            if isinstance(owner, Fixed) and name in ("index", "count") and all(_is_scalar(each) for each in (*args, *owner)):
                found = self._plainly(owner, name, args)
        if found is ABSENT or found is UNKNOWN:
            self._hand_on(args, keywords, None)
        if found is ABSENT:
            self._heap.lose(owner)
            return UNKNOWN
        return found

    def _plainly(self, owner: list[Any], name: str, args: list[Any]) -> Any:
        try:
            return getattr(list(owner), name)(*args)
        except (TypeError, ValueError):
            return UNKNOWN

    def _of_task(self, task: Task, name: str) -> Any:
        """A process that starts: it has a copy of all."""
        if name == "start":
            mark = self._heap.mark()
            self._inline(task.function, task.args, {})
            self._heap.rollback(mark)
            self._heap.release()
        elif name not in ("join", "is_alive", "terminate", "kill", "close"):
            self._heap.lose(task)
        return UNKNOWN

    def _of_table(self, table: Table, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        if name == "update" and len(args) < 2:
            for value in args:
                self._merge(table, value)
            self._heap.put(table, dict(keywords))
            return None
        if keywords:
            return ABSENT
        if name in ("items", "keys", "values") and not args:
            return View(table, name)
        if name == "get" and 0 < len(args) < 3:
            return self._item(table, args[0], args[1] if len(args) > 1 else None)
        if name == "copy" and not args:
            return self._copied(table, deep=False)
        if name == "clear" and not args and not table.lost:
            self._heap.change(table)
            table.clear()
            table.ordered = True
            return None
        if name in ("pop", "setdefault") and 0 < len(args) < 3 and _is_key(args[0]) and not table.lost:
            return self._of_entry(table, name, args[0], args[1:])
        if name == "popitem" and not args and table.is_whole and table:
            self._heap.change(table)
            return Fixed(dict.popitem(table))
        return ABSENT

    def _of_entry(self, table: Table, name: str, key: Any, default: list[Any]) -> Any:
        before = table.get(key, ABSENT)
        if before is MAYBE or (before is ABSENT and REST in table):
            self._heap.put(table, {key: UNKNOWN} if name == "setdefault" else {})
            for each in default:
                self._heap.lose(each)
            if name == "pop":
                self._heap.change(table)
                table.pop(key, None)
                if REST in table:
                    table[key] = MAYBE
            return UNKNOWN
        if name == "setdefault":
            if before is ABSENT:
                self._heap.put(table, {key: default[0] if default else None})
            return table[key]
        if before is ABSENT:
            return default[0] if default else UNKNOWN
        self._heap.change(table)
        return table.pop(key)

    def _of_items(self, items: Items, name: str, args: list[Any]) -> Any:
        if name == "copy" and not args:
            return self._copied(items, deep=False)
        if name in ("index", "count") and items.is_whole and all(_is_scalar(each) for each in (*args, *items)):
            return self._plainly(items, name, args)
        if items.lost or not items.is_whole:
            return ABSENT
        if name == "append" and len(args) == 1:
            self._heap.change(items)
            items.append(args[0])
            if items.leaky:
                self._heap.lose(args[0])
            return None
        if name == "extend" and len(args) == 1:
            self._extend(items, args[0])
            return None
        if name == "pop" and len(args) < 2 and items and all(type(each) is int for each in args):
            where = args[0] if args else -1
            if -len(items) <= where < len(items):
                self._heap.change(items)
                return items.pop(where)
        if name == "insert" and len(args) == 2 and type(args[0]) is int and not items.leaky:
            self._heap.change(items)
            items.insert(args[0], args[1])
            return None
        if name in ("reverse", "clear") and not args:
            self._heap.change(items)
            getattr(items, name)()
            return None
        if name == "sort" and not args and all(_is_scalar(each) for each in items):
            try:
                ordered = sorted(items)
            except TypeError:
                return ABSENT
            self._heap.change(items)
            items[:] = ordered
            return None
        return ABSENT

    def _extend(self, items: Items, value: Any) -> None:
        try:
            more = list(self._live_value(value))
        except _End:
            self._heap.forget(items)
            return
        self._heap.change(items)
        if items.lost or not items.is_whole or items.leaky:
            for each in more:
                self._heap.lose(each)
        if items.is_whole and not items.lost:
            items += more

    # functions

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Any:
        """The value of a definition: its defaults are evaluated here, once."""
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for each in decorators:
            self._heap.lose(self.of(each))
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        values = [self.of(each) for each in node.args.defaults]
        defaults = dict(zip(reversed(names), reversed(values), strict=False))
        for word, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                defaults[word.arg] = self.of(default)
        if not isinstance(node, ast.Lambda):
            self._annotations([*(each.annotation for each in arguments(node)), node.returns])
        if self._blind:
            return UNKNOWN
        here = self._frames[-1]
        function = Function(node, defaults, here)
        inner = here.kind not in ("module", "class") or (here.kind == "class" and here.outer is not self._module)
        if inner or not is_plain_function(node):
            self._heap.lose(function)
        return UNKNOWN if decorators else function

    def _annotations(self, nodes: Iterable[ast.expr | None]) -> None:
        """Annotations are evaluated, unless the module says otherwise; those of names alone have no effect."""
        for node in nodes:
            if node is not None and any(isinstance(each, ast.Call | ast.NamedExpr) for each in ast.walk(node)):
                self._fork(lambda node=node: self._each([node]), lambda: _NEXT)  # type: ignore[misc]

    def _inline(self, function: Function, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a function of the script, followed with its arguments."""
        node = function.node
        inner = function.scope.kind not in ("module", "class")
        if inner or not is_plain_function(node) or (function.scope.kind == "class" and function.scope not in self._frames):
            self._heap.lose(function)
            self._hand_on(args, keywords, None)
            return UNKNOWN
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        several = MORE in args
        given = (dict.fromkeys(names, UNKNOWN) if several else dict(zip(names, args, strict=False))) | keywords
        own = {*names, *(each.arg for each in node.args.kwonlyargs)}
        more = {name: given.pop(name) for name in list(given) if name not in own}
        if REST in more:  # any of the others may come by it
            given |= dict.fromkeys(own - set(given), UNKNOWN)
        if node.args.kwarg is not None:
            table = Table()
            self._heap.put(table, more)
            given[node.args.kwarg.arg] = table
        if node.args.vararg is not None:
            given[node.args.vararg.arg] = UNKNOWN if several else Fixed(args[len(names) :])
        return self._run(node, function.defaults | given, self._module)

    def _run(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, values: dict[str, Any], around: Names) -> Any:
        if node in self._running or len(self._running) >= _DEEPEST or self._steps > _MOST_STEPS:
            for value in values.values():
                self._heap.lose(value)
            self._heap.lose(Function(node, {}, around))
            return UNKNOWN
        self._followed.add(id(node))
        frame = Names(around)
        frame.update(dict.fromkeys(local_names(node), UNKNOWN))
        frame.update(values)
        body: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
        frame.shared = declared(body, ast.Global)
        frames, self._frames = self._frames, [self._module, frame]
        self._returns.append([])
        self._running.append(node)
        if isinstance(node, ast.Lambda):
            self._returns[-1].append(self.of(node.body))
            ended: Outcome = frozenset({RETURN})
        else:
            ended = self._block(node.body)
        self._running.pop()
        found = self._returns.pop() + ([None] if NEXT in ended else [])
        self._frames = frames
        return self._one_of(found)

    # names

    def _name(self, name: str) -> Any:
        """The value of a name here, `Builtin` for one of Python's own."""
        if self._poisoned:
            return UNKNOWN
        frame: Names | None = self._frames[-1]
        if self._blind:
            return Builtin(name) if hasattr(builtins, name) and name not in self._module else UNKNOWN
        while frame is not None:
            shared = name in frame.shared
            home = self._module if shared else frame
            if home.given.get(name) == BIND:
                return UNKNOWN
            if name in home:
                value = home[name]
                if self._once and home is self._module and not isinstance(value, Imported | Function | Made):
                    return value if self._module.writes.get(name, 0) < 2 and _is_scalar(value) else UNKNOWN
                return value
            frame = None if shared else frame.outer
        known = not self._star and (hasattr(builtins, name) or name in ("get_ipython", "display", "exit", "quit"))
        return Builtin(name) if known else UNKNOWN

    def _set(self, name: str, value: Any) -> None:
        frame = self._frames[-1]
        self._bind(self._module if name in frame.shared else frame, name, value)

    def _bind(self, frame: Names, name: str, value: Any) -> None:
        if self._blind:
            return
        level = frame.given.get(name, 0)
        if level:
            value = self._heap.taken(value, level)
        if self._poisoned:
            self._heap.lose(value)
        self._heap.name(frame, name, value)

    def _dotted(self, node: ast.AST) -> str | None:
        """The full name of an imported expression; None for others, and for one that may have been replaced."""
        whole = self._whole(node)
        return whole if whole is not None and self._is_intact(whole) else None

    def _whole(self, node: ast.AST) -> str | None:
        parts: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        whole: str | None = None
        if isinstance(inner, ast.Name):
            value = self._name(inner.id)
            if isinstance(value, Imported):
                whole = ".".join([value.dotted, *reversed(parts)])
            elif value is UNKNOWN and not self._poisoned:
                whole = self._called(node)
            elif isinstance(value, Builtin) and not parts:
                whole = value.name if value.name in ("exit", "quit", "get_ipython") else None
        elif isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Name | ast.Attribute) and self._dotted(inner.func) == "logging.getLogger":
                whole = ".".join(["logging.getLogger()", *reversed(parts)])
            elif isinstance(inner.func, ast.Name | ast.Attribute) and self._dotted(inner.func) in (
                "get_ipython",
                "IPython.get_ipython",
            ):
                whole = ".".join([_SHELL, *reversed(parts)])
            else:
                whole = self._called(node)
        return whole

    def _is_intact(self, dotted: str) -> bool:
        last = dotted.rpartition(".")[2]
        return not any(dotted == each or dotted.startswith(f"{each}.") or f".{last}" == each for each in self._replaced)

    # statements

    def _block(self, body: Sequence[ast.stmt]) -> Outcome:
        """Follow statements. Returns the ways in which they may end."""
        left: Outcome = frozenset()
        last = _NEXT
        pending: list[tuple[int, int]] = []
        for node in body:
            out = self._statement(node)
            if NEXT not in out:
                last = out
                break
            if out - {NEXT, RAISE}:  # the rest may be left out
                left |= out - _NEXT
                pending.append(self._pend())
        return self._settle(pending, left, last)

    def _pend(self) -> tuple[int, int]:
        """What follows may not run."""
        return self._heap.mark(), next(objects._SERIAL)

    def _settle(self, pending: list[tuple[int, int]], left: Outcome, last: Outcome) -> Outcome:
        """The end of what may not have run: each state in which it was left is joined."""
        for mark, born in reversed(pending):
            if last == _RAISE:
                self._heap.rollback(mark)
            else:
                self._heap.join(mark, {}, born)
            self._heap.release()
        return left if pending and last == _RAISE else left | last

    def _statement(self, node: ast.stmt) -> Outcome:
        self._visited.add(id(node))
        follow = self._STATEMENTS.get(type(node))
        if follow is None:
            self._give_up(node)
            inside = {type(each) for each in ast.walk(node)}
            if ast.Return in inside and self._returns:
                self._returns[-1].append(UNKNOWN)
            ways = {RETURN: ast.Return, BREAK: ast.Break, CONTINUE: ast.Continue}
            return _NEXT | {way for way, kind in ways.items() if kind in inside}
        return follow(self, node)

    def _do_expression(self, node: ast.Expr) -> Outcome:
        function = node.value.func if isinstance(node.value, ast.Call) else None
        exits = function is not None and self._dotted(function) in _EXITS
        self._unused(self.of(node.value))
        return _RAISE if exits else _NEXT

    def _unused(self, value: Any) -> None:
        """A value that no name has."""

    def _do_assign(self, node: ast.Assign | ast.AnnAssign) -> Outcome:
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, self.of(node.value))
            if self._frames[-1].kind != "function":
                self._annotations([node.annotation])
            return _NEXT
        value = self.of(node.value)
        for target in node.targets:
            self._assign(target, value)
        return _NEXT

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
        except _End:
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
        return _NEXT

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
        return _NEXT

    def _delete(self, target: ast.AST) -> None:
        if isinstance(target, ast.Name):
            frame = self._module if target.id in self._frames[-1].shared else self._frames[-1]
            self._bind(frame, target.id, ABSENT if frame.kind in ("module", "class") else UNKNOWN)
        elif isinstance(target, ast.Subscript):
            table = self.of(target.value)
            key = UNKNOWN if isinstance(target.slice, ast.Slice) else self.of(target.slice)
            if isinstance(target.slice, ast.Slice):
                self._each(each for each in (target.slice.lower, target.slice.upper, target.slice.step) if each is not None)
            if isinstance(table, Table) and _is_key(key) and REST not in table and not table.lost:
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
        truth = _truth(self.of(node.test))
        if truth is None:
            return self._fork(lambda: self._block(node.body), lambda: self._block(node.orelse))
        if (len(self._frames) == 1 and not self._rounds) or self._is_fixed(node.test):
            left_out = node.orelse if truth else node.body
            self._skipped |= {id(each): (each, node.test.lineno) for each in left_out}
        return self._block(node.body if truth else node.orelse)

    def _is_fixed(self, test: ast.expr) -> bool:
        """True for a test of imported names and constants alone, which is the same in every call of a function."""
        names = [each for each in ast.walk(test) if isinstance(each, ast.Name)]
        return all(self._called(each) is not None or each.id == "hasattr" for each in names)

    def _fork(self, first: Callable[[], Outcome], second: Callable[[], Outcome]) -> Outcome:
        """Follow two ways of which one is taken, from the same state: what both leave is known. One may end the script."""
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
        if other == _RAISE and one != _RAISE:
            heap.rollback(middle)
            heap.restore(after)
        elif one != _RAISE:
            heap.join(middle, after, born)
        heap.release()
        heap.release()
        if one == _RAISE or other == _RAISE:
            return one if other == _RAISE else other
        return one | other

    def _do_for(self, node: ast.For) -> Outcome:
        left: Outcome = frozenset()
        last: Outcome = _NEXT
        pending: list[tuple[int, int]] = []
        try:
            for item in self._live(node.iter):
                self._assign(node.target, item)
                out = self._block(node.body)
                left |= out & {RETURN}
                if not out & {NEXT, CONTINUE}:
                    last = _NEXT if BREAK in out else out - {RETURN}
                    break
                if out & {BREAK, RETURN}:  # it may have ended here
                    left |= _NEXT
                    pending.append(self._pend())
            else:
                last = self._block(node.orelse)
        except _End:
            last = self._again(node, lambda: self._assign(node.target, UNKNOWN))
        return self._settle(pending, left, last or left)

    def _again(self, node: ast.For | ast.AsyncFor | ast.While, start: Callable[[], Any]) -> Outcome:
        """A loop that runs any number of times: until what its body changes is unknown."""
        outs: Outcome = frozenset()

        def once() -> Outcome:
            nonlocal outs
            start()
            outs |= self._block(node.body)
            return _NEXT

        self._rounds += 1
        for _ in range(1 if self._poisoned else _MOST_ROUNDS):
            mark, born = self._heap.mark(), next(objects._SERIAL)
            self._fork(once, lambda: _NEXT)
            steady = self._blind or self._heap.is_steady(mark, born)
            self._heap.release()
            if steady:
                break
        else:
            self._poison()
        if isinstance(node, ast.While):
            self.of(node.test)
        self._rounds -= 1
        ended = self._fork(lambda: self._block(node.orelse), lambda: _NEXT) if BREAK in outs else self._block(node.orelse)
        return ended | (outs & {RETURN})

    def _do_while(self, node: ast.While) -> Outcome:
        left: Outcome = frozenset()
        last: Outcome | None = None
        pending: list[tuple[int, int]] = []
        for _ in range(MOST_ITEMS):
            truth = _truth(self.of(node.test)) if self._steps <= _MOST_STEPS else None
            if truth is None:
                break
            if not truth:
                last = self._block(node.orelse)
                break
            out = self._block(node.body)
            left |= out & {RETURN}
            if not out & {NEXT, CONTINUE}:
                last = (_NEXT if BREAK in out else out - {RETURN}) or left
                break
            if out & {BREAK, RETURN}:
                left |= _NEXT
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
        if not isinstance(value, Made):
            self._heap.lose(value)

        def inside() -> Outcome:
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value if isinstance(value, Made) else UNKNOWN)
            return self._contexts(node, number + 1)

        return inside() if plainly else self._caught(inside, lambda: _NEXT)

    def _caught(
        self, body: Callable[[], Outcome], handler: Callable[[], Outcome], more: Callable[[], Outcome] | None = None
    ) -> Outcome:
        """Follow code whose exception may come after any step of it and is handled; `more` follows if there is none."""
        if self._blind:
            return body() | handler()
        heap = self._heap
        found: list[Any] = []

        def through() -> Outcome:
            mark = heap.mark()
            out = body()
            found.append(heap.anywhere(mark))
            heap.release()
            if more is not None and NEXT in out:
                out = (out - _NEXT) | (self._fork(more, lambda: _NEXT) if out - _NEXT else more())
            return out

        def out_of() -> Outcome:
            states, lost = found[0]
            heap.restore(states)
            for value in lost:
                heap.lose(value)
            return handler()

        return self._fork(through, out_of)

    def _do_try(self, node: ast.Try) -> Outcome:
        def handle(number: int) -> Outcome:
            if number == len(node.handlers):
                return _RAISE
            handler = node.handlers[number]
            if handler.type is not None and not isinstance(handler.type, ast.Name | ast.Attribute | ast.Tuple):
                self._each([handler.type])
            return self._fork(lambda: self._handler(handler), lambda: handle(number + 1))

        if node.handlers:
            out = self._caught(
                lambda: self._block(node.body), lambda: handle(0), (lambda: self._block(node.orelse)) if node.orelse else None
            )
        elif any(isinstance(each, ast.Return | ast.Break | ast.Continue) for part in node.finalbody for each in ast.walk(part)):
            out = self._caught(lambda: self._block([*node.body, *node.orelse]), lambda: _NEXT)  # which ends an exception
        else:
            out = self._block([*node.body, *node.orelse])
        last = self._block(node.finalbody)
        return (last - _NEXT) | out if NEXT in last else last

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
        outs: Outcome = _NEXT
        for case in node.cases:

            def follow(case: ast.match_case = case) -> Outcome:
                self._each(each for each in ast.walk(case.pattern) if isinstance(each, ast.Call))
                for name in bound([case.pattern]):
                    self._set(name, UNKNOWN)
                if case.guard is not None:
                    self._each([case.guard])
                return self._block(case.body)

            outs |= self._fork(follow, lambda: _NEXT)
        return outs

    def _do_define(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Outcome:
        self._set(node.name, self._function(node))
        return _NEXT

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
        return _RAISE if out == _RAISE else _NEXT

    def _give_up_names(self, names: Iterable[str]) -> None:
        for name in names:
            self._heap.give(self._home(name, self._frames[-1]), name, BIND)

    def _do_import(self, node: ast.Import | ast.ImportFrom) -> Outcome:
        for alias in node.names:
            if isinstance(node, ast.Import):
                dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                if _is_poison(alias.name) and alias.name != "ctypes":
                    self._poison()
                self._set(alias.asname or dotted, Imported(dotted))
            elif alias.name == "*":
                self._star = True
                for name in list(self._frames[-1]):
                    self._set(name, UNKNOWN) if not name.startswith("__") else None
            else:
                whole = f"{node.module}.{alias.name}"
                if not node.level and _is_poison(whole):
                    self._poison()
                self._set(alias.asname or alias.name, UNKNOWN if node.level else Imported(whole))
        return _NEXT

    def _do_return(self, node: ast.Return) -> Outcome:
        value = self.of(node.value) if node.value is not None else None
        if self._returns:
            self._returns[-1].append(value)
        return frozenset({RETURN})

    def _do_raise(self, node: ast.Raise) -> Outcome:
        self._each(each for each in (node.exc, node.cause) if each is not None)
        return _RAISE

    def _do_assert(self, node: ast.Assert) -> Outcome:
        truth = _truth(self.of(node.test))
        message = node.msg
        if message is not None and truth is not True:
            self._fork(lambda: self._each([message]), lambda: _NEXT)
        return _NEXT

    def _do_async_for(self, node: ast.AsyncFor) -> Outcome:
        self._heap.lose(self.of(node.iter))
        return self._again(node, lambda: self._assign(node.target, UNKNOWN))

    _EXPRESSIONS: ClassVar[dict[type, Callable[[Any, Any], Any]]] = {
        ast.Name: _of_name, ast.Attribute: _of_attribute, ast.Dict: _of_dict, ast.List: _of_list, ast.Tuple: _of_list,
        ast.Set: _of_set, ast.Call: _call, ast.Subscript: _of_subscript, ast.NamedExpr: _of_walrus, ast.UnaryOp: _of_unary,
        ast.BinOp: _of_binary, ast.Compare: _of_comparison, ast.BoolOp: _of_boolean, ast.IfExp: _of_choice,
        ast.JoinedStr: _of_text, ast.Lambda: _of_lambda, ast.ListComp: _of_comprehension, ast.DictComp: _of_comprehension,
        ast.SetComp: _of_comprehension, ast.GeneratorExp: _of_comprehension,
    }  # fmt: skip
    _STATEMENTS: ClassVar[dict[type, Callable[[Any, Any], Outcome]]] = {
        ast.Expr: _do_expression, ast.Assign: _do_assign, ast.AnnAssign: _do_assign, ast.AugAssign: _do_change,
        ast.Delete: _do_delete, ast.If: _do_if, ast.For: _do_for, ast.While: _do_while, ast.With: _do_with, ast.Try: _do_try,
        ast.Match: _do_match, ast.FunctionDef: _do_define, ast.AsyncFunctionDef: _do_define, ast.ClassDef: _do_class,
        ast.Import: _do_import, ast.ImportFrom: _do_import, ast.Return: _do_return, ast.Raise: _do_raise,
        ast.Assert: _do_assert, ast.AsyncFor: _do_async_for, ast.Pass: lambda self, node: _NEXT,
        ast.Global: lambda self, node: _NEXT, ast.Nonlocal: lambda self, node: _NEXT,
        ast.Break: lambda self, node: frozenset({BREAK}), ast.Continue: lambda self, node: frozenset({CONTINUE}),
    }  # fmt: skip


def _truth(value: Any) -> bool | None:
    """Truth of a value; None if it is not known."""
    if isinstance(value, Table):
        return True if any(each is not MAYBE and key != REST for key, each in value.items()) else None if value else False
    if isinstance(value, Items | Fixed):
        return None if MORE in value else bool(value)
    return bool(value) if isinstance(value, bool | int | float | complex | str | bytes | None) else None


def _is_key(value: Any) -> bool:
    return isinstance(value, str | int) and value != REST


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def _is_poison(dotted: str) -> bool:
    """True for a name of a library that may change any name of the script."""
    return any(dotted == each or dotted.startswith(f"{each}.") for each in _POISON)


assert LEAK < BIND
