"""Every private name of another library in Octavo's source has a contract, and FSDP2's are in one file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from private_names import SOURCE, defined, foreign, used_in


def _contract(of):
    """A module of this folder by its file: other folders have tests of the same names."""
    spec = importlib.util.spec_from_file_location(f"contract_of_{of}", Path(__file__).with_name(f"test_{of}.py"))
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fsdp2, _pytorch, _transformers = (_contract(of) for of in ("fsdp2", "pytorch", "transformers"))
STANDARD = {
    "_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_args_from_interpreter_flags", "_replace", "_field_defaults",
}  # fmt: skip
"""Of Python itself."""
OWN = {
    "_Interval", "_bprop", "_bprop_tensors", "_error", "_extra_state", "_failed", "_fp8_state", "_hybrid_shard_zero2", "_id",
    "_token_id", "_weight",
}  # fmt: skip
"""Parts of Octavo's keys and names, and of arguments of Transformer Engine and names of SMP, in strings."""
TABLES = (
    _pytorch, _transformers, *map(_contract, ("attention", "autograd", "flash_attention", "transformer_engine")),
)  # fmt: skip


def contracts():
    """Every private part of a name with a contract."""
    names = {part for table in TABLES for name in table.NAMES for part in name.path.split(".")}
    return names | _pytorch.ATTRIBUTES.keys() | _pytorch.OTHERS.keys() | _transformers.ATTRIBUTES.keys() | _fsdp2.names()


def test_every_private_name_has_a_contract():
    assert {name: files for name, files in foreign().items() if name not in contracts() | STANDARD | OWN} == {}


def test_no_contract_is_about_a_name_that_nothing_uses():
    private = {name for name in contracts() if name.startswith("_")}
    assert private - foreign().keys() - defined() == set()


def test_fsdp2_s_private_parts_are_in_its_adapter_alone():
    adapter = SOURCE / "parallel" / "fsdp2" / "adapter.py"
    private = {name for name in _fsdp2.names() if name.startswith("_")}
    found = {file.relative_to(SOURCE).as_posix(): private & used_in(file) for file in SOURCE.rglob("*.py") if file != adapter}
    assert {file: names for file, names in found.items() if names} == {}
