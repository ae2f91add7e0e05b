"""The feed-forward half of a block: norm, first product, activation, second product.

Gate and up are one matrix, whose rows are interleaved in blocks of `gate_up_block`, gate rows first. So any slice of whole
blocks, of a tensor-parallel rank or of a shard, has the gates of its ups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.linear import LinearGemms, operands, saved_input_bytes
from octavo.fp8.quantizer import (
    DenseOperand,
    WeightUse,
    WithHighPrecision,
    active_recipe,
    repeats_input,
    restored_weight_bytes,
    saved_weight_bytes,
)
from octavo.fp8.recipe import Recipe
from octavo.fp8.scaling import ModuleState
from octavo.fp8.tensor_parallel import ColumnParallelGemms, RowParallelGemms
from octavo.kernels import gemm, reference
from octavo.kernels.activation import activation, activation_backward, is_gated
from octavo.kernels.autograd import SavedBytes, refuse_second_derivative, refuse_transforms
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.nn.arguments import Draws, Init, Tracker, activation_of, check, results
from octavo.nn.linear import NormedCall, NormedLayer, joined, norm_linear, pass_on, product
from octavo.nn.lora import Adapters, Joint, added
from octavo.nn.norm import (
    NormForm,
    NormProducer,
    backward_through_norm,
    check_input,
    flat,
    saved_by_norm,
    unflat,
)

GATE_UP_BLOCK = 32
"""Most rows of a block: 32 FP8 columns of the product fill a memory sector, and a degree that divides F / 32 cuts no block."""


def gate_up_block(ffn_hidden_size: int) -> int:
    """Rows of gate that stand before as many rows of up: 32, or the largest power of two below that divides the size."""
    return math.gcd(ffn_hidden_size, GATE_UP_BLOCK)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """gate [F, ...] and up [F, ...] as one [2F, ...] in blocks of rows."""
    block = gate_up_block(gate.shape[0])
    return torch.stack([gate.unflatten(0, (-1, block)), up.unflatten(0, (-1, block))], 1).flatten(0, 2)


def deinterleave(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `interleave`: views of gate [F, ...] and up [F, ...] as far as strides allow."""
    blocks = gate_up.unflatten(0, (-1, 2, gate_up_block(gate_up.shape[0] // 2)))
    return blocks[:, 0].flatten(0, 1), blocks[:, 1].flatten(0, 1)


class _NormMlpFunction(torch.autograd.Function):
    """h = residual + delta [..., K], and the MLP of its norm [..., N], with weight_1 [F or 2F, K] and weight_2 [N, F].

    Returns also the first `inputs` (0, 1 or 2) of the products' inputs, [..., K] and [..., F], in high precision.
    """

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, bias_2: Tensor | None,
        form: NormForm, fc1: LinearGemms, fc2: LinearGemms, curve: str, block: int, recompute: bool, skip_output: bool,
        inputs: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        want_x, (want_w1, want_b1, want_w2, want_b2) = any(ctx.needs_input_grad[:4]), ctx.needs_input_grad[4:8]
        want_hidden = want_x or want_w1 or want_b1
        # Recomputed: the activation's result, if its cast can be repeated, and on request the first product.
        fc2.want(want_hidden, want_w2, want_b2, recasts=True)
        recompute = recompute and (want_hidden or fc2.recasts)
        fc1.want(want_x, want_w1, want_b1, recomputes_output=recompute)
        skip_output = skip_output and inputs < 2
        # If the output is skipped, only backward's operands are computed.
        needs_hidden = not (skip_output and recompute and fc2.recasts and fc2.knows_input_scale)
        producer = NormProducer(residual, delta, form.of(norm_weight, norm_bias))
        normed = producer.with_high_precision(fc1.out_dtype) if inputs else None
        x, w1 = fc1.input(normed or producer), fc1.weight(weight_1, rowwise=needs_hidden)
        hidden = fc1.output(x, w1, bias_1) if needs_hidden else None

        def activate(quantizer: Quantizer, high_precision_out: Tensor | None = None) -> QuantizedTensor:
            assert hidden is not None
            return activation(curve, hidden, block, quantizer, high_precision_out=high_precision_out)

        second: WithHighPrecision | None = None
        if inputs > 1:
            second = WithHighPrecision(activate, (producer.sum.shape[0], weight_2.shape[1]), fc2.out_dtype, residual.device)
        activated = fc2.input(second or activate, rowwise=not skip_output)
        w2 = fc2.weight(weight_2, rowwise=not skip_output, cache=not recompute)
        if skip_output:
            y = residual.new_empty(flat(residual).shape[0], weight_2.shape[0], dtype=fc2.out_dtype)
        else:
            y = fc2.output(activated, w2, bias_2)
        ctx.set_materialize_grads(False)
        ctx.call = form, fc1, fc2, curve, block
        ctx.shape = residual.shape
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        ctx.save_for_backward(
            h, producer.stats, norm_weight,
            hidden if (want_hidden or fc2.recasts) and not recompute else None, bias_1 if recompute else None,
            second.matrix if second is not None and fc2.recasts else None,
            *fc1.saved(x, w1, weight_1), *fc2.saved(activated, w2, weight_2),
        )  # fmt: skip
        matrices = [cast(Tensor, one.matrix) for one in (normed, second) if one is not None]
        leading = residual.shape[:-1]
        # Views, into which autograd refuses writes: backward may read the matrices.
        return h, unflat(y, (*leading, weight_2.shape[0])), *(one.view(*leading, one.shape[1]) for one in matrices)

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, dy: Tensor | None, *d_inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call: tuple[NormForm, LinearGemms, LinearGemms, str, int] = ctx.call
        form, fc1, fc2, curve, block = call
        refuse_second_derivative("these layers")
        h, stats, norm_weight, hidden, bias_1, second, *saved = ctx.saved_tensors
        d_first, d_second = (*d_inputs, None, None)[:2]
        if dy is None and d_second is None:
            if d_first is None:
                return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * 14
            return *backward_through_norm(ctx, form, flat(d_first), h, norm_weight, stats, d_residual), *(None,) * 12
        if dy is None:
            dy = h.new_zeros(ctx.shape, dtype=fc2.out_dtype)
        (x, w1), (activated, w2) = operands(saved), operands(saved, 1)
        operand = DenseOperand(flat(dy), column_sum=fc2.wants_bias)
        dy_q = fc2.grad_output(operand)
        d_b2 = operand.column_sum() if fc2.wants_bias else None
        recompute = fc2.recomputed_input() if fc2.recasts else None
        if hidden is None and (fc2.wants_x or recompute is not None):
            hidden, x, w1 = fc1.recomputed_output(x, w1, bias_1)
        through: tuple[Tensor | None, ...] = (None,) * 4
        d_w1 = d_b1 = d_w2 = None
        if fc2.wants_x:
            d_activated = fc2.grad_input(dy_q, w2)
            if d_second is not None:
                d_activated += flat(d_second)

            def produce(quantizer: Quantizer) -> QuantizedTensor:
                nonlocal recompute, activated, d_b1
                stored = quantizer.rowwise or quantizer.columnwise  # otherwise only the amax is measured
                d_hidden, repeated, bias = activation_backward(
                    curve, d_activated, hidden, block, quantizer,
                    recompute=recompute if stored and second is None else None, bias=fc1.wants_bias and stored,
                )  # fmt: skip
                d_b1 = bias if bias is not None else d_b1
                if repeated is not None:
                    activated, recompute = repeated, None
                return d_hidden

            d_hidden = fc1.grad_output(produce)
            if fc1.wants_bias and d_b1 is None:  # nothing but the bias is trained
                produce(Quantizer(fc1.out_dtype))
            del d_activated
        if recompute is not None:
            activated = activation(curve, hidden, block, recompute) if second is None else DenseOperand(second)(recompute)
        if fc2.wants_weight:
            d_w2 = fc2.grad_weight(dy_q, activated)
        d_normed = None
        if fc1.wants_weight or fc1.wants_x:
            d_normed, d_w1 = fc1.both_gradients(d_hidden, x, w1)
        if d_normed is not None:
            if d_first is not None:
                d_normed += flat(d_first)
            through = backward_through_norm(ctx, form, d_normed, h, norm_weight, stats, d_residual)
        return *through, d_w1, d_b1, d_w2, d_b2, *(None,) * 8


class _AdaptedNormMlpFunction(torch.autograd.Function):
    """`_NormMlpFunction` of frozen matrices with adapters of one or both: h [..., K] and the result [..., N].

    The activation's kernel reads the first product with its adapters, and stores the second's input in high precision beside
    the FP8 operand. In backward no weight has a gradient, so that no operand is transposed. trained: A and B of each adapter.
    """

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, delta: Tensor | None, norm_weight: Tensor, norm_bias: Tensor | None,
        weight_1: Tensor, bias_1: Tensor | None, weight_2: Tensor, bias_2: Tensor | None,
        form: NormForm, fc1: LinearGemms, fc2: LinearGemms, curve: str, block: int, skip_output: bool,
        first: Adapters | None, second: Adapters | None, *trained: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        want_x, count = any(ctx.needs_input_grad[:4]), 0 if first is None else len(first.trained)
        fc1.want(want_x, False)
        fc2.want(want_x or first is not None, False)
        producer = NormProducer(residual, delta, form.of(norm_weight, norm_bias))
        normed = None if first is None else producer.with_high_precision(fc1.out_dtype)
        x, w1 = fc1.input(normed or producer), fc1.weight(weight_1)
        hidden = fc1.output(x, w1, bias_1)
        saved_1: tuple[Tensor | None, ...] = (None,) * 4
        if first is not None and normed is not None:
            matrix, joint = cast(Tensor, normed.matrix), first.joint(trained[:count], fc1.out_dtype)
            reduced = joint.reduced(matrix)
            joint.add_(hidden, reduced)
            saved_1 = matrix, reduced, *joint

        def activate(quantizer: Quantizer, high_precision_out: Tensor | None = None) -> QuantizedTensor:
            return activation(curve, hidden, block, quantizer, high_precision_out=high_precision_out)

        shape = producer.sum.shape[0], weight_2.shape[1]
        with_copy = None if second is None else WithHighPrecision(activate, shape, fc2.out_dtype, residual.device)
        activated = fc2.input(with_copy or activate, rowwise=with_copy is not None or not skip_output)
        w2 = fc2.weight(weight_2, rowwise=not skip_output)
        y = producer.sum.new_empty(shape[0], weight_2.shape[0], dtype=fc2.out_dtype) if skip_output else None
        y = fc2.output(activated, w2, bias_2) if y is None else y
        saved_2: tuple[Tensor | None, ...] = (None,) * 4
        if second is not None and with_copy is not None:
            matrix, joint = cast(Tensor, with_copy.matrix), second.joint(trained[count:], fc2.out_dtype)
            reduced = joint.reduced(matrix)
            if not skip_output:
                joint.add_(y, reduced)
            saved_2 = matrix, reduced, *joint
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shape = (form, fc1, fc2, curve, block, first, second, len(trained)), residual.shape
        h = residual if delta is None else unflat(producer.sum, residual.shape)
        pass_on(ctx, h)
        ctx.save_for_backward(
            h, producer.stats, norm_weight, hidden if fc2.wants_x else None, *saved_1, *saved_2,
            *fc1.saved(x, w1, weight_1), *fc2.saved(activated, w2, weight_2),
        )  # fmt: skip
        return h, unflat(y, (*residual.shape[:-1], weight_2.shape[0]))

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, d_out: Tensor | None) -> tuple[Tensor | None, ...]:
        form, fc1, fc2, curve, block, first, second, count = ctx.call
        refuse_second_derivative("these layers")
        h, stats, norm_weight, hidden, matrix_1, reduced_1, a_1, b_1, matrix_2, reduced_2, a_2, b_2, *saved = ctx.saved_tensors
        if d_out is None:
            return d_residual, d_residual if ctx.needs_input_grad[1] else None, *(None,) * (14 + count)
        dy = flat(d_out)
        of_second: list[Tensor] = []
        through: tuple[Tensor | None, ...] = (None,) * 4
        d_activated = fc2.gradients(DenseOperand(dy), saved, 1)[0]
        if second is not None:
            joint = Joint(a_2, b_2)
            d_reduced, d_a, d_b = joint.gradients(dy, matrix_2, reduced_2)
            of_second = second.split(d_a, d_b)
            if d_activated is not None:
                gemm.add_mm_(d_activated, d_reduced, joint.a)
        if d_activated is None:
            return *through, *(None,) * 12, *of_second
        of_first: list[Tensor] = []

        def produce(quantizer: Quantizer, high_precision_out: Tensor | None = None) -> QuantizedTensor:
            return activation_backward(curve, d_activated, hidden, block, quantizer, high_precision_out=high_precision_out)[0]

        if first is None:
            d_normed = fc1.gradients(produce, saved)[0]
        else:
            d_hidden = WithHighPrecision(produce, tuple(hidden.shape), fc1.out_dtype, hidden.device)
            d_normed, joint = fc1.gradients(d_hidden, saved)[0], Joint(a_1, b_1)
            if d_hidden.matrix is None:  # no input has a gradient
                d_hidden(Quantizer(fc1.out_dtype))
            d_reduced, d_a, d_b = joint.gradients(cast(Tensor, d_hidden.matrix), matrix_1, reduced_1)
            of_first = first.split(d_a, d_b)
            if d_normed is not None:
                gemm.add_mm_(d_normed, d_reduced, joint.a)
        if d_normed is not None:
            through = backward_through_norm(ctx, form, d_normed, h, norm_weight, stats, d_residual)
        return *through, *(None,) * 12, *of_first, *of_second


class _ActivationFunction(torch.autograd.Function):
    """The activation by its kernels: hidden [..., F or 2F] → [..., F] in its dtype; only `hidden` is saved for backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, curve: str, block: int) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.call = curve, block
        out = activation(curve, flat(hidden), block, Quantizer(hidden.dtype)).high_precision
        return unflat(out, (*hidden.shape[:-1], out.shape[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these layers")
        (hidden,) = ctx.saved_tensors
        curve, block = ctx.call
        d_hidden, _, _ = activation_backward(curve, flat(grad), flat(hidden), block, Quantizer(hidden.dtype))
        return unflat(d_hidden.high_precision, hidden.shape), None, None


class MlpUse(NamedTuple):
    """Inputs of the memory estimate of an MLP, or of a rank's experts, for forward and backward.

    Attributes:
        hidden_size, ffn: columns of the first matrix and of the second.
        fc1_rows: rows of the first matrix, of one expert.
        first, second: recipes of both products.
        use: `WeightUse` of both weights.
        experts: matrices in a stack.
    """

    hidden_size: int
    ffn: int
    fc1_rows: int
    first: Recipe | None
    second: Recipe | None
    use: WeightUse
    experts: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of both weights."""
        return self.experts * self.fc1_rows * self.hidden_size, self.experts * self.hidden_size * self.ffn

    def saved_weights(self, *, recompute: bool = False) -> list[int]:
        """Bytes of saved copies of weights; recompute: the first product is recomputed."""
        fc1, fc2 = (self.experts * self.fc1_rows, self.hidden_size), (self.experts * self.hidden_size, self.ffn)
        first = saved_weight_bytes(*fc1, self.first, self.use, rowwise=recompute, recast=recompute)
        return first + saved_weight_bytes(*fc2, self.second, self.use, recast=recompute)

    def backward_bytes(self, rows: int, products: int, *, recompute: bool = False) -> int:
        """Temporaries after the gradient of the output [rows, hidden]; products: the share of the last two products."""
        element = self.use.compute_bytes
        activated = rows * self.ffn * (element if self.second is None else 1) if repeats_input(self.second) else 0
        d_activated, d_hidden = rows * self.ffn * element, rows * self.fc1_rows * (element if self.first is None else 2)
        wide = 0 if repeats_input(self.first) else rows * self.fc1_rows * 4  # in float32 before its cast
        w2 = restored_weight_bytes(self.sizes[1], self.second, self.use, recast=recompute)
        return activated + d_hidden + max(d_activated + wide, w2 + d_activated, products)


def saved_by_mlp(rows: int, of: MlpUse, kind: str, *, recompute: bool, runs: int = 1) -> SavedBytes:
    """Bytes that `LayerNormMLP` saves for backward of `rows` rows, first of the residual stream.

    kind: of the norm. recompute: `checkpoint`, or several `chunks`. runs: as in `saved_input_bytes`, of the second product.
    """
    element = of.use.compute_bytes
    activations = saved_by_norm(rows, of.hidden_size, element, kind)
    activations += saved_input_bytes(rows, of.hidden_size, of.first, element, rowwise=recompute)
    if not recompute:
        activations.append(rows * of.fc1_rows * element)
    if not repeats_input(of.second):
        activations += saved_input_bytes(rows, of.ffn, of.second, element, runs=runs)
    return SavedBytes(activations, of.saved_weights(recompute=recompute))


def backward_bytes_of_mlp(
    tokens: int, of: MlpUse, *, chunks: int, recompute: bool, tensor: int = 1, summand: int | None = None
) -> int:
    """Temporaries of the backward of `LayerNormMLP` at their peak, gradients of both matrices among them.

    tensor: ranks that share the matrices, each with `tokens` tokens of the stream; products read the tokens of all ranks.
    summand: bytes per element of their partial sums; None: those of the compute dtype.
    """
    width, element = of.hidden_size, of.use.compute_bytes
    summand = summand or element
    n = min(tokens, math.ceil(tokens / chunks / CHUNK_ROWS) * CHUNK_ROWS)
    several, every = n < tokens, n * tensor
    dy = n * width * element + (every * width * 2 if of.second is not None else 0)  # of the stream, its FP8 in both layouts
    if several:  # the whole gradient of the stream, beside each part's
        dy += (2 * tokens - n) * width * element
    hidden = every * of.fc1_rows * element if recompute else 0
    d_weights = (2 if several else 1) * sum(of.sizes) * of.use.parameter_bytes
    w1 = restored_weight_bytes(of.sizes[0], of.first, of.use, recast=recompute)
    d_normed = n * width * (element + summand)
    if tensor > 1:  # partial sums, the gathered input, and the gathered dy in FP8 or in the compute dtype
        d_normed += every * width * (summand + (element if of.first is None else 2))
        dy += n * width if of.second is not None else every * width * element
    return dy + hidden + of.backward_bytes(every, d_weights + w1 + d_normed, recompute=recompute)


def backward_bytes_with_adapters(tokens: int, of: MlpUse, *, summand: int | None = None) -> int:
    """Temporaries of the backward of a `LayerNormMLP` of frozen matrices with adapters at their peak.

    summand: as of `backward_bytes_of_mlp`.
    """
    width, element = of.hidden_size, of.use.compute_bytes
    dy = tokens * width * (element + (0 if of.second is None else 1))
    # Of the activation's result and of its input, which is cast from high precision.
    d_hidden = tokens * of.ffn * element + tokens * of.fc1_rows * (element + (0 if of.first is None else 1))
    w1 = of.sizes[0] * (element if of.first is None else 1)
    return dy + d_hidden + w1 + tokens * width * (summand or element)


CHUNK_ROWS = 128
"""Tokens of a chunk are a multiple of this, the rows that share a scale under block scaling."""


class LayerNormMLP(NormedLayer):
    """y = activation(norm(x) · fc1_weightᵀ + fc1_bias) · fc2_weightᵀ + fc2_bias. x, y: [..., hidden_size].

    Parameters: layer_norm_weight, layer_norm_bias (LayerNorm only), fc1_weight [F or 2F, hidden_size] (gated activations have
    both halves), fc1_bias, fc2_weight [hidden_size, F], fc2_bias. activation: a name of `octavo.nn.arguments.ACTIVATIONS`,
    where "gelu" is Transformer Engine's, with the tanh. `return_bias` (of fc2) and `return_layernorm_output` are as in
    `LayerNormLinear`, and `output_layer_init_method` is the `init_method` of fc2. `checkpoint`: the first product is not saved
    for backward but recomputed, to the same bits; under `torch.compile` the compiler decides on what is saved. The attribute
    `gate_rows` is the number of rows in which gate and up alternate; with ffn_hidden_size all of gate precedes all of up. The
    attribute `chunks` is the number of chunks of tokens, which run one after the other in forward and in backward, with the
    temporaries of one. Several imply `checkpoint`; each is a separate tensor to the scales of current and rowwise scaling, and
    the gradients of weights are summed in their dtype.

    Raises:
        InputError: an unsupported argument or value, or `checkpoint` with `return_layernorm_output`.
    """

    chunks = 1
    skip_output = False
    """As `Linear.skip_output`, in every dtype; the product's operands are not computed either."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        checkpoint: bool = False,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        check("LayerNormMLP", others, LayerNormMLP.__init__)
        if checkpoint and return_layernorm_output:
            raise InputError(
                "LayerNormMLP(checkpoint=True, return_layernorm_output=True): its parts would run separately, without "
                "recomputation. Leave one out, or wrap the layer in torch.utils.checkpoint."
            )
        activation = activation_of(activation, activation_params)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        super().__init__(hidden_size, eps, normalization, zero_centered_gamma, make)
        self.return_bias, self.return_layernorm_output, self.checkpoint = return_bias, return_layernorm_output, checkpoint
        self.init_methods, self.draws = (init_method, output_layer_init_method), Draws(get_rng_state_tracker)
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.gate_rows = gate_up_block(ffn_hidden_size)
        fc1_rows = ffn_hidden_size * (2 if is_gated(activation) else 1)
        self.fc1_weight = nn.Parameter(torch.empty(fc1_rows, hidden_size, **make))
        self.fc1_bias = nn.Parameter(torch.empty(fc1_rows, **make)) if bias else None
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size, **make))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size, **make)) if bias else None
        self.fc1_fp8_state = ModuleState(self, "fc1_weight")
        self.fc2_fp8_state = ModuleState(self, "fc2_weight")
        self.reset_parameters()

    def forward(
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        delta: Tensor | None = None,
        return_residual: bool = False,
        return_inputs: bool = False,
    ) -> Any:
        """input [..., hidden_size] → the same shape, without the residual.

        delta and return_residual are for `forward_residual`. return_inputs: the inputs of both products in high precision are
        returned last, the norm's output [..., hidden_size] and the activation's [..., F]; not in chunks.

        Raises:
            InputError: `return_inputs` with `return_residual`.
        """
        if self.chunks == 1 or self.return_layernorm_output or return_inputs or self.adapted:
            what = (input, delta, is_first_microbatch, return_residual, self.fc2_bias)
            return self._run(*what, return_input=return_inputs, inputs=2 if return_inputs else 0)
        check_input(self, input, delta, size=self.hidden_size)
        refuse_transforms("layers that begin with a norm")
        rows, more = flat(input), None if delta is None else flat(delta)
        size = max(1, math.ceil(rows.shape[0] / self.chunks / CHUNK_ROWS)) * CHUNK_ROWS
        deltas = itertools.repeat(None) if more is None else more.split(size)
        parts = zip(rows.split(size), deltas, strict=False)
        outputs = [self._run(x, d, is_first_microbatch, True, self.fc2_bias) for x, d in parts]
        # No view: FSDP2 warns of a block whose result is one.
        h, y = (torch.ops.aten._unsafe_view(torch.cat(part), input.shape) for part in zip(*outputs, strict=True))
        return (h, y) if return_residual else results(y, self.fc2_bias, return_bias=self.return_bias)

    def _matrices(self) -> list[tuple[Tensor, Tensor | None, Init | None]]:
        fc1, fc2 = self.init_methods
        return [(self.fc1_weight, self.fc1_bias, fc1), (self.fc2_weight, self.fc2_bias, fc2)]

    def _products(self, normed: Tensor, call: NormedCall, inputs: int = 0) -> tuple[Tensor, ...]:
        how = call.dtype, call.first
        hidden = product(normed, self.fc1_weight, self.fc1_bias, self.fc1_fp8_state, *how)
        activated = reference.activation(self.activation, hidden, self.gate_rows)
        activated = activated.to(call.dtype) if inputs > 1 else activated
        y = product(activated, self.fc2_weight, call.bias, self.fc2_fp8_state, *how)
        return (y, activated) if inputs > 1 else (y,)

    def _with_adapters(self, call: NormedCall, *, inputs: int = 0) -> tuple[Tensor, ...]:
        """Norm and first product as one function, then the activation, whose input the adapters change, and the second."""
        residual, delta, norm, dtype, first, bias = call
        of_fc1 = joined(self, self.fc1_weight, self.fc1_bias, "lora_fc1")
        of_fc2 = joined(self, self.fc2_weight, bias, "lora_fc2")
        pair = of_fc1, of_fc2
        frozen = not any(part is not None and part.requires_grad for matrix in self._matrices() for part in matrix[:2])
        there = [name for name in ("lora_fc1", "lora_fc2") if name in self._modules]
        if frozen and sum(adapters is not None for adapters in pair) == len(there):
            states = self.fc1_fp8_state, self.fc2_fp8_state
            weights = self.fc1_weight, self.fc2_weight
            fc1, fc2 = (
                LinearGemms(state, weight, active_recipe(state, residual.device), dtype, first)
                for state, weight in zip(states, weights, strict=True)
            )
            trained = [matrix for adapters in pair if adapters is not None for matrix in adapters.trained]
            outputs: tuple[Tensor, ...] = _AdaptedNormMlpFunction.apply(
                residual, delta, norm.weight, norm.bias, weights[0], self.fc1_bias, weights[1], bias,
                norm.form, fc1, fc2, self.activation, self.gate_rows, self.skip_output, *pair, *trained,
            )  # fmt: skip
            return outputs
        how: Any = self.fc1_fp8_state, self.fc1_weight, active_recipe(self.fc1_fp8_state, residual.device), dtype, first
        gemms = LinearGemms(*how) if self.tensor is None else ColumnParallelGemms(self.tensor, *how)
        bias = bias if self.tensor is None else self.tensor.replicated(bias)
        h, hidden, normed = norm_linear(residual, delta, norm, self.fc1_weight, self.fc1_bias, gemms)
        hidden = added(hidden, self, normed, "lora_fc1")
        activated = _ActivationFunction.apply(hidden, self.activation, self.gate_rows)
        how = self.fc2_fp8_state, dtype, first
        y = product(activated, self.fc2_weight, bias, *how, skip_output=self.skip_output, tensor=self.tensor)
        return h, added(y, self, activated, "lora_fc2")

    def _with_norm(self, call: NormedCall, *, inputs: int = 0, **options: Any) -> tuple[Tensor, ...]:
        states = self.fc1_fp8_state, self.fc2_fp8_state
        fused = self.checkpoint or any(active_recipe(state, call.x.device) is not None for state in states)
        if torch.compiler.is_compiling() or not (inputs and fused):
            return super()._with_norm(call, inputs=inputs, **options)
        with autocast.scales_of_forward():
            _, y, normed, *activated = self._fused(call, inputs=inputs)
        return normed, y, *activated

    def _fused(self, call: NormedCall, *, inputs: int = 0) -> tuple[Tensor, ...]:
        residual, delta, norm, dtype, first, bias = call
        first_state, second_state, device = self.fc1_fp8_state, self.fc2_fp8_state, residual.device
        weight1, weight2 = self.fc1_weight, self.fc2_weight
        how1: Any = first_state, weight1, active_recipe(first_state, device), dtype, first
        how2: Any = second_state, weight2, active_recipe(second_state, device), dtype, first
        if self.tensor is None:
            fc1, fc2 = LinearGemms(*how1), LinearGemms(*how2)
        else:
            fc1, fc2 = ColumnParallelGemms(self.tensor, *how1), RowParallelGemms(self.tensor, *how2)
            bias = self.tensor.replicated(bias)
        return _NormMlpFunction.apply(
            residual, delta, norm.weight, norm.bias, weight1, self.fc1_bias, weight2, bias,
            norm.form, fc1, fc2, self.activation, self.gate_rows,
            self.checkpoint or self.chunks > 1, self.skip_output, inputs,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shape and activation, for `print(model)`."""
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, activation={self.activation}"
