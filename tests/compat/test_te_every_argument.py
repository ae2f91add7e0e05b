"""Every argument of Transformer Engine's linear layers and norms with another value than its default: no one is ignored.

What works is compared with float64 in `test_te_options.py` and elsewhere; the rest has no meaning for one rank, or is refused.
"""

import pytest
import torch
from test_arguments import CONSTRUCTORS

from octavo.errors import InputError

LAYERS = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "LayerNorm", "RMSNorm"]
SIZES = {"GroupedLinear": (2, 16, 32), "LayerNorm": (16,), "RMSNorm": (16,)}

WORKS = {
    "eps": 1e-3, "get_rng_state_tracker": None, "rng_tracker_name": "a", "init_method": torch.nn.init.zeros_,
    "output_layer_init_method": torch.nn.init.zeros_, "bias": False, "return_bias": True, "params_dtype": torch.bfloat16,
    "normalization": "RMSNorm", "return_layernorm_output": True, "parameters_split": ("a", "b"), "zero_centered_gamma": True,
    "device": "cpu", "activation": "glu", "checkpoint": True, "hidden_size": 16,
}  # fmt: skip
"""They have an effect."""
NOTHING = {
    "sequence_parallel": True, "parallel_mode": "row", "set_parallel_mode": True, "tp_size": 1, "tp_group": None,
    "return_layernorm_output_gathered": True, "ub_name": "a", "name": "a", "seq_length": 8, "micro_batch_size": 2,
    "use_grouped_tensor": True,
}  # fmt: skip
"""Of one tensor-parallel rank the same, a name, or a size for a warm-up."""
REFUSED = {
    "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "ub_overlap_ag": True, "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "symmetric_ar_type": "multimem_all_reduce",
    "save_original_input": True, "single_grouped_weight": True, "single_grouped_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_constructors(te, layer):
    sizes = SIZES.get(layer, (16, 32))
    for name in CONSTRUCTORS[layer]:
        make = {"activation": "clamped_swiglu"} if name == "activation_params" else {}
        if name in ("normalized_shape", "hidden_size"):
            assert getattr(te, layer)(**{name: 16}).weight.shape == (16,)
        elif name in REFUSED:
            with pytest.raises(InputError, match=rf"{layer}\({name}={REFUSED[name]!r}\)"):
                getattr(te, layer)(*sizes, **{name: REFUSED[name]})
        else:
            value = {"activation_params": {"limit": 2.0}, **WORKS, **NOTHING}[name]
            assert getattr(te, layer)(*sizes, **make, **{name: value}) is not None
    if layer not in ("LayerNorm", "RMSNorm"):
        for several in ({"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}):
            with pytest.raises(InputError, match=rf"{layer}\((tp_size=2|sequence_parallel=True)\).*tensor_parallel_degree"):
                getattr(te, layer)(*sizes, **several)


@pytest.mark.parametrize("layer", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("parameters_split", [None, ("a", "b")])
def test_results_and_gradients_in_fp8_are_refused(te, layer, parameters_split):
    module, x = getattr(te, layer)(16, 32, parameters_split=parameters_split), torch.randn(2, 16)
    assert torch.equal(module(x, None, False, False), module(x))
    for name in ("fp8_output", "fp8_grad"):
        with pytest.raises(InputError, match=f"{name}=True is not supported"):
            module(x, **{name: True})
