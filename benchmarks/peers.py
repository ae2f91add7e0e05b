"""Entries of the one-GPU suite: a table of models, each with its training step.

Every entry does the same work on the same tokens: forward, backward, AdamW on parameters and states in bfloat16 (Octavo's;
for the peers PyTorch's fused one), gradients set to None. Entries differ in the precision of the blocks' linear layers. Vision
transformers train by SGD with momentum on float32 weights under autocast. A peer's package is imported when its entry is built:
a missing one is a row with an error, and with the command that installs it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import te_attention
from benchmarks.cases import AnyCase, Case, LoraCase, VisionCase
from benchmarks.plain import FAMILIES, Experts, PlainDecoder
from benchmarks.vision.models import Around, Classifier, replace_blocks, timm_model, under_autocast
from octavo.config.lora import LoRA
from octavo.errors import first_line, install_extra
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import RECIPES, FastAccumulation, Format, Recipe
from octavo.parallel.fsdp import accumulate
from octavo.parallel.graphed import graphed
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import state
from octavo.train.adamw import AdamW

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
SGD: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "fused": True}
SEED = 0
RECIPE_SETTINGS: dict[str, dict[str, Any]] = {
    "delayed": {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "reduce_amax": True,
    },
    "current": {"fp8_format": Format.HYBRID, "use_power_2_scales": False},
    "rowwise": {},
    "block": {},
}
"""All fields of the recipes but `fast_accumulation`. Entries name every setting: a new default is `octavo-default`'s alone."""
MODEL_SETTINGS: dict[str, Any] = {
    "skip": (), "layers": {}, "recompute": False, "mlp_chunks": 1, "offload": False, "blocks": "auto",
}  # fmt: skip
"""Arguments of `octavo.transform` and `BuildOptions` that are the same in all entries."""
PEERS = {"bf16": "torch-", "torchao": "ao-", "te": "te-"}
"""Groups of peers (`--peers`) and the prefix of their entries' names."""
FLASH_ATTENTION = "flash-attn-4"
INSTALL = {
    "timm": install_extra("bench"),
    "torchao": install_extra("bench"),
    "transformer-engine": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    FLASH_ATTENTION: install_extra("flash"),
    "peft": "pip install peft",
    "liger-kernel": "pip install liger-kernel",
}
"""Packages that an entry or a workload may need, and the command that installs each."""


BLOCKS = re.compile(r"(model\.layers|blocks)\.(?!.*\.gate$)")
"""Names of torchao's linear layers: those of the blocks, but for routers."""


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Attributes:
        name: in the results.
        layers: precision of the blocks' linear layers, "bf16" or "fp8".
        head: precision of the output head.
        build: makes the `Training` for (case, device, compiled); keyword `seed` of the weights.
        package: the distribution, for its version; None: Octavo or PyTorch itself.
        tensor: of Transformer Engine's, it has a model whose matrices ranks share.
        overlap: that model's userbuffers exchange beside products; it trains such cases alone.
        needs: more distributions.
        vision: it trains vision cases too.
        text: it trains decoders.
        families: of the decoders it trains these alone; empty: all.
        head_forward: precision of the head's forward product, if another.
        stored: with LoRA it stores the frozen weights in FP8 alone.
        alone: it trains on one GPU, its whole batch at once.
        exchanges: differs from another entry only in the exchange of keys and values, so trains shared sequences alone.
    """

    name: str
    layers: str
    head: str
    build: Callable[..., Training]
    package: str | None = None
    vision: bool = False
    text: bool = True
    head_forward: str | None = None
    families: tuple[str, ...] = ()
    exchanges: bool = False
    tensor: bool = False
    overlap: bool = False
    stored: bool = False
    alone: bool = False
    needs: tuple[str, ...] = ()

    def trains(self, case: AnyCase) -> bool:
        """True if it has a model of this case."""
        if isinstance(case, VisionCase):
            return self.vision
        if isinstance(case, LoraCase) and case.stored and not self.stored:
            return False
        if self.alone and case.micro_batches > 1:
            return False
        alone = case.expert > 1 or (case.tensor > 1 and not self.tensor) or (case.tensor > 1 and case.spec.experts > 0)
        if self.overlap and case.tensor == 1:
            return False
        if not self.text or (self.exchanges and case.context == 1) or (alone and self.group is not None):
            return False
        return not self.families or case.spec.family in self.families

    @property
    def group(self) -> str | None:
        """Its group of peers; None for Octavo."""
        return next((group for group, prefix in PEERS.items() if self.name.startswith(prefix)), None)

    @property
    def packages(self) -> tuple[str, ...]:
        """All distributions it needs."""
        return (() if self.package is None else (self.package,)) + self.needs

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process, which libraries read when they are imported."""
        if self.package != "transformer-engine":
            return {}
        attention = te_attention.FLASH if FLASH_ATTENTION in self.needs else te_attention.CUDNN
        return attention | te_attention.USERBUFFERS if self.overlap else attention


