"""Base of the interpreter: names and scopes of a script, and the rules by which their values become unknown."""

from __future__ import annotations

import abc
import ast
import builtins
from collections.abc import Callable, Sequence
from typing import Any

from octavo.compat.migrate.heap import (
    BIND,
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
    exported,
)
from octavo.compat.migrate.known import (
    MORE,
    REST,
    UNKNOWN,
    RecipeValue,
    merge,
)
from octavo.compat.migrate.scopes import ANY_FRAME, ANY_NAME, Scopes, bound, local_names

MOST_STEPS = 100_000
SHELL = "IPython.get_ipython()"
_POISON = (
    "__main__", "unittest.mock", "mock", "ctypes", "sys.modules", "sys._getframe", "sys.settrace", "sys.setprofile",
    "pdb.set_trace", "importlib.reload", "inspect.currentframe", "inspect.stack", "inspect.trace", "inspect.getmembers",
    "inspect.getouterframes", "inspect.getinnerframes", "inspect.getmodule", "inspect.getclosurevars", "gc.get_objects",
    "gc.get_referrers", "gc.get_referents", "code.interact", *(f"builtins.{name}" for name in (*ANY_NAME, "vars")),
)  # fmt: skip
"""Library names by which a script may change any of its own names."""
NEXT, RETURN, BREAK, CONTINUE, RAISE = "next", "return", "break", "continue", "raise"
Outcome = frozenset[str]
GOES_ON: Outcome = frozenset({NEXT})
RAISES: Outcome = frozenset({RAISE})


