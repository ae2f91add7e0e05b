"""Prices, costs, the plot and the table of the vision suite: figures worked out by hand, and files that are refused."""

import json

import pytest
from matplotlib.image import imread

from benchmarks.__main__ import main
from benchmarks.records import render
from benchmarks.run import run_suite
from benchmarks.vision import page
from benchmarks.vision.costs import PUBLISHED, figures_of, gained_speed, measured, published, unpriced, with_published
from benchmarks.vision.plot import costs_figure, draw_costs
from benchmarks.vision.prices import PUBLISHED_PRICES, as_records, price_of, prices_with
from octavo.errors import InputError

H200 = """\
["NVIDIA H200"]
dollars_per_hour = 36
gpus = 4
"""


def document(prices, gpu="NVIDIA H200"):
    """Results of two entries on two GPUs, a failed one, and one of another workload."""
    common = {"head": "bf16", "batch": 128, "gpus": 2, "step_ms": 200.0, "loss": 6.9}
    rows = [
        {"workload": "vit-huge-patch16", "entry": "octavo-delayed", "images_per_second": 1000.0, **common},
        {"workload": "vit-huge-patch16", "entry": "te-delayed", "images_per_second": 800.0, **common},
        {"workload": "vit-huge-patch16", "entry": "torch-bf16", "head": "bf16", "error": "rank 1: out of memory"},
        {"workload": "vit-huge", "entry": "octavo-delayed", "images_per_second": 700.0, **common},
    ]
    machine = {"gpu": gpu, "cpu": None if gpu else "AMD EPYC", "count": 2, "torch": "2.11"}
    return {"suite": "vision", "machine": machine, "prices": as_records(prices), "rows": rows}


def test_the_published_rows():
    """8 x 64 images in 0.41 s at $32.77 an hour are $7.29 a million; in 0.199 s at $98.32 they are $10.62."""
    a100, h100, a100_block, h100_block, fp8 = PUBLISHED
    assert a100.images_per_second == pytest.approx(64 / 0.41)
    assert h100.total == pytest.approx(512 / 0.199)
    assert a100.dollars == pytest.approx(32.77 / 3600 / (512 / 0.41) * 1e6)
    assert [row.dollars for row in (a100, h100)] == pytest.approx([7.2893, 10.6150], abs=1e-4)
    assert [row.relative for row in (a100, h100)] == pytest.approx([100, 68.6697], abs=1e-4)
    assert a100_block.images_per_second == pytest.approx(64 / 0.41 / 0.81)
    assert h100_block.images_per_second == pytest.approx(64 / 0.199 / 0.68)
    assert fp8.images_per_second == pytest.approx(64 / 0.199 / 0.68 / 0.8)
    assert fp8.relative / a100_block.relative == pytest.approx(1.0225, abs=1e-4)  # "2% better"
    assert fp8.total / a100_block.total == pytest.approx(3.068, abs=1e-3)  # "3 times as fast"
    _, _, other_block, _, other_fp8 = published(gained_speed)
    assert other_fp8.images_per_second == pytest.approx(64 / 0.199 * 1.32 * 1.2)
    assert other_fp8.relative / other_block.relative == pytest.approx(0.9141, abs=1e-4)


def test_costs_of_a_measurement(tmp_path):
    """$9 of a GPU and hour, 3.6 million images in it at 1,000 a second: $2.50 a million."""
    (tmp_path / "prices.toml").write_text(H200)
    results = document(prices_with(tmp_path / "prices.toml"))
    ours, theirs, other = measured(results)
    assert (ours.machine, ours.total, ours.dollars) == ("2 x H200", 2000.0, pytest.approx(2.5))
    assert theirs.dollars == pytest.approx(3.125)
    assert ours.relative == pytest.approx(100 * PUBLISHED[0].dollars / 2.5)
    assert other.relative is None  # other images: patches of 14
    assert figures_of(ours) == ("1,000", "2,000", "2.50", "291.6%")
    assert unpriced(results) is None
    assert with_published([ours]) == [*PUBLISHED, ours]
    assert with_published([other]) == [other]