class Training:
    """A model with its training step, by default with PyTorch's fused AdamW.

    Args:
        loss: function of inputs (token ids or images) and labels.
        around: makes the context manager around a forward.
        graph: forward and backward are one CUDA graph.
        settle: called after the optimizer in every step.
        attention_errors: relative errors of its attention, if it was compared with the reference.

    Attributes:
        micro_batches: parts of a batch that go forward and backward one after another.
        sync_each: FSDP2 reduces gradients in each of them.
    """

    micro_batches = 1
    sync_each = False

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        around: Around = contextlib.nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        graph: bool = False,
        settle: Callable[[], object] | None = None,
        attention_errors: dict[str, float] | None = None,
    ) -> None:
        self.model = model
        self.attention_errors = attention_errors
        self.settle = settle
        self.loss = loss
        self.around = around
        self.graph = graph
        self.optimizer = torch.optim.AdamW(model.parameters(), **ADAMW) if optimizer is None else optimizer
        self.gradients = graphed(self._loss, model.parameters()) if graph else self._gradients

    def replicate(self, group: dist.ProcessGroup) -> None:
        """Average gradients over a group of ranks with a replica each: behind the graph, else by DistributedDataParallel."""
        if self.graph:
            self.gradients = graphed(self._loss, self.model.parameters(), group=group)
        else:
            assert isinstance(self.loss, nn.Module)
            self.loss = DistributedDataParallel(self.loss, process_group=group)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Train on one batch and free the gradients; returns the loss without a wait for the device."""
        loss = self.gradients(inputs, labels)
        self.optimizer.step()
        if self.settle is not None:
            self.settle()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        with self.around():
            return self.loss(inputs, labels)

    def _gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        parts = list(zip(inputs.chunk(self.micro_batches), labels.chunk(self.micro_batches), strict=True))
        losses = []
        for number, part in enumerate(parts, 1):
            accumulate(self.model, last=self.sync_each or number == len(parts))
            loss = self._loss(*part) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def reason_of(error: BaseException) -> str:
    """An exception of an entry in one line; of a missing package with the command that installs it."""
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    distribution = {"flash_attn": FLASH_ATTENTION}.get(missing, missing.replace("_", "-"))
    install = INSTALL.get(distribution)
    return first_line(error) if install is None else f"{first_line(error)}. Install it by {install}"


def build_plain(
    case: AnyCase, device: torch.device, compiled: bool, *, float8: str | None = None, seed: int = SEED
) -> Training:
    """The plain decoder or timm's model; torchao converts the blocks' linear layers by its recipe `float8`.

    Of experts torchao has rowwise scaling alone. Routers stay in bf16: they have fewer columns than an FP8 product needs.
    """
    if isinstance(case, VisionCase):
        model = timm_model(case, device, seed)
        loss: Callable[[Tensor, Tensor], Tensor] = Classifier(model)
    else:
        torch.manual_seed(seed)
        with device:
            model = loss = PlainDecoder(case.spec).to(torch.bfloat16)
    if float8 is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(float8)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: BLOCKS.match(name) is not None)
        if experts := [module for module in model.modules() if isinstance(module, Experts)]:
            from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

            for module in experts:
                module.grouped_mm = partial(grouped_mm, pad_token_groups_for_grouped_mm=False)
    if compiled:  # `fullgraph`, so that no unnoticed graph break slows the peer
        loss = torch.compile(loss, fullgraph=True)
    if isinstance(case, VisionCase):
        return Training(model, loss, under_autocast(device), _sgd(model))
    return Training(model, loss)


def build_huggingface(case: Case, device: torch.device, compiled: bool, *, seed: int = SEED) -> Training:
    """Hugging Face's model in bf16 with its fastest attention and experts, compiled."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(case.hf_config(), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    if case.spec.experts:
        model.set_experts_implementation("grouped_mm")
    loss = loss_of(model)
    return Training(model, torch.compile(loss) if compiled else loss)


