"""`GroupedLinear`: one linear layer per expert, each applied to its rows of one input.

Each operand of each expert has separate scales: results equal those of one `Linear` per expert, bit for bit if products run one
by one. On Hopper the products of all experts are one launch in bfloat16, and under the rowwise recipe for output and input
gradient. The splits are read on the host, since shapes follow from them: the host waits for a tensor on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.fp8 import autocast
from octavo.fp8.linear import GroupedGemms, LinearGemms
from octavo.fp8.quantizer import active_recipe
from octavo.fp8.recipe import Granularity
from octavo.fp8.scaling import ModuleState
from octavo.kernels.autograd import refuse_second_derivative
from octavo.kernels.experts.gemm import takes_groups
from octavo.nn.arguments import Draws, Init, Tracker, check
from octavo.nn.linear import compute_dtype, init_linear_, product
from octavo.nn.norm import check_input


class GroupedLinear(nn.Module):
    """yᵢ = xᵢ · weightᵢᵀ + biasᵢ for each expert i. x: [rows, in_features], split by rows into xᵢ; y: [rows, out_features].

    Parameters: weight0 … weight{n-1} [out_features, in_features]; bias0 … [out_features]. Names and arguments are Transformer
    Engine's; `octavo.nn.arguments` lists those that are not supported. With `return_bias` no bias is added, and the layer
    returns (output, [bias0, …]).
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        return_bias: bool = False,
        init_method: Init | None = None,
        get_rng_state_tracker: Tracker | None = None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check("GroupedLinear", others, GroupedLinear.__init__)
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.return_bias, self.init_method = return_bias, init_method
        self.draws = Draws(get_rng_state_tracker, rng_tracker_name)
        make: dict[str, Any] = {"dtype": params_dtype, "device": device}
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(out_features, in_features, **make)))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(out_features, **make)) if bias else None)
            setattr(self, f"weight{i}_fp8_state", ModuleState(self, f"weight{i}"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values, as of one `Linear` per expert."""
        with self.draws():
            for weight, bias in zip(self.weights, self.biases, strict=True):
                init_linear_(weight, bias, self.init_method)

    @property
    def weights(self) -> list[Tensor]:
        """The matrix of each expert, [N, K]."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    @property
    def biases(self) -> list[Tensor | None]:
        """The bias of each expert, [N], or None."""
        return [getattr(self, f"bias{i}") for i in range(self.num_gemms)]

    def forward(
        self, inp: Tensor, m_splits: Sequence[int] | Tensor, is_first_microbatch: bool | None = None, **others: Any
    ) -> Tensor | tuple[Tensor, list[Tensor | None]]:
        """inp [M, in_features], the rows of expert 0 first → [M, out_features]; leading dimensions are joined to rows.

        m_splits: rows of each expert, 0 allowed; a tensor is best on the CPU. is_first_microbatch: `first` of
        `LinearQuantizer`.

        Raises:
            InputError: the splits are not `num_gemms` numbers that add up to the rows.
        """
        if others:
            check("GroupedLinear.forward", others, GroupedLinear.forward)
        check_input(self, inp, size=self.in_features)
        x = inp.reshape(-1, self.in_features)
        splits = self._splits(m_splits, x.shape[0])
        biases: list[Tensor | None] = [None] * self.num_gemms if self.return_bias else self.biases
        y: Tensor = self._experts(x, splits, biases, compute_dtype(inp), is_first_microbatch)
        y = y.view(*inp.shape[:-1], self.out_features)
        return (y, [None if bias is None else bias.to(y.dtype) for bias in self.biases]) if self.return_bias else y

    # A compiler would compile anew for every split, and does not expect experts without rows.
    @torch.compiler.disable
    def _experts(
        self, x: Tensor, splits: list[int], biases: list[Tensor | None], dtype: torch.dtype, first: bool | None
    ) -> Tensor:
        weights = self.weights
        states: list[ModuleState] = [getattr(self, f"weight{i}_fp8_state") for i in range(self.num_gemms)]
        recipes = [active_recipe(state, x.device) for state in states]
        recipe = recipes[0]
        if recipe is None:
            grouped = takes_groups(x.device, dtype, weights)
        else:  # the only granularity whose groups run in one launch
            grouped = all(how.granularity is Granularity.ROW for how in recipe.casts.values())
        if grouped and all(other == recipe for other in recipes):
            experts = [LinearGemms(*pair, recipe, dtype, first) for pair in zip(states, weights, strict=True)]
            x = x.to(dtype) if recipe is None else x
            return _GroupedLinearFunction.apply(x, GroupedGemms(experts, splits), *weights, *biases)
        parts = zip(x.split(splits), weights, biases, states, strict=True)
        return torch.cat([product(*expert, dtype, first) for expert in parts])

    def _splits(self, m_splits: Sequence[int] | Tensor, rows: int) -> list[int]:
        counts = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        try:
            splits = [operator.index(count) for count in counts]
        except TypeError:
            raise InputError(f"m_splits = {counts!r}: give a list of whole numbers, the rows of each expert.") from None
        if len(splits) != self.num_gemms or sum(splits) != rows or min(splits, default=0) < 0:
            raise InputError(
                f"m_splits = {splits} adds up to {sum(splits)} rows for {len(splits)} experts, but the input has {rows} rows "
                f"and the layer {self.num_gemms} experts: give one count of rows, 0 or more, for each expert."
            )
        return splits

    def extra_repr(self) -> str:
        """Experts and shape, for `print(model)`."""
        bias = self.num_gemms > 0 and self.biases[0] is not None
        return f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class _GroupedLinearFunction(torch.autograd.Function):
    """All experts: x [M, K], weights [N, K] and then biases [N] of each → [M, N].

    In FP8, casts and weight gradients run one expert after another.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gemms: GroupedGemms, *parameters: Tensor | None) -> Tensor:
        n = len(gemms.experts)
        weights, biases = [weight for weight in parameters[:n] if weight is not None], parameters[n:]
        want_x, _, *wanted = ctx.needs_input_grad
        gemms.want(want_x, wanted[:n], wanted[n:])
        with autocast.scales_of_forward():
            xs, ws = gemms.inputs(x), gemms.weights(weights)
        ctx.gemms = gemms
        ctx.save_for_backward(*gemms.saved(xs, ws, weights))
        return gemms.output(x, xs, ws, biases)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        gemms: GroupedGemms = ctx.gemms
        refuse_second_derivative("these layers")
        dx, dw, db = gemms.gradients(dy, ctx.saved_tensors)
        return dx, None, *dw, *db
