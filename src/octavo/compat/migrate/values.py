"""Values of a script that are known without running it: constants, and dictionaries, sums and texts of them.

Statements are followed in their order, functions where the script calls them. A known test takes its branch; after an unknown
one, a value is known only if both branches leave the same. Each kind of statement and expression that is followed is listed
here; of any other, every name that it may bind is unknown, and every object that it may reach is lost (`heap`). So is what a
call that is not known is given, and what code may use that is called in ways that are not followed: methods, inner functions,
decorated ones, generators. After `exec` or `globals()` nothing is known. Omitted: sets, attributes of objects.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from octavo.compat.migrate.heap import (
    exported,
)
from octavo.compat.migrate.interpreter.statements import Statements
from octavo.compat.migrate.known import (
    UNKNOWN,
    merge,
)


class Values(Statements):
    """Values at each call of a script; the arguments are those of `Interpreter`."""

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