def build_te(
    case: AnyCase,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    fp8_head: bool = False,
    whole_block: bool = False,
    flash_attention: bool = False,
    seed: int = SEED,
) -> Training:
    """Transformer Engine's layers, as blocks of timm's model too; in FP8 by a recipe of `benchmarks.te.RECIPES`.

    With `fp8_head` the output head of the decoder is its layer too. With `whole_block` a block of timm's model is one
    `TransformerLayer`, as in the published script; else a faster block of its parts. Attention is cuDNN's or, with
    `flash_attention`, flash-attn-4's.

    Raises:
        InputError: its attention differs from the reference.
    """
    te_attention.choose(te_attention.FLASH if flash_attention else te_attention.CUDNN)
    from benchmarks import te

    if isinstance(case, VisionCase):
        model = timm_model(case, device, seed)
        block = te.vision_block if whole_block else te.VisionLayer
        replace_blocks(model, lambda eps: block(case, eps, device))
        errors = te.check_vision_attention(model.blocks[0], case, device)
        around = under_autocast(device, te.autocast(recipe))
        return Training(model, Classifier(model), around, _sgd(model), attention_errors=errors)
    torch.manual_seed(seed)
    how: dict[str, Any] = {"compiled": compiled, "fp8": recipe is not None, "fp8_head": fp8_head}
    model = te.TeDecoder(case.spec, case.sequence_length, device, **how)
    return Training(model, model, te.autocast(recipe), attention_errors=model.check_attention(case.batch))


def build_octavo(
    case: AnyCase,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    head: bool | Literal["backward"] = False,
    fast: FastAccumulation = False,
    params_dtype: torch.dtype = torch.bfloat16,
    strategy: str = "all_gather",
    reshard: bool | Literal["auto"] = "auto",
    sync_each: bool = False,
    stored: bool = False,
    graph: bool = False,
    seed: int = SEED,
) -> Training:
    """Octavo's model over all ranks, or timm's through `octavo.transform`; in FP8 by a recipe of `octavo.recipe`.

    head, fast, strategy, reshard, sync_each: as `fp8.head`, `fp8.fast_accumulation`, `parallel.cp_comm_type`,
    `parallel.reshard_after_forward` and `parallel.sync_each_micro_batch`. stored: frozen weights beside a `LoraCase`'s adapters
    are stored in FP8 alone. graph: forward and backward are one CUDA graph, of one micro-batch of whole documents.
    Nothing is compiled: the layers are fused kernels.
    A vision transformer's kernels are shorter than their launch from Python, so its forward and backward are one CUDA graph.
    """
    # With transformers' model classes, which import torchao: a broken torchao must not cost the other entries their rows.
    from octavo.build import BuildOptions, build_model, transform

    scaling = _recipe(recipe, fast) if recipe else None
    around = partial(fp8_autocast, enabled=scaling is not None, fp8_recipe=scaling, fp8_group=None, emulate=False)
    dtypes: dict[str, Any] = {"dtype": torch.bfloat16, "params_dtype": params_dtype}
    if isinstance(case, VisionCase):
        dtypes["params_dtype"] = torch.float32
        model = transform(timm_model(case, device, seed), scaling, **dtypes, fp8_head=False, **MODEL_SETTINGS)
        return Training(model, Classifier(model), around, _sgd(model), graph=True)
    sharding = sharding_of(state, scaling, **dtypes, strategy=strategy)
    if sharding is not None:
        sharding = replace(sharding, reshard_after_forward=reshard, sync_each_micro_batch=sync_each or case.sync_each)
    settings = MODEL_SETTINGS | {"recompute": case.recompute, "offload": case.offload, "horizon": 2}
    if isinstance(case, LoraCase):
        settings |= {"lora": LoRA(case.rank, case.alpha, base="fp8" if stored else "params_dtype"), "base_recipe": scaling}
    options = BuildOptions(**dtypes, buffer_dtype=torch.float32, seed=seed, fp8_head=head, **settings)
    model = build_model(case.hf_config(), options, device=device, sharding=sharding)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Training(model, loss_of(model), around, AdamW(trained, **ADAMW), graph=graph)