def test_a_gpu_without_a_price_has_no_cost(capsys):
    from rich.console import Console

    results = document(PUBLISHED_PRICES)
    assert figures_of(measured(results)[0]) == ("1,000", "2,000", "-", "-")
    render(results, Console(width=200))
    printed = capsys.readouterr().out
    assert "no price of NVIDIA H200 is known, so there is no cost: give one with --prices FILE.toml" in printed
    assert "published   8 x A100" in printed
    assert "torch-bf16: rank 1: out of memory" in printed
    on_cpu = document(PUBLISHED_PRICES, gpu=None)
    assert unpriced(on_cpu) is None
    assert measured(on_cpu)[0].machine == "CPU, 2 ranks"


def test_prices_of_a_file_stand_before_the_built_in_ones(tmp_path):
    file = tmp_path / "prices.toml"
    file.write_text(f'{H200}["H100 SXM"]\ndollars_per_hour = 60.5\ngpus = 8\nsource = "an offer"\n')
    found = prices_with(file)
    assert [(price.gpu, price.dollars_per_hour, price.source) for price in found] == [
        ("H200", 36.0, "prices.toml"), ("H100 SXM", 60.5, "an offer"), ("A100 40GB", 32.77, "the published figures"),
    ]  # fmt: skip
    assert price_of("NVIDIA H100 80GB HBM3", found).dollars_per_hour == 60.5
    assert price_of("NVIDIA A100-SXM4-40GB", found).dollars_per_hour == 32.77
    assert price_of("NVIDIA A100-SXM4-80GB", found) is None
    assert prices_with(None) == PUBLISHED_PRICES
    file.write_text("[Unheard-of]\ndollars_per_hour = 1\ngpus = 1\n")
    assert price_of("Unheard-of", prices_with(file, "Unheard-of")).gpus == 1
    assert PUBLISHED[0].price.dollars_per_hour == 32.77


BAD = {
    "": "has no price: write a table for each GPU, such as",
    "H200 = 3": "H200 = 3 is no table: write a table for each GPU",
    "[H20]\ngpus = 8\ndollars_per_hour = 9": "unknown GPU 'H20'. Did you mean 'H200'? Known: ",
    "[H200]\ngpu = 8": "unknown key of H200 'gpu'. Did you mean 'gpus'?",
    "[H200]\ngpus = 8": "H200 has no dollars_per_hour: write",
    "[H200]\nsource = 'x'": "H200 has no dollars_per_hour and no gpus: write",
    "[H200]\ngpus = 8\ndollars_per_hour = '9'": "H200.dollars_per_hour = '9' is not a number of dollars above 0",
    "[H200]\ngpus = 8\ndollars_per_hour = -1": "H200.dollars_per_hour = -1 is not a number",
    "[H200]\ngpus = 8\ndollars_per_hour = inf": "H200.dollars_per_hour = inf is not a number",
    "[H200]\ngpus = 8\ndollars_per_hour = true": "H200.dollars_per_hour = True is not a number",
    "[H200]\ngpus = 0\ndollars_per_hour = 9": "H200.gpus = 0 is not a whole number of GPUs, at least 1",
    "[H200]\ngpus = 8.0\ndollars_per_hour = 9": "H200.gpus = 8.0 is not a whole number",
    "[H200]\ngpus = 8\ndollars_per_hour = 9\nsource = 3": "H200.source = 3 is not a text",
    "[H200]\ngpus = 8\ndollars_per_hour = 9\n['NVIDIA H200']\ngpus = 8\ndollars_per_hour = 9": "has two prices of H200",
    "[H200": "is not valid TOML",
}


