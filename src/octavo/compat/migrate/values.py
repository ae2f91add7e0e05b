"""Values of a script that are known without running it: constants, and dictionaries, sums and texts of them.

The interpreter follows statements in order, and functions where the script calls them. A test with a known result takes its
branch; after an unknown one, a value is known only if both branches agree on it. After a statement or expression of another
kind, every name that it may bind is unknown, and every object that it may reach is lost (`heap`). Arguments of unknown calls
are lost too, and so is everything that code may use which is not followed: methods, inner and decorated functions, generators.
After `exec` or `globals()` nothing is known. Omitted: sets, attributes of objects.
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
        """Keyword → value of each estimator at the start of its job; the inputs of its `fit` are under "fit".

        Estimators in functions that the script never calls come first. If other functions may be called at any time, each of
        their estimators may be the last one: of the last only the values are known in which all of these agree.
        """
        loose = [self._of_job(job) for job in self._loose_jobs.values()]
        estimators = (
            [self._of_job(job) for job in self._idle_jobs.values()] + loose + [self._of_job(job) for job in self._jobs.values()]
        )
        if loose and len(estimators) > 1:
            estimators[-1] = copy.deepcopy(estimators[-1])
            for each in loose:
                merge(estimators[-1], each, {})
        return estimators

    @property
    def unreached(self) -> dict[int, int]:
        """`id` of a node that a known test skips → the test's line. In functions only tests without variables count."""
        left_out = [(node, line) for key, (node, line) in self._skipped.items() if key not in self._visited]
        return {id(each): line for node, line in left_out for each in ast.walk(node)}

    def last(self, name: str) -> Any:
        """The value of a module's name after its last line."""
        return exported(self._module.get(name, UNKNOWN))

    def arguments(self, call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of a call, with the entries of `**table`."""
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
        """Keywords that a call has twice, by name or by `**`: an error in Python."""
        return self._doubled.get(id(call), [])
