"""PyTorch's defaults around runs, checkpoints, exports and optimizers (dtype, device, autocast, gradients) change no result."""

import ast
import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import octavo
from defaults import default_dtype
from octavo.kernels import gemm, reference
from octavo.kernels.adamw import adamw_
from octavo.kernels.attention import reference as attention
from octavo.nn.scores import Scores, alibi_slopes, plain_attention
from octavo.train.muon import orthogonalised
from octavo.train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent / "models"))
from llamas import llama, tokens

SOURCE = Path(octavo.__file__).parent


@contextlib.contextmanager
def conversions_replace_parameters():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


AROUND = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "replaced parameters": conversions_replace_parameters,
}


def numbers(folder):
    """Losses, norms and samples of a run, and the tensors of its newest checkpoint."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = ("step", "loss", "grad_norm", "validation_loss", "perplexity", "learning_rate", "sample")
    files = sorted(folder.glob("checkpoints/step-4/*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    return [{key: record.get(key) for key in figures} for record in records], tensors


@pytest.fixture(scope="module")
def wanted(tiny_run_in, tmp_path_factory):
    run = tiny_run_in(tmp_path_factory.mktemp("defaults") / "run", steps=4, every=2)
    return numbers(Trainer(run.file, train={"sample_tokens": 4}).train().folder)


@pytest.mark.parametrize("around", AROUND)
def test_a_trainer_has_the_same_numbers(around, wanted, tiny_run):
    run = tiny_run(steps=4, every=2)
    with AROUND[around]():
        before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        found = numbers(Trainer(run.file, train={"sample_tokens": 4}).train().folder)
        assert before == (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        assert torch.equal(found[1][name], tensor), name


def test_a_callback_that_changes_folder_and_dtype_changes_no_result(wanted, tiny_run, monkeypatch):
    class Elsewhere(octavo.Callback):
        def on_step(self, trainer, record):
            os.chdir("/")
            torch.set_default_dtype(torch.bfloat16)

    run = tiny_run(steps=4, every=2)
    monkeypatch.chdir(run.folder)
    Trainer(run.file, callbacks=[Elsewhere()], train={"sample_tokens": 4, "output": "relative"}).train()
    assert Path.cwd() == run.folder
    assert torch.get_default_dtype() == torch.float32
    found = numbers(run.folder / "relative")
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], tensor) for name, tensor in wanted[1].items())


def test_a_run_prints_to_an_output_of_ascii_and_has_any_arguments(tiny_run, monkeypatch):
    run, out = tiny_run(steps=1), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", [Path("notebook"), 3])
    monkeypatch.setattr(Console, "print", lambda self, *lines, **_: sys.stdout.write(f"… {lines}"))
    Trainer(run.file).train()
    sys.stdout.flush()
    assert rb"\u2026" in out.getvalue()
    assert '"notebook"' in (run.output / "environment.json").read_text(encoding="utf-8")


def trained(folder, around, muon=False, **options):
    """Losses, weights, and the exported tensors of a loop that saves, loads and exports."""
    torch.manual_seed(0)
    source = llama(model_type="mixtral", num_local_experts=4, intermediate_size=48, output_router_logits=True)
    ids = tokens(2, 16)
    with around:
        model = octavo.transform(source, **options)
        optimizer = octavo.muon(model, lr=1e-2) if muon else torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2)
        losses = []
        for step in range(4):
            with octavo.fp8_autocast():
                loss = model(input_ids=ids, labels=ids, num_items_in_batch=29).loss
            loss.backward()
            octavo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step in (1, 3):
                octavo.save(folder / str(step), model, optimizer)
        octavo.load(folder / "1", model, optimizer)
        octavo.export(model, folder / "plain")
    files = [*folder.glob("*/*.safetensors")]
    return losses, {f"{file.parent.name} {key}": value for file in files for key, value in load_file(file).items()}


# Not the router: its adapters' gradients are PyTorch's, which a backward inside of an autocast rounds.
LINEAR = ["*_proj"]


@pytest.mark.parametrize("around", ["bfloat16", "another device", "autocast"])
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "LoRA"])
def test_a_loop_with_checkpoints_and_exports_is_the_same(around, kind, tmp_path):
    options = {"AdamW": {}, "Muon": {"muon": True}, "LoRA": {"lora": octavo.LoRA(rank=4, targets=LINEAR)}}[kind]
    wanted = trained(tmp_path / "wanted", contextlib.nullcontext(), **options)
    found = trained(tmp_path / "found", AROUND[around](), **options)
    assert torch.equal(torch.stack(found[0]), torch.stack(wanted[0]))
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        assert found[1][name].dtype == tensor.dtype, name
        assert torch.equal(found[1][name], tensor), name


def test_a_loaded_model_becomes_hugging_faces_on_the_cpu():
    model = octavo.transform(llama())
    with torch.device("meta"):
        plain = octavo.to_huggingface(model)
    assert {p.device.type for p in plain.parameters()} == {"cpu"}


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


def softmax_gradients():
    q, k, v, d_out = (draw(1, 6, 2, 8) for _ in range(4))
    out, lse = attention.forward(q, k, v, causal=True, scale=0.3)
    return out, *attention.backward(d_out, q, k, v, out, lse, causal=True, scale=0.3)


def short_gradients():
    qkv, d_out = draw(1, 6, 48), draw(1, 6, 16)
    out, lse = reference.attention(qkv, 2, 2, 0.3)
    return out, reference.attention_backward(d_out, qkv, out, lse, 2, 2, 0.3)


NO_MASK, DISTANCE = (lambda rows: None), (lambda rows: torch.zeros(6, 6))
FLOAT32 = {
    "Muon": lambda: orthogonalised(draw(2, 8, 6), torch.float32),
    "attention": softmax_gradients,
    "short attention": short_gradients,
    "product": lambda: gemm.high_precision_mm(draw(4, 8), draw(8, 4), torch.float32),
    "sum of products": lambda: gemm.add_mm_(draw(4, 4), draw(4, 8), draw(8, 4)),
    "scores": lambda: plain_attention(*(draw(1, 6, 2, 8) for _ in range(3)), NO_MASK, DISTANCE, Scores(cap=5.0), scale=0.3),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_float32_is_not_rounded_under_autocast(name):
    wanted = FLOAT32[name]()
    with torch.autocast("cpu", torch.bfloat16):
        found = FLOAT32[name]()
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, wanted)), strict=True):
        assert torch.equal(one, other)


def test_constants_are_float32_whatever_the_default():
    def step_257():
        tensors = [draw(8), draw(8), draw(8), draw(8).abs()]
        adamw_(*tensors, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=257)
        return tensors[0]

    wanted = step_257(), alibi_slopes(12, torch.device("cpu"))
    with default_dtype(torch.bfloat16):
        found = step_257(), alibi_slopes(12, torch.device("cpu"))
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


CONSTRUCTORS = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "linspace",
    "eye",
    "empty_strided",
}
OF_RUNS = ("bench", "doctor.py", "plan", "run", "train", "verify")
"""Called inside of `Trainer.train`, or by commands, where nothing is set around them."""


def test_every_tensor_of_a_library_call_names_its_device():
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in OF_RUNS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in CONSTRUCTORS}:
                keywords = {keyword.arg for keyword in node.keywords}
                floats = node.func.attr in ("zeros", "ones", "rand", "randn", "linspace", "eye") and "dtype" not in keywords
                if not keywords & {"device", None} or (floats and None not in keywords):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:60]}")
    assert not found, "give device=, and dtype= of floats: scripts set PyTorch's defaults"
