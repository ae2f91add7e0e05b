"""Workloads: shapes of released models, with random weights, tokens and images.

One GPU trains 8 layers of an 8B or 7B model with embedding and head, in a third of the memory of the whole; several GPUs train
the whole. Rotary angles are unscaled: their table is made once and has no part in the speed. The speed of text is in tokens a
second, of vision in images a second. Text and vision cases have the same properties, so the measurement is the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.models.families import spec_of
from octavo.models.shapes import SHAPES
from octavo.plan.flops import MatmulParameters, TokenFlops, flops_per_token, matmul_parameters, model_flops


@dataclass(frozen=True)
class Case:
    """A Llama's shape and a batch.

    Attributes:
        name: as the results name it.
        hidden_size, layers, heads, kv_heads, head_dim, intermediate_size, vocab_size: the shape.
        tied: whether the output head is the embedding.
        batch, sequence_length: sequences and tokens in a step of one GPU.
        rope_theta, rms_norm_eps: constants of the positions and of the norms.
    """

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    batch: int
    sequence_length: int
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5

    rate: ClassVar[str] = "tokens_per_second"
    package: ClassVar[str | None] = None
    state_bytes: ClassVar[int] = 8

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence_length

    @property
    def units(self) -> int:
        """Tokens in a step: the unit of `rate`."""
        return self.tokens

    @property
    def parameters(self) -> int:
        """Parameters of the matrices, embedding included."""
        counted = matmul_parameters(spec_of(self.hf_config()))
        return counted.stored + (0 if self.tied else counted.head)

    @property
    def batch_shape(self) -> dict[str, int]:
        """Sizes of the batch, for the row of the results."""
        return {"batch": self.batch, "sequence_length": self.sequence_length}

    def flops(self) -> TokenFlops:
        """FLOPs of a token."""
        return model_flops(spec_of(self.hf_config()), self.sequence_length)

    def hf_config(self) -> Any:
        """The same shape as a `transformers.LlamaConfig`."""
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tied,
            max_position_embeddings=self.sequence_length,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            rms_norm_eps=self.rms_norm_eps,
            use_cache=False,
        )


@dataclass(frozen=True)
class VisionCase:
    """The shape of timm's vision transformer with a class token, and a batch.

    Attributes:
        name: as the results name it.
        hidden_size, layers, heads, intermediate_size, classes: the shape.
        patch, image_size, channels: sides of a patch and of an image in pixels, and its channels.
        batch: images in a step.

    Class attributes, which `Case` has too:
        rate: the key of a row that holds the speed.
        package: the distribution of the model's code; None: Octavo's own.
        state_bytes: bytes of a parameter in training: weight, gradient, optimizer states.
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

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch) ** 2

    @property
    def sequence_length(self) -> int:
        """Tokens of an image: its patches and the class token."""
        return self.patches + 1

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

    @property
    def batch_shape(self) -> dict[str, int]:
        """Sizes of the batch, for the row of the results."""
        return {"batch": self.batch, "image_size": self.image_size, "sequence_length": self.sequence_length}

    def flops(self) -> TokenFlops:
        """FLOPs of an image; the products of patches and of classes count as the router, which is never in FP8."""
        d = self.hidden_size
        matrices = self.layers * (4 * d * d + 2 * d * self.intermediate_size)
        token = flops_per_token(
            MatmulParameters(layers=matrices, router=0, head=0, inactive=0),
            attention_width=d,
            sequence_length=self.sequence_length,
            windows=[None] * self.layers,
            causal=False,
        )
        ends = self.patches * self.channels * self.patch**2 * d + d * self.classes
        return TokenFlops(token.layers * self.sequence_length, 6.0 * ends, 0.0, token.attention * self.sequence_length)


AnyCase = Case | VisionCase


def case_of(shape: str, name: str, batch: int, sequence_length: int, *, layers: int | None = None) -> Case:
    """A case by the name of a built-in shape (`octavo.models.shapes.SHAPES`); layers: fewer than the whole model has."""
    sizes = SHAPES[shape]
    heads: int = sizes["num_attention_heads"]
    rope: dict[str, Any] = sizes.get("rope_parameters", {"rope_theta": 10_000.0})  # Llama's default
    return Case(
        name,
        hidden_size=sizes["hidden_size"],
        layers=layers or sizes["num_hidden_layers"],
        heads=heads,
        kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes.get("head_dim", sizes["hidden_size"] // heads),
        intermediate_size=sizes["intermediate_size"],
        vocab_size=sizes["vocab_size"],
        tied=sizes["tie_word_embeddings"],
        batch=batch,
        sequence_length=sequence_length,
        rope_theta=rope["rope_theta"],
        rms_norm_eps=sizes["rms_norm_eps"],
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        case_of("llama-1b", "llama-1b", 4, 4096),
        case_of("llama-8b", "llama-8b-8layers", 2, 8192, layers=8),
        case_of("llama2-7b", "llama2-7b-8layers", 4, 4096, layers=8),
        # The whole model. 16,384 tokens a GPU in both: enough arithmetic to hide the gathering of weights.
        case_of("llama-8b", "llama-8b-8k", 2, 8192),
        case_of("llama-8b", "llama-8b-16k", 1, 16_384),
        Case("tiny", 64, 2, 4, 2, 16, 128, 512, True, 2, 32),  # for CPUs and tests: it measures nothing
    )
}
VISION_CASES: dict[str, VisionCase] = {
    case.name: case
    for case in (
        VisionCase("vit-huge", 1280, 32, 16, 5120, 1000, 14, 224, 128),
        VisionCase("tiny-vit", 64, 2, 4, 128, 10, 8, 32, 2),  # for CPUs and tests; it measures nothing
    )
}
ALL_CASES: dict[str, AnyCase] = {**CASES, **VISION_CASES}
