"""The workloads: the shapes of released models, with random weights, tokens and images.

A layer of the 8B or 7B model repeats, so that 8 of them with embedding and head say on one GPU what the whole model does, in a
third of the memory; several GPUs train the whole. RoPE is unscaled: the table of angles is made once and has no part in the
speed. Text is counted in tokens and vision in images; what a step costs and holds is asked of the case, so that nothing that
measures needs to know which of them it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.models.families import spec_of
from octavo.models.shapes import SHAPES
from octavo.plan.flops import MatmulParameters, TokenFlops, flops_per_token, matmul_parameters, model_flops


@dataclass(frozen=True)
class Case:
    """One workload: a Llama's shape and a batch.

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
        """What `rate` counts, in a step."""
        return self.tokens

    @property
    def parameters(self) -> int:
        """Parameters of the matrices, embedding included."""
        counted = matmul_parameters(spec_of(self.hf_config()))
        return counted.stored + (0 if self.tied else counted.head)

    @property
    def batch_shape(self) -> dict[str, int]:
        """What a row tells of the batch."""
        return {"batch": self.batch, "sequence_length": self.sequence_length}

    def flops(self) -> TokenFlops:
        """Operations of a token."""
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
    """One workload: the shape of timm's vision transformer with a class token, and a batch.

    Attributes:
        name: as the results name it.
        hidden_size, layers, heads, intermediate_size, classes: the shape.
        patch, image_size, channels: sides of a patch and of an image in pixels, and its channels.
        batch: images in a step.

    Class attributes, which `Case` has too:
        rate: the key of a row under which the speed stands.
        package: the distribution that the model is taken from.
        state_bytes: of each parameter in training: weight, gradient, states of the optimizer.
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
        """What `rate` counts, in a step."""
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
        """What a row tells of the batch."""
        return {"batch": self.batch, "image_size": self.image_size, "sequence_length": self.sequence_length}

    def flops(self) -> TokenFlops:
        """Operations of an image; its first and last products, of patches and classes, are beside the blocks as a router is."""
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


def _of_shape(name: str, shape: str, batch: int, sequence_length: int, *, layers: int | None = None) -> Case:
    """A workload of a built-in shape, with fewer layers where they are given."""
    of = SHAPES[shape]
    return Case(
        name=name,
        hidden_size=of["hidden_size"],
        layers=layers or of["num_hidden_layers"],
        heads=of["num_attention_heads"],
        kv_heads=of["num_key_value_heads"],
        head_dim=of["hidden_size"] // of["num_attention_heads"],
        intermediate_size=of["intermediate_size"],
        vocab_size=of["vocab_size"],
        tied=of["tie_word_embeddings"],
        batch=batch,
        sequence_length=sequence_length,
        rope_theta=of.get("rope_parameters", {}).get("rope_theta", 10_000.0),
        rms_norm_eps=of["rms_norm_eps"],
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        _of_shape("llama-1b", "llama-1b", 4, 4096),
        _of_shape("llama-8b-8layers", "llama-8b", 2, 8192, layers=8),
        _of_shape("llama2-7b-8layers", "llama2-7b", 4, 4096, layers=8),
        # The whole, with 16,384 tokens a GPU in both: products enough to hide the gathering of weights behind.
        _of_shape("llama-8b-8k", "llama-8b", 2, 8192),
        _of_shape("llama-8b-16k", "llama-8b", 1, 16_384),
        Case("tiny", 64, 2, 4, 2, 16, 128, 512, True, 2, 32),  # for CPUs and tests: it measures nothing
    )
}
VISION_CASES: dict[str, VisionCase] = {
    case.name: case
    for case in (
        VisionCase("vit-huge", 1280, 32, 16, 5120, 1000, 14, 224, 128),
        VisionCase("tiny-vit", 64, 2, 4, 128, 10, 8, 32, 2),  # as tiny is
    )
}
ALL_CASES: dict[str, AnyCase] = {**CASES, **VISION_CASES}
