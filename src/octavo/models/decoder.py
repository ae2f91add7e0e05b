"""Octavo's decoder: embedding, blocks, norm, and a head that computes its loss in chunks.

It replaces Hugging Face's model, with the same arguments and results: Hugging Face's forward builds masks and whole logits.
Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.collectives.blocks import parameters_of
from octavo.collectives.context import ContextGroup, averaged, same_numbers, summed
from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError
from octavo.fp8 import checkpoints
from octavo.fp8.autocast import current_recipe
from octavo.fp8.linear import LinearGemms
from octavo.fp8.quantizer import active_recipe
from octavo.fp8.recipe import CurrentScaling, Granularity, Operand
from octavo.fp8.scaling import ModuleState
from octavo.kernels.attention.pattern import Pattern, packed_pattern, pattern_of
from octavo.kernels.cross_entropy import Objective
from octavo.models.families import ACTIVATIONS
from octavo.models.huggingface import (
    IGNORED,
    PretrainedInterface,
    check_inputs,
    refuse_arguments,
    refuse_other_balancing,
)
from octavo.models.spec import ModelSpec
from octavo.models.tensor_parallel import (
    part_of_rank,
    refuse_other_parameters,
    refuse_other_settings,
    rows_of_words,
    share_parameters,
    words_of,
)
from octavo.nn.block import RunBlock, TransformerLayer
from octavo.nn.embedding import Embedding, SharedWeight
from octavo.nn.experts import StackedExperts
from octavo.nn.head import OutputHead, linear_cross_entropy
from octavo.nn.linear import compute_dtype, high_precision
from octavo.nn.moe import Experts, balancing_loss, router_z_loss
from octavo.nn.norm import NORM_LAYERS
from octavo.nn.plain_names import use_plain_names
from octavo.nn.unrounded import unrounded_linear

FP8_HEAD: Literal["backward"] = "backward"
"""Default of a decoder's `fp8_head`: resolved by the recipe."""
_STATES = "octavo_states_alone"
"""Argument of a sharded decoder's forward that requests the result of `last_hidden_state`."""


