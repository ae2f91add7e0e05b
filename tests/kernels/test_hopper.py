"""Every Triton kernel compiles for Hopper, at the sizes of models; tiles fit in shared memory, some kernels in registers."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).parent.parent.parent / "src" / "octavo" / "kernels"
SHARED_MEMORY = 227 * 1024  # bytes of a program on Hopper
# Of a thread at most, and bytes that it spills; nothing else shows how many a kernel takes. With 128 an activation took a
# quarter more time. Cross entropy keeps a part of a row in them; of unaligned rows it spills a few.
REGISTERS = {"activation_tiles": (96, 0), "_cross_entropy": (128, 32)}
# The target's logit. All others come 8 at a time, of a slice with padding too.
NARROW = {"_cross_entropy_statistics": 1, "_cross_entropy_of_slice": 0}


@pytest.mark.long(lambda sizes: sizes == "all")
@pytest.mark.parametrize("sizes", ["few", "all"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
def test_kernels_compile_for_hopper(sizes):
    script = Path(__file__).with_name("hopper.py")
    done = subprocess.run(
        [sys.executable, script, sizes], capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(name, size) for name, size in found["compiled"] if isinstance(size, str) or size > SHARED_MEMORY] == []
    assert found["missing"] == []
    assert {name for name, _, _ in found["registers"]} == set(REGISTERS)
    assert [row for row in found["registers"] if row[1] > REGISTERS[row[0]][0] or row[2] > REGISTERS[row[0]][1]] == []
    assert {name for name, _ in found["narrow"]} == set(NARROW)
    assert [row for row in found["narrow"] if row[1] > NARROW[row[0]]] == []


def may_return_none(function):
    """True for a helper of kernels that returns a parameter which it compares with None: Triton 3.6 does not compile it."""
    compared = [node.left for node in ast.walk(function) if isinstance(node, ast.Compare) and "None" in ast.unparse(node)]
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]
    names = [
        {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)} for trees in (compared, returned)
    ]
    return bool(names[0] & names[1])


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.relative_to(KERNELS).as_posix())
def test_helpers_of_kernels_return_no_none(path):
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]
    kernels = [node for node in nodes if any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)]
    assert [kernel.name for kernel in kernels if may_return_none(kernel)] == []


def test_a_helper_that_returns_none_is_found():
    source = "def advanced(pointer, by):\n    if pointer is not None:\n        pointer += by\n    return pointer"
    assert may_return_none(ast.parse(source).body[0])
    assert not may_return_none(ast.parse(source.replace("return pointer", "return by")).body[0])
