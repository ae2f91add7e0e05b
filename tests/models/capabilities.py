"""The table of docs/models.md that says what works for which model, each cell by a training step of a tiny model.

`make models-table` (python tests/models) rewrites it between two comments. A cell is "yes" if loss and every gradient are those
of its reference (`references`), and "refused" with a footnote where Octavo raises an InputError. Anything else is an error of
this program. Delayed scaling has no amax in its first step, so that two passes over the same batch are made and the second is
compared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from llamas import llama, tokens
from torch import Tensor, nn
from torch.nn import functional
from vits import images, vit

import octavo
import ranks
from octavo.errors import InputError
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import load_state_records, state_records
from octavo.models.convert import conversion_of
from octavo.models.decoder import Decoder
from octavo.parallel import offload

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
BEGIN = "<!-- table by `make models-table` -->"
END = "<!-- end of the table -->"
VISION = "timm's `VisionTransformer`"
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 0}
_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _causal(kind: str, **changes: Any) -> nn.Module:
    return _narrowed(llama(model_type=kind, **_SIZES, **changes))


def _narrowed(model: nn.Module) -> nn.Module:
    """With matrices of 0.06, a usual spread: larger ones magnify the errors of FP8 from block to block."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "`llama`": lambda: _causal("llama"),
    "`mistral`": lambda: _causal("mistral", sliding_window=5),
    "`qwen2`": lambda: _causal("qwen2"),
    "`qwen3`": lambda: _causal("qwen3"),
    "`phi3`": lambda: _causal("phi3"),
    "`gpt_neox`": lambda: _causal("gpt_neox"),
    "`mixtral`": lambda: _causal("mixtral", num_local_experts=4),
    "`qwen3_moe`": lambda: _causal("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "other causal models (GPT-2)": lambda: _causal("gpt2", **_GPT2),
    VISION: lambda: _narrowed(vit(embed_dim=64, num_heads=4)),
}
"""Row of the table → a model of two layers with random weights, the same in every process."""

REFUSALS = {
    "splits the sequences of Octavo's decoder": (
        "Octavo splits only the sequences of its decoder. In your loop a model may"
        " [split them itself](context-parallelism.md#your-own-model)."
    ),
    "are recomputed in part": "the model runs its original code, and only Octavo's blocks are recomputed in part.",
    "are recomputed only with": "experts are recomputed only with their whole block.",
    "are offloaded": "the model runs its original code, and only Octavo's blocks are offloaded.",
}
"""Part of a message → its footnote."""
OUTSIDE = "the router runs in float32, all other matrices of the blocks in FP8."
NOTES = [*REFUSALS.values(), OUTSIDE]
_SIGNS = "¹²³⁴⁵"

DEGREES: list[dict[str, int]] = [{}, {"context_parallel_degree": 2}]
"""Of two ranks: each with other samples, and both with the same sequences."""
EXACT = {"loss": 1e-5, "norm": 1e-4, "each": 1e-3}
"""Largest relative errors in float32: of the loss, of all gradients together, of each gradient."""
FORMAT = {"loss": 1e-2, "norm": 0.2, "each": 0.5}
"""Of E4M3 operands (rounded by up to 1/16) with gradients in E5M2 (1/8), against float32."""
SUMS = {"loss": 5e-3, "norm": 5e-2, "each": 0.2}
"""Of the same FP8 step with sums in another order, after which some values are rounded to a neighbour."""