@pytest.mark.parametrize("text", BAD, ids=BAD.values())
def test_files_of_prices_that_are_refused(text, tmp_path, capsys):
    file = tmp_path / "prices.toml"
    file.write_text(text)
    assert main(["vision", "--device", "cpu", "--prices", str(file), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("octavo: ")
    assert said.count("\n") == 1
    assert BAD[text] in said
    assert not (tmp_path / "out").exists()


def test_other_options_that_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"price file '.*no.toml' does not exist.*Give the path of a TOML file\.$"):
        run_suite("vision", device="cpu", prices=tmp_path / "no.toml", output=tmp_path, command="python -m benchmarks")
    with pytest.raises(InputError, match=r"only the suite vision has costs\. Leave it out of the suite one-gpu"):
        run_suite("one-gpu", device="cpu", prices=tmp_path / "no.toml", output=tmp_path, command="python -m benchmarks")
    with pytest.raises(InputError, match="unknown entry 'octavo-current'"):
        run_suite("vision", device="cpu", entries=["octavo-current"], output=tmp_path, command="python -m benchmarks")


def test_the_plot_has_a_bar_for_each_row(tmp_path):
    results = document(PUBLISHED_PRICES)
    figure = costs_figure(with_published(measured(results)))
    speeds, costs = figure.axes
    assert [bar.get_width() for bar in speeds.patches][-3:] == [1000.0, 800.0, 700.0]
    assert [bar.get_width() for bar in costs.patches] == pytest.approx([*(row.dollars for row in PUBLISHED), 0, 0, 0])
    assert [text.get_text() for text in costs.texts][-4:] == ["5.77", "-", "-", "-"]
    assert speeds.get_yticklabels()[-1].get_text() == "2 x H200: vit-huge, octavo-delayed, batch 128"
    file = tmp_path / "vision-vit.json"
    file.write_text(json.dumps(results))
    assert draw_costs(file) == tmp_path / "vision-vit.png"
    assert imread(tmp_path / "vision-vit.png").shape[1] == 1320
    file.write_text(json.dumps({**results, "rows": results["rows"][2:3]}))
    assert draw_costs(file) is None  # every entry failed


def test_a_plot_that_cannot_be_drawn_is_a_warning(tmp_path, capsys):
    file = tmp_path / "vision.json"
    file.write_text(json.dumps(document(PUBLISHED_PRICES)))
    (tmp_path / "vision.png").mkdir()
    assert draw_costs(file) is None
    assert "vision.png was not drawn: IsADirectoryError" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vision.json", "vision.png"]


def test_the_page_has_a_row_for_each_result(tmp_path):
    (tmp_path / "prices.toml").write_text(H200)
    (tmp_path / "vision-b.json").write_text(json.dumps(document(prices_with(tmp_path / "prices.toml"))))
    before = f"# Page\n\n{page.BEGIN}\nold\n{page.END}\n\nafter\n"
    (tmp_path / "page.md").write_text(before)
    assert page.main([str(tmp_path / "page.md"), str(tmp_path)]) == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# Page\n")
    assert text.endswith(f"{page.END}\n\nafter\n")
    assert "old" not in text
    link = f"[measured](../{tmp_path.parent.name}/{tmp_path.name}/vision-b.json)"
    assert text.count("| published |") == 5
    assert text.count(link) == 3
    cells = (
        f"| {link} | 2 \N{MULTIPLICATION SIGN} H200 | `vit-huge` | `octavo-delayed` | 128 | 700 | 1,400 | 3.57 | \N{EN DASH} |"
    )
    assert cells in text
    assert "its figures give 31.3% worse" in text.replace("\n", " ")
    assert page.rewrite(text, tmp_path) == text
    assert "Plots" not in text
    (tmp_path / "vision-b.png").touch()
    assert f"\n\nPlots: [vision-b](../{tmp_path.parent.name}/{tmp_path.name}/vision-b.png).\n\n" in page.rewrite(text, tmp_path)


def test_a_page_of_results_that_are_none_is_refused(tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text(f"{page.BEGIN}\n{page.END}\n")
    before = file.read_text()
    results = document(PUBLISHED_PRICES)
    for text, words in (
        ("text", "it is not JSON. Give the JSON files of python -m benchmarks vision"),
        (json.dumps({key: results[key] for key in ("suite", "machine", "rows")}), "it has no prices"),
        (json.dumps({**results, "suite": "one-gpu"}), "vision-b.json is of the suite one-gpu"),
    ):
        (tmp_path / "vision-b.json").write_text(text)
        assert page.main([str(file), str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
    assert file.read_text() == before


@pytest.mark.parametrize("text", ["", page.BEGIN, f"{page.END}{page.BEGIN}", f"{page.BEGIN}{page.BEGIN}{page.END}"])
def test_a_page_without_its_markers_is_refused(text, tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text(text)
    assert page.main([str(file), str(tmp_path)]) == 2
    assert "each once and in this order" in capsys.readouterr().err
    assert file.read_text() == text
    assert page.main([str(tmp_path / "other.md"), str(tmp_path)]) == page.main([]) == 2
