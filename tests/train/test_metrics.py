"""metrics.jsonl: exact floats, valid JSON, and the cut on resume."""

import json
import math
import struct

from hypothesis import given
from hypothesis import strategies as st

from octavo.train.metrics import MetricsFile, cut, encode, read_metrics


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


def test_a_cut_to_zero_empties_the_file_and_an_absent_one_stays_absent(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut(path, 3)
    assert not path.exists()
    assert read_metrics(path) == []
    write(path, [1, 2])
    cut(path, 0)
    assert path.read_bytes() == b""
