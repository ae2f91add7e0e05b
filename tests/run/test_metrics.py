"""metrics.jsonl: exact floats, valid JSON, and the cut on resume."""

import json
import math
import resource
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import OctavoError
from octavo.run.metrics import MetricsFile, cut, encode, lacking, read_metrics


@settings(deadline=None)
@given(st.floats(width=64))
def test_every_float_reads_back_exactly_and_the_line_is_strict_json(value):
    line = encode({"step": 1, "loss": value})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    json.loads(line, parse_constant=refuse)
    found = json.loads(line)["loss"]
    if math.isnan(value):
        assert found == "NaN"
    elif math.isinf(value):
        assert found == ("Infinity" if value > 0 else "-Infinity")
    else:
        assert struct.pack("d", found) == struct.pack("d", value)


def test_not_numbers_come_back_as_floats(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "mfu": None})
    file.close()
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == math.inf
    assert record["lr"] == -math.inf
    assert record["mfu"] is None


def write(path, steps, tail=b""):
    path.write_bytes(b"".join(encode({"step": s, "loss": s / 3}).encode() + b"\n" for s in steps) + tail)


def test_lines_after_the_checkpoint_and_a_torn_last_line_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8), b'{"step": 8, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    file = MetricsFile(path, 5)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    file.append({"step": 6, "loss": 2.0})
    file.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(path)[4]["loss"] == 5 / 3


def test_a_line_torn_exactly_before_its_line_end_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2], b'{"step": 3, "loss": 1.0}')
    cut(path, 9)
    assert path.read_bytes().endswith(b"\n")
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("damaged", [b"{]\n", b"\xff\xfe\n", b"7\n", b'{"loss": 1.0}\n', b'{"step": null}\n', b"\n"])
def test_a_damaged_line_in_the_middle_costs_no_other(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4), damaged)
    path.write_bytes(path.read_bytes() + b"".join(encode({"step": s}).encode() + b"\n" for s in range(4, 8)))
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 6, 7]
    cut(path, 5)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert damaged in path.read_bytes()


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (b'{"step": 3, "lo', "line 3 of {} is cut or damaged, and the record of step 3 is missing"),
        (b'{"step": 3, "lo\n', "line 3 of {} is cut or damaged, and the record of step 3 is missing"),
        (b"", "{} has 2 lines, and the record of step 3 is missing"),
    ],
)
def test_a_lacking_record_is_said_with_its_line_and_the_remedy(tmp_path, tail, words):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2], tail)
    found = lacking(path, 3)
    assert found.startswith(words.format(path))
    assert f"remove {tmp_path / 'checkpoints' / 'step-3'}, and octavo train repeats" in found


def test_a_cut_to_zero_empties_the_file_and_an_absent_one_stays_absent(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut(path, 3)
    assert not path.exists()
    assert read_metrics(path) == []
    write(path, [1, 2])
    cut(path, 0)
    assert path.read_bytes() == b""


def test_a_full_disk_is_one_message_and_the_lines_before_it_are_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.append({"step": 1, "loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))  # the next line fits in part
    try:
        with pytest.raises(OctavoError, match=r"metrics.jsonl could not be written: .* The last checkpoint is intact") as error:
            file.append({"step": 2, "loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    assert error.value.exit_code == 1
    assert [r["step"] for r in read_metrics(path)] == [1]
