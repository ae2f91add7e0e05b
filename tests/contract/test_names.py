"""Every private name of another library in Octavo's source has a contract, and FSDP2's are in one file."""

from __future__ import annotations

import test_attention
import test_autograd
import test_flash_attention
import test_fsdp2
import test_pytorch
import test_transformer_engine
import test_transformers
from private_names import SOURCE, defined, foreign, used_in

STANDARD = {
    "_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_args_from_interpreter_flags", "_replace", "_field_defaults",
}  # fmt: skip
"""Of Python itself."""
OWN = {
    "_Interval", "_bprop", "_bprop_tensors", "_error", "_extra_state", "_failed", "_fp8_state", "_hybrid_shard_zero2", "_id",
    "_token_id", "_weight",
}  # fmt: skip
"""Parts of Octavo's keys and names, and of arguments of Transformer Engine and names of SMP, in strings."""
TABLES = (test_attention, test_autograd, test_flash_attention, test_pytorch, test_transformer_engine, test_transformers)


def contracts():
    """Every private part of a name with a contract."""
    names = {part for table in TABLES for name in table.NAMES for part in name.path.split(".")}
    return (
        names
        | test_pytorch.ATTRIBUTES.keys()
        | test_pytorch.OTHERS.keys()
        | test_transformers.ATTRIBUTES.keys()
        | test_fsdp2.names()
    )


def test_every_private_name_has_a_contract():
    assert {name: files for name, files in foreign().items() if name not in contracts() | STANDARD | OWN} == {}


def test_no_contract_is_about_a_name_that_nothing_uses():
    private = {name for name in contracts() if name.startswith("_")}
    assert private - foreign().keys() - defined() == set()


def test_fsdp2_s_private_parts_are_in_its_adapter_alone():
    adapter = SOURCE / "parallel" / "fsdp2" / "adapter.py"
    private = {name for name in test_fsdp2.names() if name.startswith("_")}
    found = {file.relative_to(SOURCE).as_posix(): private & used_in(file) for file in SOURCE.rglob("*.py") if file != adapter}
    assert {file: names for file, names in found.items() if names} == {}
