"""The feed-forward half of a block as a mixture of experts: norm, router, and each expert's two products of its own tokens.

No token is dropped, and nothing waits for the sizes of groups. The router runs in float32. Its weight of a token multiplies the
input of the expert's second product.

Legend: T tokens, V experts that a token visits, E experts, H hidden_size, F ffn_hidden_size, R rows of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.experts import ExpertsGemms, PermutedRows
from octavo.fp8.quantizer import active_recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.activation import is_gated
from octavo.kernels.experts.activation import expert_activation, expert_activation_backward
from octavo.kernels.experts.permute import add_copies
from octavo.kernels.experts.routes import Routes, make_routes
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer
from octavo.nn.linear import compute_dtype, init_linear_
from octavo.nn.norm import NormParameters, ResidualLayer, check_input, flat, reset_norm_, residual_norm, unflat
from octavo.nn.te_arguments import Draws, Init, Tracker, activation_of


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture and the rule of its router.

    Attributes:
        count: experts.
        visited: experts of a token, those of the largest probabilities.
        normalized: the weights of a token are its probabilities divided by their sum.
        jitter: in training the layer's input is multiplied by uniform numbers from 1 − jitter to 1 + jitter.
    """

    count: int
    visited: int
    normalized: bool = True
    jitter: float = 0.0


class LayerNormMoE(ResidualLayer):
    """y = Σ wₑ · fc2ₑ(activation(fc1ₑ(norm(x)))) over the experts e that the router chooses for a token.

    Parameters: layer_norm_weight, layer_norm_bias (LayerNorm only), router_weight [E, H], fc1_weight [E, F or 2F, H] (gated
    activations have all gates before all ups), fc2_weight [E, H, F]. FP8 scales are an expert's own. The router is never FP8.

    Raises:
        InputError: a count that is not possible, such as more visited experts than there are.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float,
        experts: Experts,
        *,
        normalization: str = "RMSNorm",
        activation: str = "swiglu",
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= experts.visited <= experts.count:
            raise InputError(
                f"a token visits {experts.visited} of {experts.count} experts: use 1 to {experts.count} (num_experts_per_tok)."
            )
        if not 0 <= experts.jitter < 1:
            raise InputError(f"router_jitter_noise = {experts.jitter}: use 0, for none, or a number below 1 such as 0.01.")
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.hidden_size, self.ffn_hidden_size, self.eps, self.experts = hidden_size, ffn_hidden_size, eps, experts
        self.normalization, self.activation = normalization, activation_of(activation)
        self.init_methods, self.draws = (init_method, output_layer_init_method), Draws(get_rng_state_tracker)
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size, **make))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size, **make)) if normalization == "LayerNorm" else None
        self.router_weight = nn.Parameter(torch.empty(experts.count, hidden_size, **make))
        fc1_rows = ffn_hidden_size * (2 if is_gated(self.activation) else 1)
        self.fc1_weight = nn.Parameter(torch.empty(experts.count, fc1_rows, hidden_size, **make))
        self.fc2_weight = nn.Parameter(torch.empty(experts.count, hidden_size, ffn_hidden_size, **make))
        self.fc1_fp8_state = ModuleState(self, "fc1_weight", experts=experts.count)
        self.fc2_fp8_state = ModuleState(self, "fc2_weight", experts=experts.count)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: a norm that changes nothing, and those of `init_linear_` for each matrix."""
        reset_norm_(self.layer_norm_weight, self.layer_norm_bias)
        first, second = self.init_methods
        with self.draws():
            init_linear_(self.router_weight, None, first)
            for weight, method in ((self.fc1_weight, first), (self.fc2_weight, second)):
                for matrix in weight.unbind():
                    init_linear_(matrix, None, method)

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        delta: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """input, delta [..., H] → (input + delta, the experts' result, the routing of this call).

        counted: bool [...], the tokens of the routing; all if absent. The routing is float32 [2E + 2], sums over tokens: of
        each expert's probability, of the tokens that visit it, of log-sum-exp² of the router's logits, and of its entropy. The
        gradient goes through the first and the third.
        """
        check_input(self, input, delta, size=self.hidden_size)
        dtype = compute_dtype(input)
        norm = NormParameters(self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        h, normed = residual_norm(input, delta, norm, dtype)
        x = flat(normed)
        if self.training and self.experts.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.experts.jitter, 1 + self.experts.jitter)
        logits = _Router.apply(x, self.router_weight)
        scores, chosen = self._route(logits)
        y = self._run(x, scores, chosen, dtype, is_first_microbatch)
        return h, unflat(y, input.shape), self._routing(logits, chosen, None if counted is None else counted.flatten())

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, V], and experts, int64 [T, V], of each token."""
        scores, chosen = torch.topk(logits.softmax(-1), self.experts.visited, dim=-1)
        return scores / scores.sum(-1, keepdim=True) if self.experts.normalized else scores, chosen

    def _routing(self, logits: Tensor, chosen: Tensor, counted: Tensor | None) -> Tensor:
        logarithms = logits.log_softmax(-1)
        probabilities = logarithms.exp()
        squares = logits.logsumexp(-1).square()
        with torch.no_grad():
            entropy = -(probabilities * logarithms).sum(-1)
            visits = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
        columns = torch.cat((probabilities, visits, squares[:, None], entropy[:, None]), 1)
        return columns.sum(0) if counted is None else (columns * counted[:, None]).sum(0)

    # A compiler expects no experts without rows, nor kernels whose grids follow from sizes on the device.
    @torch.compiler.disable
    def _run(self, x: Tensor, scores: Tensor, chosen: Tensor, dtype: torch.dtype, first: bool | None) -> Tensor:
        if not x.shape[0]:
            return x.to(dtype)
        routes = make_routes(chosen, self.experts.count)
        with autocast.scales_of_forward():
            fc1, fc2 = (
                ExpertsGemms(state, weight, routes, active_recipe(state, x.device), dtype, first)
                for state, weight in ((self.fc1_fp8_state, self.fc1_weight), (self.fc2_fp8_state, self.fc2_weight))
            )
            y: Tensor = _ExpertsFunction.apply(
                x.to(dtype), scores, self.fc1_weight, self.fc2_weight, *routes.tensors, routes, fc1, fc2, self.activation
            )
        return y

    def extra_repr(self) -> str:
        """Shape and experts, for `print(model)`."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation}, "
            f"experts={self.experts.count}, visited={self.experts.visited}"
        )


