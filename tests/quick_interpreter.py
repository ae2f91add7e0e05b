"""Triton's interpreter without its largest cost; importing this module is enough.

A launch replaces the names of `triton.language` by the interpreter's. The interpreter then does it again at each call of a
function within the kernel: `triton.language.core` is searched for built-ins, which are replaced already, and that is two thirds
of the time of a test. Here each launch replaces the names of a module once.
"""

import functools

import triton.language as tl
from triton.runtime import interpreter

_replaced = set()
_replace, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__


def _replace_once(function):
    seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if seen in _replaced:
        return interpreter._LangPatchScope()
    _replaced.add(seen)
    return _replace(function)


@functools.wraps(_launch)
def _launch_anew(self, *arguments, **keywords):
    _replaced.clear()  # the launch before has put the names back
    return _launch(self, *arguments, **keywords)


interpreter._patch_lang, interpreter.GridExecutor.__call__ = _replace_once, _launch_anew