@dataclass
class Step:
    """The loss and the gradients by the source's names, whole and on the CPU, of a step."""

    loss: float
    gradients: dict[str, Tensor]

    def check(self, wanted: Step, *, loss: float, norm: float, each: float) -> None:
        """Assert that it is another step, within relative errors."""
        assert self.gradients.keys() == wanted.gradients.keys()
        assert abs(self.loss - wanted.loss) <= loss * abs(wanted.loss), (self.loss, wanted.loss)
        errors = {name: (self.gradients[name] - gradient).norm() for name, gradient in wanted.gradients.items()}
        norms = {name: gradient.norm() for name, gradient in wanted.gradients.items()}
        whole = torch.stack(list(norms.values())).norm()
        total = torch.stack(list(errors.values())).norm() / whole
        assert total <= norm, f"the gradients are off by {total:.2g}"
        for name, error in errors.items():
            # Some gradients are zero but for rounding, such as that of a bias of keys.
            assert error <= each * norms[name] + 1e-3 * norm * whole, f"{name}: off by {error}, of {norms[name]}"

    def check_bits(self, wanted: Step) -> None:
        """Assert the same bits."""
        assert self.loss == wanted.loss
        assert self.gradients.keys() == wanted.gradients.keys()
        assert all(torch.equal(self.gradients[name], gradient) for name, gradient in wanted.gradients.items())


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _theirs(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the source's names."""
    way = conversion_of(model)
    if way is None:
        return dict(tensors)
    return {part: value for name, tensor in tensors.items() for part, value in way.split(name, tensor).items()}


def _samples(model: str) -> tuple[Tensor, Tensor]:
    """Four samples and their labels."""
    return images(4) if model == VISION else (tokens(4, 16), tokens(4, 16))


def _loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), labels) if x.is_floating_point() else model(input_ids=x, labels=labels).loss


def _step(model: nn.Module, x: Tensor, labels: Tensor, recipe: Any = None, records: Mapping[str, Tensor] | None = None) -> Step:
    """The second of two passes over the same batch; records: FP8 records that it begins with."""
    for number in range(2):
        if number and records is not None:
            load_state_records(model, records, recipe)
        model.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = _loss(model, x, labels)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient for {missing}"
    return Step(loss.item(), _theirs(model, {name: _whole(gradient) for name, gradient in gradients.items()}))


def _transformed(model: str, **options: Any) -> nn.Module:
    return octavo.transform(MODELS[model](), dtype=torch.float32, device="cpu", **options)


@functools.cache
def _reference(model: str) -> Step:
    return _step(MODELS[model](), *_samples(model))


@functools.cache
def _transformed_step(model: str, delayed: bool) -> Step:
    """On one rank, without recomputation and offloading; under delayed scaling or without FP8."""
    return _step(_transformed(model), *_samples(model), RECIPES["delayed"]() if delayed else None)


def _by_recipe(model: str, name: str) -> str:
    ours = _transformed(model)
    _step(ours, *_samples(model)).check(_reference(model), **EXACT)
    found = _step(ours, *_samples(model), RECIPES[name]())
    found.check(_reference(model), **FORMAT)
    assert found.loss != _reference(model).loss  # it was FP8
    layers = octavo.describe(ours).layers
    assert any(layer.fp8 for layer in layers)
    inside = [layer for layer in layers if not layer.fp8 and ".0." in layer.name]  # a matrix of a block
    assert all(layer.name.endswith("router") for layer in inside), inside
    return f"yes{_sign(OUTSIDE)}" if inside else "yes"


def _steps_of_rank(model: str) -> list[list[Step] | str]:
    """For each of `DEGREES` the steps without FP8 and under delayed scaling, or the refusal."""
    return [_steps_by(model, degrees) for degrees in DEGREES]


def _steps_by(model: str, degrees: dict[str, int]) -> list[Step] | str:
    """The loss is the mean over the batch on every rank."""
    records = _records_of_one_rank(model)  # each rank's own first cast, of its own samples, is by another scale
    octavo.init(degrees)
    size, rank, found = octavo.state.dp_size, octavo.state.dp_rank, []
    try:
        for recipe in (None, RECIPES["delayed"]()):
            ours = _transformed(model, recipe=recipe)
            assert all(hasattr(p, "full_tensor") for p in ours.parameters())  # in shards
            assert (getattr(ours, "context", None) is not None) == ("context_parallel_degree" in degrees)
            x, labels = (part.chunk(size)[rank] for part in _samples(model))
            step = _step(ours, x, labels, recipe, None if recipe is None else records)
            if not isinstance(ours, Decoder):  # the loss of a model's own code is that of this rank's samples
                losses = torch.tensor(step.loss)
                dist.all_reduce(losses)
                step.loss = losses.item() / dist.get_world_size()
            found.append(step)
    except InputError as error:
        return str(error)
    finally:
        octavo.shutdown()
    return found


