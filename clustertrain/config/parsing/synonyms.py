"""Other names for the keys and values of a recipe: names in other trainers, and former names.

Sources: Hugging Face's TrainingArguments and model configurations, Lightning's Trainer, torchtitan's job configuration,
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

_KEYS: Mapping[str, str] = {
    "contract.metric": "metric_for_best_model monitor deciding_metric",
    "contract.mode": "greater_is_better higher_is_better",
    "contract.on_budget_spent": "when_spent",
    "model": "network net architecture",
    "model.preset": "model_name name_or_path model_name_or_path flavor",
    "model.init": "pretrained init_from load_from checkpoint_path pretrained_path",
    "model.head_dim": "head_size d_head",
    "model.dim": "hidden_size hidden_dim d_model n_embd embed_dim embedding_dim",
    "model.layers": "num_hidden_layers num_layers n_layers n_layer depth",
    "model.heads": "num_attention_heads num_heads n_heads n_head",
    "model.kv_heads": "num_key_value_heads num_kv_heads n_kv_heads",
    "model.ffn_dim": "intermediate_size ffn_hidden_size mlp_dim hidden_ffn",
    "model.max_seq_len": "max_position_embeddings max_length n_positions",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.tie_embeddings": "tie_word_embeddings weight_tying",
    "model.dropout": "hidden_dropout resid_pdrop dropout_rate dropout_p",
    "model.convnet.classes": "num_classes num_labels n_classes",
    "model.convnet.channels": "in_channels num_channels in_chans",
    "data": "dataset datasets dataloader",
    "data.path": "data_dir data_path dataset_path train_file",
    "data.seq_len": "sequence_length context_length context_len block_size max_seq_length",
    "data.pack": "packing sequence_packing",
    "data.attention": "reset_attention_mask reset_position_ids document_masking attn_mask_type",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_file tokenizer_name_or_path",
    "data.chat_template": "template jinja_template chat_template_path",
    "data.validation": "validation_split val_split eval_split test_size validation_fraction",
    "data.validation_path": "validation_file val_path eval_path",
    "data.workers": "num_workers dataloader_num_workers",
    "data.prefetch": "prefetch_factor dataloader_prefetch_factor",
    "data.augment": "augmentation augmentations transforms",
    "objective": "loss criterion loss_fn",
    "objective.label_smoothing": "label_smoothing_factor smoothing",
    "objective.ignore_index": "ignored_index pad_token_id",
    "adapter": "lora peft lora_config peft_config",
    "adapter.kind": "peft_type use_dora",
    "adapter.rank": "r lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.rank_stabilized": "use_rslora rslora",
    "adapter.target_modules": "lora_target_modules modules targets",
    "optim": "optimizer",
    "optim.name": "optimizer_type optimizer_name",
    "optim.lr": "learning_rate base_lr max_lr peak_lr",
    "optim.lr_reference_batch": "lr_batch",
    "optim.betas": "beta beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "optim.eps": "epsilon adam_epsilon",
    "optim.weight_decay": "decay wd l2",
    "optim.layer_decay": "layerwise_lr_decay llrd layer_lr_decay",
    "optim.clip_norm": "max_grad_norm max_norm grad_clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping",
    "optim.clip": "gradient_clip_algorithm clip_mode",
    "schedule": "scheduler lr_scheduler lr_schedule",
    "schedule.kind": "lr_scheduler_type scheduler_type decay_type",
    "schedule.warmup_steps": "warmup num_warmup_steps warmup_iters",
    "schedule.warmup_ratio": "warmup_fraction warmup_share warmup_pct",
    "schedule.warmup_epochs": "num_warmup_epochs",
    "schedule.milestone_epochs": "lr_steps",
    "schedule.max_momentum": "mom_max",
    "schedule.min_momentum": "base_momentum mom_min",
    "schedule.floor": "min_lr eta_min end_lr final_lr min_lr_ratio min_lr_factor",
    "schedule.cooldown_steps": "cooldown decay_steps decay_ratio",
    "parallel": "parallelism",
    "parallel.activation_checkpointing": "gradient_checkpointing activation_checkpoint recompute",
    "parallel.compile": "torch_compile",
    "parallel.offload": "cpu_offload",
    "parallel.context_parallel_method": "context",
    "parallel.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "job": "slurm resources",
    "job.name": "run_name experiment_name",
    "job.nodes": "num_nodes nnodes",
    "job.gpus": "devices gpus_per_node nproc_per_node",
    "job.device": "accelerator",
    "job.layout": "strategy fsdp ddp deepspeed",
    "job.tp": "tensor_parallel tensor_parallel_degree tensor_parallel_size",
    "job.pp": "pipeline_parallel pipeline_parallel_degree pipeline_parallel_size",
    "job.cp": "context_parallel context_parallel_degree context_parallel_size",
    "job.dp_replicate": "data_parallel_replicate_degree",
    "job.dp_shard": "data_parallel_shard_degree",
    "train": "training trainer",
    "train.steps": "max_steps num_steps total_steps training_steps max_iters iterations",
    "train.epochs": "max_epochs num_epochs num_train_epochs n_epochs",
    "train.global_batch": "batch_size global_batch_size train_batch_size gradient_accumulation_steps "
    "accumulate_grad_batches grad_accum",
    "train.micro_batch": "micro_batch_size local_batch_size per_device_train_batch_size per_device_batch_size",
    "train.precision": "dtype bf16 fp16 tf32 fp8 amp mixed_precision mixed_precision_param",
    "train.seed": "random_seed data_seed",
    "train.log_every": "logging_steps log_every_n_steps log_interval log_freq",
    "train.deterministic": "full_determinism use_deterministic_algorithms",
    "train.attention_backend": "attn_implementation sdpa_backend sdp_kernel",
    "train.profile": "profiler profiling enable_profiling",
    "stability.on_divergence": "then",
    "stability.grad_norm_min": "vanishing",
    "evaluation": "eval validation_loop",
    "evaluation.every": "eval_steps eval_interval eval_every val_check_interval eval_strategy",
    "evaluation.every_epochs": "check_val_every_n_epoch eval_epochs",
    "evaluation.samples": "limit_val_batches max_eval_samples eval_iters",
    "evaluation.micro_batch": "eval_batch_size per_device_eval_batch_size val_batch_size",
    "evaluation.patience": "early_stopping early_stopping_patience early_stop",
    "evaluation.warn_when_rising": "rising",
    "checkpoint": "checkpointing",
    "checkpoint.every": "save_steps save_interval save_every every_n_train_steps interval",
    "checkpoint.keep": "save_total_limit keep_latest_k max_to_keep keep_last",
    "checkpoint.keep_best": "save_top_k load_best_model_at_end save_best",
    "checkpoint.async_save": "background async_mode async_checkpoint",
    "job.checkpoint_dir": "output_dir default_root_dir save_dir checkpoint_folder",
    "telemetry": "monitoring metrics_export",
    "tracking": "logger logging loggers wandb tensorboard mlflow",
    "tracking.trackers": "to report_to log_with enable_wandb enable_tensorboard",
    "tracking.project": "project_name wandb_project experiment",
    "preemption_test": "rehearsal",
}
# Notes on keys whose values have another unit than in other trainers.
UNIT_NOTES: Mapping[str, str] = {"schedule.floor": "It is a fraction of optim.lr."}
_VALUES: Mapping[str, str] = {
    "cross-entropy": "ce crossentropy nll softmax categorical-crossentropy sparse-categorical-crossentropy",
    "binary-cross-entropy": "bce bce-with-logits bcewithlogits bcewithlogitsloss sigmoid",
    "mse": "l2 squared mean-squared-error",
    "l1": "mae absolute mean-absolute-error",
    "huber": "smooth-l1",
    "dpo": "preference preferences direct-preference-optimization",
    "nt-xent": "ntxent infonce info-nce contrastive simclr clip",
    "cosine": "cosine-with-warmup cosine-annealing cosineannealing cosineannealinglr",
    "linear": "linear-with-warmup polynomial",
    "step": "multistep steplr multisteplr staircase exponential",
    "one-cycle": "onecycle onecyclelr",
    "plateau": "reduce-lr-on-plateau reducelronplateau",
    "wsd": "warmup-stable-decay trapezoidal trapezoid",
    "constant": "constant-with-warmup none off fixed",
    "adamw8bit": "adam8bit adamw-8bit adamw-bnb-8bit",
    "adamw": "adamw-torch adamw-torch-fused adamw-fused",
    "fp32": "32 float32 float full 32-true",
    "bf16": "bfloat16 bf16-mixed bf16-true",
    "fp16": "16 float16 half 16-mixed",
    "fp8": "float8",
    "fsdp": "fsdp2 zero3 zero-3 full-shard full",
    "fsdp-grad-op": "zero2 zero-2 shard-grad-op",
    "zero1": "zero-1",
    "hybrid-shard": "hsdp",
    "ddp": "dp data-parallel",
    "decoder": "transformer gpt gpt2 llama lm causal-lm",
    "convnet": "cnn resnet conv",
    "two-tower": "siamese dual-encoder bi-encoder clip",
    "selective": "true on",
    "cuda": "gpu",
    "apptainer": "singularity",
    "enroot": "pyxis",
    "podman": "docker",
    "wandb": "weights-and-biases weights-biases",
    "images": "image vision",
    "tokens": "tokenized token",
    "chat": "conversation conversations messages instruct instruction sft",
    "custom": "own",
    "accuracy": "acc top1",
    "perplexity": "ppl",
}


def _invert(names: Mapping[str, str]) -> dict[str, list[str]]:
    inverted: dict[str, list[str]] = {}
    for name, aliases in names.items():
        for alias in aliases.split():
            inverted.setdefault(alias, []).append(name)
    return inverted


KEYS_BY_ALIAS, VALUES_BY_ALIAS = _invert(_KEYS), _invert(_VALUES)  # alias -> names


def find_keys(name: str) -> list[str]:
    """Return the dotted keys that ``name`` may mean."""
    return KEYS_BY_ALIAS.get(name.lower().replace("-", "_"), [])


def find_values(name: str) -> list[str]:
    """Return the values, of any key, that ``name`` may mean."""
    return VALUES_BY_ALIAS.get(name.lower().replace("_", "-"), [])
