"""Every preset and every run file under examples/ is equal to one rank, at 2 and 4 ranks."""

from pathlib import Path

import pytest
from verified import comparisons

import ranks
from octavo.config.run import RunConfig
from octavo.verify import certificate

pytestmark = ranks.alone

ROOT = Path(__file__).parents[2]
FILES = sorted(str(file.relative_to(ROOT)) for folder in ("presets", "examples") for file in (ROOT / folder).rglob("*.toml"))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.long(lambda name, world: (name, world) != ("presets/llama-8b-128k.toml", 2))
def test_a_run_file_is_equal(name, world):
    config, said = certificate._lowered(RunConfig.from_file(ROOT / name), world, ())
    degrees = config.parallel.model_dump(include={"cp_comm_type", *(key for key in vars(config.parallel) if "degree" in key)})
    assert all("does not divide" in line for line in said)
    found = comparisons(config, world, degrees)
    assert {where: each.first for where, each in found.items() if each.first is not None} == {}
    assert len(found) == (3 if config.fp8.enabled is False else 6)