def balancing_loss(routing: Tensor, visits: Tensor, visited: int) -> Tensor:
    """E · Σₑ (share of the tokens that visit e) · (mean probability of e), over all layers: float32 [].

    routing: float32 [layers, 2E + 2], as `LayerNormMoE` returns it, of this rank's tokens. visits: float32 [E], of all layers
    and ranks; the gradient goes through the probabilities alone. The sum over ranks is the loss of all tokens.
    """
    tokens = visits.sum() / visited
    experts = len(visits)
    return experts * (visits * routing[:, :experts].sum(0)).sum() / tokens.clamp(min=1).square()


def router_z_loss(routing: Tensor, visits: Tensor, visited: int) -> Tensor:
    """Mean of log-sum-exp² of the router's logits over all tokens and layers: float32 [].

    Source: ST-MoE (arXiv:2202.08906), equation 5, of one layer; Megatron-LM has the same, and adds layers up where this is
    their mean, as the balancing loss. Arguments and the sum over ranks are those of `balancing_loss`.
    """
    return routing[:, -2].sum() / (visits.sum() / visited).clamp(min=1)


def routing_metrics(routing: Tensor, visited: int) -> dict[str, Any]:
    """What a run records of its experts: over all layers, from sums [layers, 2E + 2] over all tokens.

    `expert_load` has the tokens of each expert relative to the mean, `largest_expert_load` the largest in any layer,
    `router_entropy` the mean of a token and layer in nats; no token is dropped.
    """
    experts = routing.shape[1] // 2 - 1
    visits = routing[:, experts : 2 * experts].double()
    total = visits.sum().clamp(min=1)
    layers = visits * (experts / visits.sum(1, keepdim=True).clamp(min=1))
    return {
        "expert_load": (visits.sum(0) * (experts / total)).tolist(),
        "largest_expert_load": layers.max().item(),
        "router_entropy": (routing[:, -1].double().sum() * (visited / total)).item(),
        "dropped_tokens": 0,
    }


