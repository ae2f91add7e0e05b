"""Results of a script's calls without running it: calls of libraries, built-ins, estimators, methods and its own functions."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable
from typing import Any

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
    Task,
    View,
    exported,
)
from octavo.compat.migrate.interpreter.core import (
    GOES_ON,
    MOST_STEPS,
    NEXT,
    RETURN,
    SHELL,
    Outcome,
    is_key,
    is_poison,
    is_scalar,
)
from octavo.compat.migrate.interpreter.expressions import End, Expressions
from octavo.compat.migrate.known import (
    MORE,
    REST,
    UNKNOWN,
    RecipeValue,
    converted,
    merge,
    of_text,
)
from octavo.compat.migrate.scopes import ANY_FRAME, ANY_NAME, arguments, declared, is_plain_function, local_names, starts_alone

_DEEPEST = 8
_READING = ("print", "isinstance", "issubclass", "type", "len", "repr", "str", "id", "callable", "display", "hash", "bool")
"""Functions of Python and Jupyter that neither change their arguments nor pass them on."""
_READERS = (
    "json.dumps", "json.dump", "pprint.pprint", "pprint.pformat", "pprint.pp", "yaml.dump", "IPython.display.display",
    "logging.info", "logging.debug", "logging.warning", "logging.error", "copy.copy", "copy.deepcopy",
    *(f"logging.getLogger().{name}" for name in ("info", "debug", "warning", "error", "exception", "log")),
)  # fmt: skip
"""Functions of libraries that neither change their arguments nor pass them on."""
_SCALARS = ("int", "float", "str", "bool", "round", "abs")
_OF_LISTS = ("list", "tuple", "sorted", "min", "max", "sum", "len", "dict")
_OF_SCALARS: dict[str, Callable[[Any], Any]] = {"sorted": sorted, "min": min, "max": max, "sum": sum}
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
_PUBLIC = ("logs", "stop", "attach", "hyperparameters", "training_image_uri", "deploy", "model", "create_model", "wait")
"""Methods of an estimator that do not change its arguments."""


class Calls(Expressions):
    """The interpreter of expressions and calls."""

    # calls

    def _arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call; `[MORE]` for an unknown number of positional ones."""
        args = self._several(call.args)
        return [MORE] if args is None else args, self._keywords(call)

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        keywords: dict[str, Any] = {}
        for word in call.keywords:
            value = self.of(word.value)
            entries = self._entries(value) if word.arg is None else {word.arg: value}
            twice = [name for name in entries if name in keywords and name != REST]
            if twice:
                self._doubled[id(call)] = sorted({*self._doubled.get(id(call), []), *map(str, twice)})
            for name, each in entries.items():
                keywords[name] = UNKNOWN if each is MAYBE else each
        return keywords

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
            and (result := self._of_list_call(node, callee.name)) is not ABSENT
        ):
            return result
        args, keywords = self._arguments(node)
        self._remember(node, [UNKNOWN] if any(isinstance(each, ast.Starred) for each in node.args) else args, keywords)
        kind = self._recipe_of(dotted) if dotted is not None else None
        if kind is not None:
            return RecipeValue(kind, exported(args), exported(keywords))
        maker = dotted or (self._whole(function) or self._maybe(function) if owner is ABSENT else None)
        names = self._positional(maker) if maker is not None else None
        if names is not None:
            by_name = {REST: UNKNOWN} if MORE in args else dict(zip(names, args, strict=False))
            return self._job(node, by_name | keywords, sure=dotted is not None)
        if isinstance(function, ast.Attribute) and owner is not ABSENT:
            return self._method(owner, function.attr, args, keywords)
        if isinstance(callee, Function):
            return self._inline(callee, args, keywords)
        if isinstance(callee, Builtin):
            return self._builtin(callee.name, node, args, keywords)
        if dotted is not None and not self._blind:
            result = self._library(dotted, node, args, keywords)
            if result is not ABSENT:
                return result
        if dotted == "os.path.join" and args and all(isinstance(each, str) for each in args):
            return os.path.join(*args)  # noqa: PTH118 - as the script does
        if name == "hasattr" or isinstance(callee, Task):
            return UNKNOWN
        self._hand_on(args, keywords, dotted)
        return UNKNOWN

    def _callee(self, function: ast.expr) -> tuple[Any, Any]:
        """(value of the callee, object of a followed method or ABSENT)."""
        if isinstance(function, ast.Attribute):
            dotted = self._dotted(function)
            owner = self.of(function.value)
            if isinstance(owner, Table | Items | Fixed | str | Job | Task | View):
                return UNKNOWN, owner
            if isinstance(owner, Imported):
                whole = f"{owner.dotted}.{function.attr}"
                if is_poison(whole) or function.attr in ANY_FRAME:
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
        """Lose the arguments of a call that is not followed."""
        for value in (*args, *keywords.values()):
            if not (isinstance(value, RecipeValue) and dotted is not None and self._is_library(dotted)):
                self._heap.lose(value)

    def _remember(self, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> None:
        """Record the arguments of a call; those that differ between its executions become UNKNOWN."""
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
        """The result of a known library function; ABSENT for others."""
        if dotted in ("copy.copy", "copy.deepcopy") and len(args) == 1 and not keywords:
            return self._copied(args[0], deep=dotted == "copy.deepcopy")
        if dotted == "logging.getLogger":
            return Imported("logging.getLogger()")
        if dotted in ("get_ipython", "IPython.get_ipython"):
            return Imported(SHELL)
        if dotted in _READERS:
            return UNKNOWN
        if dotted.startswith(f"{SHELL}."):
            magic = dotted.endswith(("run_line_magic", "magic")) and args and isinstance(args[0], str) and args[0].split()
            quiet = dotted.endswith((".system", ".getoutput")) or (magic and magic[0].lstrip("%") in _QUIET_MAGICS)
            return UNKNOWN if quiet else self._poison()
        if dotted in ("importlib.import_module",):
            return UNKNOWN if args and isinstance(args[0], str) and not is_poison(args[0]) else self._poison()
        target = keywords.get("target")
        if dotted in ("multiprocessing.Process", "torch.multiprocessing.Process") and isinstance(target, Function):
            passed = keywords.get("args", Fixed())
            if isinstance(passed, Fixed | Items) and MORE not in passed and not args and set(keywords) <= {"target", "args"}:
                return Task(target, list(passed))
        plain = not args and set(keywords) <= {"target", "daemon", "name"}
        if dotted == "threading.Thread" and isinstance(target, Function) and plain and starts_alone(target.node):
            return Task(target, [], is_thread=True)
        return ABSENT

    def _copied(self, value: Any, *, deep: bool, memo: dict[int, Any] | None = None) -> Any:
        """A copy of a value; UNKNOWN if it cannot be followed."""
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
        if isinstance(value, RecipeValue):
            return RecipeValue(value.dotted, value.args, value.words, value.lost)
        if is_scalar(value) or isinstance(value, Imported | Builtin | Function):
            return value
        self._heap.lose(value)
        return UNKNOWN

    def _builtin(self, name: str, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a built-in function."""
        if name == "hasattr" and len(args) == 2 and isinstance(args[1], str):
            there = self._has(f"{self._dotted(node.args[0])}.{args[1]}")
            return UNKNOWN if there is None else there
        if name in ("exit", "quit"):
            return UNKNOWN
        if name == "get_ipython":
            return Imported(SHELL)
        if name == "getattr" and len(args) > 1 and isinstance(args[0], Imported) and isinstance(args[1], str):
            whole = f"{args[0].dotted}.{args[1]}"
            self._hand_on(args[2:], keywords, None)
            return self._poison() if is_poison(whole) or args[1] in ANY_FRAME else Imported(whole)
        if name in _SCALARS and not keywords and all(is_scalar(each) for each in args):
            return converted(name, args)
        if name in _READING:
            return UNKNOWN
        self._hand_on(args, keywords, None)
        return UNKNOWN

    def _of_list_call(self, node: ast.Call, name: str) -> Any:
        """The result of a built-in function of a list; ABSENT if the call is not followed."""
        if any(isinstance(each, ast.Starred) for each in node.args):
            return ABSENT
        if name == "dict":
            if len(node.args) > 1:
                return ABSENT
            merged = Table()
            args = []
            for each in node.args:
                value = self._lazy(each, []) if self._is_lazy(each) else self.of(each)
                args.append(value if not isinstance(value, list) or isinstance(value, Items | Fixed) else UNKNOWN)
                self._merge(merged, value)
            words = self._keywords(node)
            self._remember(node, args, words)
            self._heap.put(merged, words)
            return merged
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
        except End:
            return Items([MORE]) if name in ("list", "sorted") else UNKNOWN
        if name in ("list", "tuple"):
            return Items(items) if name == "list" else Fixed(items)
        return self._of_scalars(name, items, items)

    def _of_scalars(self, name: str, items: list[Any], lost: list[Any]) -> Any:
        """`sorted`, `min`, `max` or `sum` of constants."""
        if all(is_scalar(each) for each in items):
            try:
                result = _OF_SCALARS[name](items)
            except (TypeError, ValueError):
                return UNKNOWN
            return Items(result) if name == "sorted" else result
        for each in lost:
            self._heap.lose(each)
        return Items([MORE]) if name == "sorted" else UNKNOWN

    def _merge(self, table: Table, value: Any) -> None:
        """`table.update(value)`, for a dictionary or pairs."""
        if isinstance(value, Table):
            self._heap.put(table, dict(value))
            return
        try:
            pairs = list(self._live_value(value))
        except End:
            self._heap.put(table, {REST: UNKNOWN})
            return
        for pair in pairs:
            if isinstance(pair, Fixed | Items) and len(pair) == 2 and MORE not in pair:
                self._store(table, pair[0], pair[1])
            else:
                self._heap.lose(pair)
                self._heap.put(table, {REST: UNKNOWN})

    # estimators

    def _job(self, node: ast.Call, values: dict[str, Any], *, sure: bool) -> Any:
        """A new estimator; lost at once unless it is certainly one (`sure`)."""
        if self._blind:
            return UNKNOWN
        number: Any = id(node) if self._rounds else (id(node), len(self._jobs))
        table = Table()
        table.update(values)
        job = Job(table, exported(table))
        self._jobs[number] = job
        if not sure:
            self._heap.lose(job)
            self._hand_on(values.values(), {}, None)
        return job

    def _of_estimator(self, job: Job, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        if name == "fit":
            now = exported(job.given)
            merge(now, job.initial, {})
            inputs = keywords.get("inputs", args[0] if args else None)
            if job.lost:
                now = self._of_job(Job(job.given, job.initial, lost=True))
            job.fitted, job.inputs = now | {"fit": {"inputs": exported(inputs)}}, inputs
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
            initial = job.initial.get("hyperparameters")
            if isinstance(initial, dict) or initial is None:
                job.initial = job.initial | {"hyperparameters": {**(initial or {}), **exported(keywords)}}
            return None
        if name not in _PUBLIC:
            self._heap.lose(job)
        self._hand_on(args, keywords, None)
        return UNKNOWN

    # methods

    def _method(self, owner: Any, name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a method of a known object."""
        if isinstance(owner, Job):
            return self._of_estimator(owner, name, args, keywords)
        if isinstance(owner, Task):
            return self._of_task(owner, name)
        if isinstance(owner, Table):
            result = self._of_table(owner, name, args, keywords)
        elif isinstance(owner, Items):
            result = self._of_items(owner, name, args) if not keywords else ABSENT
        elif isinstance(owner, str):
            if name == "join" and len(args) == 1 and isinstance(args[0], Items | Fixed | Table | View):
                try:
                    args = [list(self._live_value(args[0]))]
                except End:
                    return UNKNOWN
            result = of_text(owner, name, args, keywords)
            result = Items(result) if isinstance(result, list) else result
        else:
            result = ABSENT
            if isinstance(owner, Fixed) and name in ("index", "count") and all(is_scalar(each) for each in (*args, *owner)):
                result = self._plainly(owner, name, args)
        if result is ABSENT or result is UNKNOWN:
            self._hand_on(args, keywords, None)
        if result is ABSENT:
            self._heap.lose(owner)
            return UNKNOWN
        return result

    def _plainly(self, owner: list[Any], name: str, args: list[Any]) -> Any:
        try:
            return getattr(list(owner), name)(*args)
        except (TypeError, ValueError):
            return UNKNOWN

    def _of_task(self, task: Task, name: str) -> Any:
        """A method of a process or thread: a process has copies of all objects, a thread may run at any time."""
        if name == "start" and task.is_thread:
            self._inline(task.function, [], {})
            self._threads.append((task.function, starts_alone(task.function.node)))
        elif name == "start":
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
        if name in ("pop", "setdefault") and 0 < len(args) < 3 and is_key(args[0]) and not table.lost:
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
        if name in ("index", "count") and items.is_whole and all(is_scalar(each) for each in (*args, *items)):
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
        if name == "sort" and not args and all(is_scalar(each) for each in items):
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
        except End:
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
        """The value of a function's definition; defaults are evaluated here, once."""
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
        """Follow annotations with calls, which may or may not be evaluated; others have no effect."""
        for node in nodes:
            if node is not None and any(isinstance(each, ast.Call | ast.NamedExpr) for each in ast.walk(node)):
                self._fork(lambda node=node: self._each([node]), lambda: GOES_ON)  # type: ignore[misc]

    def _inline(self, function: Function, args: list[Any], keywords: dict[str, Any]) -> Any:
        """The result of a call of a function of the script."""
        node = function.node
        inner = function.scope.kind not in ("module", "class")
        if inner or not is_plain_function(node) or (function.scope.kind == "class" and function.scope not in self._frames):
            self._heap.lose(function)
            self._hand_on(args, keywords, None)
            return UNKNOWN
        names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        several = MORE in args
        values = (dict.fromkeys(names, UNKNOWN) if several else dict(zip(names, args, strict=False))) | keywords
        parameters = {*names, *(each.arg for each in node.args.kwonlyargs)}
        more = {name: values.pop(name) for name in list(values) if name not in parameters}
        if REST in more:  # it may contain any of the others
            values |= dict.fromkeys(parameters - set(values), UNKNOWN)
        if node.args.kwarg is not None:
            table = Table()
            self._heap.put(table, more)
            values[node.args.kwarg.arg] = table
        if node.args.vararg is not None:
            values[node.args.vararg.arg] = UNKNOWN if several else Fixed(args[len(names) :])
        return self._run(node, function.defaults | values, self._module)

    def _run(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, values: dict[str, Any], around: Names) -> Any:
        if node in self._running or len(self._running) >= _DEEPEST or self._steps > MOST_STEPS:
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
        results = self._returns.pop() + ([None] if NEXT in ended else [])
        self._frames = frames
        return self._one_of(results)
