"""Entries of the LoRA suite: adapters beside all matrices of a frozen model, on the same tokens.

Octavo's entries store the frozen weights in bfloat16 or in FP8 alone; their adapters and moments are float32. Over several GPUs
the frozen weights are sharded in the form in which they are stored. Entries that end in -graph replay forward and backward as
one CUDA graph (`octavo.graphed`); they and the peers train on one GPU. The peer is PEFT around Hugging Face's model in
bfloat16, attention by SDPA: as its users run it, compiled block by block, with Liger's kernels, with torchao's FP8 products of
the blocks (-fp8-head: of the output head too), and with FlashAttention-4 in SDPA's place. Its adapters are bfloat16, which is
faster than PEFT's default of float32. Sequences have one document each, so that no library needs a mask. Before a peer is
timed, loss and gradients of two of its blocks are compared with PEFT's in float32.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.cases import LoraCase
from benchmarks.peers import ADAMW, BLOCKS, FLASH_ATTENTION, SEED, Entry, Training, build_octavo, loss_of
from benchmarks.plain import next_token_loss
from octavo.errors import InputError
from octavo.fp8.recipe import FastAccumulation


class CompiledLoss(nn.Module):
    """A Hugging Face decoder with each block, and the last norm with head and loss, compiled.

    Block by block: one graph serves all of them, so it compiles in seconds and not in minutes. fullgraph: False allows breaks
    in a block, as at an attention that the compiler cannot read.
    """

    def __init__(self, model: nn.Module, *, fullgraph: bool = True) -> None:
        super().__init__()
        self.model = model
        adapted: Any = model
        decoder = adapted.get_base_model()
        self.inner: Any = decoder.model
        self.head = decoder.lm_head
        layers: Iterable[nn.Module] = self.inner.layers
        for layer in layers:
            layer.compile(fullgraph=fullgraph)
        self.inner.norm.compile(fullgraph=True)
        self.of_hidden = torch.compile(_head_loss, fullgraph=True)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean cross entropy of each next token, in float32."""
        hidden_BTD = self.inner(input_ids=ids_BT, use_cache=False).last_hidden_state
        loss: Tensor = self.of_hidden(self.head, hidden_BTD, labels_BT)
        return loss