class Interpreter(abc.ABC):
    """Values at each call of a script.

    Args:
        tree: the script's syntax tree.
        positional: dotted name of an estimator → names of its positional arguments; None for other names.
        called: expression → its full dotted name; None if it may be something else.
        maybe: as `called`, also if it may be something else.
        has: dotted name of a library → True if it exists; None for other names.
        recipe_of: dotted name → class of the recipe that its call returns, or None.
        is_library: True for a name of a library whose calls do not change recipes.
    """

    def __init__(
        self,
        tree: ast.AST,
        positional: Callable[[str], Sequence[str] | None] = lambda dotted: None,
        called: Callable[[ast.AST], str | None] = lambda node: None,
        maybe: Callable[[ast.AST], str | None] = lambda node: None,
        has: Callable[[str], bool | None] = lambda dotted: None,
        recipe_of: Callable[[str], str | None] = lambda dotted: None,
        is_library: Callable[[str], bool] = lambda dotted: False,
    ) -> None:
        self._positional, self._called, self._has, self._recipe_of, self._is_library = (
            positional,
            called,
            has,
            recipe_of,
            is_library,
        )
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
        self._doubled: dict[int, list[str]] = {}  # call → its repeated keywords
        self._given: dict[int, tuple[list[Any], dict[str, Any]]] = {}  # call → arguments
        self._jobs: dict[Any, Job] = {}
        self._idle_jobs: dict[Any, Job] = {}  # in functions that the script never calls
        self._loose_jobs: dict[Any, Job] = {}  # in functions that may be called at any time
        self._threads: list[tuple[Function, set[str]]] = []  # started threads, and names whose `fit` they call
        self._rounds = 0  # enclosing loops with an unknown number of iterations
        self._followed: set[int] = set()
        self._released: set[int] = set()
        self._steps = 0
        self._poisoned = self._poisoning = self._blind = self._star = False
        self._once = False  # True: only names that are bound once are known
        self._visited: set[int] = set()
        self._skipped: dict[int, tuple[ast.stmt, int]] = {}  # skipped statement → line of its test
        self._scan(tree)
        self._block(getattr(tree, "body", []))
        self._rest(tree)

    # the whole script

    def _scan(self, tree: ast.AST) -> None:
        """Treat all values of a script as unknown if it has the name of a frame's attribute as a string."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ANY_FRAME:
                parent = self._scopes.parents.get(id(node))
                self._poisoned |= not isinstance(parent, ast.Compare | ast.Expr)

    def _rest(self, tree: ast.AST) -> None:
        """Follow each function that the script never calls, and undo its changes."""
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
            for job in self._jobs.values():  # with the arguments at that point
                job.fitted = self._of_job(job)
            self._poisoned, self._star, self._replaced = flags
            self._heap.rollback(mark)
            self._heap.release()
            (self._loose_jobs if self._once else idle).update({key: job for key, job in self._jobs.items() if key not in done})
        self._once = False
        self._jobs, self._idle_jobs = done, idle
        self._steps = 0
        for node in ast.walk(tree):  # calls that the interpreter has not reached
            if isinstance(node, ast.Call) and self._poisoned and id(node) not in self._given:
                dotted = self._maybe(node.func)
                if dotted is not None and self._positional(dotted) is not None and id(node) not in self._jobs:
                    table = Table({REST: UNKNOWN})
                    self._jobs[id(node)] = Job(table, exported(table))

    def _surroundings(self, node: ast.AST) -> Names:
        """The names around a function that the script never calls: those of enclosing functions are unknown."""
        hidden = Names(self._module)
        around = self._scopes.parents.get(id(node))
        while around is not None:
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
                hidden.update(dict.fromkeys(local_names(around), UNKNOWN))
            around = self._scopes.parents.get(id(around))
        return hidden

    def _poison(self) -> Any:
        """Treat every value as unknown from here on."""
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
        """Note that a library's name may have been replaced."""
        if not self._blind:
            self._replaced.add(dotted)
            if dotted.startswith((SHELL, "builtins")):
                self._poison()

    def _release(self, function: Function) -> None:
        """Apply the effects of a function that unseen code may call at any time from now on."""
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
        """The `Names` in which a free name of a scope is bound."""
        while scope is not None and scope is not self._module:
            if name in scope and name not in scope.shared and scope.kind != "class":
                return scope
            scope = scope.outer
        return self._module

    def _give_up(self, *parts: ast.AST) -> Any:
        """Apply the effects of code that is not followed; its value is UNKNOWN."""
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

    # names

    def _name(self, name: str) -> Any:
        """The value of a name in the current scope; `Builtin` for built-ins."""
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
                if self._once and home is self._module and not isinstance(value, Imported | Function | RecipeValue):
                    return value if self._module.writes.get(name, 0) < 2 and is_scalar(value) else UNKNOWN
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
        if self._threads and frame is self._module:
            self._rebind(name, value)
        self._heap.name(frame, name, value)

    def _rebind(self, name: str, value: Any) -> None:
        """Apply the effect of a name that is bound after the start of a thread: the thread may read either value."""
        for function, started in self._threads:
            if name in started and not isinstance(value, Job):
                self._heap.lose(function)
            elif name not in started and name in self._scopes.of_function(function.node).loads:
                for job in self._jobs.values():
                    job.inputs = UNKNOWN

    def _watch(self) -> None:
        """Merge the current arguments of each estimator into those at its start, which may happen now in a thread."""
        for job in self._jobs.values():
            now = exported(job.given)
            merge(job.initial, now, {})
            if job.fitted is not None:
                merge(job.fitted, now | {"fit": {"inputs": exported(job.inputs)}}, {})

    def _dotted(self, node: ast.AST) -> str | None:
        """The full name of an imported expression; None for others, and for names that may have been replaced."""
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
                whole = ".".join([SHELL, *reversed(parts)])
            else:
                whole = self._called(node)
        return whole

    def _is_intact(self, dotted: str) -> bool:
        last = dotted.rpartition(".")[2]
        return not any(dotted == each or dotted.startswith(f"{each}.") or f".{last}" == each for each in self._replaced)

    def _of_job(self, job: Job) -> dict[str, Any]:
        """The arguments at an estimator's start. Without a `fit` in sight, it may be any time; if lost, with any dictionary."""
        if job.fitted is not None:
            return job.fitted
        now = exported(job.given)
        merge(now, job.initial, {})
        if job.lost:
            for value in now.values():
                if isinstance(value, dict):
                    value.update(dict.fromkeys([*value, REST], UNKNOWN))
        return now

    # For subclasses.

    @abc.abstractmethod
    def _call(self, node: ast.Call) -> Any: ...

    @abc.abstractmethod
    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Any: ...

    @abc.abstractmethod
    def _run(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, values: dict[str, Any], around: Names) -> Any: ...

    @abc.abstractmethod
    def _remember(self, node: ast.Call, args: list[Any], keywords: dict[str, Any]) -> None: ...

    @abc.abstractmethod
    def _assign(self, target: ast.AST, value: Any) -> None: ...

    @abc.abstractmethod
    def _block(self, body: Sequence[ast.stmt]) -> Outcome: ...

    @abc.abstractmethod
    def _fork(self, first: Callable[[], Outcome], second: Callable[[], Outcome]) -> Outcome: ...


def truth_of(value: Any) -> bool | None:
    """The truth value; None if it is not known."""
    if isinstance(value, Table):
        return True if any(each is not MAYBE and key != REST for key, each in value.items()) else None if value else False
    if isinstance(value, Items | Fixed):
        return None if MORE in value else bool(value)
    return bool(value) if isinstance(value, bool | int | float | complex | str | bytes | None) else None


def is_key(value: Any) -> bool:
    """True for a known key of a `Table`."""
    return isinstance(value, str | int) and value != REST


def is_scalar(value: Any) -> bool:
    """True for a known constant."""
    return isinstance(value, bool | int | float | str | None)


def is_poison(dotted: str) -> bool:
    """True for a library's name by which a script may change any of its own names."""
    return any(dotted == each or dotted.startswith(f"{each}.") for each in _POISON)
