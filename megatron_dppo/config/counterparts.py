"""Names of other RL packages beside the keys of this package.

The hint for an unknown key reads the table, and tools/coming_from.py prints docs/coming_from.md from it. The names are
those of verl 0.6 to 0.9, TRL's ``GRPOConfig`` up to 1.16, slime's arguments, NeMo-RL's GRPO recipes and prime-rl's
configuration, in 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

PACKAGES = ("verl", "TRL", "slime", "NeMo-RL", "prime-rl")


@dataclass(frozen=True)
class Counterpart:
    """A key of this package, and the names of the same setting elsewhere.

    Attributes:
        key: the key here; with a value after ``=`` if one value of the key is the counterpart.
        names: package -> its names, dotted as in its configuration, without leading dashes.
        note: difference in meaning; empty if there is none.
    """

    key: str
    names: dict[str, tuple[str, ...]]
    note: str = ""


def _row(key: str, note: str = "", **names: str) -> Counterpart:
    """Return a row. ``names``: package, in lower case with underscores -> its names, separated by spaces."""
    by_package: dict[str, tuple[str, ...]] = {}
    for package in PACKAGES:
        text = names.get(package.lower().replace("-", "_"), "")
        if text:
            by_package[package] = tuple(text.split())
    return Counterpart(key, by_package, note)


COUNTERPARTS = (
    _row(
        "model.hf_checkpoint",
        verl="actor_rollout_ref.model.path",
        trl="model_name_or_path",
        slime="hf_checkpoint",
        nemo_rl="policy.model_name",
        prime_rl="model.name",
    ),
    _row(
        "data.train",
        verl="data.train_files",
        trl="train_dataset dataset_name",
        slime="prompt_data",
        nemo_rl="data.train_data_path",
    ),
    _row(
        "data.evaluation",
        "a table of named sets",
        verl="data.val_files",
        trl="eval_dataset",
        slime="eval_prompt_data",
        nemo_rl="data.val_data_path",
    ),
    _row(
        "data.max_prompt_tokens",
        verl="data.max_prompt_length",
        trl="max_prompt_length",
        slime="rollout_max_prompt_len",
        nemo_rl="data.max_input_seq_length",
    ),
    _row(
        "rollout.max_response_tokens",
        verl="data.max_response_length",
        trl="max_completion_length",
        slime="rollout_max_response_len",
        nemo_rl="policy.generation.max_new_tokens",
        prime_rl="sampling.max_tokens sampling.max_completion_tokens",
    ),
    _row(
        "rollout.prompts_per_step",
        "prompts of a batch; TRL and prime-rl count responses",
        verl="data.train_batch_size",
        trl="generation_batch_size",
        slime="rollout_batch_size",
        nemo_rl="grpo.num_prompts_per_step",
        prime_rl="batch_size",
    ),
    _row(
        "rollout.group_size",
        "responses to a prompt",
        verl="actor_rollout_ref.rollout.n",
        trl="num_generations",
        slime="n_samples_per_prompt",
        nemo_rl="grpo.num_generations_per_prompt",
        prime_rl="rollouts_per_example",
    ),
    _row(
        "rollout.temperature",
        verl="actor_rollout_ref.rollout.temperature",
        trl="temperature",
        slime="rollout_temperature",
        nemo_rl="policy.generation.temperature",
        prime_rl="sampling.temperature",
    ),
    _row(
        "rollout.max_staleness",
        "0 is synchronous; verl's threshold is a share of stale samples",
        verl="async_training.staleness_threshold",
        nemo_rl="grpo.async_grpo.max_trajectory_age_steps",
        prime_rl="max_async_level max_off_policy_steps",
    ),
    _row(
        "rollout.drop_zero_variance_groups",
        "DAPO's dynamic sampling",
        verl="algorithm.filter_groups.enable",
        slime="dynamic_sampling_filter_path",
        nemo_rl="grpo.use_dynamic_sampling",
    ),
    _row(
        "rollout.max_generation_rounds",
        verl="algorithm.filter_groups.max_num_gen_batches",
        nemo_rl="grpo.dynamic_sampling_max_gen_batches",
    ),
    _row(
        "rollout.oversampling",
        "a multiple; slime gives the number of prompts",
        slime="over_sampling_batch_size",
        nemo_rl="grpo.batch_multiplier",
    ),
    _row(
        "rollout.router_replay",
        "R3",
        verl="actor_rollout_ref.actor.megatron.router_replay.mode actor_rollout_ref.actor.router_replay.mode",
        slime="use_rollout_routing_replay",
    ),
    _row(
        "training.prompts_per_mini_batch",
        "prompts of an optimiser step; slime and NeMo-RL count responses, so divide by rollout.group_size",
        verl="actor_rollout_ref.actor.ppo_mini_batch_size",
        slime="global_batch_size",
        nemo_rl="policy.train_global_batch_size",
    ),
    _row(
        "training.micro_batch_tokens",
        "packed tokens of a micro-batch on a rank; always by tokens, so there is no switch for dynamic batches",
        verl="actor_rollout_ref.actor.ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu use_dynamic_bsz",
        trl="per_device_train_batch_size",
        slime="max_tokens_per_gpu micro_batch_size use_dynamic_batch_size",
        nemo_rl="policy.dynamic_batching.train_mb_tokens policy.train_micro_batch_size",
        prime_rl="seq_len micro_batch_size",
    ),
    _row(
        "training.recompute",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        trl="gradient_checkpointing",
        slime="recompute_granularity",
        nemo_rl="policy.megatron_cfg.activation_checkpointing",
    ),
    _row(
        "algorithm.name",
        "the mask and the weight. mu is always the engine's, so no option turns that on",
        verl="actor_rollout_ref.actor.policy_loss.loss_mode",
        trl="importance_sampling_level",
        slime="use_tis",
        nemo_rl="loss_fn.use_importance_sampling_correction loss_fn.sequence_level_importance_ratios",
        prime_rl="loss.type",
    ),
    _row(
        "algorithm.options.clip_low",
        verl="actor_rollout_ref.actor.clip_ratio_low clip_ratio",
        trl="epsilon",
        slime="eps_clip",
        nemo_rl="loss_fn.ratio_clip_min",
    ),
    _row(
        "algorithm.options.clip_high",
        verl="actor_rollout_ref.actor.clip_ratio_high",
        trl="epsilon_high",
        slime="eps_clip_high",
        nemo_rl="loss_fn.ratio_clip_max",
    ),
    _row(
        "algorithm.advantage",
        "adv_estimator=grpo is group-standardized, without the division by the deviation it is group-mean (Dr. GRPO; "
        "the default here), rloo is leave-one-out. There is no critic",
        verl="algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo",
        trl="scale_rewards",
        slime="advantage_estimator disable_grpo_std_normalization",
        nemo_rl="grpo.normalize_rewards grpo.use_leave_one_out_baseline",
    ),
    _row(
        "algorithm.aggregation",
        verl="actor_rollout_ref.actor.loss_agg_mode",
        trl="loss_type",
        slime="calculate_per_token_loss",
        nemo_rl="loss_fn.token_level_loss",
    ),
    _row(
        "algorithm.reference_kl",
        "above 0 turns the penalty on",
        verl="actor_rollout_ref.actor.kl_loss_coef use_kl_loss",
        trl="beta",
        slime="kl_loss_coef use_kl_loss",
        nemo_rl="loss_fn.reference_policy_kl_penalty",
    ),
    _row(
        "algorithm.reference_estimator",
        "low_var_kl is k3, mse is k2",
        verl="actor_rollout_ref.actor.kl_loss_type",
        slime="kl_loss_type",
        nemo_rl="loss_fn.reference_policy_kl_type",
    ),
    _row(
        "algorithm.truncated_responses=drop",
        trl="mask_truncated_completions",
        nemo_rl="grpo.overlong_filtering",
    ),
    _row(
        "algorithm.overlong_tokens",
        verl="reward_model.overlong_buffer.len overlong_buffer_cfg.len",
        nemo_rl="grpo.reward_shaping.overlong_buffer_length",
    ),
    _row(
        "optimizer.lr",
        verl="actor_rollout_ref.actor.optim.lr",
        trl="learning_rate",
        slime="lr",
        nemo_rl="policy.megatron_cfg.optimizer.lr",
        prime_rl="optim.lr",
    ),
    _row(
        "optimizer.clip_grad",
        verl="actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.optim.clip_grad",
        trl="max_grad_norm",
        slime="clip_grad",
        nemo_rl="policy.max_grad_norm",
        prime_rl="optim.max_norm",
    ),
    _row(
        "run.steps",
        "batches, not optimiser steps",
        verl="trainer.total_training_steps total_epochs",
        trl="max_steps num_train_epochs",
        slime="num_rollout num_epoch",
        nemo_rl="grpo.max_num_steps",
        prime_rl="max_steps",
    ),
    _row(
        "run.directory",
        verl="trainer.default_local_dir",
        trl="output_dir",
        slime="save",
        nemo_rl="checkpointing.checkpoint_dir",
        prime_rl="output_dir",
    ),
    _row(
        "reward.name",
        "`verl` takes a verl function with its own arguments",
        verl="custom_reward_function.path",
        trl="reward_funcs",
        slime="rm_type custom_rm_path",
    ),
    _row(
        "engine.placement=colocated",
        "the hybrid engine: trainer and servers take turns on the same devices",
        verl="actor_rollout_ref.hybrid_engine",
        trl="vllm_mode",
        slime="colocate",
        nemo_rl="policy.generation.colocated.enabled",
    ),
    _row(
        "engine.servers",
        slime="rollout_num_gpus",
        nemo_rl="policy.generation.colocated.resources.num_nodes",
    ),
    _row(
        "sglang.tp_size",
        verl="actor_rollout_ref.rollout.tensor_model_parallel_size",
        trl="vllm_tensor_parallel_size",
        slime="rollout_num_gpus_per_engine",
        nemo_rl="policy.generation.vllm_cfg.tensor_parallel_size",
        prime_rl="inference.parallel.tp",
    ),
    _row(
        "sglang.mem_fraction_static",
        verl="actor_rollout_ref.rollout.gpu_memory_utilization",
        trl="vllm_gpu_memory_utilization",
        slime="sglang_mem_fraction_static",
        nemo_rl="policy.generation.vllm_cfg.gpu_memory_utilization",
    ),
    _row(
        "parallel.tensor",
        verl="actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        slime="tensor_model_parallel_size",
        nemo_rl="policy.megatron_cfg.tensor_model_parallel_size",
    ),
    _row(
        "parallel.pipeline",
        verl="actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
        slime="pipeline_model_parallel_size",
        nemo_rl="policy.megatron_cfg.pipeline_model_parallel_size",
    ),
    _row(
        "parallel.context",
        verl="actor_rollout_ref.actor.megatron.context_parallel_size ulysses_sequence_parallel_size",
        slime="context_parallel_size",
        nemo_rl="policy.megatron_cfg.context_parallel_size",
        prime_rl="model.cp",
    ),
    _row(
        "parallel.expert",
        verl="actor_rollout_ref.actor.megatron.expert_model_parallel_size",
        slime="expert_model_parallel_size",
        nemo_rl="policy.megatron_cfg.expert_model_parallel_size",
        prime_rl="model.ep",
    ),
    _row(
        "parallel.world_size",
        "all ranks of the trainer",
        verl="trainer.n_gpus_per_node trainer.nnodes",
        slime="actor_num_gpus_per_node actor_num_nodes",
        nemo_rl="cluster.gpus_per_node cluster.num_nodes",
    ),
    _row(
        "evaluation.every",
        verl="trainer.test_freq",
        trl="eval_steps",
        slime="eval_interval",
        nemo_rl="grpo.val_period",
        prime_rl="eval.interval",
    ),
    _row(
        "evaluation.samples_per_prompt",
        verl="actor_rollout_ref.rollout.val_kwargs.n",
        slime="n_samples_per_eval_prompt",
        prime_rl="eval.rollouts_per_example",
    ),
    _row(
        "checkpoint.every",
        verl="trainer.save_freq",
        trl="save_steps",
        slime="save_interval",
        nemo_rl="checkpointing.save_period",
        prime_rl="ckpt.interval",
    ),
    _row(
        "checkpoint.keep",
        verl="trainer.max_actor_ckpt_to_keep",
        trl="save_total_limit",
        nemo_rl="checkpointing.keep_top_k",
        prime_rl="ckpt.keep_last",
    ),
    _row(
        "tracking.trackers",
        verl="trainer.logger",
        trl="report_to",
        slime="use_wandb use_tensorboard",
        nemo_rl="logger.wandb_enabled logger.tensorboard_enabled",
    ),
    _row(
        "tracking.project",
        verl="trainer.project_name",
        slime="wandb_project",
        nemo_rl="logger.wandb.project",
        prime_rl="wandb.project",
    ),
    _row(
        "tracking.name",
        verl="trainer.experiment_name",
        trl="run_name",
        slime="wandb_group",
        nemo_rl="logger.wandb.name",
        prime_rl="wandb.name",
    ),
    _row("run.seed", trl="seed", slime="seed rollout_seed", nemo_rl="grpo.seed"),
)
"""The rows, in the order of the page."""


def key_of_name(path: str) -> str | None:
    """Return the key here for a whole name of another package, or for two parts at least of its end; else None.

    ``path``: the dotted name as the user wrote it.
    """
    name = path.replace("-", "_")
    for other_name, key in _keys_by_name():
        shorter, longer = sorted((name, other_name), key=len)
        if name == other_name or ("." in shorter and longer.endswith(f".{shorter}")):
            return key
    return None


def key_of_last_part(path: str) -> str | None:
    """Return the key here for the last part of another package's name; None without one.

    The first row counts if the packages give one last part different meanings.
    """
    last_part = path.replace("-", "_").rpartition(".")[2]
    for other_name, key in _keys_by_name():
        if other_name.rpartition(".")[2] == last_part:
            return key
    return None


def _keys_by_name() -> Iterator[tuple[str, str]]:
    """Yield each name of another package with the key here, without a value."""
    for row in COUNTERPARTS:
        for names in row.names.values():
            for name in names:
                yield name, row.key.partition("=")[0]
