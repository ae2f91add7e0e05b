"""Every private name of another library in Octavo's source has a contract, and FSDP2's are in one file."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import names_page
import pytest
import torch
from private_names import SOURCE, defined, foreign, used_in
from torch import nn

import octavo
from octavo import versions
from octavo.errors import InputError


def _contract(of):
    """A module of this folder by its file: other folders have tests of the same names."""
    spec = importlib.util.spec_from_file_location(f"contract_of_{of}", Path(__file__).with_name(f"test_{of}.py"))
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fsdp2, _pytorch, _transformers = (_contract(of) for of in ("fsdp2", "pytorch", "transformers"))
STANDARD = {
    "_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_args_from_interpreter_flags", "_asdict", "_replace",
    "_field_defaults",
}  # fmt: skip
"""Of Python itself."""
OWN = {
    "_Interval", "_bprop", "_bprop_tensors", "_degree", "_error", "_extra_state", "_failed", "_fp8_state",
    "_hybrid_shard_zero2", "_id", "_pattern", "_scale", "_scale_bits", "_token_id", "_weight",
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


def test_the_page_of_private_names_is_made_of_the_contracts():
    page = SOURCE.parents[1].joinpath("docs", "private-parts.md").read_text(encoding="utf-8")
    assert names_page.written(page) == page, "python tests/contract/names_page.py docs/private-parts.md"


def test_fsdp2_s_private_parts_are_in_its_adapter_alone():
    adapter = SOURCE / "parallel" / "fsdp2" / "adapter.py"
    private = {name for name in _fsdp2.names() if name.startswith("_")}
    found = {file.relative_to(SOURCE).as_posix(): private & used_in(file) for file in SOURCE.rglob("*.py") if file != adapter}
    assert {file: names for file, names in found.items() if names} == {}


AT_CHOICE = {
    "torch._C._cudnn", "torch._C._remove_obj_from_tls", "torch.utils.checkpoint._checkpoint_impl",
    "torch.optim.AdamW._init_group", "torch.nn.modules.module._IncompatibleKeys",
}  # fmt: skip
"""Names that Octavo asks for before it uses them, or that later versions alone have."""


def test_what_is_asked_for_before_a_training_are_the_names_with_a_contract():
    """Those of scripts for SMP and of benchmarks stop these alone."""
    names = {name for table in TABLES for name in table.NAMES if name.path.partition(".")[0] in versions.CALLED}
    needed = {name.path for name in names if not all(file.startswith(("compat/", "benchmarks/")) for file in name.files)}
    assert {path for paths in versions.CALLED.values() for path in paths} == needed - AT_CHOICE


@pytest.mark.parametrize("name", ["transformers.PreTrainedModel._init_weights", "torch._foreach_norm"])
def test_a_library_that_lacks_a_name_is_refused_before_a_step(name, monkeypatch):
    versions.lacking.cache_clear()
    monkeypatch.delattr(name)
    try:
        with pytest.raises(InputError) as error:
            octavo.transform(nn.Linear(4, 4))
    finally:
        versions.lacking.cache_clear()
    package = name.partition(".")[0]
    assert f"has no {name}, which Octavo uses; versions " in str(error.value)
    assert f"pip install '{versions.requirement(package)}'" in str(error.value)


@pytest.mark.long(lambda module: module != "torch._C._autograd")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch._C._autograd", "_top_saved_tensors_default_hooks"),
        ("transformers.core_model_loading", "revert_weight_conversion"),
    ],
)
def test_a_name_that_is_missing_at_an_import_is_refused(module, name):
    code = (
        f"import pkgutil, octavo\ndelattr(pkgutil.resolve_name('{module}'), '{name}')\n"
        "try:\n    octavo.transform\nexcept octavo.errors.InputError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"has no {module}.{name}, which Octavo uses; versions " in result.stdout


def test_errors_of_another_kind_keep_their_traceback():
    for mistake in (
        "import torch.nonsense_of_mine as _",
        "torch.nonsense",
        "from os import nonsense",
        "import nonsense",
        "None._x",
    ):
        with pytest.raises((ImportError, AttributeError)) as error:
            exec(mistake, {"torch": torch})
        assert (versions.broken(error.value) is None) == (mistake != "import torch.nonsense_of_mine as _")
