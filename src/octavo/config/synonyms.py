"""Keys of other trainers and mistyped keys → the key of a run file, for the hint of an error message.

Only a hint: no key is accepted under another name, since units often differ (a ratio instead of steps, samples per rank instead
of all samples). Similar names need no row here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from octavo.errors import nearest

_TABLE: tuple[tuple[str, str, str], ...] = (
    ("optimizer.lr", "learning_rate max_lr peak_lr base_lr", ""),
    ("optimizer.weight_decay", "wd decay", ""),
    ("optimizer.betas", "beta1 beta2 adam_beta1 adam_beta2 adam_betas", "both in one list: [0.9, 0.95]"),
    ("optimizer.eps", "epsilon adam_epsilon adam_eps", ""),
    ("optimizer.warmup_steps", "warmup num_warmup_steps warmup_iters lr_warmup_steps", "in optimizer steps"),
    ("optimizer.warmup_steps", "warmup_ratio warmup_fraction warmup_epochs", "in optimizer steps: the ratio x train.steps"),
    (
        "optimizer.schedule",
        "lr_scheduler_type lr_scheduler scheduler lr_schedule lr_decay_style",
        '"cosine", "linear", "wsd" or "constant"',
    ),
    ("optimizer.min_lr_fraction", "min_lr min_lr_ratio lr_end final_lr", "a fraction of optimizer.lr"),
    ("optimizer.clip", "grad_clip max_grad_norm clip_grad clip_grad_norm gradient_clipping gradient_clip_val clip_norm", ""),
    (
        "parallel.sync_each_micro_batch",
        "sync_each_batch no_sync reshard_gradients reduce_each_micro_batch sync_gradients zero2_gradients",
        "true sums gradients over the shards in every micro-batch",
    ),
    ("lora.rank", "r lora_r lora_rank", ""),
    ("lora.alpha", "lora_alpha", ""),
    ("lora.dropout", "lora_dropout", ""),
    ("lora.targets", "target_modules lora_target_modules lora_target", ""),
    ("lora.rslora", "use_rslora", ""),
    ("lora.save_whole", "modules_to_save", ""),
    ("train.epochs", "epoch num_epochs num_train_epochs max_epochs n_epochs", ""),
    ("train.steps", "max_steps num_steps total_steps train_steps num_train_steps iterations max_iters train_iters", ""),
    (
        "train.global_batch",
        "batch_size batch global_batch_size train_batch_size total_batch_size",
        "sequences in an optimizer step, over all ranks; train.micro_batch: those in a forward of one rank",
    ),
    (
        "train.global_batch",
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps accumulation_steps",
        "train.micro_batch x ranks x accumulation steps",
    ),
    (
        "train.micro_batch",
        "per_device_train_batch_size per_device_batch_size micro_batch_size device_batch_size train_micro_batch_size_per_gpu",
        "sequences in a forward of one rank; train.global_batch: those in an optimizer step",
    ),
    (
        "data.sequence_length",
        "seq_len seq_length context_length context_size ctx_len max_seq_len max_seq_length max_length block_size n_ctx",
        "",
    ),
    ("train.output", "output_dir out_dir save_dir run_dir log_dir checkpoint_dir", ""),
    ("train.output", "resume resume_from_checkpoint resume_from", "the same train.output continues its run"),
    ("model.dtype", "bf16 use_bf16", 'model.dtype = "bfloat16", the default'),
    ("model.dtype", "fp16 use_fp16", 'model.dtype = "float16"'),
    ("model.dtype", "precision mixed_precision torch_dtype amp amp_dtype fp32", '"bfloat16", "float16" or "float32"'),
    (
        "model.source",
        "model_name_or_path model_name model_path pretrained_model_name_or_path base_model",
        "and model.load = true for its weights",
    ),
    ("model.load", "pretrained from_pretrained init_from", "true or false"),
    (
        "data.source",
        "dataset datasets dataset_name train_file train_files data_path dataset_path train_data data_files corpus",
        "",
    ),
    ("data.subset", "dataset_config_name dataset_config", ""),
    ("data.text_field", "dataset_text_field text_column text_key", ""),
    (
        "data.train_on",
        "assistant_only_loss completion_only_loss train_on_responses_only roles_to_train train_on_inputs mask_prompt",
        '"assistant", "last" or "all"',
    ),
    ("data.chat_template", "chat_template_path chat_template_name chat_template_jinja", ""),
    ("data.chat_template_variables", "chat_template_kwargs template_kwargs", ""),
    ("data.overlong", "excess_length_strategy truncation_mode truncation", '"truncate", "cut" or "drop"'),
    ("data.tokenizer", "tokenizer_name tokenizer_name_or_path tokenizer_path", ""),
    ("data.vocab_size", "vocabulary_size vocab", ""),
    ("data.workers", "num_workers dataloader_num_workers", ""),
    ("data.max_documents", "max_train_samples max_samples", ""),
    ("data.validation_fraction", "val_split val_size test_size eval_split", "a share of the documents"),
    ("checkpoint.every", "save_steps save_interval save_every checkpoint_every checkpoint_interval ckpt_every", ""),
    ("checkpoint.keep", "save_total_limit keep_last max_checkpoints", ""),
    ("train.validate_every", "eval_steps eval_interval val_check_interval validation_interval", ""),
    ("train.validate_batches", "eval_iters eval_batches limit_val_batches max_eval_batches", ""),
    ("log.every", "logging_steps log_interval log_every log_every_n_steps log_freq", ""),
    ("log.trackers", "report_to logger loggers tracker", ""),
    ("train.recompute", "gradient_checkpointing activation_checkpointing checkpoint_activations", ""),
    ("train.offload", "cpu_offload activation_offloading", ""),
    ("train.compile", "torch_compile use_compile", ""),
    ("train.label_smoothing", "label_smoothing_factor", ""),
    ("train.seed", "random_seed manual_seed", ""),
    (
        "moe.moe_load_balancing",
        "load_balancing moe_router_load_balancing_type output_router_logits",
        '"aux_loss", "sinkhorn", "balanced" or "none"',
    ),
    ("moe.moe_aux_loss_coeff", "router_aux_loss_coef aux_loss_coeff aux_loss_coef moe_aux_loss_weight", ""),
    ("moe.moe_z_loss_coeff", "router_z_loss_coef z_loss_coeff z_loss_coef moe_zloss_weight", ""),
    ("moe.router_jitter_noise", "moe_input_jitter_eps jitter_noise router_jitter", ""),
    ("fp8.enabled", "fp8 use_fp8 enable_fp8", 'true, false or "auto"'),
    ("fp8.recipe", "fp8_recipe", ""),
    ("fp8.format", "fp8_format", ""),
    ("parallel.tensor_parallel_degree", "tp tp_size tensor_parallel_size tensor_model_parallel_size", ""),
    ("parallel.context_parallel_degree", "cp cp_size context_parallel_size", ""),
    ("parallel.hybrid_shard_degree", "fsdp fsdp_size dp_shard sharding_degree data_parallel_shard_degree", ""),
)
"""(key, its other names, the difference in meaning). If two rows share a name, the first with an existing key applies."""

_SYNONYMS = [(name, key, note) for key, names, note in _TABLE for name in names.split()]


def hint(name: str, known: Sequence[str]) -> str:
    """` Did you mean section.key?` for an unknown name; empty if no known `section.key` is close."""
    key, note = closest(name, known)
    return "" if key is None else f" Did you mean {key} ({note})?" if note else f" Did you mean {key}?"


def closest(name: str, known: Sequence[str]) -> tuple[str | None, str]:
    """The known `section.key` for another trainer's name, in any case, section or spelling; and how its meaning differs."""
    plain = re.sub(r"[-\s]", "_", name.strip().lstrip("-")).lower().removesuffix("_")
    section, _, last = plain.rpartition(".")
    if plain in known:
        return plain, ""
    same = [key for key in known if key.partition(".")[2] == last]
    if same:
        return next((key for key in same if key.startswith("train.")), same[0]), ""
    for other, key, note in _SYNONYMS:
        if other == last and key in known:
            return key, note
    keys = _of_section(section, known)
    guess = nearest(last, [key.partition(".")[2] for key in keys])
    return (next(key for key in keys if key.partition(".")[2] == guess), "") if guess else (None, "")


def _of_section(section: str, known: Iterable[str]) -> list[str]:
    """The keys of a section; all keys without a section."""
    return [key for key in known if not section or key.startswith(f"{section}.")]
