"""[model]: the transformer, its weights and its dtypes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from octavo.config.section import OnDiskOrHub, Section

OF_POSITIONS = ("rope_parameters", "max_position_embeddings")
"""Keys of a Hugging Face config that may change with pretrained weights, to extend their positions."""


class ModelConfig(Section):
    """The transformer, its weights and its dtypes."""

    source: Annotated[str, OnDiskOrHub] = Field(
        description='A Hugging Face folder or id, or a built-in shape such as "llama-1b".'
    )
    load: bool = Field(False, description="Start from the pretrained weights of `source` instead of random ones.")
    resize: bool = Field(
        False,
        description="Add the tokenizer's additional tokens to pretrained weights: new rows are the mean of the old ones.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Dtype of activations and of products outside FP8; float16 uses train.loss_scale.",
    )
    params_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype of parameters, gradients and optimizer states: float32 gives master weights."
    )
    blocks: Literal["auto", "own"] = Field(
        "auto",
        description="\"own\" runs the model's original code instead of Octavo's blocks. A run that started with it continues "
        "with it.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the Hugging Face config to override, such as hidden_size; with load = true only "
        "rope_parameters and max_position_embeddings.",
    )

    @model_validator(mode="after")
    def _overrides_need_random_weights(self) -> ModelConfig:
        if self.load and (others := [key for key in self.config if key not in OF_POSITIONS]):
            raise ValueError(
                f"model.config.{others[0]} changes random weights, so model.load must be false; with pretrained ones "
                f"model.config may have only {' and '.join(OF_POSITIONS)}. To change others, "
                "edit config.json in a copy of the folder, and set "
                "model.source to it; model.resize = true adds tokens to their vocabulary"
            )
        return self
