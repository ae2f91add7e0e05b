"""The feed-forward half of a block as a mixture of experts (MoE): norm, router, experts.

No token is dropped. The router runs in float32. Assignments other than by the largest probabilities apply in training only, to
this call's tokens on this rank.

Legend: T tokens, K experts per token (top-k), E experts, H hidden_size, F ffn_hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor, nn

from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError, unknown
from octavo.fp8.quantizer import repeats_input
from octavo.kernels.autograd import SavedBytes, refuse_transforms
from octavo.kernels.experts import assignment, router
from octavo.kernels.experts.routes import most_rows
from octavo.nn.arguments import Creation, Draws, activation_of
from octavo.nn.expert_lora import RouterAdapters
from octavo.nn.experts import StackedExperts, saved_by_experts
from octavo.nn.linear import compute_dtype, init_linear_
from octavo.nn.mlp import MlpUse
from octavo.nn.norm import NormForm, ResidualLayer, check_input, flat, reset_norm_, residual_norm, saved_by_norm, unflat

Assignment = Literal["largest", "sinkhorn", "balanced"]


@dataclass(frozen=True)
class Experts:
    """The experts of an MoE layer and the rule of its router.

    Attributes:
        count: number of experts.
        top_k: experts per token.
        normalized: divide a token's weights by their sum.
        jitter: in training, multiply the layer's input by uniform numbers from 1 − jitter to 1 + jitter.
        assignment: "largest": a token goes to the experts of its largest probabilities. "sinkhorn": training assigns tokens
            by Sinkhorn's iteration; weights, in evaluation too, are unnormalised probabilities, or with one expert per token
            the sigmoid of its logit. "balanced": training assigns tokens round robin.
    """

    count: int
    top_k: int
    normalized: bool = True
    jitter: float = 0.0
    assignment: Assignment = "largest"


class LayerNormMoE(ResidualLayer):
    """y = Σ wₑ · fc2ₑ(activation(fc1ₑ(norm(x)))) over the experts e that the router chooses for a token. x, y: [..., H].

    Parameters: layer_norm_weight, layer_norm_bias (LayerNorm only), router_weight [E, H], and those of `experts`, a
    `StackedExperts`. The router is never FP8.

    Ranks of a tensor group (`tensor`) norm and route their tokens. If each holds a slice of every expert, the tokens of all are
    gathered, and the parts of their results summed. Gathers are in the compute dtype: each expert has a separate scale. If
    ranks hold whole experts, a rank's tokens are sent to the ranks of their experts, as without the group.

    Raises:
        InputError: an impossible count, such as more experts per token than experts.
    """

    tensor: TensorGroup | None = None
    """The ranks with other slices of the experts, or with other experts; inputs and outputs have this rank's tokens."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float,
        experts: Experts,
        *,
        normalization: str = "RMSNorm",
        zero_centered_gamma: bool = False,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        **create: Unpack[Creation],
    ) -> None:
        super().__init__()
        count, top_k = experts.count, experts.top_k
        if not (isinstance(count, int) and count >= 1):
            raise InputError(f"{count} experts (num_local_experts or num_experts of a config): use a whole number from 1.")
        if not (isinstance(top_k, int) and 1 <= top_k <= count):
            raise InputError(
                f"{top_k} experts per token of {count} experts (num_experts_per_tok of a config): use a whole number "
                f"from 1 to {count}."
            )
        if not 0 <= experts.jitter < 1:
            raise InputError(
                f"router_jitter_noise = {experts.jitter} (jitter of a layer): use 0 for none, or a number below 1."
            )
        if experts.assignment not in get_args(Assignment):
            raise unknown("assignment", str(experts.assignment), get_args(Assignment))
        make: dict[str, Any] = {"dtype": create.get("params_dtype"), "device": create.get("device")}
        self.hidden_size, self.config, self.norm = hidden_size, experts, NormForm(normalization, eps, zero_centered_gamma)
        self.init_method, self.draws = create.get("init_method"), Draws(create.get("get_rng_state_tracker"))
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size, **make))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size, **make)) if normalization == "LayerNorm" else None
        self.router_weight = nn.Parameter(torch.empty(experts.count, hidden_size, **make))
        self.experts = StackedExperts(
            hidden_size, ffn_hidden_size, experts.count, activation_of(activation, activation_params),
            (self.init_method, create.get("output_layer_init_method")), self.draws, **make,
        )  # fmt: skip
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: a norm with factors of 1, and a router's matrix by `init_linear_`."""
        reset_norm_(self.layer_norm_weight, self.layer_norm_bias, zero_centered=self.norm.zero_centered)
        with self.draws():
            init_linear_(self.router_weight, None, self.init_method)

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        delta: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """input, delta [..., H] → (input + delta, the experts' result, the routing of this call).

        counted: bool [...], the tokens of the routing, and of Sinkhorn's iteration; all if absent. The routing is float32 [2E +
        2], sums over tokens: of each expert's probability, of the tokens sent to it, of log-sum-exp² of the router's logits,
        and of its entropy. The gradient flows through the first and the third.
        """
        check_input(self, input, delta, size=self.hidden_size)
        refuse_transforms("layers that begin with a norm")
        dtype = compute_dtype(input)
        parameters = self.layer_norm_weight, self.layer_norm_bias, self.router_weight
        if self.tensor is not None:
            parameters = map(self.tensor.replicated, parameters)  # type: ignore[assignment]
        weight, bias, of_router = parameters
        router_weight: Tensor = of_router
        if (adapters := self._modules.get("lora_router")) is not None:
            assert isinstance(adapters, RouterAdapters)
            router_weight = adapters.added(router_weight)
        h, normed = residual_norm(input, delta, self.norm.of(weight, bias), dtype)
        x = flat(normed)
        if self.training and self.config.jitter:
            x = x * self._noise(x, 1 - self.config.jitter, 1 + self.config.jitter)
        x, logits = _Router.apply(x, router_weight)
        counted = None if counted is None else counted.flatten()
        largest = self.config.assignment == "largest" or not (self.training or self.config.assignment == "sinkhorn")
        scores, chosen = self._route(logits) if largest else self._assign(logits, counted)
        y = self._computed(x.to(dtype), scores, chosen, is_first_microbatch)
        return h, unflat(y, input.shape), self._routing(logits, chosen, counted)

    def _computed(self, x: Tensor, scores: Tensor, chosen: Tensor, first: bool | None) -> Tensor:
        """The experts' result [T, H] of x [T, H]. Slices of experts compute it from the gathered tokens of all tensor ranks."""
        if self.tensor is None or self.experts.group is not None:
            out: Tensor = self.experts(x, scores, chosen, first)
            return out
        of_all = self.tensor.gathered(x[None])[0], self.tensor.gathered(scores[None])[0], self.tensor.gather(chosen)
        return self.tensor.scattered(self.experts(*of_all, first, x.dtype)[None], x.dtype)[0]

    def _noise(self, x: Tensor, low: float, high: float) -> Tensor:
        """Uniform numbers for x [T, H], of each token of a tensor group its own."""
        return torch.empty_like(x).uniform_(low, high) if self.tensor is None else self.tensor.uniform(x, low, high)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, K], and experts, int64 [T, K], of each token."""
        scores, chosen = torch.topk(logits.softmax(-1), self.config.top_k, dim=-1)
        return scores / scores.sum(-1, keepdim=True) if self.config.normalized else scores, chosen

    def _assign(self, logits: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_route` for the other assignments; the gradient flows only through the weights."""
        config = self.config
        if config.assignment == "balanced":
            chosen = assignment.round_robin(logits, config.top_k)
            scores = logits.softmax(-1).gather(1, chosen)
            return scores / scores.sum(-1, keepdim=True) if config.normalized else scores, chosen
        if self.training:
            chosen = assignment.sinkhorn(logits, config.top_k, counted)
        else:
            chosen = torch.topk(logits, config.top_k, dim=-1).indices
        return (logits.sigmoid() if config.top_k == 1 else logits.softmax(-1)).gather(1, chosen), chosen

    def _routing(self, logits: Tensor, chosen: Tensor, counted: Tensor | None) -> Tensor:
        logarithms = logits.log_softmax(-1)
        probabilities = logarithms.exp()
        squares = logits.logsumexp(-1).square()
        with torch.no_grad():
            entropy = -(probabilities * logarithms).sum(-1)
            assigned = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
        columns = torch.cat((probabilities, assigned, squares[:, None], entropy[:, None]), 1)
        return columns.sum(0) if counted is None else (columns * counted[:, None]).sum(0)

    def extra_repr(self) -> str:
        """Width and experts per token, for `print(model)`."""
        other = "" if self.config.assignment == "largest" else f", assignment={self.config.assignment}"
        return f"hidden_size={self.hidden_size}, top_k={self.config.top_k}{other}"


