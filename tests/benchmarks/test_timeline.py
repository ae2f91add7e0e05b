"""Timelines of traces that are written by hand, and traces of a run."""

import gzip
import json

import pytest
from matplotlib.image import imread

from benchmarks import run
from benchmarks.profile.timeline import Call, calls_of, cut, main
from octavo.errors import InputError

PRODUCT, GATHER = "nvjet_sm90_qqtst_128x160_TNT", "ncclDevKernel_AllGather_RING_LL"


def event(name, stream, start, dur, cat="kernel"):
    """An event of a Chrome trace, times in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": 5000.0 + start, "dur": dur, "args": {"stream": stream}}


@pytest.fixture
def trace(tmp_path):
    events = [
        event("_norm_rows", 7, 900.0, 100.0),
        event(PRODUCT, 7, 0.0, 400.0),
        event(GATHER, 31, 100.0, 1100.0),
        event("Memcpy DtoD (Device -> Device)", 7, 450.0, 50.0, "gpu_memcpy"),
        event("aten::mm", 7, 0.0, 9e6, "cpu_op"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    path = tmp_path / "case-entry.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_calls_have_a_stream_a_kind_and_times_from_the_first(trace):
    calls = calls_of(json.loads(gzip.decompress(trace.read_bytes())))
    assert calls == [
        Call(7, "fp8 products", 0.0, 0.4), Call(31, "communication", 0.1, pytest.approx(1.2)),
        Call(7, "copies and elementwise", 0.45, 0.5), Call(7, "norms", 0.9, 1.0),
    ]  # fmt: skip
    assert cut(calls, 0.3, 0.9) == [
        Call(7, "fp8 products", 0.0, pytest.approx(0.1)),
        Call(31, "communication", 0.0, pytest.approx(0.6)),
        Call(7, "copies and elementwise", pytest.approx(0.15), pytest.approx(0.2)),
    ]
    with pytest.raises(InputError, match=r"no kernel runs between 2 ms and 3 ms: the trace has 0 to 1\.2 ms"):
        cut(calls, 2.0, 3.0)


def test_a_stretch_is_printed_drawn_and_kept(trace, tmp_path, capsys):
    kept, picture = tmp_path / "stretch.json", tmp_path / "stretch.png"
    assert main([str(trace), "--from", "0.3", "--to", "0.9", "--output", str(kept), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "stream 31: communication 0.60 ms",
        "stream 7: fp8 products 0.10, copies and elementwise 0.05 ms",
    ]
    assert imread(picture).shape[1] == 1440
    assert main([str(kept)]) == 0  # what was kept says the same
    assert capsys.readouterr().out == printed


def test_what_is_no_trace_is_refused(tmp_path, trace, capsys):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "broken.json.gz").write_bytes(trace.read_bytes()[:40])
    data = bytearray(trace.read_bytes())
    data[30] ^= 255
    (tmp_path / "corrupt.json.gz").write_bytes(data)
    for name, text in (
        ("list.json", "[]"),
        ("text.json", "text"),
        ("calls.json", '{"calls": [[1, "norms"]]}'),
        ("times.json", '{"traceEvents": [{"cat": "kernel", "name": "a", "args": {"stream": 7}}]}'),
        ("host.json", '{"traceEvents": [{"cat": "cpu_op", "name": "a"}]}'),
    ):
        (tmp_path / name).write_text(text)
    reasons = {
        "other.json": "is not a trace: it has neither traceEvents nor calls. Give a file of python -m benchmarks --traces",
        "list.json": "is not a trace: it has neither traceEvents nor calls.",
        "text.json": "is not a trace: it is not JSON.",
        "calls.json": "is not a trace: its calls are not as PyTorch's profiler writes them.",
        "times.json": "is not a trace: its calls are not as PyTorch's profiler writes them.",
        "host.json": "has no kernel of a GPU.",
        "broken.json.gz": "is not a trace: it is damaged, a compressed file without its end or with other bytes.",
        "corrupt.json.gz": "is not a trace: it is damaged,",
        "none.json": "cannot be read: No such file or directory. Give a file of python -m benchmarks --traces",
    }
    for name, reason in reasons.items():
        assert main([str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"octavo: {tmp_path / name} {reason}")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("first", "last", "way"),
    [
        ("0.9", "0.3", ", such as --from 0.3 --to 0.9"),
        ("0.5", "0.5", ""),
        ("-1", "0.5", ""),
        ("nan", "0.5", ""),
        ("0.3", "nan", ""),
    ],
)
def test_what_is_no_stretch_is_refused(tmp_path, trace, capsys, first, last, way):
    assert main([str(trace), "--from", first, "--to", last, "--output", str(tmp_path / "stretch.json")]) == 2
    said = f"--from {first} and --to {last} are no stretch of a trace: --from is 0 ms or more, and --to is above it{way}."
    assert capsys.readouterr() == ("", f"octavo: {said}\n")
    assert not (tmp_path / "stretch.json").exists()


def test_a_stretch_behind_the_end_is_refused(trace, capsys):
    assert main([str(trace), "--from", "2"]) == 2
    assert "no kernel runs between 2 ms and the end: the trace has 0 to 1.2 ms" in capsys.readouterr().err


def test_files_that_could_not_be_written_are_refused_before_the_table(tmp_path, trace, capsys):
    kept = tmp_path / "kept.json"
    assert main([str(trace), "--output", str(kept)]) == 0
    capsys.readouterr()
    before, files = kept.read_bytes(), sorted(tmp_path.iterdir())
    for option, file, words in (
        ("--output", tmp_path / "none" / "file.json", "there is no folder"),
        ("--plot", tmp_path / "none" / "file.png", "there is no folder"),
        ("--output", tmp_path / "x.png", f"the name does not end in .json. Use {tmp_path / 'x.json'}."),
        ("--plot", tmp_path / "x.txt", f"the name does not end in .png. Use {tmp_path / 'x.png'}."),
        ("--output", kept, "is the trace itself"),
    ):
        assert main([str(kept), "--plot", str(tmp_path / "ok.png"), option, str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"octavo: {option} {file}")
        assert said.err.count("\n") == 1
        assert words in said.err
    assert (kept.read_bytes(), sorted(tmp_path.iterdir())) == (before, files)


def test_traces_of_a_run_are_not_written_over(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr(run, "_check_gpu", lambda *arguments: None)  # PyTorch's operators stand for kernels
    how = {
        "cases": ["tiny"],
        "entries": ["torch-bf16"],
        "steps": 1,
        "warmup": 0,
        "device": "cpu",
        "command": "python -m benchmarks",
    }
    made = run.run_suite("one-gpu", traces=tmp_path / "traces", output=tmp_path / "one.json", **how)
    assert made["rows"][0]["kernel_ms"]
    (found,) = (tmp_path / "traces").iterdir()
    assert found.name == "tiny-torch-bf16.json.gz"
    with pytest.raises(InputError, match=r"tiny-torch-bf16\.json\.gz exists: give --traces another folder"):
        run.run_suite("one-gpu", traces=tmp_path / "traces", output=tmp_path / "two.json", **how)
    with pytest.raises(InputError, match=r"--traces .* cannot be written to: it is a file. Give the path of a folder"):
        run.run_suite("one-gpu", traces=found, output=tmp_path / "two.json", **how)
    assert not (tmp_path / "two.json").exists()