class _Router(torch.autograd.Function):
    """x [T, H] · weight [E, H]ᵀ in float32: bf16 operands of one dtype are multiplied exactly and added up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            if x.device.type == "cuda" and x.dtype == weight.dtype != torch.float32:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = (grad @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
            dw = (grad.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw


class _ExpertsFunction(torch.autograd.Function):
    """Permutation, first product, activation, second product, sum of copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, weight_1: Tensor, weight_2: Tensor,
        tokens: Tensor, rows: Tensor, experts: Tensor, ends: Tensor,
        routes: Routes, fc1: ExpertsGemms, fc2: ExpertsGemms, curve: str,
    ) -> Tensor:  # fmt: skip
        want_x, want_scores, want_w1, want_w2 = ctx.needs_input_grad[:4]
        want_hidden = want_x or want_scores or want_w1
        again_x, again_activated = want_w1 and fc1.quantizer.recomputable, want_w2 and fc2.quantizer.recomputable
        weights = torch.zeros(len(tokens), device=x.device).scatter_(0, rows.flatten().long(), scores.float().flatten())
        x_q = fc1.quantizer.input(PermutedRows(x, routes), columnwise=want_w1 and not again_x, recompute=again_x)
        w1 = fc1.quantizer.weight(weight_1)
        hidden = fc1.output(x_q, w1, routes)
        activated = fc2.quantizer.input(
            lambda quantizer: expert_activation(curve, hidden, weights, routes, quantizer),
            columnwise=want_w2 and not again_activated, recompute=again_activated,
        )  # fmt: skip
        w2 = fc2.quantizer.weight(weight_2)
        y = add_copies(fc2.output(activated, w2, routes), routes)
        ctx.call = routes.tile, routes.splits, fc1, fc2, curve
        fc1.quantizer.routes = fc2.quantizer.routes = None  # a backward takes those that were saved
        ctx.save_for_backward(
            tokens, rows, experts, ends, weights, x if again_x else None,
            hidden if want_hidden or again_activated else None,
            *_columnwise(x_q, want_w1 and not again_x), *_columnwise(activated, want_w2 and not again_activated),
            *(fc1.quantizer.saved_weight(w1, weight_1) if want_x else NOTHING),
            *(fc2.quantizer.saved_weight(w2, weight_2) if want_hidden else NOTHING),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: tuple[int, tuple[int, ...] | None, ExpertsGemms, ExpertsGemms, str] = ctx.call
        tile, splits, fc1, fc2, curve = call
        tokens, rows, experts, ends, weights, x, hidden, *saved = ctx.saved_tensors
        x_q, activated, w1, w2 = (QuantizedTensor(*saved[i : i + 4]) for i in (0, 4, 8, 12))
        routes = Routes(tokens, rows, experts, ends, tile, splits)
        for gemms in (fc1, fc2):
            gemms.quantizer.begin_backward()
            gemms.quantizer.routes = routes
        want_x, want_scores, want_w1, want_w2 = ctx.needs_input_grad[:4]
        want_hidden = want_x or want_scores or want_w1
        dy_q = fc2.quantizer.grad_output(PermutedRows(flat(dy), routes), rowwise=want_hidden, columnwise=want_w2)
        recompute = fc2.quantizer.recomputed_input() if want_w2 and fc2.quantizer.recomputable else None
        dx = d_scores = d_w1 = d_w2 = None
        if want_hidden:
            d_activated = fc2.grad_input(dy_q, fc2.quantizer.restored_weight(w2), routes)
            d_weights: Tensor | None = None

            def produce(quantizer: Quantizer) -> QuantizedTensor:
                nonlocal recompute, activated, d_weights
                stored = quantizer.rowwise or quantizer.columnwise  # otherwise only the amax is measured
                d_hidden, repeated, d_weights = expert_activation_backward(
                    curve, d_activated, hidden, weights, routes, quantizer, recompute=recompute if stored else None
                )
                if repeated is not None:
                    activated, recompute = repeated, None
                return d_hidden

            d_hidden = fc1.quantizer.grad_output(produce, rowwise=want_x, columnwise=want_w1)
            if d_weights is None:  # nothing but the router is trained
                produce(Quantizer(fc1.out_dtype))
            d_scores = d_weights[routes.rows.long()] if d_weights is not None and want_scores else None
            del d_activated
        if recompute is not None:
            activated = expert_activation(curve, hidden, weights, routes, recompute)
        if want_w2:
            d_w2 = fc2.grad_weight(dy_q, activated, routes)
        if want_w1:
            if x is not None:
                x_q = PermutedRows(x, routes)(fc1.quantizer.recomputed_input())
            d_w1 = fc1.grad_weight(d_hidden, x_q, routes)
        if want_x:
            dx = add_copies(fc1.grad_input(d_hidden, fc1.quantizer.restored_weight(w1), routes), routes)
        return dx, d_scores, d_w1, d_w2, *(None,) * 8


def _columnwise(x: QuantizedTensor, wanted: bool) -> QuantizedTensor:
    """The layout of the weight gradient."""
    return QuantizedTensor(None, None, *x.columnwise) if wanted else NOTHING