@functools.cache
def _records_of_one_rank(model: str) -> dict[str, Tensor]:
    """FP8 records of a whole model behind a pass over all samples."""
    ours, recipe = _transformed(model), RECIPES["delayed"]()
    x, labels = _samples(model)
    with octavo.fp8_autocast(fp8_recipe=recipe):
        loss = _loss(ours, x, labels)
    loss.backward()
    return state_records(ours)


@functools.cache
def _on_two_ranks(model: str) -> list[list[list[Step] | str]]:
    """`_steps_of_rank` of each rank."""
    found: list[list[list[Step] | str]] = ranks.run(2, _steps_of_rank, model)
    return found


def _over_ranks(model: str, degrees: dict[str, int]) -> str:
    first, second = (found[DEGREES.index(degrees)] for found in _on_two_ranks(model))
    if isinstance(first, str):
        raise InputError(first)
    for delayed, one, other, tolerance in zip((False, True), first, second, (EXACT, SUMS), strict=True):
        one.check_bits(other)
        one.check(_transformed_step(model, delayed), **tolerance)
    return "yes"


def _kept_bytes(model: nn.Module, samples: tuple[Tensor, Tensor]) -> int:
    """What autograd keeps of a forward for backward, without parameters and what is recomputed."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = _loss(model, *samples)
    loss.backward()
    return sum(kept.values()) - sum(kept.get(p.untyped_storage().data_ptr(), 0) for p in model.parameters())


def _recomputed(model: str, recompute: Any) -> str:
    plain, ours = _transformed(model), _transformed(model, recompute=recompute)
    _step(ours, *_samples(model), RECIPES["delayed"]()).check_bits(_transformed_step(model, True))
    assert _kept_bytes(ours, _samples(model)) < _kept_bytes(plain, _samples(model))
    return "yes"


def _offloaded(model: str) -> str:
    ours = _transformed(model, offload=True)
    with (
        mock.patch.object(offload, "SMALLEST_BYTES", 0),
        mock.patch.object(offload, "_Saved", wraps=offload._Saved) as saved,
    ):
        found = _step(ours, *_samples(model), RECIPES["delayed"]())
    assert saved.called
    found.check_bits(_transformed_step(model, True))
    return "yes"


def _exported(model: str) -> str:
    from transformers import AutoModelForCausalLM

    ours = _transformed(model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    before = _step(ours, *_samples(model))
    optimizer.step()
    wanted = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "exported"
        octavo.export(ours, folder)
        if model == VISION:
            again = octavo.transform(MODELS[model](), dtype=torch.float32, load_from=folder)
        else:
            again = octavo.transform(AutoModelForCausalLM.from_pretrained(folder).train(), dtype=torch.float32)
    found = again.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    after = _step(again, *_samples(model))
    after.check_bits(_step(ours, *_samples(model)))
    assert after.loss != before.loss
    return "yes"


def _by_trainer(model: str) -> str:
    reference = _trainer_numbers(MODELS[model]())
    torch.testing.assert_close(_trainer_numbers(_transformed(model)), reference, rtol=EXACT["norm"], atol=0)
    found = _trainer_numbers(_transformed(model), RECIPES["current"]())
    torch.testing.assert_close(found, reference, rtol=FORMAT["norm"], atol=0)
    assert not torch.equal(found, reference)  # it was FP8
    return "yes"


def _trainer_numbers(model: nn.Module, recipe: Any = None) -> Tensor:
    """Loss and gradient norm of one step of Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    name = VISION if hasattr(model, "patch_embed") else ""

    class Fp8Trainer(Trainer):
        def compute_loss_context_manager(self) -> contextlib.ExitStack:
            context = super().compute_loss_context_manager()
            context.enter_context(octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe))
            return context

        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **others: Any) -> Any:
            if name != VISION:
                return super().compute_loss(model, inputs, **others)
            return _loss(model, inputs["x"], inputs["labels"])

    key = "x" if name == VISION else "input_ids"
    samples = [{key: x, "labels": label} for x, label in zip(*_samples(name), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}
        arguments = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=1, remove_unused_columns=False, **quiet)
        trainer = Fp8Trainer(model, arguments, train_dataset=samples)
        with contextlib.redirect_stdout(None):
            trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    return torch.tensor([log["loss"], log["grad_norm"]])


