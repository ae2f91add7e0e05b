"""The blocks of the results page, from results written by hand; the newest file of a workload alone."""

import json

import pytest

from benchmarks import pages
from octavo.errors import InputError

FLASH = "Transformer Engine, flash-attn 4.0.0b36, window bounds of -1 mended"


def row(entry, speed, *, workload="llama-1b", gpus=1, **more):
    figures = {"tokens_per_second": speed, "step_ms": 160.25, "peak_gib": speed / 4e3, "batch": 4, "sequence_length": 4096}
    return {"workload": workload, "entry": entry, "gpus": gpus, "interleaved": True, **figures, **more}


ROWS = [
    row("te-delayed", 80_000.0, attention=FLASH),
    row("octavo-default", 96_000.0, attention="FlashAttention-4 4.0.0b36", mfu=0.471),
    row("octavo-bf16", 70_000.0, attention="cuDNN's kernel through scaled_dot_product_attention, document by document"),
    {"workload": "llama-1b", "entry": "te-current", "error": "OutOfMemoryError: CUDA out of memory."},
    {"workload": "llama-1b", "entry": "te-delayed-flash-attention", "error": "InputError: its attention is wrong (…)"},
    {"workload": "llama-1b", "entry": "ao-rowwise", "error": "no such kernel"},
]


def document(rows, day="2026-11-27", gpu="NVIDIA H100 80GB HBM3", count=1, suite="one-gpu", **peers):
    machine = {"gpu": gpu, "count": count, "torch": "2.11.0", "flash-attn-4": "4.0.0b36", "peers": peers}
    return {"suite": suite, "date": f"{day}T13:40:00+00:00", "machine": machine, "rows": rows}


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)

    def write(**files):
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    return write


def test_a_block_has_every_entry_and_the_conditions(results, tmp_path):
    folder = results(one=document(ROWS, **{"transformer-engine": "2.20.2"}))
    page = "# Page\n\n<!-- Measured: one -->\nold\n<!-- End of measured -->\n\nafter\n"
    text = pages.rewrite(page, folder, tmp_path / "docs")
    assert text.startswith("# Page\n\n<!-- Measured: one -->\n| workload | entry | tokens/s | ms a step | MFU | peak GiB | ")
    assert text.endswith("\n<!-- End of measured -->\n\nafter\n")
    titles, _, first, *rest = [line for line in text.splitlines() if line.startswith("|")]
    times, dash = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
    assert titles.endswith(f" | attention | {times} best peer |")
    link = "[JSON](../benchmarks/results/one.json)"
    what = f"Llama-3.2-1B's shape, 4 {times} 4,096 tokens ({link})"
    assert first == f"| {what} | `octavo-default` | 96,000 | 160 | 47.1% | 24.0 | FlashAttention-4 4.0.0b36 | 1.200 |"
    assert rest[0] == f"|  | `te-delayed` | 80,000 | 160 | {dash} | 20.0 | flash-attn-4 | 1.000 |"
    assert rest[1] == f"|  | `octavo-bf16` | 70,000 | 160 | {dash} | 17.5 | cuDNN | 0.875 |"
    for line, fault in zip(rest[2:], ("out of memory", "attention is wrong", "failed"), strict=True):
        assert line.split(" | ")[2:] == [fault, *[dash] * 4, f"{dash} |"]
    said = "Measured: 2026-11-27, one H100, torch 2.11.0, flash-attn-4 4.0.0b36, Transformer Engine 2.20.2; entries in two "
    said += "alternating rounds."
    assert said in " ".join(text.split())
    assert pages.rewrite(text, folder, tmp_path / "docs") == text
    assert pages.named(text) == ["one"]


def test_conditions_that_files_share_are_said_once(results, tmp_path):
    alone = [row(name, 1e4, workload="llama-8b-8layers", interleaved=False) for name in ("octavo-bf16", "te-bf16")]
    folder = results(one=document(ROWS[:2]), two=document(alone), three=document([row("te-bf16", 1e4, gpus=2)], count=2))
    text = " ".join(pages.block(["one", "two", "three"], folder, tmp_path).split())
    shared = "2026-11-27, one H100, torch 2.11.0, flash-attn-4 4.0.0b36; entries in two alternating rounds, but one "
    shared += "after the other for eight layers of Llama-3.1-8B, "
    assert f"Measured: {shared}4 \N{MULTIPLICATION SIGN} 4,096 tokens. 2026-11-27, 2 H100s, " in text
    assert "| GPUs | tokens/s per GPU |" in text


@pytest.mark.parametrize(
    ("other", "superseded"),
    [
        (document(ROWS, "2026-11-28"), True),
        (document(ROWS, "2026-11-26"), False),
        (document(ROWS[:2], "2026-11-28"), False),  # without all of its entries
        (document(ROWS, "2026-11-28", gpu="NVIDIA H200"), False),
        (document(ROWS, "2026-11-28", count=2), False),
        (document([*ROWS, row("te-bf16", 1.0, workload="llama-8b-8layers")], "2026-11-28"), False),
        ({"calls": []}, False),
    ],
)
def test_an_older_file_of_a_workload_is_refused(results, tmp_path, other, superseded):
    folder = results(one=document(ROWS), other=other)
    if not superseded:
        assert pages.block(["one"], folder, tmp_path)
        return
    with pytest.raises(
        InputError, match=r"one\.json has the same workload as other\.json, which is newer: name that, and delete"
    ):
        pages.block(["one"], folder, tmp_path)


def test_a_file_that_is_not_there_is_refused(results, tmp_path, capsys):
    with pytest.raises(InputError, match=r"none\.json cannot be read"):
        pages.block(["none"], results(), tmp_path)
    assert pages.main(["docs/results.md"]) == 2
    assert "takes no arguments" in capsys.readouterr().err
