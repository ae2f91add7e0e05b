"""SMP's DelayedParamIniter: initial values for parameters on the meta device, once FSDP has sharded them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from octavo.compat.smp.transform import transformed
from octavo.compat.smp.utils import empty_module_params, get_logger, move_buffers_to_device
from octavo.compat.te.device import default_device
from octavo.errors import InputError


class ParamInit:
    """A `param_init_fn` for FSDP.

    For a transformed model it is a mark only: Octavo initializes the model by its config, equally on any number of ranks. For
    any other model, PyTorch's FSDP calls it with each module.
    """

    def __init__(self, initer: DelayedParamIniter) -> None:
        self.initer = initer

    def __call__(self, module: nn.Module) -> None:
        """Give the module's direct parameters memory and initial values."""
        self.initer.init(module)


class DelayedParamIniter:
    """Initial values for a model on the meta device.

    Args:
        model: transformed, or any other for PyTorch's FSDP.
        init_method_using_config: initializes the direct parameters of a module, in a model that is neither transformed nor
            Hugging Face's.
        verbose: log the parameters.

    Raises:
        InputError: `init_method_using_config` for a transformed model, which has other modules and fused parameters.
    """

    def __init__(
        self, model: nn.Module, init_method_using_config: Callable[[nn.Module], Any] | None = None, verbose: bool = False
    ) -> None:
        if init_method_using_config is not None and transformed(model) is not None:
            raise InputError(
                "DelayedParamIniter(init_method_using_config=…): a transformed model has Octavo's modules and initialises them "
                "by its config (initializer_range). Leave it out, or use it for a model that is not transformed."
            )
        self.model, self.method, self.verbose = model, init_method_using_config, verbose
        self.counted = 0

    def get_param_init_fn(self) -> ParamInit:
        """The function for FSDP's `param_init_fn`."""
        return ParamInit(self)

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """The function for FSDP's `post_param_init_fn`: ties weights; those of a transformed model stay tied anyway."""

        def tie(module: Any) -> None:
            if transformed(self.model) is None and hasattr(module, "tie_weights"):
                module.tie_weights()

        return tie

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> None:
        """Count `args`, by default the module's direct parameters, as initialized."""
        self.counted += sum(p.numel() for p in (args or module.parameters(recurse=False)))

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Context after which no parameter and no buffer of the model may be on the meta device.

        Raises:
            AssertionError: one is.
        """
        yield
        if enabled:
            tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
            left = [name for name, tensor in tensors if tensor.is_meta]
            if left:  # also under python -O
                name = type(self.model).__name__
                raise AssertionError(f"{len(left)} tensors of {name} have no values, the first is {left[0]}")

    @torch.no_grad()
    def init(self, module: nn.Module) -> None:
        """Give memory and initial values to the direct parameters of a module, in a model that is not transformed."""
        parameters = list(module.parameters(recurse=False))
        device = default_device() or torch.device("cpu")
        if self.method is not None:
            self.method(module)
        else:
            method: Any = getattr(self.model, "_init_weights", None)
            if method is None:
                raise InputError(
                    f"DelayedParamIniter: {type(self.model).__name__} is not a Hugging Face model, whose initial values are "
                    "known. Give init_method_using_config."
                )
            empty_module_params(module, device)
            method(module)
        move_buffers_to_device(module, device)
        self.count_num_params(module)
        if self.verbose and parameters:
            get_logger().info("%s: %d parameters initialised", type(module).__name__, sum(p.numel() for p in parameters))