def build_default(case: Case, device: torch.device, compiled: bool, *, seed: int = SEED) -> Training:
    """Hugging Face's model in bf16, as the peers', through `octavo.transform` and `octavo.fp8_autocast`: no setting named."""
    from transformers import AutoModelForCausalLM

    from octavo.build import transform

    torch.manual_seed(seed)
    with device:
        theirs = AutoModelForCausalLM.from_config(case.hf_config()).to(torch.bfloat16)
    model = transform(theirs.train())
    return Training(model, loss_of(model), fp8_autocast, AdamW(model.parameters(), **ADAMW))


def _recipe(name: str, fast: FastAccumulation) -> Recipe:
    """A recipe of `octavo.recipe` with every field given; rowwise and block scaling have no `fast_accumulation`."""
    has_fast = any(field.name == "fast_accumulation" for field in fields(RECIPES[name]))
    return RECIPES[name](**RECIPE_SETTINGS[name], **({"fast_accumulation": fast} if has_fast else {}))


def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a model that is called as Hugging Face's are."""

    def loss(input_ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = model(input_ids=input_ids, labels=labels).loss
        return found

    return loss


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **SGD)


def _octavo(name: str, recipe: str | None = None, *, head: bool | Literal["backward"] = False, **how: Any) -> Entry:
    build = partial(build_octavo, recipe=recipe, head=head, **how)
    return Entry(name, "fp8" if recipe else "bf16", build=build, vision=not head, **_precisions(head))


def _precisions(head: bool | Literal["backward"]) -> dict[str, Any]:
    """`Entry`'s precisions of a head under `fp8.head`."""
    return {"head": "fp8" if head else "bf16", "head_forward": "bf16" if head == "backward" else None}


def _torchao(name: str, recipe: str) -> Entry:
    return Entry(name, "fp8", "bf16", partial(build_plain, float8=recipe), "torchao", vision=True, families=FAMILIES)


def te_entry(
    name: str,
    build: Callable[..., Training],
    recipe: str | None = None,
    *,
    head: bool = False,
    flash: bool = False,
    **more: Any,
) -> Entry:
    """An entry of Transformer Engine. head: it is in FP8 too. flash: attention is flash-attn-4's."""
    given = {"recipe": recipe, "fp8_head": head, "flash_attention": flash}
    how = {key: value for key, value in given.items() if value}
    return Entry(
        name,
        "fp8" if recipe else "bf16",
        "fp8" if head else "bf16",
        partial(build, **how),
        "transformer-engine",
        needs=(FLASH_ATTENTION,) if flash else (),
        **more,
    )


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-default", "fp8", build=build_default, **_precisions("backward")),
        _octavo("octavo-bf16"),
        _octavo("octavo-delayed", "delayed"),
        _octavo("octavo-delayed-fast", "delayed", fast=True),
        _octavo("octavo-delayed-fast-input", "delayed", fast="input_gradient"),
        _octavo("octavo-current", "current"),
        _octavo("octavo-rowwise", "rowwise"),
        _octavo("octavo-block", "block"),
        _octavo("octavo-delayed-fp8-head", "delayed", head=True),
        _octavo("octavo-delayed-fast-fp8-head", "delayed", head=True, fast=True),
        _octavo("octavo-delayed-fp8-head-backward", "delayed", head="backward"),
        _octavo("octavo-delayed-fast-fp8-head-backward", "delayed", head="backward", fast=True),
        _octavo("octavo-delayed-fast-input-fp8-head-backward", "delayed", head="backward", fast="input_gradient"),
        Entry("torch-bf16", "bf16", "bf16", build_plain, vision=True, families=FAMILIES),
        Entry("torch-huggingface-bf16", "bf16", "bf16", build_huggingface, "transformers", families=("mixtral",)),
        _torchao("ao-tensorwise", "tensorwise"),
        _torchao("ao-rowwise", "rowwise"),
        te_entry("te-bf16", build_te, vision=True),
        te_entry("te-delayed", build_te, "delayed", vision=True),
        te_entry("te-delayed-flash-attention", build_te, "delayed", flash=True, vision=True),
        te_entry("te-delayed-block", partial(build_te, whole_block=True), "delayed", vision=True, text=False),
        te_entry("te-delayed-fp8-head", build_te, "delayed", head=True),
        te_entry("te-delayed-flash-attention-fp8-head", build_te, "delayed", head=True, flash=True),
        te_entry("te-current", build_te, "current", vision=True),
    )
}
