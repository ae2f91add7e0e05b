"""The interpreter's heap: a script's dictionaries, lists and functions with their aliases, as far as reading knows them.

An object is known while every reference to it is known. Once unseen code may hold a reference, the object is lost for good:
later writes to it are unknown too. Each change is logged, so that both branches of an unknown test start from the same state,
and their common part is known afterwards. Omitted: sets, attributes.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.compat.migrate.known import MORE, REST, UNKNOWN, RecipeValue, same

_SERIAL = itertools.count()
_DEEPEST, _MOST_PARTS = 40, 20_000


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()
"""No value: an unbound name, or an absent key."""
MAYBE: Any = type(UNKNOWN)()
"""The value of a key that may be absent, known only at run time."""
READ, METHOD, LEAK, BIND = 1, 2, 3, 4
"""Uses of a name by unseen code, in increasing strength: read entries, call a method, pass its object on, rebind it."""


class Table(dict[Any, Any]):
    """A dictionary.

    Attributes:
        lost: unseen code may hold a reference to it.
        leaky: unseen code may hold references to its values.
        ordered: the order of its keys is known.
    """

    def __init__(self, *content: Any) -> None:
        super().__init__(*content)
        self.serial = next(_SERIAL)
        self.lost = self.leaky = False
        self.ordered = True

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a change may affect."""
        return list(self.items()), self.lost, self.leaky, self.ordered

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.clear()
        self.update(state[0])
        self.lost, self.leaky, self.ordered = state[1:]

    @property
    def is_whole(self) -> bool:
        """True if all keys and their order are known."""
        return self.ordered and REST not in self and not any(value is MAYBE for value in self.values())


class Items(list[Any]):
    """A list; `lost` and `leaky` as of `Table`."""

    def __init__(self, *content: Any) -> None:
        super().__init__(*content)
        self.serial = next(_SERIAL)
        self.lost = self.leaky = False

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a change may affect."""
        return list(self), self.lost, self.leaky

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self[:] = state[0]
        self.lost, self.leaky = state[1:]

    @property
    def is_whole(self) -> bool:
        """True if its length is known."""
        return MORE not in self


class Fixed(list[Any]):
    """A tuple."""


class Names(dict[str, Any]):
    """The names of a module, class, function or comprehension.

    Attributes:
        outer: the enclosing names, in which absent ones are looked up.
        shared: names declared global.
        given: name → its strongest use (`READ` … `BIND`) by code that may run at any time.
    """

    def __init__(self, outer: Names | None = None, kind: str = "function") -> None:
        super().__init__()
        self.serial = next(_SERIAL)
        self.outer, self.kind = outer, kind
        self.shared: set[str] = set()
        self.given: dict[str, int] = {}
        self.writes: dict[str, int] = {}


@dataclass(frozen=True)
class View:
    """A live view of the keys, values or items of a dictionary."""

    table: Table
    kind: str


@dataclass(frozen=True)
class Imported:
    """A module, or a name of one."""

    dotted: str


@dataclass(frozen=True)
class Builtin:
    """A built-in function."""

    name: str


class Losable:
    """Base of immutable objects that can only be lost."""

    lost: bool
    serial: int

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that a change may affect."""
        return (self.lost,)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        (self.lost,) = state


