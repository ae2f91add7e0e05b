"""The layers' errors against float64 on a CPU: Octavo's are those of its formats, and a peer's layers are measured alike."""

import contextlib
import io
import json
import time
import types

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

from octavo.bench import layers as suite
from octavo.bench.layers import (
    LAYERS,
    OCTAVO,
    ON_CPU,
    RECIPES,
    Library,
    draw,
    error,
    exact_tensors,
    measure_layers,
    size_of,
)
from octavo.bench.results import write
from octavo.bench.run import STEPS, check_figures, render, run_suite
from octavo.errors import InputError, OctavoError

CPU = torch.device("cpu")


def measured(names, libraries=(OCTAVO,), **how):
    how = {"seeds": 1, "settling": suite.SETTLING, "say": lambda line: None, **how}
    return measure_layers([LAYERS[name] for name in names], CPU, libraries, **how)


@pytest.mark.parametrize("name", LAYERS)
def test_octavos_errors_are_those_of_the_format(name):
    rows = measured([name])
    parameters = [name for name, _ in OCTAVO.make(LAYERS[name], ON_CPU, CPU).named_parameters()]
    tensors = ["output", "input.grad", *(f"{name}.grad" for name in parameters)]
    assert [(row["recipe"], row["tensor"]) for row in rows] == [(recipe, tensor) for recipe in RECIPES for tensor in tensors]
    assert all(row["te_error"] is None and row["layer"] == name for row in rows)
    of = {(row["recipe"], row["tensor"]): row["octavo_error"] for row in rows}
    for tensor in tensors:
        # Half a unit of bf16's last place is 0.2% and E4M3's 3%, E5M2's 6%; a layer rounds several times.
        assert 0 < of["bf16", tensor] < 0.01, tensor
        assert of["delayed", tensor] < 0.16, tensor
        # Once delayed scaling has the scales of its tensors it casts as current scaling does, but for gradients whose maxima
        # move with what was cast before them.
        assert of["delayed", tensor] == pytest.approx(of["current", tensor], rel=0.3), tensor
    assert of["current", "output"] > 5 * of["bf16", "output"]


class PlainMLP(nn.Module):
    """With Transformer Engine's order of rows: all gates above all ups."""

    def __init__(self, hidden, ffn, *, bias, normalization, activation, params_dtype, device):
        super().__init__()
        make = {"dtype": params_dtype, "device": device}
        assert normalization == "RMSNorm"
        assert activation == "swiglu"
        assert not bias
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden, **make))
        self.fc1_weight = nn.Parameter(torch.empty(2 * ffn, hidden, **make))
        self.fc2_weight = nn.Parameter(torch.empty(hidden, ffn, **make))

    def forward(self, x):
        normed = functional.rms_norm(x.float(), x.shape[-1:], self.layer_norm_weight.float(), 1e-5).bfloat16()
        gate, up = functional.linear(normed, self.fc1_weight).float().chunk(2, -1)
        return functional.linear((functional.silu(gate) * up).bfloat16(), self.fc2_weight)


class PlainLinear(nn.Linear):
    def __init__(self, *sizes, bias, params_dtype, device):
        super().__init__(*sizes, bias, device, params_dtype)


def peer(**classes):
    return Library("te", types.SimpleNamespace(**classes), lambda recipe: contextlib.nullcontext)


def test_a_peer_has_the_same_weights_and_inputs():
    theirs = peer(Linear=PlainLinear, LayerNormMLP=PlainMLP)
    rows = measured(["linear", "mlp-swiglu"], (OCTAVO, theirs), settling=1)
    for row in rows:
        assert 0 < row["te_error"] < 0.01, row
        if row["recipe"] == "bf16":
            assert row["octavo_error"] == pytest.approx(row["te_error"], rel=0.3), row


