"""[moe]: expert balancing by a loss or an assignment, the z loss, and the router's noise."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.config.section import Section


class MoeConfig(Section):
    """Router losses (SMP's names) and noise (Hugging Face's name). Absent keys are taken from the model's config."""

    moe_load_balancing: Literal["aux_loss", "sinkhorn", "balanced", "none"] | None = Field(
        None,
        description='"aux_loss": a balancing loss. "sinkhorn": in training a Sinkhorn iteration over the tokens of a rank '
        'assigns them. "balanced": in training tokens are assigned round robin. "none": no balancing. Default: '
        "by the model's `output_router_logits`.",
    )
    moe_aux_loss_coeff: float | None = Field(
        None, ge=0, description="Coefficient of the balancing loss, by default `router_aux_loss_coef`."
    )
    moe_z_loss_coeff: float | None = Field(
        None,
        ge=0,
        description="Coefficient of the router z loss, the mean squared log-sum-exp of the router's logits; by default none.",
    )
    router_jitter_noise: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Largest deviation from 1 of the random factors of the input of router and experts in training. "
        "Default: the model's config.",
    )

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {key: value for key, value in self.model_dump().items() if value is not None}