@dataclass(eq=False)
class Function(Losable):
    """A function of the script.

    Attributes:
        defaults: parameter → value, evaluated once.
        scope: the enclosing names; of a function that is followed at its calls, the module's only.
        lost: unseen code may call it.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    defaults: dict[str, Any]
    scope: Names
    lost: bool = False
    serial: int = field(default_factory=lambda: next(_SERIAL))


@dataclass(eq=False)
class Job(Losable):
    """An estimator.

    Attributes:
        given: its arguments.
        initial: a copy of them at construction.
        fitted: a copy at the start of its job; None before.
        inputs: the inputs of `fit`, as in the script.
        lost: unseen code may hold a reference to it.
    """

    given: Table
    initial: dict[str, Any]
    fitted: dict[str, Any] | None = None
    inputs: Any = None
    lost: bool = False
    serial: int = field(default_factory=lambda: next(_SERIAL))


@dataclass(frozen=True)
class Task:
    """A process or thread that has not started: its function and arguments.

    is_thread: True for a thread, which shares the script's objects and names; a process has copies.
    """

    function: Function
    args: list[Any]
    is_thread: bool = False


Place = tuple[int, Any]
"""(`id` of an object, a name in it or None for the whole object)."""


class Heap:
    """The log of changes, and the consequences of losing an object."""

    def __init__(self) -> None:
        self._log: list[tuple[Any, Any, Any]] = []  # object, name or None, value before the change
        self._marks = 0
        self.on_release: Callable[[Function], None] = lambda function: None
        self.on_replace: Callable[[str], None] = lambda dotted: None

    # changes

    def change(self, box: Any) -> None:
        """Log an object that is about to change."""
        if self._marks:
            self._log.append((box, None, box.state))

    def name(self, names: Names, name: str, value: Any) -> None:
        """Bind a name, or unbind it with `ABSENT`."""
        if self._marks:
            self._log.append((names, name, names.get(name, ABSENT)))
        names.writes[name] = names.writes.get(name, 0) + 1
        _set(names, name, value)

    def give(self, names: Names, name: str, level: int) -> None:
        """Make a name visible to code that may run at any time."""
        if level > names.given.get(name, 0):
            names.given[name] = level  # never taken back
        if name in names:
            value = self.taken(names[name], names.given[name])
            if self._marks:
                self._log.append((names, name, names[name]))
            names[name] = value

    def taken(self, value: Any, level: int) -> Any:
        """A value after unseen code used its name; the object may be lost."""
        if level == READ and isinstance(value, Table | Items):
            self.leak(value)
        elif not isinstance(value, Imported | Job) or level >= LEAK or (isinstance(value, Job) and level == METHOD):
            self.lose(value)
        return UNKNOWN if level == BIND else value

    def put(self, table: Table, entries: dict[Any, Any]) -> None:
        """Set entries of a dictionary; unknown ones (`REST`) may replace any."""
        gone: list[Any] = []
        if table.lost:
            gone = list(entries.values())
        else:
            self.change(table)
            if REST in entries:
                gone = list(table.values())
                for key in table:
                    table[key] = UNKNOWN
                table[REST], table.ordered = UNKNOWN, False
            for key, value in entries.items():
                if value is MAYBE:
                    gone.append(table.get(key))
                    table[key] = UNKNOWN if table.get(key, MAYBE) is not MAYBE else MAYBE
                elif key != REST:
                    table[key] = value
            if table.leaky:
                gone += entries.values()
        for value in gone:
            self.lose(value)

    def forget(self, value: Any) -> None:
        """Make the content of an object unknown; later writes to it are known."""
        if isinstance(value, Table | Items) and not value.lost:
            self.change(value)
            gone = list(children(value))
            if isinstance(value, Table):
                value.update(dict.fromkeys(value, MAYBE))  # a key may have been removed
                value[REST], value.ordered = UNKNOWN, False
            else:
                value[:] = [MORE]
            for each in gone:
                self.lose(each)

    # losses

    def leak(self, value: Table | Items) -> None:
        """Mark the current and later values of a dictionary or list as reachable by unseen code."""
        if not value.leaky:
            self.change(value)
            value.leaky = True
            for each in list(value.values() if isinstance(value, Table) else value):
                self.lose(each)

    def lose(self, value: Any) -> None:
        """Mark a value, and everything reachable from it, as reachable by unseen code."""
        if isinstance(value, Table | Items):
            if not value.lost:
                self.forget(value)
                value.lost = True
        elif isinstance(value, Fixed):
            for each in value:
                self.lose(each)
        elif isinstance(value, View):
            self.leak(value.table)
        elif isinstance(value, Losable):
            known = not value.lost
            if known:
                self.change(value)
                value.lost = True
            if isinstance(value, Job):
                for each in value.given.values():
                    self.forget(each)
            elif isinstance(value, Function) and known:
                for each in value.defaults.values():
                    self.lose(each)
                self.on_release(value)
        elif isinstance(value, Task):
            self.lose(value.function)
            for each in value.args:
                self.lose(each)
        elif isinstance(value, Imported):
            self.on_replace(value.dotted)
        elif isinstance(value, RecipeValue):
            value.lost = True  # never taken back

    # branches

    def mark(self) -> int:
        """Start to log; ended by `release`."""
        self._marks += 1
        return len(self._log)

    def release(self) -> None:
        """End the logging that `mark` started."""
        self._marks -= 1
        if not self._marks:
            self._log.clear()

    def changed(self, mark: int) -> dict[Place, tuple[Any, Any, Any]]:
        """Each place changed since a mark → object, name, and its value at the mark."""
        places: dict[Place, tuple[Any, Any, Any]] = {}
        for box, key, before in self._log[mark:]:
            places.setdefault((id(box), key), (box, key, before))
        return places

    def rollback(self, mark: int) -> dict[Place, tuple[Any, Any, Any]]:
        """Restore the state at a mark. Returns each changed place → object, name, and its value before the rollback."""
        after: dict[Place, tuple[Any, Any, Any]] = {}
        for place, (box, key, before) in self.changed(mark).items():
            after[place] = box, key, _now(box, key)
            self._write(box, key, before)
        return after

    def restore(self, after: dict[Place, tuple[Any, Any, Any]]) -> None:
        """Reapply the changes that `rollback` returned."""
        for box, key, state in after.values():
            self._write(box, key, state)

    def join(self, mark: int, after: dict[Place, tuple[Any, Any, Any]], born: int) -> None:
        """Merge two branches: only what they have in common stays known.

        Args:
            mark: the start of the second, whose end is now.
            after: the end of the first.
            born: objects with a later serial were created in one of them.
        """
        lost: list[Any] = []
        second = self.changed(mark)
        for place, (box, key, state) in after.items():
            if box.serial > born and place not in second:
                self._write(box, key, state)
            else:
                self._write(box, key, _joined(box, key, state, _now(box, key), lost))
        for place, (box, key, before) in second.items():
            if place not in after and box.serial <= born:
                self._write(box, key, _joined(box, key, before, _now(box, key), lost))
        for value in lost:
            self.lose(value)

    def anywhere(self, mark: int) -> tuple[dict[Place, tuple[Any, Any, Any]], list[Any]]:
        """(each place → object, name, and what its values since a mark have in common; values lost by that)."""
        lost: list[Any] = []
        places: dict[Place, tuple[Any, Any, Any]] = {}
        for box, key, before in self._log[mark:]:
            place = id(box), key
            so_far = places[place][2] if place in places else before
            places[place] = box, key, _joined(box, key, so_far, before, lost)
        return {
            place: (box, key, _joined(box, key, state, _now(box, key), lost)) for place, (box, key, state) in places.items()
        }, lost

    def is_steady(self, mark: int, born: int) -> bool:
        """True if no place has changed since a mark."""
        return all(
            box.serial > born or _alike(box, key, before, _now(box, key)) for box, key, before in self.changed(mark).values()
        )

    def _write(self, box: Any, key: Any, state: Any) -> None:
        self._log.append((box, key, _now(box, key)))
        if key is None:
            box.state = state
        else:
            _set(box, key, state)


def _set(names: Names, name: str, value: Any) -> None:
    if value is ABSENT:
        names.pop(name, None)
    else:
        names[name] = value


def _now(box: Any, key: Any) -> Any:
    return box.state if key is None else box.get(key, ABSENT)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | None)


def is_same(left: Any, right: Any) -> bool:
    """True for the same object, and for equal constants."""
    alike = isinstance(left, Imported | Builtin) and left == right
    return left is right or alike or (_is_plain(left) and _is_plain(right) and same(left, right))


def _common(left: Any, right: Any, lost: list[Any]) -> Any:
    """The part that two values share."""
    if is_same(left, right):
        return left
    lost += [each for each in (left, right) if not isinstance(each, Imported)]
    return UNKNOWN


def _joined(box: Any, key: Any, left: Any, right: Any, lost: list[Any]) -> Any:
    """The part that two states of a place share."""
    if key is not None:
        if box.kind == "class" and (left is ABSENT) != (right is ABSENT):  # the name may be the enclosing scope's
            lost += [around[key] for around in _outwards(box) if key in around]
        return _common(left, right, lost)
    if isinstance(box, Table):
        return _joined_tables(left, right, lost)
    if isinstance(box, Items):
        flags = [one or other for one, other in zip(left[1:], right[1:], strict=True)]
        if len(left[0]) == len(right[0]):
            return [_more(one, other, lost) for one, other in zip(left[0], right[0], strict=True)], *flags
        lost += [*left[0], *right[0]]
        return [MORE], *flags
    return tuple(one or other for one, other in zip(left, right, strict=True))


def _outwards(names: Names) -> Iterator[Names]:
    """The enclosing names, outwards."""
    while names.outer is not None:
        names = names.outer
        yield names


def _more(left: Any, right: Any, lost: list[Any]) -> Any:
    return MORE if MORE in (left, right) else _common(left, right, lost)


def _joined_tables(left: tuple[Any, ...], right: tuple[Any, ...], lost: list[Any]) -> tuple[Any, ...]:
    first, second = dict(left[0]), dict(right[0])
    joined: dict[Any, Any] = {}
    for key in [*first, *(key for key in second if key not in first)]:
        one, other = first.get(key, ABSENT), second.get(key, ABSENT)
        if key != REST and (one is ABSENT or other is ABSENT or one is MAYBE or other is MAYBE):
            lost += [one, other]
            joined[key] = MAYBE
        else:
            joined[key] = UNKNOWN if key == REST else _common(one, other, lost)
    ordered = left[3] and right[3] and list(first) == list(second)
    return list(joined.items()), left[1] or right[1], left[2] or right[2], ordered


def _alike(box: Any, key: Any, left: Any, right: Any) -> bool:
    if key is not None:
        return is_same(left, right)
    if isinstance(box, Table):
        return left[1:] == right[1:] and pairwise(
            itertools.chain.from_iterable(left[0]), itertools.chain.from_iterable(right[0])
        )
    if isinstance(box, Items):
        return bool(left[1:] == right[1:]) and pairwise(left[0], right[0])
    return bool(left == right)


def pairwise(left: Iterable[Any], right: Iterable[Any]) -> bool:
    """True for the same values in the same order."""
    one, other = list(left), list(right)
    return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))


def exported(value: Any) -> Any:
    """A copy of a value as plain dictionaries, lists and constants; other parts, and parts beyond a limit, are UNKNOWN."""
    return _exported(value, 0, [_MOST_PARTS])


def _exported(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > _DEEPEST or left[0] < 0:
        return UNKNOWN
    if isinstance(value, dict):
        return {key: _exported(each, depth + 1, left) for key, each in value.items()}
    if isinstance(value, list):
        return [each if each is MORE else _exported(each, depth + 1, left) for each in value]
    if isinstance(value, RecipeValue):
        inside = _exported(value.args, depth + 1, left), _exported(value.words, depth + 1, left)
        return UNKNOWN if value.lost else RecipeValue(value.dotted, *inside)
    return UNKNOWN if value is MAYBE or isinstance(value, View | Imported | Builtin | Function | Job | Task) else value


def plain(value: Any, depth: int = 0) -> Any:
    """A known value as a Python object, with tuples. Raises ValueError for an unknown or too deeply nested value."""
    if isinstance(value, Table):
        if value.is_whole and depth < 4:
            return {key: plain(each, depth + 1) for key, each in value.items()}
    elif isinstance(value, list):
        if MORE not in value and depth < 4:
            parts = [plain(each, depth + 1) for each in value]
            return tuple(parts) if isinstance(value, Fixed) else parts
    elif _is_plain(value):
        return value
    raise ValueError(value)


def children(value: Any) -> Iterator[Any]:
    """The values inside of an object."""
    if isinstance(value, Table):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
    elif isinstance(value, View):
        yield from value.table.values()