def saved_by_moe(tokens: int, of: MlpUse, experts: int, top_k: int, kind: str, row_tile: int, *, routed: int) -> SavedBytes:
    """Bytes that `LayerNormMoE` saves for backward: first of the residual stream. Small tensors of the router are estimates.

    of: this rank's experts, which are assumed to get an equal share of the tokens' copies. kind: of the norm. row_tile: of
    `Routes`. routed: tokens whose norm and router this rank computes; in a tensor group each rank has a part of all.
    """
    element, copies = of.use.compute_bytes, tokens * top_k
    activations = [*saved_by_norm(routed, of.hidden_size, element, kind), routed * of.hidden_size * element]
    spread = of.experts < experts
    if (spread or routed < tokens) and repeats_input(of.first):  # the experts' input, beside the router's
        activations.append((copies if spread else tokens) * of.hidden_size * element)
    # `chosen`, two `scores`, and `rows`
    probabilities, of_copies = 6 * routed * experts * 4, routed * top_k * (8 + 2 * 4) + copies * 4
    stacked = saved_by_experts(most_rows(copies, of.experts, row_tile), of)
    return SavedBytes([*activations, probabilities, of_copies, *stacked.activations], stacked.weight_copies)


def balancing_loss(routing: Tensor, tokens_per_expert: Tensor, top_k: int) -> Tensor:
    """E · Σₑ (share of the tokens sent to e) · (mean probability of e), over all layers: float32 [].

    routing: float32 [layers, 2E + 2], as `LayerNormMoE` returns it, of this rank's tokens. tokens_per_expert: float32 [E],
    summed over layers and ranks; the gradient flows only through the probabilities. The sum over ranks is the loss of all
    tokens.
    """
    tokens = tokens_per_expert.sum() / top_k
    experts = len(tokens_per_expert)
    return experts * (tokens_per_expert * routing[:, :experts].sum(0)).sum() / tokens.clamp(min=1).square()


