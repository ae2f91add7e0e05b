"""[moe]: the losses that balance a mixture of experts, and the noise of its router."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from octavo.config.section import Section

OTHER_BALANCING = ("sinkhorn", "balanced")
"""Values of SMP's `moe_load_balancing` that are not here."""


class MoeConfig(Section):
    """Losses of the router and its noise: SMP's names, and Hugging Face's for the noise. Absent keys: as the model's config."""

    moe_load_balancing: Literal["aux_loss", "none"] | None = Field(
        None, description='"aux_loss": the loss balances the experts; "none": it does not. Absent: by `output_router_logits`.'
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

    @field_validator("moe_load_balancing", mode="before")
    @classmethod
    def _refuse_other_balancing(cls, value: Any) -> Any:
        if value in OTHER_BALANCING:
            raise ValueError(
                "tokens go to the experts of the largest probabilities here, in training as in inference, and no other "
                'assignment is built in; use "aux_loss", which balances them by the loss, or "none"'
            )
        return value

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {key: value for key, value in self.model_dump().items() if value is not None}
