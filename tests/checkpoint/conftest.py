"""Makes helper modules importable: those of this folder, `ranks`, the Llamas of the models' tests, and tensor ranks; tokens."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
for folder in (Path(__file__).parent, TESTS, TESTS / "models", TESTS / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def data(shared_data, tmp_path_factory):
    """Tokens of the steps of `layouts`."""
    import layouts

    from octavo.config.data import DataConfig
    from octavo.data.prepared import prepare

    folder = str(tmp_path_factory.mktemp("data"))
    return prepare(DataConfig(source=str(shared_data[0]), vocab_size=300, sequence_length=layouts.TOKENS, folder=folder))
