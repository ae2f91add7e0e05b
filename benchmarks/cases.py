"""Workloads: shapes of released models, with random weights, tokens and images.

One GPU trains 8 layers of an 8B or 7B model with embedding and head, in a third of the memory of the whole, and as many of
Mixtral 8x7B as all entries have room for; several GPUs train the whole. Rotary angles are unscaled: their table is computed
once and has no part in the speed. Text and vision cases have the same interface.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.config.recompute import Recompute
from octavo.models.families import spec_of
from octavo.models.shapes import SHAPES
from octavo.models.spec import ModelSpec
from octavo.plan.flops import TokenFlops, adapter_parameters, matmul_parameters, model_flops


@dataclass(frozen=True)
class Case:
    """A decoder's shape and a batch.

    Attributes:
        name: in the results.
        sizes: keys of the Hugging Face config, such as an entry of `octavo.models.shapes.SHAPES`.
        batch, sequence_length: sequences of one GPU, or of `context` × `tensor` GPUs that share them, in a forward, and their
            tokens.
        micro_batches: forwards and backwards of a step.
        context: GPUs that share each sequence.
        expert: GPUs that the experts of a block are spread over, by Octavo alone.
        tensor: GPUs that hold parts of the same matrices.
        sync_each: gradients are reduced in each micro-batch, and none stays unsharded between them.
        recompute, offload: as `train.recompute` and `train.offload`, of Octavo's entries. Peers keep each layer's input where
            any is set.

    Class attributes, which `VisionCase` has too:
        rate: the key of a row that holds the speed.
        package: the distribution of the model's code; None: Octavo's.
        state_bytes: bytes of a parameter in training: weight, gradient, optimizer states.
    """

    name: str
    sizes: Mapping[str, Any]
    batch: int
    sequence_length: int
    micro_batches: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    sync_each: bool = False
    recompute: Recompute = False
    offload: bool = False

    rate: ClassVar[str] = "tokens_per_second"
    package: ClassVar[str | None] = None
    state_bytes: ClassVar[int] = 8

    def hf_config(self) -> Any:
        """The shape as a config of transformers, without rotary scaling."""
        from transformers import AutoConfig

        given = self.sizes.get("rope_parameters", {})
        rope = {key: given[key] for key in ("rope_theta", "partial_rotary_factor") if key in given}
        changes = {
            "max_position_embeddings": self.sequence_length,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **rope},  # the default of these families
            "use_cache": False,
        }
        return AutoConfig.for_model(**{**self.sizes, **changes})

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """The shape."""
        return spec_of(self.hf_config())

    @property
    def units(self) -> int:
        """Tokens of one GPU in a step: the unit of `rate`."""
        return self.batch * self.sequence_length * self.micro_batches // (self.context * self.tensor)

    @property
    def parameters(self) -> int:
        """Parameters of the matrices, embedding included."""
        counted = matmul_parameters(self.spec)
        return counted.stored + (0 if self.spec.tied else counted.head)

    def flops(self) -> TokenFlops:
        """FLOPs of a token."""
        return model_flops(self.spec, self.sequence_length)


@dataclass(frozen=True)
class LoraCase(Case):
    """A decoder's shape and a batch for LoRA on all matrices of the blocks.

    Attributes:
        rank, alpha: of the adapters; alpha 2 x rank.
        stored: the frozen weights fit the GPU in FP8 alone, so only entries that store them so train it.
    """

    rank: int = 16
    stored: bool = False

    state_bytes: ClassVar[int] = 2

    @property
    def alpha(self) -> float:
        """The adapters count alpha / rank times."""
        return 2.0 * self.rank

    def flops(self) -> TokenFlops:
        """FLOPs of a token: frozen matrices have no weight gradient."""
        return model_flops(self.spec, self.sequence_length, adapters=adapter_parameters(self.spec, self.rank))


@dataclass(frozen=True)
class VisionCase:
    """The shape of timm's vision transformer with a class token, and a batch.

    Attributes:
        name: in the results.
        hidden_size, layers, heads, intermediate_size, classes: the shape.
        patch, image_size, channels: sides of a patch and of an image in pixels, and its channels.
        batch: images in a step.
    """

    name: str
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    classes: int
    patch: int
    image_size: int
    batch: int
    channels: int = 3

    rate: ClassVar[str] = "images_per_second"
    package: ClassVar[str | None] = "timm"
    state_bytes: ClassVar[int] = 12
    micro_batches: ClassVar[int] = 1

    @property
    def sequence_length(self) -> int:
        """Tokens of an image: its patches and the class token."""
        return (self.image_size // self.patch) ** 2 + 1

    @property
    def units(self) -> int:
        """Images in a step: the unit of `rate`."""
        return self.batch

    @property
    def parameters(self) -> int:
        """All parameters."""
        d, f = self.hidden_size, self.intermediate_size
        block = 4 * d * d + 4 * d + 2 * d * f + f + d + 4 * d
        ends = (self.channels * self.patch**2 + 1) * d + (1 + self.sequence_length) * d + 2 * d + (d + 1) * self.classes
        return self.layers * block + ends

    def flops(self) -> TokenFlops:
        """FLOPs of an image; the products of patches and of classes count as the router, which is never in FP8."""
        d, tokens = self.hidden_size, self.sequence_length
        blocks = self.layers * (4 * d * d + 2 * d * self.intermediate_size)
        ends = (tokens - 1) * self.channels * self.patch**2 * d + d * self.classes
        attention = 12.0 * self.layers * d * tokens**2  # no mask: a query sees all keys
        return TokenFlops(layers=6.0 * blocks * tokens, router=6.0 * ends, head=0.0, attention=attention)


AnyCase = Case | VisionCase

# For CPUs and tests; they measure nothing.
_TINY = SHAPES["llama-tiny"] | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_theta": 500_000.0},
}
_TINY_NEOX = SHAPES["pythia-160m"] | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_TINY_MIXTRAL = _TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
_FEW = {"head_dim": 16, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
"""Largest values of further keys."""
_TINY_VIT = VisionCase("tiny-vit", 64, 2, 4, 128, 10, 8, 32, 2)

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama-1b", SHAPES["llama-1b"], 4, 4096),
        Case("llama-8b-8layers", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 2, 8192),
        # A step so short that the ranks' exchange shows.
        Case("llama-8b-8layers-b1", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 1, 8192),
        # The same tokens a GPU, with each matrix split over two GPUs or four instead of sharded.
        Case("llama-8b-8layers-tp2", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 2, 8192, tensor=2),
        Case("llama-8b-8layers-tp4", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 4, 8192, tensor=4),
        Case("llama-70b-12layers-tp2", SHAPES["llama-70b"] | {"num_hidden_layers": 12}, 2, 8192, tensor=2),
        # Gradients stay unsharded between micro-batches, or are reduced in each.
        Case("llama-8b-8layers-b1-4-micro-batches", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 1, 8192, micro_batches=4),
        Case("llama2-7b-8layers", SHAPES["llama2-7b"] | {"num_hidden_layers": 8}, 4, 4096),
        Case("mistral-7b-layers-16k", SHAPES["mistral-7b"] | {"num_hidden_layers": 16}, 1, 16_384),
        Case("mixtral-8x7b-layers", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 7}, 4, 4096),
        Case("mixtral-8x7b-4layers", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 4}, 4, 4096),  # for 80 GB
        # With float32 weights, gradients and moments: all experts on each GPU, and spread over two. Two layers fit 80 GB.
        Case("mixtral-8x7b-2layers", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 2}, 4, 4096),
        Case("mixtral-8x7b-2layers-tp2", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 2}, 8, 4096, tensor=2),
        Case("mixtral-8x7b-2layers-ep2", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 2}, 4, 4096, expert=2),
        Case("mixtral-8x7b-5layers", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 5}, 4, 4096),
        Case("mixtral-8x7b-5layers-tp2", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 5}, 8, 4096, tensor=2),
        Case("mixtral-8x7b-5layers-tp2-ep2", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 5}, 8, 4096, tensor=2, expert=2),
        Case("mixtral-8x7b-5layers-ep2", SHAPES["mixtral-8x7b"] | {"num_hidden_layers": 5}, 4, 4096, expert=2),
        Case("neox-20b-layers", SHAPES["gpt-neox-20b"] | {"num_hidden_layers": 12}, 8, 2048),
        Case("neox-20b-10layers", SHAPES["gpt-neox-20b"] | {"num_hidden_layers": 10}, 8, 2048),  # for 80 GB
        # The whole model. 16,384 tokens a GPU in both: enough arithmetic to hide the gathering of weights.
        Case("llama-8b-8k", SHAPES["llama-8b"], 2, 8192),
        Case("llama-8b-16k", SHAPES["llama-8b"], 1, 16_384),
        # Of the published figures, for 8 GPUs of 80 GB: `benchmarks.published`.
        Case("llama-8b-8k-16-micro-batches", SHAPES["llama-8b"], 1, 8192, micro_batches=16, sync_each=True),
        Case("llama-8b-32k-recomputed", SHAPES["llama-8b"], 1, 32_768, recompute="selective"),
        Case("llama2-7b", SHAPES["llama2-7b"], 4, 4096),
        Case(
            "qwen3-30b-a3b-ep8-16-micro-batches",
            SHAPES["qwen3-30b-a3b"],
            4,
            4096,
            micro_batches=16,
            expert=8,
            recompute="selective",
        ),
        Case("mixtral-8x7b-ep8", SHAPES["mixtral-8x7b"], 1, 4096, expert=8),
        # Their parts, for 2 GPUs.
        Case(
            "qwen3-30b-a3b-4layers-ep2-2-micro-batches",
            SHAPES["qwen3-30b-a3b"] | {"num_hidden_layers": 4},
            4,
            4096,
            micro_batches=2,
            expert=2,
            recompute="selective",
        ),
        Case("tiny", _TINY, 2, 32),
        Case("tiny-mistral", _TINY | {"model_type": "mistral", "sliding_window": 8}, 2, 32),
        Case("tiny-neox", _TINY_NEOX, 2, 32),
        Case("tiny-4-micro-batches", _TINY, 2, 32, micro_batches=4),
        Case("tiny-tp2", _TINY, 2, 32, tensor=2),
        Case("tiny-mixtral", _TINY_MIXTRAL, 2, 32),
        Case("tiny-mixtral-tp2", _TINY_MIXTRAL, 2, 32, tensor=2),
        Case("tiny-mixtral-tp2-ep2", _TINY_MIXTRAL, 2, 32, tensor=2, expert=2),
        Case("tiny-mixtral-ep2", _TINY_MIXTRAL, 2, 32, expert=2),
    )
}
VISION_CASES: dict[str, VisionCase] = {
    case.name: case
    for case in (
        VisionCase("vit-huge", 1280, 32, 16, 5120, 1000, 14, 224, 128),
        VisionCase("vit-huge-patch16", 1280, 32, 16, 5120, 1000, 16, 224, 128),
        VisionCase("vit-huge-patch16-b64", 1280, 32, 16, 5120, 1000, 16, 224, 64),
        _TINY_VIT,
    )
}
CONTEXT_CASES: dict[str, Case] = {
    case.name: case
    for case in (
        CASES["llama-8b-8k"],
        CASES["llama-8b-16k"],
        # The same tokens a GPU, of sequences that two GPUs share.
        Case("llama-8b-8k-cp2", SHAPES["llama-8b"], 4, 8192, context=2),
        Case("llama-8b-16k-cp2", SHAPES["llama-8b"], 2, 16_384, context=2),
        # One sequence of a GPU, which does not fit; and of two.
        Case("llama-8b-32k", SHAPES["llama-8b"], 1, 32_768),
        Case("llama-8b-32k-cp2", SHAPES["llama-8b"], 1, 32_768, context=2),
        Case("llama-8b-64k", SHAPES["llama-8b"], 1, 65_536, recompute="selective"),
        Case("llama-8b-64k-cp2", SHAPES["llama-8b"], 1, 65_536, context=2, recompute="selective"),
        Case("llama-8b-128k", SHAPES["llama-8b"], 1, 131_072, recompute="selective", offload=True),
        Case("llama-8b-128k-cp2", SHAPES["llama-8b"], 1, 131_072, context=2, recompute="selective"),
        Case("llama-8b-256k", SHAPES["llama-8b"], 1, 262_144, recompute=True, offload=True),
        Case("llama-8b-256k-cp2", SHAPES["llama-8b"], 1, 262_144, context=2, recompute="selective", offload=True),
        # For 80 GB: a quarter of the layers.
        Case("llama-8b-8layers-16k", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 1, 16_384),
        Case("llama-8b-8layers-16k-cp2", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 2, 16_384, context=2),
        Case(
            "llama-8b-8layers-128k-cp2",
            SHAPES["llama-8b"] | {"num_hidden_layers": 8},
            1,
            131_072,
            context=2,
            recompute="selective",
        ),
        CASES["tiny"],
        Case("tiny-cp2", _TINY, 2, 32, context=2, recompute="selective"),
        # Of the published figures.
        Case("llama-8b-16k-cp8", SHAPES["llama-8b"], 4, 16_384, context=8),
        Case("llama-8b-128k-cp4", SHAPES["llama-8b"], 1, 131_072, context=4, recompute="selective"),
        Case("llama-8b-256k-cp8", SHAPES["llama-8b"], 1, 262_144, context=8, recompute="selective"),
    )
}
LORA_CASES: dict[str, LoraCase] = {
    case.name: case
    for case in (
        LoraCase("llama-8b-lora", SHAPES["llama-8b"], 1, 4096),
        LoraCase("llama-8b-8layers-lora", SHAPES["llama-8b"] | {"num_hidden_layers": 8}, 1, 4096),
        LoraCase("llama-70b-lora", SHAPES["llama-70b"], 1, 4096, recompute=True, stored=True),
        # Of the published figures, for 8 GPUs of 80 GB; and its part, for 2.
        LoraCase(
            "llama-70b-lora-2-micro-batches",
            SHAPES["llama-70b"],
            2,
            4096,
            micro_batches=2,
            recompute="selective",
            stored=True,
        ),
        LoraCase(
            "llama-70b-4layers-lora-2-micro-batches",
            SHAPES["llama-70b"] | {"num_hidden_layers": 4},
            2,
            4096,
            micro_batches=2,
            recompute="selective",
            stored=True,
        ),
        LoraCase("tiny-lora", _TINY, 2, 32, rank=4),
        LoraCase("tiny-lora-stored", _TINY, 2, 32, rank=4, recompute=True, stored=True),
    )
}


def tiny_of(case: AnyCase) -> AnyCase:
    """The case for two ranks of a CPU: its batch and settings, degrees and micro-batches of two, a tiny model of its family."""
    name = f"tiny-{case.name}"
    if isinstance(case, VisionCase):
        return replace(_TINY_VIT, name=name)
    small = {key: value for key, value in _TINY.items() if key not in ("model_type", "tie_word_embeddings")}
    few = {key: min(value, case.sizes[key]) for key, value in _FEW.items() if key in case.sizes}
    degrees = {key: min(2, getattr(case, key)) for key in ("context", "expert", "tensor", "micro_batches")}
    length = 32 * degrees["context"]
    sizes = {key: value for key, value in {**case.sizes, **small, **few}.items() if not key.endswith("_token_id")}
    return replace(case, name=name, sizes=sizes, sequence_length=length, **degrees)


PUBLISHED: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    (
        CASES,
        (
            "llama-1b",
            "llama-8b-8layers",
            "llama-8b-8k-16-micro-batches",
            "llama-8b-32k-recomputed",
            "llama2-7b",
            "qwen3-30b-a3b-ep8-16-micro-batches",
            "mixtral-8x7b-ep8",
        ),
    ),
    (CONTEXT_CASES, ("llama-8b-16k-cp8", "llama-8b-64k-cp2", "llama-8b-128k-cp4", "llama-8b-256k-cp8")),
    (LORA_CASES, ("llama-70b-lora-2-micro-batches",)),
    (VISION_CASES, ("vit-huge-patch16",)),
)
"""The cases of `benchmarks.published`; each has its tiny one."""
for _cases, _names in PUBLISHED:
    _cases.update({f"tiny-{name}": tiny_of(_cases[name]) for name in _names})

ALL_CASES: dict[str, AnyCase] = {**CASES, **CONTEXT_CASES, **VISION_CASES, **LORA_CASES}
