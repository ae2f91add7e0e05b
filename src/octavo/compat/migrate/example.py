"""Table of the arguments of SMP's example script: their defaults, and their keys in a run file."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "train_batch_size": 2, "val_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 5000, "seed": 12345, "bf16": 1,
    "fp8": 1, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max", "grad_clip": 1.0, "weight_decay": 0.2, "beta1": 0.9,
    "beta2": 0.95, "lr": 0.0001, "lr_decay_style": "cosine", "lr_decay_iters": 47683, "min_lr": 1e-05, "warmup": 0.0032,
    "plateau": 0.0, "activation_checkpointing": 1, "logging_freq": 1, "num_kept_checkpoints": 2, "checkpoint_freq": 1000,
    "max_context_width": 2048, "vocab_size": 50432, "hidden_width": 768, "num_layers": 12, "num_heads": 12,
    "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, "llama_intermediate_size": 11008,
    "intermediate_size": 14336, "initializer_range": 0.02, "sharding_strategy": "hybrid_shard", "validation_batches": 10,
    "data_num_workers": 0, "use_smp_implementation": 0, "moe": 0, "moe_load_balancing": "sinkhorn", "moe_aux_loss_coeff": 0.001,
    "moe_z_loss_coeff": 0.001, "num_local_experts": 8, "num_experts_per_tok": 2, "dataset_type": "gpt_jsonl", "zipped_data": 1,
    "use_synthetic_data": 0, "rope_scaling_factor": 8.0, "rope_scaling_low_freq_factor": 1.0,
    "rope_scaling_high_freq_factor": 4.0, "rope_scaling_original_max_position_embeddings": 8192,
}  # fmt: skip
"""Arguments of SMP's example script with keys in a run file → the example's defaults; for rotary scaling, Llama 3.1's."""
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Keys of a config's rotary scaling; the arguments begin with `rope_scaling_`."""

OPTIONAL = (
    "hf_pretrained_model_name_or_dir", "validation_freq", "num_key_value_heads", "sliding_window", "training_dir", "test_dir",
    "tensorboard_dir", "checkpoint_dir", "resume_from_checkpoint", "hybrid_shard_degree", "context_parallel_degree",
    "tensor_parallel_degree", "expert_parallel_degree", "sm_activation_offloading", "activation_loading_horizon", "random_seed",
    "model_dir", "rope_scaling_type",
)  # fmt: skip
"""Further arguments with keys, without defaults."""
NUMBERS = (
    "validation_freq", "num_key_value_heads", "sliding_window", "hybrid_shard_degree", "context_parallel_degree",
    "tensor_parallel_degree", "expert_parallel_degree", "activation_loading_horizon", "random_seed",
    "sm_activation_offloading",
)  # fmt: skip
"""The numbers and flags in `OPTIONAL`."""
NO_KEY = (
    "auto_wrap_policy", "backward_fetch_policy", "clean_cache", "data_type", "delayed_param",
    "distributed_backend", "enable_memory_profiling", "epochs", "fast_validation", "forward_prefetch", "framework",
    "limit_all_gathers", "log_reduced_training_loss", "logging_freq_for_avg", "nccl_test_log", "patch_neox_rope",
    "preserve_np_state", "profile_nsys", "same_seed", "save_final_model", "use_orig_params", "use_smp_flash_attn",
    "checkpoint_type", "do_train", "do_eval", "delayed_parameter_initialization", "fsdp_cache_flush_warnings",
    "allow_empty_shards", "moe_all_to_all_dispatcher", "global_token_shuffle",
)  # fmt: skip
"""Arguments without a key: always on, or without counterpart in Octavo."""
SHAPES = {
    "llama_v2": "llama2-7b",
    "llama_v3": "llama-8b",
    "gpt_neox": "pythia-410m",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
}
"""`model_type` → built-in shape, whose sizes are replaced by the arguments."""
