"""Prepared data as the JSON lines of channels, and read back as they were."""

import json
import re

import pytest

from octavo.cli import main
from octavo.config.data import DataConfig
from octavo.data.prepared import prepare
from octavo.errors import InputError
from octavo.run.channels import write_channels


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "one line of text after another until there is enough of it "
    (tmp_path / "articles.jsonl").write_text("".join(json.dumps({"text": words * (1 + n % 9)}) + "\n" for n in range(100)))
    return DataConfig(
        source="articles.jsonl",
        max_documents=50,
        seed=42,
        validation_fraction=0.2,
        vocab_size=300,
        sequence_length=64,
        folder="d",
    )


def test_chunks_are_the_joined_tokens_and_come_back_as_they_were(config, tmp_path):
    prepared = prepare(config)
    counts = write_channels(prepared, config, tmp_path / "channels")
    for split, name in (("train", "train/training.json"), ("validation", "test/validation.json")):
        rows = [json.loads(line) for line in (tmp_path / "channels" / name).read_text().splitlines()]
        chunks = [row["input_ids"] for row in rows]
        assert all(
            row == {"input_ids": ids, "attention_mask": [1] * 64, "labels": ids} for row, ids in zip(rows, chunks, strict=True)
        )
        tokens = prepared.tokens(split).tolist()
        assert chunks == [tokens[at : at + 64] for at in range(0, len(tokens) - 63, 64)]
        assert counts[name] == len(chunks) > 0
    again = DataConfig(
        source="channels/train/*.json", validation_source="channels/test/validation.json", sequence_length=64, folder="d"
    )
    found = prepare(again)
    for split in ("train", "validation"):
        length = len(prepared.tokens(split)) // 64 * 64
        assert found.tokens(split).tolist() == prepared.tokens(split)[:length].tolist()


def test_a_folder_with_files_documents_apart_and_too_little_text_are_refused(config, tmp_path):
    prepared = prepare(config)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        write_channels(prepared, config, tmp_path / "full")
    with pytest.raises(InputError, match=r"set it to .join"):
        write_channels(prepared, config.model_copy(update={"packing": "documents"}), tmp_path / "new")
    with pytest.raises(InputError, match=r"too few for a chunk of data\.sequence_length = 1000000"):
        write_channels(prepared, config.model_copy(update={"sequence_length": 1_000_000}), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "x").read_text() == "mine"


def test_the_command_says_what_it_wrote(config, tmp_path, capsys):
    data = config.model_dump(
        include={"source", "max_documents", "seed", "validation_fraction", "vocab_size", "sequence_length"}
    )
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items())
    (tmp_path / "run.toml").write_text(
        f'[model]\nsource = "llama-tiny"\n[data]\nfolder = "d"\n{lines}[train]\nsteps = 1\nglobal_batch = 1\n'
    )
    assert main(["prepare", "run.toml", "--channels", "out"]) == 0
    assert "chunks of 64 tokens in out/train/training.json" in capsys.readouterr().out
    assert main(["prepare", "run.toml", "--channels", "out", "--json"]) == 2
    capsys.readouterr()
    lines = [
        line
        for line in (tmp_path / "run.toml").read_text().splitlines()
        if not line.startswith(('source = "art', "max_", "vali"))
    ]
    (tmp_path / "again.toml").write_text("\n".join(lines).replace("[data]", '[data]\nsource = "out/train"'))
    assert main(["prepare", "again.toml", "data.validation_source=out/test"]) == 0
    said = re.findall(".*tokens to train on.* to validate on", capsys.readouterr().out)
    assert len(said) == 1
    assert (
        main(
            [
                "prepare",
                "again.toml",
                "data.source=out",
                "data.split=train",
                "data.validation_source=out",
                "data.validation_split=test",
            ]
        )
        == 0
    )
    assert re.findall(".*tokens to train on.* to validate on", capsys.readouterr().out) == said
    assert main(["prepare", "again.toml", "data.source=out", "data.validation_source=out/test"]) == 2
    assert "both read 'out/test/validation.json'" in capsys.readouterr().err.replace(f"{tmp_path}/", "")
