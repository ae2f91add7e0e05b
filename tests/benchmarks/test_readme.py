"""The figure and the table of the README, from results written by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.readme import lines_of, main, named, rewrite
from octavo.errors import InputError

PAGE = """# Page

<!-- The figure: nothing -->
<!-- End of the figure -->

Text.

<!-- The table: nothing -->
old
<!-- End of the table -->

End.
"""


def row(entry, speed, *, workload="llama-1b", head="bf16", attention=None, gpus=1, **more):
    figures = {
        "tokens_per_second": speed,
        "step_ms": 160.0,
        "peak_gib": speed / 4e3,
        "batch": 4,
        "sequence_length": 4096,
        "interleaved": True,
    }
    return {"workload": workload, "entry": entry, "head": head, "attention": attention, "gpus": gpus, **figures, **more}


CUDNN, FLASH = (
    "Transformer Engine, cuDNN (sub-backend 1)",
    "Transformer Engine, flash-attn 4.0.0b36, window bounds of -1 mended",
)
ROWS = [
    row("octavo-bf16", 70_000.0),
    row("octavo-default", 96_000.0, head="fp8", attention="FlashAttention-4 4.0.0b36"),
    row("octavo-delayed-fast-fp8-head", 99_000.0, head="fp8"),
    row("te-delayed", 76_000.0, attention=CUDNN),
    row("te-delayed-flash-attention", 78_000.0, attention=FLASH),
    row("te-delayed-flash-attention-fp8-head", 80_000.0, head="fp8", attention=FLASH),
    row("ao-tensorwise", 74_000.0),
    {"workload": "llama-1b", "entry": "te-current", "head": "bf16", "error": "no memory"},
]
VIT = [
    row("octavo-delayed", 1.0, workload="vit-huge") | {"tokens_per_second": None, "images_per_second": 880.5, "batch": 128},
    row("te-delayed", 1.0, workload="vit-huge", interleaved=False)
    | {"tokens_per_second": None, "images_per_second": 800.0, "batch": 128},
    {"workload": "vit-huge", "entry": "te-delayed-flash-attention", "error": "InputError: its attention is wrong (…)"},
]
SHARED = [
    row("octavo-delayed", 11_000.0, workload="llama-8b-16k-cp2", gpus=2, batch=2, sequence_length=16_384),
    row("octavo-delayed-a2a", 12_000.0, workload="llama-8b-16k-cp2", gpus=2, batch=2, sequence_length=16_384),
    row("te-delayed-flash-attention-a2a", 10_000.0, workload="llama-8b-16k-cp2", gpus=2, attention=FLASH, interleaved=False),
    row("octavo-bf16", 9_000.0, workload="llama-8b-16k", gpus=2),
]


def document(suite, rows, day="2026-11-27", gpu="NVIDIA H100 80GB HBM3"):
    machine = {"gpu": gpu, "torch": "2.11.0", "flash-attn-4": "4.0.0b36"}
    machine["peers"] = {"transformer-engine": "2.20.2", "torchao": "0.18.0"}
    given = [{key: value for key, value in each.items() if value is not None} for each in rows]
    return {"suite": suite, "date": f"{day}T13:40:00+00:00", "machine": machine, "rows": given}


@pytest.fixture
def folder(tmp_path):
    """A page, and three files of one day."""
    (tmp_path / "README.md").write_text(PAGE)
    (tmp_path / "benchmarks").mkdir()
    for name, suite, rows in (("one", "one-gpu", ROWS), ("vit", "vision", VIT), ("two", "context", SHARED)):
        (tmp_path / "benchmarks" / f"{name}.json").write_text(json.dumps(document(suite, rows)))
    return tmp_path


def test_ratios_are_to_the_best_peer_at_its_best_setting(folder):
    files = [str(folder / "benchmarks" / f"{name}.json") for name in ("one", "vit", "two")]
    assert main([str(folder / "README.md"), *files]) == 0
    page = (folder / "README.md").read_text()
    text = " ".join(page.split())
    command = "python -m benchmarks.readme README.md benchmarks/one.json benchmarks/vit.json benchmarks/two.json"
    assert page.count(f": {command} -->\n") == 2
    times, setting = "\N{MULTIPLICATION SIGN}", "Transformer Engine 2.20.2, FP8 delayed, FP8 head, attention of flash-attn-4"
    assert f"On one H100 it trains Llama-3.2-1B's shape, 4 {times} 4,096 tokens, at **96,000 tokens/s**: 1.20 times" in text
    assert f"the fastest peer at its fastest setting ({setting}), in 24.0 GiB against 20.0." in text
    assert f"([JSON](benchmarks/one.json)) | **96,000** | 80,000 | 1.200 | 24.0 and 20.0 | {setting} |" in page
    assert "128 images ([JSON](benchmarks/vit.json)) | **880** | 800 | 1.101 | 0.0 and 0.0 | " in page
    assert "with all three products of the head in FP8 and fast accumulation it is 1.24 times as fast" in text
    # The fastest exchange of Octavo's beside the fastest of the peer's; a workload without a peer is left out.
    shared = (
        "| 2 GPUs: Llama-3.1-8B, 2 \N{MULTIPLICATION SIGN} 16,384 tokens of 2 GPUs together ([JSON](benchmarks/two.json)) | "
    )
    assert f"{shared}**12,000** | 10,000 | 1.200 | 3.0 and 2.5 | Transformer Engine" in page
    assert "attention of flash-attn-4, a2a |" in page
    assert page.count("[JSON]") == 3
    assert "Measured on 2026-11-27 on H100s with torch 2.11.0 and, for Octavo, flash-attn-4 4.0.0b36." in text
    assert "`te-delayed-flash-attention` has no figure for timm's ViT-Huge, 128 images, since its attention was wrong." in text
    assert "Not measured" not in text
    assert "Text.\n" in page
    assert "old" not in page
    assert named(page) == (Path("README.md"), [Path("benchmarks") / f"{name}.json" for name in ("one", "vit", "two")])
    assert rewrite(page, *named(page), folder) == page
    assert main([str(folder / "README.md")]) == 0  # the files of its markers
    assert (folder / "README.md").read_text() == page


def test_a_peer_that_lacks_the_attention_that_octavo_has_is_said(folder):
    without = [each for each in ROWS if "flash-attention" not in each["entry"]]
    (folder / "benchmarks" / "one.json").write_text(json.dumps(document("one-gpu", without)))
    assert main([str(folder / "README.md"), str(folder / "benchmarks" / "one.json")]) == 0
    page = " ".join((folder / "README.md").read_text().split())
    assert "Not measured in these runs: Transformer Engine with flash-attn-4." in page
    assert "| 1.263 |" in page  # over te-delayed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            document("one-gpu", ROWS, day="2026-11-26"),
            "is of another day than .*vit.json: 2026-11-26 and 2026-11-27. One table",
        ),
        (document("one-gpu", ROWS, gpu="NVIDIA H200"), "is of another GPU than .*: NVIDIA H200 and NVIDIA H100 80GB HBM3"),
        (document("vision", VIT), "have both vit-huge on 1 GPUs: a table has one run of each"),
        (document("one-gpu", ROWS[:3]), "has no workload with Octavo's defaults and a peer"),
        (document("one-gpu", ROWS[3:]), "has no workload with Octavo's defaults and a peer"),
        (
            document("kernels", ROWS),
            "is of the suite kernels. Give JSON files of python -m benchmarks one-gpu, sharded, context, vision",
        ),
        ({"rows": []}, "is not a file of python -m benchmarks: it lacks one of suite, date, machine, rows"),
        (
            document("one-gpu", [{"workload": "llama-1b", "entry": "te-bf16"}]),
            "row 1 has no workload, entry, and speed or error",
        ),
    ],
)
def test_what_is_no_one_table_is_refused(folder, capsys, change, message):
    (folder / "benchmarks" / "one.json").write_text(json.dumps(change))
    with pytest.raises(InputError, match=message):
        lines_of([folder / "benchmarks" / "vit.json", folder / "benchmarks" / "one.json"])
    arguments = [str(folder / "README.md"), *(str(folder / "benchmarks" / f"{name}.json") for name in ("vit", "one"))]
    assert main(arguments) == 2
    assert (folder / "README.md").read_text() == PAGE
    assert capsys.readouterr().err.startswith("octavo: ")


@pytest.mark.parametrize("page", ["", PAGE + PAGE, PAGE.replace("<!-- End of the table -->", "")])
def test_a_page_without_its_markers_is_refused(folder, page):
    (folder / "README.md").write_text(page)
    assert main([str(folder / "README.md"), str(folder / "benchmarks" / "one.json")]) == 2
    assert (folder / "README.md").read_text() == page


def test_no_results_are_refused(folder, capsys):
    assert main([str(folder / "README.md")]) == 2
    assert "the page's markers name none. Give JSON files of python -m benchmarks" in capsys.readouterr().err
    assert main([]) == 2
    assert main([str(folder / "absent.md")]) != 0