def test_weights_are_those_that_were_drawn():
    layer = LAYERS["mlp-swiglu"]
    drawn, x, grad = draw(layer, ON_CPU, CPU, 3)
    assert all(value.dtype == torch.bfloat16 for value in (*drawn.values(), x, grad))
    again = draw(layer, ON_CPU, CPU, 3)
    assert torch.equal(x, again[1])
    assert not torch.equal(x, draw(layer, ON_CPU, CPU, 4)[1])
    module = OCTAVO.make(layer, ON_CPU, CPU)
    OCTAVO.fill(module, layer, drawn)
    assert not torch.equal(module.fc1_weight, drawn["fc1_weight"])  # in blocks
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    for name, value in OCTAVO.gradients(module, layer).items():
        assert torch.equal(value, drawn[name.removesuffix(".grad")])
    exact = exact_tensors(layer, ON_CPU, drawn, x, grad)
    assert all(value.dtype == torch.float64 for value in exact.values())


def test_an_error_is_relative_to_the_norm():
    assert error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]).double()) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="relative error of nan"):
        error(torch.tensor([torch.nan]), torch.ones(1).double())
    with pytest.raises(ValueError, match="shape"):
        error(torch.ones(2), torch.ones(1).double())


def test_the_median_of_the_seeds_counts():
    rows = measured(["linear"], seeds=3, settling=0)
    alone = [measure_seed(seed) for seed in range(3)]
    found = next(row for row in rows if (row["recipe"], row["tensor"]) == ("bf16", "output"))
    assert found["octavo_error"] == sorted(alone)[1]
    assert found["seeds"] == 3


def measure_seed(seed):
    layer = LAYERS["linear"]
    drawn = draw(layer, ON_CPU, CPU, seed)
    found = suite.found_tensors(OCTAVO, layer, ON_CPU, "bf16", *drawn, 0)
    return error(found["output"], exact_tensors(layer, ON_CPU, *drawn)["output"])


def test_a_peer_that_fails_has_no_figures_and_says_why(tmp_path):
    def broken(*sizes, **how):
        raise RuntimeError("no such kernel\nand a trace")

    said = []
    rows = measured(["linear"], (OCTAVO, peer(Linear=broken)), settling=0, say=said.append)
    assert all(row["te_error"] is None and row["te_failed"] == "RuntimeError: no such kernel" for row in rows)
    assert all(row["octavo_error"] > 0 for row in rows)
    assert said == ["linear", *(f"linear, {recipe}: te failed: RuntimeError: no such kernel" for recipe in RECIPES)]
    text = io.StringIO()
    results = {"suite": "layers", "machine": {"gpu": "a GPU", "cpu": None, "count": 1, "torch": "2.11"}, "rows": rows}
    render(results, Console(file=text))
    assert "delayed: RuntimeError: no such kernel" in text.getvalue()
    assert "largest ratio" not in text.getvalue()
    write({tmp_path / "layers.json": results})


def test_a_layer_without_exact_tensors_costs_the_others_no_figures(monkeypatch):
    def exact(layer, *drawn):
        if layer.name == "linear":
            raise torch.OutOfMemoryError("CUDA out of memory.\nand a trace")
        return exact_tensors(layer, *drawn)

    monkeypatch.setattr(suite, "exact_tensors", exact)
    said = []
    rows = measured(["linear", "layernorm-linear"], settling=0, say=said.append)
    failed, others = rows[: len(RECIPES)], rows[len(RECIPES) :]
    assert [row["recipe"] for row in failed] == list(RECIPES)
    for row in failed:
        assert row["layer"] == "linear"
        assert row["octavo_error"] is row["te_error"] is None
        assert row["exact_failed"] == "OutOfMemoryError: CUDA out of memory"
    assert all(row["layer"] == "layernorm-linear" and row["octavo_error"] > 0 for row in others)
    assert said == ["linear", "linear failed: OutOfMemoryError: CUDA out of memory", "layernorm-linear"]
    results = {"suite": "layers", "machine": {"gpu": "a GPU", "cpu": None, "count": 1, "torch": "2.11"}, "rows": rows}
    render(results, Console(file=(text := io.StringIO())))
    assert "delayed: OutOfMemoryError: CUDA out of memory" in text.getvalue()
    with pytest.raises(OctavoError, match="no entry gave a figure of linear"):
        check_figures(results)


