"""The generated parts of the README, from results written by hand."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.readme import comparisons, main, named, rewrite
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


def write(folder, *names):
    """The page, rewritten from the named files."""
    page = folder / "README.md"
    assert main([str(page), *(str(folder / "benchmarks" / f"{name}.json") for name in names)]) == 0
    return page.read_text()


def figures(text):
    return re.findall(r"\d[\d,.]*(?<![,.])", text)


def cells(page, name):
    """The row of a file, from its second cell on."""
    (line,) = [line for line in page.splitlines() if line.startswith("|") and f"([JSON](benchmarks/{name}.json))" in line]
    return line.removesuffix(" |").split(" | ")[1:]


def part(page, name):
    return page.split(f"<!-- The {name}: ")[1].split(" -->\n")[1].split("<!-- End")[0]


def footnote(page):
    return " ".join(part(page, "table").split("\n\n")[1].split())


def test_a_column_has_what_differs_between_peers_and_is_left_out_where_nothing_does(folder):
    other = [each | {"workload": "llama-8b-8layers"} for each in ROWS]
    (folder / "benchmarks" / "other.json").write_text(json.dumps(document("one-gpu", other)))
    assert len(cells(write(folder, "one", "vit"), "one")) == 5
    page = write(folder, "one", "other")
    assert len(cells(page, "one")) == len(cells(page, "other")) == 4
    shared = "in all rows: Transformer Engine 2.20.2, FP8 with delayed scaling, FP8 head, flash-attn-4's attention"
    assert shared in footnote(page)


def test_ratios_are_to_the_best_peer_at_its_best_setting(folder):
    page = write(folder, "one", "vit", "two")
    bullet = " ".join(part(page, "figure").split())
    assert bullet.startswith("* **Fast**")
    assert "Llama-3.2-1B's shape at 96,000 tokens/s, 1.20 times" in bullet
    assert "Transformer Engine 2.20.2" in bullet
    assert figures(bullet.split(" at ")[1]) == ["96,000", "1.20", "2.20.2", "24.0", "20.0"]
    assert cells(page, "one")[:4] == ["**96,000**", "80,000", "1.200", "24.0 and 20.0"]
    assert cells(page, "vit")[:4] == ["**880**", "800", "1.101", "0.0 and 0.0"]
    # The fastest exchange of Octavo's beside the fastest of the peer's; a workload without a peer is left out.
    assert cells(page, "two")[:4] == ["**12,000**", "10,000", "1.200", "3.0 and 2.5"]
    times = "\N{MULTIPLICATION SIGN}"
    assert f"| 2 GPUs: Llama-3.1-8B, 2 {times} 16,384 tokens of 2 GPUs together ([JSON]" in page
    assert page.count("[JSON]") == 3
    assert "Octavo, tokens or images/s per GPU |" in page
    assert "Text.\n" in page
    assert "old" not in page


def test_parts_of_a_peers_setting_that_all_rows_share_are_in_the_footnote(folder):
    page = write(folder, "one", "vit", "two")
    shared = "Transformer Engine 2.20.2, FP8 with delayed scaling"
    assert shared in footnote(page)
    assert cells(page, "one")[4] == "FP8 head, flash-attn-4's attention"
    assert cells(page, "vit")[4] == "bf16 head"
    assert cells(page, "two")[4] == "bf16 head, flash-attn-4's attention, a2a"
    page = write(folder, "one")
    assert cells(page, "one")[4] == f"{shared}, FP8 head, flash-attn-4's attention"


def test_the_footnote_has_the_conditions(folder):
    said = footnote(write(folder, "one", "vit", "two"))
    for fact in ("2026-11-27", "H100s", "torch 2.11.0", "flash-attn-4 4.0.0b36", "1.24 times", "1 of 3 rows"):
        assert fact in said
    assert re.search(r"`te-delayed-flash-attention` .* timm's ViT-Huge: .*wrong", said)
    assert "Not measured" not in said
    assert "\N{DAGGER}" not in said  # in each row Octavo's turns alternated
    vit = [each | {"interleaved": False} for each in VIT]
    (folder / "benchmarks" / "vit.json").write_text(json.dumps(document("vision", vit)))
    page = write(folder, "one", "vit")
    assert "\N{DAGGER}" in footnote(page)
    assert [line.count("\N{DAGGER}") for line in page.splitlines() if "[JSON]" in line] == [0, 1]
    assert "\N{DAGGER}" not in footnote(write(folder, "vit"))


def test_the_markers_store_the_command(folder):
    page = write(folder, "one", "vit", "two")
    command = "python -m benchmarks.readme README.md benchmarks/one.json benchmarks/vit.json benchmarks/two.json"
    assert page.count(f": {command} -->\n") == 2
    assert named(page) == (Path("README.md"), [Path("benchmarks") / f"{name}.json" for name in ("one", "vit", "two")])
    assert rewrite(page, *named(page), folder) == page
    assert main([str(folder / "README.md")]) == 0  # the files of its markers
    assert (folder / "README.md").read_text() == page


@pytest.mark.parametrize(("part", "what"), [("flash-attention", "flash-attn-4"), ("fp8-head", "an FP8 head")])
def test_settings_of_octavo_that_no_peer_was_measured_with_are_named(folder, part, what):
    without = [each for each in ROWS if not (each["entry"].startswith("te-") and part in each["entry"])]
    (folder / "benchmarks" / "one.json").write_text(json.dumps(document("one-gpu", without)))
    assert f"Not measured: Transformer Engine with {what}." in footnote(write(folder, "one"))
    both = footnote(write(folder, "one", "vit"))
    assert f"Not measured: Transformer Engine with {what} for Llama-3.2-1B's shape." in both


def test_the_best_peer_of_fewer_entries(folder):
    without = [each for each in ROWS if "flash-attention" not in each["entry"]]
    (folder / "benchmarks" / "one.json").write_text(json.dumps(document("one-gpu", without)))
    assert cells(write(folder, "one"), "one")[1:3] == ["76,000", "1.263"]


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
        comparisons([folder / "benchmarks" / "vit.json", folder / "benchmarks" / "one.json"])
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
