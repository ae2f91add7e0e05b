"""Stacked experts of an MoE layer: each runs two products over its tokens. No kernel waits for the sizes of groups.

Legend: T tokens, K experts per token (top-k), E experts, H hidden_size, F ffn_hidden_size, R rows of all experts. Under
expert parallelism E and R are this rank's, and T counts received copies of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.collectives.experts import Exchange, ExpertGroup
from octavo.fp8 import autocast
from octavo.fp8.experts import ExpertsGemms, PermutedRows
from octavo.fp8.linear import SAVED, operands, saved_input_bytes
from octavo.fp8.quantizer import active_recipe, repeats_input, restored_weight_bytes
from octavo.fp8.scaling import ModuleState
from octavo.kernels.activation import is_gated
from octavo.kernels.autograd import SavedBytes, refuse_second_derivative
from octavo.kernels.experts.activation import expert_activation, expert_activation_backward
from octavo.kernels.experts.permute import add_copies, permute
from octavo.kernels.experts.routes import Routes, make_routes
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer
from octavo.kernels.reference import wide
from octavo.nn.arguments import Draws, Init
from octavo.nn.expert_lora import Pairs, StackedAdapters
from octavo.nn.linear import init_linear_
from octavo.nn.mlp import MlpUse


class StackedExperts(nn.Module):
    """y = Σ wₑ · fc2ₑ(activation(fc1ₑ(x))) over the experts e of each token. x, y: [T, H]; weights of tokens: [T, K].

    Parameters: fc1_weight [E · F or E · 2F, H] and fc2_weight [E · H, F], the matrices of all experts one after the other; with
    a gated activation all gates of an expert, then all its ups. FSDP2 shards rows: any number of ranks can hold parts of any
    number of experts. Each expert has separate FP8 scales. The weight of a token multiplies the input of the second product.

    Children `lora_fc1` and `lora_fc2`, both or none, are adapters of frozen matrices.
    """

    skip_output = False
    """As `LayerNormMLP.skip_output`."""
    lora_fc1: StackedAdapters
    lora_fc2: StackedAdapters

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        count: int,
        activation: str,
        init_methods: tuple[Init | None, Init | None],
        draws: Draws,
        *,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size, self.count, self.activation = hidden_size, ffn_hidden_size, count, activation
        self.init_methods, self.draws = init_methods, draws
        fc1_rows = ffn_hidden_size * (2 if is_gated(activation) else 1)
        self.fc1_weight = nn.Parameter(torch.empty(count * fc1_rows, hidden_size, dtype=dtype, device=device))
        self.fc2_weight = nn.Parameter(torch.empty(count * hidden_size, ffn_hidden_size, dtype=dtype, device=device))
        self.fc1_fp8_state = ModuleState(self, "fc1_weight", experts=count)
        self.fc2_fp8_state = ModuleState(self, "fc2_weight", experts=count)
        self.group: ExpertGroup | None = None
        """The ranks over which the experts are distributed; the parameters are those of this rank's experts."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: those of `init_linear_` for each matrix."""
        with self.draws():
            for weight, method in zip((self.fc1_weight, self.fc2_weight), self.init_methods, strict=True):
                for matrix in weight.chunk(self.count):
                    init_linear_(matrix, None, method)

    @property
    def adapters(self) -> tuple[StackedAdapters, ...]:
        """The adapters of the first and of the second product, or none."""
        return (self.lora_fc1, self.lora_fc2) if "lora_fc1" in self._modules else ()

    @property
    def spread(self) -> tuple[nn.Parameter, ...]:
        """The parameters, if experts are distributed over ranks; otherwise none."""
        if self.group is None:
            return ()
        return (self.fc1_weight, self.fc2_weight, *(each for one in self.adapters for each in one.trained))

    # A compiler expects no experts without rows, nor kernels whose grids follow from sizes on the device.
    @torch.compiler.disable
    def forward(
        self,
        x: Tensor,
        scores: Tensor,
        chosen: Tensor,
        is_first_microbatch: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, H], of each token the weights float32 [T, K] and the experts int64 [T, K] → [T, H] of x's dtype.

        dtype: of the products; None: that of x. A wider x has its values: result and gradient of x are then not rounded to it.
        """
        dtype = dtype or x.dtype
        trip = None
        if self.group is not None:
            # Adapters read the copies before their cast.
            fp8 = self.group.fp8 and not self.adapters and active_recipe(self.fc1_fp8_state, x.device) is not None
            trip = _Trip(self.group.exchange(chosen), x, scores, fp8=fp8)
            routes = make_routes(trip.exchange.experts[:, None], self.group.local)
        elif x.shape[0]:
            routes = make_routes(chosen, self.count)
        else:
            return x
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.fc1_weight, self.fc2_weight)]
        with autocast.scales_of_forward():
            fc1, fc2 = (
                ExpertsGemms(state, weight, routes, active_recipe(state, x.device), dtype, is_first_microbatch)
                for state, weight in zip((self.fc1_fp8_state, self.fc2_fp8_state), weights, strict=True)
            )
            fc1.input_grad_dtype = fc2.output_dtype = x.dtype
            y: Tensor = _ExpertsFunction.apply(
                x, scores, *weights, *routes.tensors, routes, fc1, fc2, self.activation, trip, self.skip_output, self.adapters,
                *(matrix for one in self.adapters for matrix in one.operands()),
            )  # fmt: skip
        return y

    def extra_repr(self) -> str:
        """Shape and number, for `print(model)`."""
        return (
            f"count={self.count}, hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}"
        )


class _Trip:
    """A dispatch in flight: copies of the rows of x [T, H], with their weights, to the ranks of their experts."""

    def __init__(self, exchange: Exchange, x: Tensor, scores: Tensor, *, fp8: bool) -> None:
        self.exchange, self.fp8 = exchange, fp8
        with torch.no_grad():
            copies = x[exchange.tokens]  # while the host waits for the sizes
            weights = torch.empty_like(exchange.rows, dtype=torch.promote_types(scores.dtype, torch.float32)).flatten()
            weights.scatter_(0, exchange.rows.flatten(), scores.to(weights.dtype).flatten())
            exchange.sizes()
            self.copies, self.weights = exchange.dispatch(copies, fp8=fp8), exchange.dispatch(weights[:, None])


class _ExpertsFunction(torch.autograd.Function):
    """Permutation, first product, activation, second product, sum of copies: x [T, H] → [T, H].

    scores [T, K]; weight_1 [E·F, H], or [E·2F, H] with a gate; weight_2 [E·H, F]; tokens, rows, experts, ends: of `Routes`.

    Dispatch overlaps the cast of the first weight, and in backward that of the second; the combine of the input's gradients
    overlaps the products of the weights' gradients. The combine of forward is exposed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, weight_1: Tensor, weight_2: Tensor,
        tokens: Tensor, rows: Tensor, experts: Tensor, ends: Tensor,
        routes: Routes, fc1: ExpertsGemms, fc2: ExpertsGemms, curve: str, trip: _Trip | None, skip_output: bool,
        adapters: tuple[StackedAdapters, ...], *trained: Tensor,
    ) -> Tensor:  # fmt: skip
        # Under no_grad a parameter still needs its gradient by needs_input_grad, but no operand has the layout for it.
        want_x, want_scores, want_w1, want_w2 = (fc1.grads and wanted for wanted in ctx.needs_input_grad[:4])
        want_hidden = want_x or want_scores or want_w1 or (fc1.grads and bool(adapters))
        fc1.want(want_x, want_w1, recasts=True)
        fc2.want(want_hidden, want_w2, recasts=True)
        weight_1, weight_2 = (weight.unflatten(0, (len(ends), -1)) for weight in (weight_1, weight_2))
        w1 = fc1.weight(weight_1)
        exchange, tokens_here, y_dtype = None if trip is None else trip.exchange, x.shape[0], x.dtype
        x = x.to(fc1.out_dtype)
        if trip is not None:
            x, scores = trip.copies.wait(), trip.weights.wait()
        scores = wide(scores)
        weights = scores.new_zeros(len(tokens)).scatter_(0, rows.flatten().long(), scores.flatten())
        x_q = fc1.input(PermutedRows(x, routes))
        hidden = fc1.output(x_q, w1)
        pairs = _pairs(adapters, trained, fc1.out_dtype, routes)
        reduced: list[Tensor] = []
        if adapters:
            reduced.append(pairs[0].reduced(_rows(x, routes, fc1.out_dtype), routes))
            pairs[0].add_(hidden, reduced[0], routes)

        def activate(quantizer: Quantizer) -> QuantizedTensor:
            return expert_activation(curve, hidden, weights, routes, quantizer)

        activated = fc2.input(activate, rowwise=not skip_output)
        w2 = fc2.weight(weight_2, rowwise=not skip_output)
        if adapters:
            reduced.append(pairs[1].reduced(activate(Quantizer(fc2.out_dtype)).high_precision, routes))
        if skip_output:
            y = x.new_empty(tokens_here, weight_2.shape[1], dtype=y_dtype)
        else:
            result = fc2.output(activated, w2)
            if adapters:
                pairs[1].add_(result, reduced[1], routes)
            y = add_copies(result, routes.rows, routes.tile)
            if exchange is not None:
                y = add_copies(exchange.collect(y).wait(), exchange.rows, routes.tile)
        ctx.call = routes.tile, routes.splits, fc1, fc2, curve, exchange, trip is not None and trip.fp8, adapters
        fc1.routes = fc2.routes = None  # backward sets the saved ones
        ctx.save_for_backward(
            tokens, rows, experts, ends, weights, x if fc1.recasts or adapters else None,
            hidden if want_hidden or fc2.recasts else None,
            *fc1.saved(x_q, w1, weight_1), *fc2.saved(activated, w2, weight_2),
            *reduced, *(matrix for pair in pairs for matrix in pair),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: tuple[
            int, tuple[int, ...] | None, ExpertsGemms, ExpertsGemms, str, Exchange | None, bool, tuple[StackedAdapters, ...]
        ] = ctx.call
        tile, splits, fc1, fc2, curve, exchange, fp8, adapters = call
        tokens, rows, experts, ends, weights, x, hidden, *saved = ctx.saved_tensors
        (x_q, w1), (activated, w2) = operands(saved), operands(saved, 1)
        routes = Routes(tokens, rows, experts, ends, tile, splits)
        refuse_second_derivative("these layers")
        fc1.routes = fc2.routes = routes
        flight = None if exchange is None else exchange.dispatch(dy[exchange.tokens], fp8=fp8)
        second = fc2.restored_weight(w2) if fc2.wants_x else NOTHING
        dy = dy if flight is None else flight.wait()
        dy_q = fc2.grad_output(PermutedRows(dy, routes))
        of_adapters = _AdapterBackward(adapters, saved[2 * SAVED :], routes) if adapters else None
        recompute = fc2.recomputed_input() if fc2.recasts else None
        dx = d_scores = d_w1 = d_w2 = None
        if fc2.wants_x:
            d_activated = fc2.grad_input(dy_q, second)
            del second
            d_weights: Tensor | None = None
            if of_adapters is not None:
                of_adapters.second(
                    _rows(dy, routes, fc2.out_dtype), d_activated,
                    expert_activation(curve, hidden, weights, routes, Quantizer(fc2.out_dtype)).high_precision,
                )  # fmt: skip

            def produce(quantizer: Quantizer) -> QuantizedTensor:
                nonlocal recompute, activated, d_weights
                stored = quantizer.rowwise or quantizer.columnwise  # otherwise only the amax is measured
                d_hidden, repeated, d_weights = expert_activation_backward(
                    curve, d_activated, hidden, weights, routes, quantizer, recompute=recompute if stored else None
                )
                if repeated is not None:
                    activated, recompute = repeated, None
                return d_hidden

            d_hidden = fc1.grad_output(produce)
            if of_adapters is not None:
                of_adapters.first(produce(Quantizer(fc1.out_dtype)).high_precision, _rows(x, routes, fc1.out_dtype))
            elif d_weights is None:  # nothing but the router is trained
                produce(Quantizer(fc1.out_dtype))
            d_scores = d_weights[routes.rows.long()] if d_weights is not None and ctx.needs_input_grad[1] else None
            del d_activated
        if fc1.wants_x:
            dx = fc1.grad_input(d_hidden, w1)
            if of_adapters is not None:
                of_adapters.add_of_input_(dx)
            dx = add_copies(dx, routes.rows, tile)
        if exchange is not None:
            back = [None if x is None else exchange.collect(x) for x in (dx, d_scores)]
        if recompute is not None:
            activated = expert_activation(curve, hidden, weights, routes, recompute)
        if fc2.wants_weight:
            d_w2 = fc2.grad_weight(dy_q, activated)
        if fc1.wants_weight:
            if x is not None:
                x_q = PermutedRows(x, routes)(fc1.recomputed_input())
            d_w1 = fc1.grad_weight(d_hidden, x_q)
        if exchange is not None:
            dx, d_scores = (None if x is None else x.wait() for x in back)
            dx = None if dx is None else add_copies(dx, exchange.rows, tile)
            d_scores = None if d_scores is None else d_scores[exchange.rows, 0]
        d_w1, d_w2 = (None if dw is None else dw.flatten(0, 1) for dw in (d_w1, d_w2))
        return dx, d_scores, d_w1, d_w2, *(None,) * 11, *(() if of_adapters is None else of_adapters.gradients)


def _rows(x: Tensor, routes: Routes, dtype: torch.dtype) -> Tensor:
    """Rows of x [T, K] in the order of their experts, in `dtype`."""
    return permute(x, routes, Quantizer(dtype)).high_precision


def _pairs(adapters: Sequence[StackedAdapters], trained: Sequence[Tensor], dtype: torch.dtype, routes: Routes) -> list[Pairs]:
    matrices = zip(adapters, trained[::2], trained[1::2], strict=True)
    return [one.pairs(a, b, dtype, routes) for one, a, b in matrices]


class _AdapterBackward:
    """The backward of the adapters of both products.

    saved: the reduced rows of both, then their pairs.
    """

    def __init__(self, adapters: Sequence[StackedAdapters], saved: Sequence[Tensor], routes: Routes) -> None:
        self._adapters, self._routes = adapters, routes
        self._reduced, self._pairs = saved[:2], (Pairs(*saved[2:4]), Pairs(*saved[4:6]))
        self._d_reduced: Tensor
        self._found: list[Tensor] = []

    def second(self, dy: Tensor, d_activated: Tensor, activated: Tensor) -> None:
        """Compute the gradients of the second product's adapters; add that of their input to d_activated. All are rows."""
        pair = self._pairs[1]
        d_reduced, d_b = pair.of_result(dy, self._reduced[1], self._routes)
        pair.add_of_input_(d_activated, d_reduced, self._routes)
        self._found = [pair.of_a(d_reduced, activated, self._routes), d_b]

    def first(self, d_hidden: Tensor, x: Tensor) -> None:
        """Compute the gradients of the first product's adapters."""
        self._d_reduced, d_b = self._pairs[0].of_result(d_hidden, self._reduced[0], self._routes)
        self._found = [self._pairs[0].of_a(self._d_reduced, x, self._routes), d_b, *self._found]

    def add_of_input_(self, dx: Tensor) -> None:
        """Add the gradient of the first product's input to dx."""
        self._pairs[0].add_of_input_(dx, self._d_reduced, self._routes)

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of A and B of both products."""
        pairs = zip(self._adapters, self._found[::2], self._found[1::2], strict=True)
        return [matrix for one, d_a, d_b in pairs for matrix in one.gradients(d_a, d_b)]


def saved_by_experts(rows: int, of: MlpUse) -> SavedBytes:
    """Bytes that `StackedExperts` saves for backward of `rows` rows, without its input and scores."""
    element = of.use.compute_bytes
    of_rows = torch.int32.itemsize + torch.float32.itemsize  # `tokens` and `weights`
    activations = [rows * of_rows, rows * of.fc1_rows * element]
    for columns, recipe in ((of.hidden_size, of.first), (of.ffn, of.second)):
        if not repeats_input(recipe):
            activations += saved_input_bytes(rows, columns, recipe, element)
    return SavedBytes(activations, of.saved_weights())


def backward_bytes_of_experts(
    rows: int,
    tokens: int,
    copies: int,
    of: MlpUse,
    *,
    trained: Literal["weights", "adapters"] | None = "weights",
    summand: int | None = None,
) -> int:
    """Temporaries of the backward of `StackedExperts` at their peak, gradients of both stacks of matrices among them.

    tokens: of this rank. copies: token copies exchanged with other ranks. trained: the parameters with gradients.
    summand: bytes per element of a result or gradient that ranks sum; None: those of the compute dtype.
    """
    width, element = of.hidden_size, of.use.compute_bytes
    summand = summand or element
    dy = tokens * width * summand + rows * width * (element if of.second is None else 2)
    dy += 2 * copies * width * element  # send and receive buffers, of the output's or of the input's gradient
    x, dx = rows * width * (element if of.first is None else 1), rows * width * summand
    w1 = restored_weight_bytes(of.sizes[0], of.first, of.use)
    if trained == "weights":
        return dy + of.backward_bytes(rows, sum(of.sizes) * of.use.parameter_bytes + max(x, w1 + dx))
    # Also in high precision: the gradients of both results, and the inputs of both products.
    adapters = rows * (2 * width + of.ffn + of.fc1_rows) * element if trained == "adapters" else 0
    return dy + adapters + of.backward_bytes(rows, w1 + dx)
