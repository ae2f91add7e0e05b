"""A run with weights and validation text of its own: the same after a resume; changes of either are refused."""

import gzip
import json
import random

import pytest
import torch

from octavo.cli import main
from octavo.run.metrics import read_metrics


@pytest.fixture
def random_state():
    states = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    torch.set_rng_state(states[1])


@pytest.mark.usefixtures("random_state")
def test_a_run_with_weights_continues_to_the_same_losses(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=4, every=2)
    second, held_out = tmp_path / "second.csv.gz", tmp_path / "held.txt"
    rows = [f'{i},"small, and of few words {i}"\n' for i in range(30)]
    second.write_bytes(gzip.compress(f"id,text\n{''.join(rows)}".encode()))
    held_out.write_text("text that no training sees " * 40)
    text = run.file.read_text().replace("validation_fraction = 0.1", "")
    text = text.replace(f'source = "{run.corpus}"', f'source = ["{run.corpus}", "{second}"]\nweights = [0.25, 0.75]')
    text = text.replace("[fp8]", f'validation_source = "{held_out}"\n[fp8]', 1)
    run.file.write_text(text.replace("[optimizer]", '[optimizer]\nschedule = "constant"', 1))
    data = f"data.folder={tmp_path / 'data'}"

    def train(output, *more):
        code = main(["train", str(run.file), data, f"train.output={tmp_path / output}", "train.validate_every=2", *more])
        return code, capsys.readouterr().err

    assert train("whole")[0] == 0
    assert train("parts", "train.steps=2")[0] == 0
    assert train("parts", "data.weights=[1, 3]")[0] == 0  # the same shares
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for key in ("loss", "validation_loss"):
        assert [record.get(key) for record in whole] == [record.get(key) for record in parts]
    assert [record.get("validation_loss") is not None for record in whole] == [False, True, False, True]

    for change, words in (
        ("data.weights=[0.5, 0.5]", "data.weights was [0.25, 0.75] and is now [0.5, 0.5]"),
        (f"data.validation_source={run.corpus.parent / 'other.txt'}", "other.txt': there is no such file"),
        ("data.validation_fraction=0.2", "data.validation_fraction = 0.2 has no effect with data.validation_source"),
    ):
        code, said = train("parts", change)
        assert code == 2
        assert words in said

    assert main(["train", str(run.file), data, "train.steps=50", "--dry-run", "--json"]) == 0
    batch = json.loads(capsys.readouterr().out)["batch"]
    assert list(batch["epochs_by_source"]) == [str(run.corpus), str(second)]
    first, small = batch["epochs_by_source"].values()
    assert small > 1 > first > 0
    assert main(["train", str(run.file), data, "train.steps=50", "--dry-run"]) == 0
    assert f"{second}: {small:.2f} of " in capsys.readouterr().out


def test_a_source_whose_weight_gives_it_no_sequence_is_said_at_the_start_and_by_a_dry_run(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    small = tmp_path / "small.jsonl"
    small.write_text(run.corpus.read_text())
    command = ["train", str(run.file), f"data.source=['{run.corpus}', '{small}']", f"data.folder={tmp_path / 'data'}"]
    said = f"data.weights: none of the run's 8 sequences is from {small} (weight 1e-09). Raise its weight, or remove it"
    assert main([*command, "data.weights=[1, 1e-9]", "--dry-run"]) == 0  # before any data is prepared
    assert said in capsys.readouterr().out
    assert main([*command, "data.weights=[1, 1e-9]"]) == 0
    assert said in capsys.readouterr().err
    assert main([*command, "data.weights=[3, 1]", "--dry-run"]) == 0
    assert "no sequence" not in capsys.readouterr().out