def test_the_largest_ratio_is_told():
    row = {"layer": "linear", "recipe": "bf16", "te_error": 0.002}
    rows = [row | {"tensor": "output", "octavo_error": 0.002}, row | {"tensor": "input.grad", "octavo_error": 0.003}]
    text = io.StringIO()
    machine = {"gpu": "a GPU", "cpu": None, "count": 1, "torch": "2.11"}
    render({"suite": "layers", "machine": machine, "rows": rows}, Console(file=text))
    assert "largest ratio to Transformer Engine's error: 1.500 (linear, bf16, input.grad)" in text.getvalue()


def seconds_of(*calls):
    """Times in microseconds by the host's clock, as a GPU's events would give them."""
    found = []
    for call in calls:
        begin = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - begin))
    return found


def test_forward_and_backward_of_each_recipe_are_timed():
    rows = measured(["linear", "mlp-swiglu"], settling=0, timer=seconds_of, timed=size_of(40, 256))
    assert all(row["octavo_us"] > 0 for row in rows)
    assert len({(row["layer"], row["octavo_us"]) for row in rows}) == 2 * len(RECIPES)
    text = io.StringIO()
    results = {"suite": "layers", "machine": {"gpu": "a GPU", "cpu": None, "count": 1, "torch": "2.11"}, "rows": rows}
    for row in rows:
        row["octavo_us"] = {"bf16": 300.0, "delayed": 200.0, "current": 240.0}[row["recipe"]]
    render(results, Console(file=text, width=120))
    assert "1 x 40 tokens of 256 features" in text.getvalue()
    cells = [line.split() for line in text.getvalue().splitlines()]
    assert ["mlp-swiglu", "300", "200", "1.50", "240", "1.25"] in cells

    def broken(*calls):
        raise RuntimeError("no events")

    rows = measured(["linear"], settling=0, timer=broken, timed=size_of(32, 256))
    assert {row["time_failed"] for row in rows} == {"RuntimeError: no events"}
    assert all(row["octavo_error"] > 0 and "octavo_us" not in row for row in rows)
    assert not any("octavo_us" in row for row in measured(["linear"], settling=0))


def test_a_run_of_layers_is_written(tmp_path):
    said = []
    results = run_suite(
        "layers", cases=["linear", "llama-layer"], steps=1, warmup=2, output=tmp_path, device="cpu", say=said.append,
        command="octavo bench layers",
    )  # fmt: skip
    assert json.loads((tmp_path / "layers.json").read_text()) == results
    assert list(dict.fromkeys(row["layer"] for row in results["rows"])) == ["linear", "llama-layer"]
    assert results["machine"]["peers"] == {}
    assert said[0] == "linear"
    with pytest.raises(InputError, match="Did you mean 'mlp-gelu'"):
        run_suite("layers", cases=["mlp-gellu"], device="cpu", command="octavo bench layers")
    assert STEPS["layers"] == (3, suite.SETTLING)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"tokens": 64},
            "--tokens and --hidden are of the timed layers on a GPU: nothing is timed on the device cpu. Remove them.",
        ),
        ({"hidden": 512}, "nothing is timed on the device cpu"),
    ],
)
def test_a_size_without_a_timer_is_refused(tmp_path, how, message):
    with pytest.raises(InputError) as caught:
        run_suite("layers", output=tmp_path / "none", device="cpu", command="octavo bench layers", **how)
    assert message in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_sizes_are_those_of_whole_groups_of_heads():
    assert size_of(None, None) == suite.ON_GPU
    assert size_of(4096, 4096) == (1, 4096, 4096, 16384, 64, 16)
    with pytest.raises(
        InputError, match=r"--hidden 5000 is not a multiple of 256 \(four heads of 64\). Nearest: --hidden 5120."
    ):
        size_of(None, 5000)
