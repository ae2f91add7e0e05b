"""The workloads: the shapes of released models, with random weights and tokens.

A layer of the 8B or 7B model repeats, so that 8 of them with embedding and head say on one GPU what the whole model does, in a
third of the memory; several GPUs train the whole. RoPE is unscaled: the table of angles is made once and has no part in the
speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.batch * self.sequence_length

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


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("llama-1b", 2048, 16, 32, 8, 64, 8192, 128_256, True, 4, 4096),
        Case("llama-8b-8layers", 4096, 8, 32, 8, 128, 14_336, 128_256, False, 2, 8192),
        Case("llama2-7b-8layers", 4096, 8, 32, 32, 128, 11_008, 32_000, False, 4, 4096, rope_theta=10_000.0),
        # The whole, with 16,384 tokens a GPU in both: products enough to hide the gathering of weights behind.
        Case("llama-8b-8k", 4096, 32, 32, 8, 128, 14_336, 128_256, False, 2, 8192),
        Case("llama-8b-16k", 4096, 32, 32, 8, 128, 14_336, 128_256, False, 1, 16_384),
        Case("tiny", 64, 2, 4, 2, 16, 128, 512, True, 2, 32),  # for CPUs and tests: it measures nothing
    )
}
