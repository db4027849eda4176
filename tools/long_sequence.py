#!/usr/bin/env python3
"""One optimiser step of the real trainer on one long sequence, with the output layer in chunks, and with all logits at
once. Each way runs in a separate process with the same limit of memory.

    python tools/long_sequence.py --tokens 32768 --vocabulary 151936 --limit-gib 8

The model is a random Qwen3 of one layer, hidden 64. Only the second half of the sequence is trained on. Prints seconds,
the gradient's norm, and the process's peak memory; or how the process died.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_dppo.diagnostics.gpu_check import policy_config, random_model

GIB = 2**30
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def step(checkpoint: Path, tokens: int, chunk: int, limit: int) -> dict[str, float]:
    """Do the step in this process. Return seconds, the gradient's norm and peak bytes."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    from megatron_dppo.algorithms.algorithm import build_algorithm
    from megatron_dppo.algorithms.inputs import TokenInputs
    from megatron_dppo.algorithms.policy_loss import LossSums, policy_loss
    from megatron_dppo.data.packing import PackedBatch, pack
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.trainer.trainer import Trainer
    from megatron_dppo.vocab_parallel import PolicyStats

    policy = policy_config(
        checkpoint, "float32", training={"micro_batch_tokens": tokens}, head={"chunk_tokens": chunk}
    )
    trainer = Trainer(policy)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(trainer.shape.vocab_size, (tokens,), generator=generator).tolist()
    response = ids[tokens // 2 :]
    mu = {"rollout_log_probs": [-12.0] * len(response)}
    sequence = Trajectory.of_response(
        ids[: tokens // 2], response, problem_id=0, advantage=1.0, columns=mu
    )
    algorithm = build_algorithm("dppo-binary-tv", {})

    def loss(stats: PolicyStats, batch: PackedBatch) -> LossSums:
        rollout = batch.columns["rollout_log_probs"]
        inputs = TokenInputs(stats.log_probs, rollout, batch.advantages, batch.loss_mask)
        return policy_loss(algorithm, inputs)

    began = time.perf_counter()
    result = trainer.train_mini_batch([pack([sequence], trains=[True])], loss, float(len(response)))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "norm": result.grad_norm, "peak": peak}


def main() -> None:
    """Run a child process for each size of chunks, and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    limit = int(options.limit_gib * GIB)
    if options.child:
        print(json.dumps(step(options.child, options.tokens, options.chunk, limit)))
        return
    table = Table("tokens whose logits exist", "seconds", "gradient norm", "peak memory")
    with tempfile.TemporaryDirectory() as folder:
        config = {
            **MODEL,
            "vocab_size": options.vocabulary,
            "max_position_embeddings": options.tokens,
        }
        checkpoint = random_model(Path(folder), config)
        for chunk in (options.chunk, options.tokens):
            command = [sys.executable, __file__, "--child", str(checkpoint), "--chunk", str(chunk)]
            command += ["--tokens", str(options.tokens), "--limit-gib", str(options.limit_gib)]
            child = subprocess.run(command, capture_output=True, text=True, check=False)
            if child.returncode:
                last = (child.stderr.strip() or "killed").splitlines()[-1]
                table.add_row(
                    f"{chunk:,}", "-", "-", f"died under {options.limit_gib:g} GiB: {last[:80]}"
                )
                continue
            figures = json.loads(child.stdout.splitlines()[-1])
            table.add_row(
                f"{chunk:,}", f"{figures['seconds']:.1f}", f"{figures['norm']:.6f}",
                f"{figures['peak'] / GIB:.1f} GiB",
            )  # fmt: skip
    Console(highlight=False, width=110).print(table)


if __name__ == "__main__":
    main()
