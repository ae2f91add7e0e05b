"""[model]: the transformer, its weights and its dtypes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from octavo.config.section import Section
from octavo.dtypes import DtypeName


class ModelConfig(Section):
    """The transformer, its weights and dtypes."""

    source: str = Field(description='A Hugging Face folder or id, or a built-in shape such as "llama-1b".')
    load: bool = Field(False, description="Start from the pretrained weights of `source` instead of random ones.")
    dtype: DtypeName = Field(
        "bfloat16",
        description="Dtype of activations and of products outside FP8; float16 uses train.loss_scale.",
    )
    params_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Dtype of parameters, gradients and optimizer states; float32 gives master weights."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Overrides of the Hugging Face config, such as hidden_size (random weights only).",
    )

    @model_validator(mode="after")
    def _check_overrides(self) -> ModelConfig:
        if self.load and self.config:
            raise ValueError("model.config changes the shape, so model.load must be false")
        return self