COLUMNS: dict[str, Callable[[str], str]] = {
    "delayed": lambda model: _by_recipe(model, "delayed"),
    "current": lambda model: _by_recipe(model, "current"),
    "rowwise": lambda model: _by_recipe(model, "rowwise"),
    "block": lambda model: _by_recipe(model, "block"),
    "shards, 2 ranks": lambda model: _over_ranks(model, DEGREES[0]),
    "context, 2 ranks": lambda model: _over_ranks(model, DEGREES[1]),
    "`recompute=True`": lambda model: _recomputed(model, True),
    '`"selective"`': lambda model: _recomputed(model, "selective"),
    '`"mlp"`': lambda model: _recomputed(model, "mlp"),
    "`offload=True`": _offloaded,
    "export, reload": _exported,
    "Trainer": _by_trainer,
}


def _sign(note: str) -> str:
    return _SIGNS[NOTES.index(note)]


def row(model: str) -> str:
    """A line of the table."""
    return f"| {' | '.join([model, *(_cell(model, column) for column in COLUMNS)])} |"


def _cell(model: str, column: str) -> str:
    try:
        return COLUMNS[column](model)
    except InputError as error:
        (note,) = [note for part, note in REFUSALS.items() if part in str(error)]  # no other refusal is expected
        return f"refused{_sign(note)}"
    except Exception as error:
        error.add_note(f"{model}, {column}")
        raise


def head() -> list[str]:
    """The lines above the rows."""
    return [f"| model | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]


def notes() -> list[str]:
    """The lines below the table: footnotes, and the reference of each column."""
    return [*(f"* {sign} {note}" for sign, note in zip(_SIGNS, NOTES, strict=True)), "", *references()]


def references() -> list[str]:
    """The reference of each column with the largest relative errors."""

    def within(errors: Mapping[str, float]) -> str:
        loss, norm, each = (f"{100 * errors[key]:g}%" for key in ("loss", "norm", "each"))
        return f"{loss} of the loss, {norm} of all gradients together, {each} of each gradient"

    rows = {
        "recipes": ("Hugging Face's (timm's) model in float32", within(FORMAT)),
        "2 ranks, without FP8": ("one rank", within(EXACT)),
        "2 ranks, delayed scaling": ("one rank, from the same scales", within(SUMS)),
        "recomputation, offload": ("the same step without it, delayed scaling", "none; and less is saved for backward"),
        "export, reload": ("weights and next step of the exported model", "none"),
        "Trainer": (
            "Trainer around Hugging Face's (timm's) model",
            f"{100 * EXACT['norm']:g}% of loss and norm of the gradients in float32, {100 * FORMAT['norm']:g}% in FP8",
        ),
    }
    return ["| column | reference | largest error |", "|---|---|---|", *(f"| {k} | {a} | {b} |" for k, (a, b) in rows.items())]


def lines_of(page: str) -> list[str]:
    """The lines between the two comments of the page."""
    return page.split(BEGIN)[1].split(END)[0].strip().splitlines()


def rows_of(lines: list[str]) -> dict[str, str]:
    """Row's name → line."""
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[2:])
    return {line.split(" | ")[0].removeprefix("| "): line for line in table}


def write(models: Iterable[str]) -> None:
    """Rewrite the table of the page; rows of other models stay as they are."""
    page = PAGE.read_text(encoding="utf-8")
    old = rows_of(lines_of(page))
    new = {model: row(model) for model in models}
    lines = [*head(), *(new.get(model) or old[model] for model in MODELS), "", *notes()]
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    text = "\n".join(lines)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
