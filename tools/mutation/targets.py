"""The mutated modules, and the unit tests that must notice their mutants."""

from __future__ import annotations

LOSS = (
    "policy_loss",
    "penalties",
    "masks",
    "divergence",
    "nonfinite",
    "presets",
    "later_rules",
    "theory",
)
DATA = ("packing", "data_balancing", "mini_batches")
CHECKS = ("weight_checks", "engine_checksums", "weight_sync")
LONE = ("lone_trainer",)
FILES = ("trajectory", "batch_file")
CONVERSION = ("conversion_tables", "conversion_streaming", "conversion_bad_input", "dist_blocks")
TARGETS: dict[str, tuple[str, ...]] = {
    "algorithms/divergence.py": LOSS,
    "algorithms/inputs.py": LOSS,
    "algorithms/aggregation.py": (*LOSS, "mini_batches"),
    "algorithms/advantages.py": ("advantages",),
    "algorithms/algorithm.py": (*LOSS, "loss_record"),
    "algorithms/decisions.py": LOSS,
    "algorithms/likelihood.py": ("nonfinite",),
    "algorithms/policy_loss.py": LOSS,
    "algorithms/reference_penalty.py": ("reference_penalty", "presets"),
    "algorithms/token_metrics.py": (*LOSS, "frequency_canary"),
    "algorithms/topk_terms.py": (*LOSS, "projection"),
    "algorithms/rules.py": LOSS,
    "algorithms/sequence_rules.py": LOSS,
    "algorithms/step_rules.py": LOSS,
    "algorithms/triage.py": LOSS,
    "algorithms/table.py": ("presets",),
    "vocab_parallel/agreement.py": ("policy_stats",),
    "vocab_parallel/backends.py": ("policy_stats", "triton_backend"),
    "vocab_parallel/policy_stats.py": ("policy_stats",),
    "vocab_parallel/head.py": ("head", "head_memory"),
    "vocab_parallel/wire.py": ("policy_stats",),
    "data/batch_file.py": FILES,
    "data/columns.py": ("trajectory", "exchange_parts", "nonfinite", "routing"),
    "data/balancing.py": ("data_balancing",),
    "data/packing.py": (*DATA, "nonfinite"),
    "data/trajectory.py": (*FILES, "exchange_parts", "continuation", "routing"),
    "loop/batch_layout.py": (*DATA, *LONE),
    "loop/evaluation.py": ("evaluation",),
    "loop/learning.py": (*DATA, "loss_record", "learning", *LONE),
    "model/adapters.py": ("adapters", "adapter_updates", "peft_folder"),
    "model/gather_plan.py": ("conversion_tables", "conversion_proof", "weight_plan"),
    "model/engine_layout.py": ("conversion_tables", "conversion_proof"),
    "model/layout.py": ("conversion_proof", "model_layout"),
    "model/splits.py": ("conversion_tables", "conversion_proof", "model_layout"),
    "model/mapping.py": ("conversion_tables", "conversion_proof"),
    "model/resharding.py": ("conversion_proof", "weight_plan"),
    "model/shard_plan.py": ("shard_plan", "weight_plan"),
    "checkpoint_conversion/adapters.py": ("peft_folder", "adapters"),
    "checkpoint_conversion/certificate.py": CONVERSION,
    "checkpoint_conversion/dist_reading.py": CONVERSION,
    "checkpoint_conversion/dist_writing.py": CONVERSION,
    "checkpoint_conversion/hf_folder.py": CONVERSION,
    "convert/streaming.py": CONVERSION,
    "checkpoint_conversion/tensor_store.py": CONVERSION,
    "checkpoint_conversion/torch_dist.py": CONVERSION,
    "trainer/checkpoint/state.py": ("checkpoint_state",),
    "trainer/lora_modules.py": ("adapters", *LONE),
    "trainer/lora_policy.py": LONE,
    "trainer/megatron_config.py": ("trainer_config",),
    "trainer/merged_weights.py": LONE,
    "trainer/router_replay.py": ("router_replay",),
    "trainer/step.py": ("trainer_microbatch", *LONE),
    "trainer/token_loss.py": ("token_loss", "loss_record"),
    "trainer/trainer.py": LONE,
    "trainer/weight_source.py": LONE,
    "weights/checksums.py": CHECKS,
    "tensor_hash/__init__.py": CHECKS,
    "weights/canary.py": CHECKS,
    "weights/transaction.py": CHECKS,
    "weights/verification.py": CHECKS,
}
"""Module of megatron_dppo -> its files ``test_<name>.py`` under ``tests/unit``. A changed function is tested by
every test of all chosen modules that calls it, the quickest first. Code that runs when the module is
loaded is tested by the module's own files.
"""
