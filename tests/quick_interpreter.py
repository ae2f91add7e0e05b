"""Triton's interpreter without three costs that are most of its time; importing this module is enough.

- A launch replaces the names of `triton.language` by the interpreter's, and each call of a function within the kernel does it
  again, in a search for built-ins that are replaced already. Here a launch does it once.
- Sums and products of integers are computed again in int64 for an assertion that the interpreter never makes: its `debug` is
  off. Here they are not.
- A table of dtypes is built for each look-up. Here what it said is kept.

Triton 3.6 also reads the bound of a loop from an array of one dimension, which NumPy 2.4 refuses; here as later versions do.
"""

import dataclasses
import functools

import triton.language as tl
from triton.runtime import interpreter

_replaced = set()
_replace, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
_replace_tensor = interpreter._patch_lang_tensor
_numpy_dtype, _numpy_dtypes = interpreter._get_np_dtype, {}


def _replace_once(function):
    seen = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
    if seen in _replaced:
        return interpreter._LangPatchScope()
    _replaced.add(seen)
    return _replace(function)


def _replace_tensor_and_index(tensor, scope):
    _replace_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


@functools.wraps(_launch)
def _launch_anew(self, *arguments, **keywords):
    _replaced.clear()  # the launch before has put the names back
    return _launch(self, *arguments, **keywords)


def _kept_numpy_dtype(dtype):
    if isinstance(dtype, (tl.pointer_type, tl.block_type)):
        of_pointers = isinstance(dtype, tl.pointer_type) or isinstance(dtype.element_ty, tl.pointer_type)
        return _numpy_dtype(dtype) if of_pointers else _kept_numpy_dtype(dtype.element_ty)
    if dtype.name not in _numpy_dtypes:
        _numpy_dtypes[dtype.name] = _numpy_dtype(dtype)
    return _numpy_dtypes[dtype.name]


interpreter._patch_lang, interpreter.GridExecutor.__call__ = _replace_once, _launch_anew
interpreter._get_np_dtype, interpreter._patch_lang_tensor = _kept_numpy_dtype, _replace_tensor_and_index
_options = interpreter.interpreter_builder.options
assert not _options.debug
interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)