def router_z_loss(routing: Tensor, tokens_per_expert: Tensor, top_k: int) -> Tensor:
    """Mean of log-sum-exp² of the router's logits over all tokens and layers: float32 [].

    Source: ST-MoE (arXiv:2202.08906), equation 5, of one layer; Megatron-LM has the same, and adds layers up where this is
    their mean, as the balancing loss. Arguments and the sum over ranks are those of `balancing_loss`.
    """
    return routing[:, -2].sum() / (tokens_per_expert.sum() / top_k).clamp(min=1)


def routing_metrics(routing: Tensor, top_k: int) -> dict[str, Any]:
    """Figures of experts in a run's records: over all layers, from sums [layers, 2E + 2] over all tokens.

    `expert_load` has the tokens of each expert relative to the mean, `largest_expert_load` the largest in any layer,
    `router_entropy` the mean of a token and layer in nats; no token is dropped.
    """
    experts = routing.shape[1] // 2 - 1
    tokens_per_expert = routing[:, experts : 2 * experts].double()
    total = tokens_per_expert.sum().clamp(min=1)
    layers = tokens_per_expert * (experts / tokens_per_expert.sum(1, keepdim=True).clamp(min=1))
    return {
        "expert_load": (tokens_per_expert.sum(0) * (experts / total)).tolist(),
        "largest_expert_load": layers.max().item(),
        "router_entropy": (routing[:, -1].double().sum() * (top_k / total)).item(),
        "dropped_tokens": 0,
    }


class _Router(torch.autograd.Function):
    """x [T, H] for the experts, unchanged, and the logits x · weightᵀ, float32 [T, E]; weight [E, H].

    Backward adds the experts' gradient of x inside its product, so that no separate pass sums the two.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return x, router.logits(x, weight)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        if grad is None:
            return dx, None
        want_x, want_weight = ctx.needs_input_grad
        with torch.autocast(x.device.type, enabled=False):
            return router.gradients(grad, x, weight, dx, want_x=want_x, want_weight=want_weight)
