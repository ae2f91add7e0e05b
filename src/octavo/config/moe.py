"""[moe]: expert balancing by a loss or an assignment, the z loss, and the router's noise."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.config.section import Section


class MoeConfig(Section):
    """Router losses (SMP's names) and noise (Hugging Face's name). Absent keys are taken from the model's config."""

    moe_load_balancing: Literal["aux_loss", "sinkhorn", "balanced", "none"] | None = Field(
        None,
        description='"aux_loss": the loss balances the experts; "sinkhorn": in training an iteration over the tokens of a rank '
        'assigns them; "balanced": in training tokens are assigned round robin; "none": none of these. Absent: by '
        "`output_router_logits`.",
    )
    moe_aux_loss_coeff: float | None = Field(
        None, ge=0, description="Coefficient of the balancing loss; `router_aux_loss_coef` when absent."
    )
    moe_z_loss_coeff: float | None = Field(
        None,
        ge=0,
        description="Coefficient of the router's z loss, the mean squared log-sum-exp of its logits; no z loss when absent.",
    )
    router_jitter_noise: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Largest distance from 1 of the random numbers that multiply the input of router and experts in training; "
        "as in the model's config when absent.",
    )

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {key: value for key, value in self.model_dump().items() if value is not None}