def _head_loss(head: nn.Module, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
    return next_token_loss(head(hidden_BTD), labels_BT)


Loss = Callable[[Tensor, Tensor], Tensor]
LIMITS = {"bf16": 0.05, "fp8": 0.3}
"""Largest relative error of a peer's loss and gradients, by the precision of its products."""


def build_peft(
    case: LoraCase,
    device: torch.device,
    compiled: bool,
    *,
    blocks: bool = True,
    liger: bool = False,
    float8: str | None = None,
    head: bool = False,
    flash: bool = False,
    seed: int = SEED,
) -> Training:
    """PEFT's adapters in Hugging Face's model. blocks: compile, where `compiled`. float8: torchao's recipe of the products.

    head: of the output head's too. flash: attention by FlashAttention-4, not SDPA.

    Raises:
        InputError: its loss or gradients differ from the reference.
    """
    how: dict[str, Any] = {"compiled": compiled and blocks, "liger": liger, "float8": float8, "head": head, "flash": flash}
    two = replace(case, sizes={**case.sizes, "num_hidden_layers": 2})
    torch.manual_seed(seed)
    compare(two, device, *_peft_model(two, device, **how), limit=LIMITS["fp8" if float8 else "bf16"])
    torch.manual_seed(seed)
    model, loss = _peft_model(case, device, **how)
    return Training(model, loss, optimizer=torch.optim.AdamW(trained_of(model), **ADAMW))


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters with gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _peft_model(
    case: LoraCase,
    device: torch.device,
    *,
    compiled: bool = False,
    liger: bool = False,
    float8: str | None = None,
    head: bool = False,
    flash: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[nn.Module, Loss]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with device:
        attention = "flash_attention_4" if flash else "sdpa"
        model = AutoModelForCausalLM.from_config(case.hf_config(), dtype=dtype, attn_implementation=attention)
    patches = _with_liger(model) if liger else {}
    if float8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(float8)
        takes = lambda _, name: BLOCKS.match(name) is not None or (head and name == "lm_head")  # noqa: E731
        convert_to_float8_training(model, config=config, module_filter_fn=takes)
    config = LoraConfig(r=case.rank, lora_alpha=int(case.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    with device:
        adapted: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    adapted.train()
    return adapted, CompiledLoss(adapted, fullgraph=not flash) if compiled else _patched(loss_of(adapted), patches)


def _with_liger(model: nn.Module) -> dict[str, Any]:
    """Give a model Liger's kernels; returns the names that this replaced in the module of its code, which are as before.

    Its rotary embedding is such a name, and would be that of every other entry of the process.
    """
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    apply_liger_kernel_to_llama(model=model)
    patches = {name: value for name, value in names.items() if before.get(name) is not value}
    names.update({name: before[name] for name in patches if name in before})
    return patches


def _patched(loss: Loss, patches: Mapping[str, Any]) -> Loss:
    """A loss whose forward finds these names in the code of transformers' Llama."""
    if not patches:
        return loss

    def patched(ids: Tensor, labels: Tensor) -> Tensor:
        from transformers.models.llama import modeling_llama

        names = vars(modeling_llama)
        before = {name: names[name] for name in patches if name in names}
        names.update(patches)
        try:
            return loss(ids, labels)
        finally:
            names.update(before)

    return patched


def compare(case: LoraCase, device: torch.device, model: nn.Module, loss: Loss, *, limit: float) -> None:
    """Compare loss and adapters' gradients with PEFT's in float32, of the same weights with a B that is not 0.

    Raises:
        InputError: a relative error above the limit.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=generator)
    reference, of_reference = _peft_model(case, device, dtype=torch.float32)
    reference.load_state_dict(model.state_dict())
    shape = case.batch, case.sequence_length
    ids = torch.randint(case.spec.vocabulary, shape, device=device, generator=generator)
    found, wanted = loss(ids, ids), of_reference(ids, ids)
    found.backward()
    wanted.backward()
    errors = {"loss": abs(found.item() / wanted.item() - 1)}
    pairs = zip(trained_of(model), trained_of(reference), strict=True)
    squares = [[(a.double() - b.double()).square().sum(), b.double().square().sum()] for a, b in _gradients(pairs)]
    differing, whole = (float(sum(part)) for part in zip(*squares, strict=True))
    errors["gradients"] = (differing / whole) ** 0.5
    for what, error in errors.items():
        if not error <= limit:
            raise InputError(
                f"{what} of two blocks: a relative error of {error:.3g} from PEFT's in float32, where {limit} is allowed."
            )
    model.zero_grad(set_to_none=True)


def _gradients(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> Iterator[tuple[Tensor, Tensor]]:
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert theirs.grad is not None
        yield ours.grad, theirs.grad


def _peft(name: str, layers: str = "bf16", *, needs: tuple[str, ...] = (), **how: Any) -> Entry:
    head = "fp8" if how.get("head") else "bf16"
    return Entry(
        name, layers, head, partial(build_peft, **how), "peft", families=("llama",), alone=True, needs=("transformers", *needs)
    )


def _octavo(
    name: str,
    recipe: str | None = None,
    *,
    head: bool | Literal["backward"] = False,
    stored: bool = False,
    fast: FastAccumulation = False,
    graph: bool = False,
) -> Entry:
    build = partial(build_octavo, recipe=recipe, head=head, stored=stored, fast=fast, graph=graph)
    precisions: dict[str, Any] = {"head": "fp8" if head else "bf16", "head_forward": "bf16" if head == "backward" else None}
    return Entry(name, "fp8" if recipe else "bf16", build=build, stored=stored, alone=graph, **precisions)


_DEFAULTS: dict[str, Any] = {"head": "backward", "fast": "input_gradient"}
"""As run files have them."""

LORA: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _octavo("octavo-bf16"),
        _octavo("octavo-delayed", "delayed", **_DEFAULTS),
        _octavo("octavo-current", "current", **_DEFAULTS),
        _octavo("octavo-delayed-fp8-base", "delayed", stored=True, **_DEFAULTS),
        _octavo("octavo-delayed-fp8-base-graph", "delayed", stored=True, graph=True, **_DEFAULTS),
        _octavo("octavo-delayed-fp8-base-graph-fp8-head", "delayed", stored=True, graph=True, **_DEFAULTS | {"head": True}),
        _octavo("octavo-current-fp8-base", "current", stored=True, **_DEFAULTS),
        _octavo("octavo-block-fp8-base", "block", stored=True, head="backward"),
        _peft("torch-peft", blocks=False),
        _peft("torch-peft-compiled"),
        _peft("torch-peft-liger", blocks=False, liger=True, needs=("liger-kernel",)),
        _peft("ao-peft-tensorwise", "fp8", float8="tensorwise", needs=("torchao",)),
        _peft("ao-peft-tensorwise-fp8-head", "fp8", float8="tensorwise", head=True, needs=("torchao",)),
        _peft(
            "ao-peft-tensorwise-flash-attention-fp8-head",
            "fp8",
            float8="tensorwise",
            head=True,
            flash=True,
            needs=("torchao", FLASH_ATTENTION),
        ),
        _peft("ao-peft-rowwise", "fp8", float8="rowwise", needs=("torchao",)),
    )
}


def table(results: Mapping[str, Any]) -> str:
    """Kernel milliseconds a step by kind, the largest kernels, and host milliseconds, of rows with a breakdown."""
    lines = []
    for row in results["rows"]:
        if "kernel_ms" not in row:
            continue
        total, host = sum(row["kernel_ms"].values()), row.get("host_ms", math.nan)
        name = f"{row['workload']} {row['entry']}"
        lines += [f"{name}: step {row['step_ms']:.1f} ms, kernels {total:.1f}, host {host:.1f}"]
        lines += ["  " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in row["kernel_ms"].items())]
        lines += [f"  {one['ms']:8.2f} ms {one['calls']:7.0f} x {one['name'][:90]}" for one in row["largest_kernels"]]
    return "\n".join(lines)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(table(json.loads(Path(path).read_text())))