class RotaryAngles:
    """cos and sin of the rotary angles of positions. Not a module, so that `.to(dtype)` does not round them."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype  # the tables are rounded to it, and returned in float32
        kind = spec.rotary.get("rope_type", "default")
        if kind == "default":
            rotated = int(spec.head_dim * spec.rotary_fraction)
            exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device="cpu") / rotated
            self.inv_freq, self.factor = 1.0 / (spec.rotary["rope_theta"] ** exponent), 1.0
        else:
            config = LlamaConfig(
                hidden_size=spec.heads * spec.head_dim,  # LlamaConfig refuses hidden sizes that are not divisible by the heads
                num_attention_heads=spec.heads,
                head_dim=spec.head_dim,
                max_position_embeddings=spec.max_positions,
                rope_parameters=dict(spec.rotary),
            )
            self.inv_freq, self.factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")

    def __call__(self, position_ids: Tensor) -> tuple[Tensor, Tensor, bool]:
        """position_ids [B, T] → cos and sin of rotated columns, float32 [B, T, Dr]; and whether their halves are equal."""
        if self.inv_freq.device != position_ids.device:
            self.inv_freq = self.inv_freq.to(position_ids.device)
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        cos, sin = (table * self.factor for table in (angles.cos(), angles.sin()))
        if self.dtype != torch.float32:
            cos, sin = (table.to(self.dtype).float() for table in (cos, sin))
        return cos, sin, True


class Decoder(PretrainedInterface):
    """A causal language model by its spec; `config` is the Hugging Face config of the same model.

    Parameters have `params_dtype`; the residual stream, and products outside FP8, have `dtype`. fp8_head: True runs the head's
    products for a loss in FP8, "backward" only those of its gradients; None is "backward" under Octavo's recipes and False
    under Transformer Engine's. Other values raise an InputError. tensor: the tensor-parallel ranks; parameters are then this
    rank's parts. spread: experts are whole instead, and sharding leaves each rank some of them.
    """

    def __init__(
        self,
        config: Any,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        params_dtype: torch.dtype,
        device: torch.device | str | None = None,
        buffer_dtype: torch.dtype = torch.float32,
        fp8_head: bool | Literal["backward"] | None = None,
        objective: Objective | None = None,
        tensor: TensorGroup | None = None,
        spread: bool = False,
    ) -> None:
        super().__init__()
        if fp8_head not in (None, False, True, "backward"):
            raise InputError(
                f'fp8_head = {fp8_head!r} is not supported: use False, True, or "backward" for only its gradients.'
            )
        self.fp8_head: bool | Literal["backward"] = FP8_HEAD if fp8_head is None else fp8_head
        """The products of the head that are FP8."""
        self.fp8_head_asked = fp8_head is not None
        self.config, self.spec, self.dtype = config, spec, dtype
        make: dict[str, Any] = {"params_dtype": params_dtype, "device": device}
        self.tensor, self.spread = tensor, spread
        of_rank = spec if tensor is None else part_of_rank(spec, tensor.size, spread=spread)
        rows = spec.vocabulary if tensor is None else rows_of_words(spec.vocabulary, tensor.size)
        self.embedding = Embedding(rows, spec.hidden_size, padding=spec.padding, dtype=dtype, **make)
        self.layers = nn.ModuleList(
            _block(of_rank, i, window, make) for i, window in enumerate(spec.windows or (None,) * spec.layers)
        )
        self.norm = NORM_LAYERS[spec.normalization](spec.hidden_size, spec.norm_eps, **make)
        self.head = OutputHead(spec.hidden_size, rows, bias=False, dtype=params_dtype, device=device)
        if spec.tied:
            self.head.weight = self.embedding.weight
        if self.fp8_head:
            # The gradient of the logits has a constant scale.
            vars(self.head)["fp8_state"] = ModuleState(self.head, operands=(Operand.INPUT, Operand.WEIGHT))
        if tensor is not None:
            share_parameters(self, tensor, spread=spread)
        self.rotary = RotaryAngles(spec, buffer_dtype)
        self.run_block: RunBlock = TransformerLayer.forward_residual
        self.data_group: dist.ProcessGroup | None = None
        """Ranks with other samples of the same step; gradients must be summed over them."""
        self.token_group: dist.ProcessGroup | None = None
        """Ranks with other tokens of the same step: those of `data_group` and of `context`."""
        self.context: ContextGroup | None = None
        """The ranks that share each sequence; all of them run every forward, with the same whole sequences."""
        self._compared = False
        self.sharded = False
        """Each rank has a part of the weights, so all ranks run every forward."""
        self.output_hidden_states = False
        """The default of the forward's argument."""
        self.router_losses_apart = False
        """The loss excludes router losses; `take_routing` then covers every forward, for `weighted_router_losses`."""
        self._routing: tuple[Tensor, Tensor] | None = None
        self._router_logits = getattr(config, "output_router_logits", None)
        self.objective = objective
        """Training loss; None for the plain cross entropy, which every evaluation uses."""

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules before and after the blocks, without those that share a weight."""
        return ([], [self.norm]) if self.spec.tied else ([self.embedding], [self.norm, self.head])

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *behind: Any,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        max_documents: int | None = None,
        is_first_microbatch: bool | None = None,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> Any:
        """Logits, or with labels only the loss.

        Args:
            input_ids: int64 [B, T]; needed.
            attention_mask: [B, T], 0 for padding, to which no token attends.
            position_ids: int64 [B, T] or [1, T]; a position other than the previous one plus 1 begins a new document, and
                attention stays within documents. On the host, they cause no GPU synchronisation.
            *behind: only None: pass further arguments by keyword, since Hugging Face's have another order.
            labels: int64 [B, T], the tokens themselves (the model shifts them), -100 where nothing is predicted.
            num_items_in_batch: divisor of the sum of the losses; by default the number of real targets on all ranks with other
                samples, so that the loss is the mean over all of them. If every rank has all weights, a forward without
                gradients takes the mean over this rank's samples, so that a single rank may evaluate.
            max_documents: most documents of all samples together. Positions on a GPU are then not read on the host, so that a
                CUDA graph can be replayed with other positions; with more documents the loss is NaN. Refused on a CPU if there
                are more.
            is_first_microbatch: False reuses the FP8 weights of the call with True.
            return_dict: False returns a tuple.
            output_hidden_states: also return `.hidden_states`: the embeddings, and the output of each block, the last one
                normalised; by default as in the config of the transformed model.
            logits_to_keep: as in Hugging Face, the last positions with logits, or the indices of positions; 0 for all.
            **others: arguments of Hugging Face's models, only with a no-op value (`use_cache=False`).

        Returns:
            `CausalLMOutput`: `.loss` float32 [] with labels (`.logits` is None then), else `.logits` [B, T, V]. Gradients of a
            loss computed from logits or hidden states are averaged over ranks with other samples.

        Raises:
            InputError: an input is missing, or its shape or dtype does not fit, or an unsupported argument such as
                `inputs_embeds` has a value. On a CPU also an id or a label outside the vocabulary, and different sequences on
                ranks that share them; on a GPU, without synchronisation, these make the loss NaN (different sequences only
                after the first forward, which checks them).
        """
        if self.tensor is not None and torch.compiler.is_compiling():
            _refuse_compiled(self.tensor.size)
        if others.pop(_STATES, False):
            others |= {"labels": labels, "num_items_in_batch": num_items_in_batch, "return_dict": return_dict}
            others |= {"output_hidden_states": output_hidden_states, "logits_to_keep": logits_to_keep}
            refuse_arguments(others, behind)
            return self._states(input_ids, attention_mask, position_ids, is_first_microbatch)
        if output_hidden_states is None:
            output_hidden_states = self.output_hidden_states
        if self.spec.experts:
            refuse_other_balancing(self.config, self._router_logits, others.get("output_router_logits"), self.spec.balance)
        refuse_arguments(others if labels is None else {**others, "logits_to_keep": logits_to_keep}, behind)
        input_ids = check_inputs(input_ids, attention_mask, position_ids, labels, self.spec.vocabulary)
        pattern, fits = self._packed(max_documents, input_ids, position_ids, attention_mask, labels)
        same = self._same_on_all(input_ids, labels, position_ids, attention_mask, num_items_in_batch)
        tokens = input_ids.shape[1]
        shared = SharedWeight()  # a loss reads the head's weight through it; logits read it directly
        hidden, states, routings = self._hidden(
            input_ids,
            attention_mask,
            position_ids,
            is_first_microbatch,
            shared=None if labels is None else shared,
            keep_states=output_hidden_states,
            pattern=pattern,
        )
        last = (averaged(self._whole(hidden, tokens), self.data_group),) if output_hidden_states else ()
        output = CausalLMOutput(hidden_states=(*states, *last) or None)
        if labels is None:
            output["logits"] = averaged(self._logits(hidden, tokens, logits_to_keep), self.data_group)
        else:
            loss = self._loss(hidden, labels, num_items_in_batch, is_first_microbatch, routings, shared)
            same = fits if same is None else same
            output["loss"] = loss if same is None else loss.where(same, torch.nan)
        return output.to_tuple() if return_dict is False else output

    def last_hidden_state(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *behind: Any,
        is_first_microbatch: bool | None = None,
        **others: Any,
    ) -> BaseModelOutput:
        """States after the last norm, for a head or a loss of a library; arguments as of the forward.

        Returns:
            `BaseModelOutput`: `.last_hidden_state` [B, T, hidden], in the dtype of the head's weight.

        Raises:
            InputError: as in the forward; or the model trains with router losses, which are part of its
                built-in loss.
        """
        inputs = input_ids, attention_mask, position_ids
        if isinstance(self, FSDPModule):  # the hooks of its forward gather the weights
            states: BaseModelOutput = self(
                *inputs, *behind, is_first_microbatch=is_first_microbatch, **others, **{_STATES: True}
            )
            return states
        refuse_arguments(others, behind)
        return self._states(*inputs, is_first_microbatch)

    def _states(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None, first: bool | None
    ) -> BaseModelOutput:
        if self.training and (self.spec.balance or self.spec.router_z_loss):
            raise InputError(
                "model.base_model has no loss of the routers, with which this model trains: use the loss of model(…, labels=…),"
                ' or octavo.transform(model, blocks="own").'
            )
        input_ids = check_inputs(input_ids, attention_mask, position_ids, None, self.spec.vocabulary)
        self._same_on_all(input_ids, position_ids, attention_mask)
        hidden, _, routings = self._hidden(input_ids, attention_mask, position_ids, first)
        if routings:
            self._router_losses(routings, None)  # recorded, as in the forward
        if isinstance(self.head, FSDPModule):
            hidden = self._past_head(hidden)
        whole = averaged(self._whole(hidden, input_ids.shape[1]), self.data_group).to(self.head.weight.dtype)
        return BaseModelOutput(last_hidden_state=whole.clone() if isinstance(self, FSDPModule) else whole)  # FSDP2: no view

    def _past_head(self, hidden: Tensor) -> Tensor:
        """The states, unchanged: FSDP2 ends the forward of norm and head, which it gathers together, after the head."""
        states_of_head: list[Tensor] = []

        def run(hidden: Tensor) -> Tensor:
            states_of_head.append(hidden)
            return hidden

        states: Tensor = self._output_head()(hidden, run)
        wrapped = bool(self.head._backward_hooks or self.head._backward_pre_hooks)
        if not states_of_head or not (wrapped or states is states_of_head[-1]):
            raise InputError("a hook of the output head returns something else, and model.base_model has no logits: remove it.")
        return states

    def _hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        first: bool | None,
        *,
        shared: SharedWeight | None = None,
        keep_states: bool = False,
        pattern: Pattern | None = None,
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(this rank's states after the last norm; the states before each block, if requested; the experts' routings).

        shared: shares a tied embedding's weight with the loss. pattern: attention pattern; None to derive it from the
        arguments.
        """
        tokens = input_ids.shape[1]
        padded = -(-tokens // self._multiple) * self._multiple
        if pattern is None:
            pattern = pattern_of(position_ids, attention_mask, *input_ids.shape, padded_to=padded)
        if position_ids is None:
            position_ids = torch.arange(tokens, device=input_ids.device)[None]
        angles = self.rotary(self._local_tokens(position_ids.to(input_ids.device, non_blocking=True), padded))
        unchanged = type(self.embedding) is Embedding and "forward" not in vars(self.embedding)
        tied = shared is not None and self.spec.tied and unchanged
        with contextlib.nullcontext() if self.tensor is None else self._embeds():
            embedded = self.embedding(self._local_tokens(input_ids, padded), **({"shared": shared} if tied else {})).to(
                self.dtype
            )
        rate = self.spec.embedding_dropout if self.training else 0.0
        residual = functional.dropout(embedded, rate) if self.tensor is None else self.tensor.dropped(embedded, rate)
        delta = None
        states: list[Tensor] = []
        routings: list[Tensor] = []
        options = {"counted": self._counted(attention_mask, input_ids, padded)} if self.spec.experts else {}
        for layer in self.layers:
            if keep_states:
                state = residual if delta is None else residual + delta
                states.append(averaged(self._whole(state, tokens), self.data_group))
            arguments = residual, delta, pattern, angles, first
            residual, delta, *routing = self.run_block(layer, *arguments, **(options if layer.experts else {}))
            routings += routing
        return self.norm(residual, delta), states, routings

    def _packed(
        self,
        most: int | None,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
    ) -> tuple[Pattern | None, Tensor | None]:
        """The pattern of at most `most` documents; for positions on a GPU also bool [], False if there are more.

        None without a limit.
        """
        if most is None:
            return None, None
        if type(most) is not int or most < 1 or position_ids is None or labels is None:
            raise InputError(
                f"max_documents = {most!r}: give a whole number, at least 1, with position_ids that restart where a document "
                "begins, and labels."
            )
        if attention_mask is not None or self.context is not None or self.tensor is not None:
            what = "an attention_mask" if attention_mask is not None else "ranks that share each sequence or the matrices"
            raise InputError(
                f"max_documents = {most} with {what}: document boundaries on the GPU are not supported with it. Leave "
                "max_documents out, and give position_ids on the host."
            )
        if position_ids.device.type != "cpu":
            return packed_pattern(position_ids, len(input_ids), most)
        pattern = pattern_of(position_ids, None, *input_ids.shape)
        if (documents := sum(map(len, pattern.documents)) or len(input_ids)) > most:
            raise InputError(f"max_documents = {most}, but the positions have {documents} documents: give {documents} or more.")
        return pattern, None

    @contextlib.contextmanager
    def _embeds(self) -> Iterator[None]:
        """Around the embedding's call with a rank's tokens."""
        embedding: Any = self.embedding  # replaced by a caller
        embedding.in_decoder = True
        try:
            yield
        finally:
            embedding.in_decoder = False

    def _same_on_all(self, *inputs: Tensor | int | None) -> Tensor | None:
        """Equality of the inputs on the ranks that share sequences: bool [], or None if that is known already.

        Also checked: settings that decide the exchanges between ranks, and in the first forward which parameters are frozen.
        Only the first forward waits for a GPU; later ones make the loss NaN.

        Raises:
            InputError: they differ.
        """
        if (self.context is None and self.tensor is None) or torch.compiler.is_compiling():
            return None
        settings = self._settings(next(x.device for x in inputs if isinstance(x, Tensor)))
        code = torch.tensor(zlib.crc32(repr(settings).encode()), device="cpu")
        tensors = [*(x if x is None or isinstance(x, Tensor) else torch.tensor(x, device="cpu") for x in inputs), code]
        of_context = None if self.context is None else self.context.same(*tensors)
        of_tensor = None if self.tensor is None else same_numbers(self.tensor.group, *tensors)
        both = [same for same in (of_context, of_tensor) if same is not None]
        if both[0].is_cuda and self._compared and torch.is_grad_enabled():
            return both[0] if len(both) == 1 else both[0] & both[1]
        if not self._compared and self.tensor is not None:
            blocks = parameters_of(self)
            experts = [module for module in self.modules() if isinstance(module, StackedExperts)]
            spread = {id(parameter) for each in experts for parameter in each.spread}
            named = [(name, blocks[p]) for name, p in self.named_parameters() if id(p) not in spread]
            refuse_other_parameters(self, named, self.tensor.size)
        self._compared = True
        for same, group, key in ((of_context, self.context, "context"), (of_tensor, self.tensor, "tensor")):
            if same is not None and group is not None and not same:
                sharing = f"the {group.size} ranks that share each sequence ({key}_parallel_degree)"
                refuse_other_settings(group.group, settings, sharing)
                raise InputError(
                    f"{sharing} were given different ones: "
                    "give all of them the samples of octavo.state.dp_rank, of octavo.state.dp_size."
                )
        return None

    def _settings(self, device: torch.device) -> dict[str, str]:
        """Settings that must be equal on the ranks of a group, by the calls that set them."""
        recipe = current_recipe(device)
        settings = {
            "model.train()": "training" if self.training else "evaluation",
            "torch.no_grad": "gradients" if torch.is_grad_enabled() else "no gradients",
            "fp8_autocast": "no FP8" if recipe is None else f"{recipe}",
        }
        if not self._compared:
            frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
            settings["requires_grad"] = f"frozen are {', '.join(frozen)}" if frozen else "nothing is frozen"
        return settings

    @property
    def _multiple(self) -> int:
        """Sequences are padded to a multiple of this many tokens, so that ranks have equal numbers."""
        tensor = 1 if self.tensor is None else self.tensor.size
        return tensor if self.context is None else self.context.size * math.lcm(2, tensor)

    def _local_tokens(self, x: Tensor, padded: int) -> Tensor:
        """This rank's tokens of [B, T], padded to `padded` tokens with copies of the first one.

        Each copy is a separate document: repeated rows do not change the amax.
        """
        x = torch.cat((x, x[:, :1].expand(-1, padded - x.shape[1])), 1) if padded > x.shape[1] else x
        return x if self.context is None else self.context.split(x)

    def _counted(self, attention_mask: Tensor | None, input_ids: Tensor, padded: int) -> Tensor | None:
        """Mask of this rank's real tokens, bool [B, T]; None if all are real."""
        if attention_mask is None and padded == input_ids.shape[1]:
            return None
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        real = functional.pad(mask != 0, (0, padded - input_ids.shape[1]))
        real = real if self.context is None else self.context.split(real)
        return real if self.tensor is None else self.tensor.local(real)

    def _router_losses(self, routings: list[Tensor], share: Tensor | None) -> Tensor | None:
        """This rank's part of the routers' losses, over all tokens of this forward on all ranks, times its `share`.

        They include their coefficients; None if both are 0. Ranks of a tensor group return the same value, their sum.
        """
        routing, spec = torch.stack(routings), self.spec
        if self.router_losses_apart:
            self._record_routing(routing.detach(), routing.new_zeros(2))
            return None
        tokens_per_expert = routing.detach()[:, spec.experts : 2 * spec.experts].sum(0)
        if self.token_group is not None and self._joins():
            dist.all_reduce(tokens_per_expert, group=self.token_group)
        if self.tensor is not None:
            self.tensor.sum_(tokens_per_expert)
        losses = [of(routing, tokens_per_expert, spec.top_k) for of in (balancing_loss, router_z_loss)]
        if self.training and checkpoints.trains():
            self._record_routing(routing.detach(), torch.stack(losses).detach() * (1 if share is None else share))
        total = self._weighted(losses)
        if total is not None and self.tensor is not None:
            total = summed(total, self.tensor.group)
        return total if total is None or share is None else total * share

    def _weighted(self, losses: list[Tensor]) -> Tensor | None:
        """Balancing loss and z loss times their coefficients; None if both are 0."""
        coefficients = self.spec.balance, self.spec.router_z_loss
        weighted = [coefficient * loss for coefficient, loss in zip(coefficients, losses, strict=True) if coefficient]
        return sum(weighted[1:], weighted[0]) if weighted else None

    def weighted_router_losses(self, routing: Tensor) -> Tensor | None:
        """The routers' losses times their coefficients, over all tokens in the sums `routing` [MoE layers, 2E + 2]: a scalar.

        None if both coefficients are 0.
        """
        tokens_per_expert = routing[:, self.spec.experts : 2 * self.spec.experts].sum(0)
        return self._weighted([of(routing, tokens_per_expert, self.spec.top_k) for of in (balancing_loss, router_z_loss)])

    def _record_routing(self, *new: Tensor) -> None:
        routing, losses = new if self._routing is None else map(torch.add, self._routing, new)
        self._routing = routing, losses

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Does nothing, since gradients are not reduced here. FSDP2's method overrides it in a sharded model."""

    def take_routing(self) -> tuple[Tensor, Tensor] | None:
        """This rank's routing in training forwards since the last call; the sum over ranks covers all tokens.

        Sums as `LayerNormMoE` returns them, float32 [MoE layers, 2E + 2]; and balancing loss and z loss without coefficients,
        float32 [2], each forward weighted by its share of the step's targets. None without experts.
        """
        routing, self._routing = self._routing, None
        return routing

    def _joins(self) -> bool:
        """True if all ranks with other samples run this forward."""
        return self.sharded or checkpoints.trains()

    def _whole(self, x: Tensor, tokens: int) -> Tensor:
        """The tokens of all ranks, without padding."""
        return self._of_context(x if self.tensor is None else self.tensor.whole(x), tokens)

    def _of_context(self, x: Tensor, tokens: int) -> Tensor:
        """The tokens of the ranks of `context`, without padding."""
        x = x if self.context is None else self.context.gather(x)
        return x if x.shape[1] == tokens else x[:, :tokens]

    def _logits(self, hidden: Tensor, tokens: int, logits_to_keep: int | Tensor) -> Tensor:
        tensor, dtype = self.tensor, hidden.dtype
        hidden = hidden if tensor is None else tensor.gathered(hidden)

        def run(hidden: Tensor) -> Tensor:
            weight, wide = self.head.weight.to(self.dtype), hidden.dtype != dtype
            logits = unrounded_linear(hidden, weight, dtype) if wide else high_precision(hidden, weight)
            return logits if tensor is None else tensor.words(logits, self.spec.vocabulary)

        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if self.context is not None and torch.is_grad_enabled():
            # Each rank multiplies its tokens: the head's gradients are summed over the ranks.
            return self._of_context(self._output_head()(hidden, run), tokens)[:, positions]
        logits: Tensor = self._output_head()(self._of_context(hidden, tokens)[:, positions], run)
        return logits

    def _output_head(self) -> OutputHead:
        head: Any = self.head
        if not isinstance(head, OutputHead):
            kind = f"{type(head).__module__}.{type(head).__name__}"
            raise InputError(
                f"the head of Octavo's decoder is a {kind}, and its loss would bypass the adapter: add adapters before"
                " octavo.transform, octavo.transform(get_peft_model(model, config))."
            )
        return head

    def _loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None,
        first: bool | None,
        routings: list[Tensor],
        shared: SharedWeight,
    ) -> Tensor:
        target = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        joined = num_items_in_batch is None and self.data_group is not None and self._joins()
        routed = bool(routings) and not self.router_losses_apart
        share = self._share(target, num_items_in_batch) if routed and num_items_in_batch is not None else None
        added = self._router_losses(routings, share) if routings else None
        if num_items_in_batch is None:
            num_items_in_batch = (target != IGNORED).sum()
            if joined:
                dist.all_reduce(num_items_in_batch, group=self.data_group)
            num_items_in_batch = num_items_in_batch.clamp(min=1)  # without targets loss and gradients are 0, not NaN
        count = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=hidden.device)
        dtype = compute_dtype(hidden)
        hidden = hidden if self.tensor is None else self.tensor.gathered(hidden)
        padded = hidden.shape[1] * (1 if self.context is None else self.context.size)
        if padded > target.shape[1]:
            target = functional.pad(target, (0, padded - target.shape[1]), value=IGNORED)
        target = target if self.context is None else self.context.split(target)

        losses: list[Tensor] = []

        def run(hidden: Tensor) -> Tensor:
            loss = linear_cross_entropy(
                hidden.flatten(0, 1),
                shared.of(self.head.weight),
                target.flatten(),
                count,
                objective=self.objective if self.training else None,
                fp8=self._fp8_head(hidden.device, dtype, first),
                fp8_logits=self.fp8_head is True,
                words=None if self.tensor is None else words_of(self.spec.vocabulary, self.tensor),
                dtype=None if self.tensor is None else dtype,
            )
            losses.append(loss)
            return loss

        loss: Tensor = self._output_head()(hidden, run)
        self._check_hooks(loss, losses)
        loss = loss if added is None else loss + added
        loss = loss if self.context is None else self.context.sum(loss)
        return summed(loss, self.data_group) if joined and self.data_group is not None else loss

    def _check_hooks(self, loss: Tensor, losses: list[Tensor]) -> None:
        """Refuse a hook that changes inputs or outputs of the head, which here returns the loss, not logits."""
        wrapped = bool(self.head._backward_hooks or self.head._backward_pre_hooks)  # these wrap the tensors without a change
        if torch.compiler.is_compiling() or (losses and (wrapped or loss is losses[-1])):
            return
        raise InputError(
            "a hook changes inputs or outputs of the output head, which returns the loss here, not logits: leave "
            "labels out, and compute the loss from the logits."
        )

    def _share(self, target: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
        """This forward's share of the step's targets: the weight of its router losses."""
        targets = (target != IGNORED).sum()
        if self.data_group is not None and self._joins():
            dist.all_reduce(targets, group=self.data_group)
        return targets.float() / torch.as_tensor(num_items_in_batch, device=targets.device)

    def _fp8_head(self, device: torch.device, dtype: torch.dtype, first: bool | None) -> LinearGemms | None:
        """The products of a head that runs in FP8 here; its operands have one scale each under every recipe."""
        state: ModuleState | None = getattr(self.head, "fp8_state", None)
        recipe = None if state is None else active_recipe(state, device)
        if state is None or recipe is None or not (self.fp8_head_asked or recipe.native):
            return None
        if self.fp8_head == "backward" and not torch.is_grad_enabled():
            return None
        delayed = recipe.history is not None and not torch.compiler.is_compiling()
        if recipe.casts[Operand.INPUT].granularity is not Granularity.TENSOR:
            recipe = CurrentScaling()
        elif delayed and checkpoints.are_around():
            recipe = CurrentScaling()  # stateless: a recomputation repeats its casts
        elif delayed:
            recipe = recipe.with_octavo_rules  # Transformer Engine has no such head, hence no rules for it
        return LinearGemms(state, self.head.weight, recipe, dtype, first)


@torch.compiler.disable(reason="torch.compile of a model of tensor-parallel ranks")
def _refuse_compiled(degree: int) -> NoReturn:
    """Called from compiled code, where PyTorch's error would name an inner collective."""
    raise InputError(
        f"torch.compile of a model with tensor_parallel_degree = {degree}: its collectives overlap products through streams "
        "and memory unknown to the compiler. Leave torch.compile out, or set tensor_parallel_degree = 1."
    )


def _block(spec: ModelSpec, layer: int, window: int | None, make: dict[str, Any]) -> TransformerLayer:
    has_experts = spec.experts > 0 and layer not in spec.dense
    block = TransformerLayer(
        spec.hidden_size,
        spec.dense_ffn_size if layer in spec.dense else spec.ffn_size,
        spec.heads,
        spec.kv_heads,
        layernorm_epsilon=spec.norm_eps,
        hidden_dropout=spec.hidden_dropout,
        attention_dropout=spec.attention_dropout,
        kv_channels=spec.head_dim,
        window_size=None if window is None else (window - 1, 0),
        normalization=spec.normalization,
        bias=spec.proj_bias,
        qkv_bias=spec.qkv_bias,
        mlp_bias=spec.mlp_bias,
        activation=ACTIVATIONS[spec.activation, spec.gated],
        parallel_attention_mlp=spec.parallel,
        qk_norm_type="RMSNorm" if spec.qk_norm else None,
        qk_norm_eps=spec.norm_eps,
        qk_norm_before_rope=True,
        experts=Experts(spec.experts, spec.top_k, spec.normalized, spec.jitter, spec.assignment) if has_experts else None,
        **make,
    )
    block.separate_dropout = True  # as GPT-NeoX does
    return use_plain_names(block)
