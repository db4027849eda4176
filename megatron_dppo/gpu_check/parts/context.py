"""Context parallelism: an optimiser step on sequences that two ranks share against the same step on one."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dppo import EXAMPLES
from megatron_dppo.gpu_check import Bench, Row, part
from megatron_dppo.gpu_check.models import policy_config, random_batch, random_model
from megatron_dppo.system.network import free_port

MODEL = EXAMPLES / "model_configs" / "qwen3-1.7b-base" / "config.json"
# Dense, because bf16 rounding would route some tokens to other experts.
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 4096, "max_window_layers": 2,
}  # fmt: skip
LENGTHS = [3, 500, 2041, 4096]
SMALL_LENGTHS = [1, 3, 50, 202]
RANKS = 2
EXCHANGES = ("p2p", "a2a")
LIMITS = {"bfloat16": (0.1, 1e-2), "float32": (1e-5, 1e-5)}
"""By dtype: nats of any log-probability, relative difference of the unclipped gradient norm."""


@part(
    "context parallelism: log-probabilities, loss and gradient norm of two ranks against one", 300.0
)
def context(bench: Bench) -> Iterator[Row]:
    """A row of each exchange, and on GPUs one of the layout against Transformer Engine's own."""
    if bench.gpus == 1:
        yield Row("context parallel", "not here: one GPU only")
        return
    dtype = "bfloat16" if bench.gpus else "float32"
    settings = {
        "checkpoint": str(
            random_model(bench.folder / "checkpoint", json.loads(MODEL.read_text()) | SMALL)
        ),
        "dtype": dtype,
        "lengths": LENGTHS if bench.gpus else SMALL_LENGTHS,
        "folder": str(bench.folder),
    }
    one = _run(1, {**settings, "name": "one", "megatron": {}})
    # Without GPUs there is one exchange, which nothing names.
    for exchange in EXCHANGES if bench.gpus else (None,):
        megatron = {"cp_comm_type": exchange} if exchange else {}
        name = exchange or "a2a over gloo"
        yield compared_row(
            name, dtype, one, _run(RANKS, {**settings, "name": name, "megatron": megatron})
        )
    yield _layout_row(bench)


def compared_row(exchange: str, dtype: str, one: dict[str, Any], two: dict[str, Any]) -> Row:
    """The step of two ranks beside that of one, judged."""
    log_prob, norm = LIMITS[dtype]
    pairs = zip(two["log_probs"], one["log_probs"], strict=True)
    figures = {
        "log_prob": max(abs(a - b) for a, b in pairs),
        "norm": abs(two["norm"] / one["norm"] - 1),
    }
    return Row(
        f"CP{RANKS}, {exchange}, {dtype}",
        f"log-prob {figures['log_prob']:.1e} nats, gradient norm {figures['norm']:.1e}",
        f"at most {log_prob:.0e} nats, {norm:.0e}",
        figures["log_prob"] <= log_prob and figures["norm"] <= norm,
        figures,
    )


def _layout_row(bench: Bench) -> Row:
    label = "own rows of each rank"
    if not bench.gpus or importlib.util.find_spec("transformer_engine") is None:
        return Row(label, "not here: Transformer Engine's layout needs it and a GPU")
    import torch
    import transformer_engine_torch

    from megatron_dppo.trainer.context_parallel import own_rows

    bounds = torch.tensor([0, 8, 24, 24, 88, 152], dtype=torch.int32, device="cuda")
    is_same = all(
        torch.equal(
            own_rows(bounds, 152, 4, rank),
            transformer_engine_torch.thd_get_partitioned_indices(bounds, 152, 4, rank).long(),
        )
        for rank in range(4)
    )
    return Row(
        label,
        "as Transformer Engine's" if is_same else "others",
        "as Transformer Engine's",
        is_same,
    )


def _run(ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 of ``ranks`` found."""
    import torch

    torch.multiprocessing.spawn(_worker, (ranks, free_port(), settings), ranks)
    return dict(json.loads(_report(settings).read_text()))


def _report(settings: dict[str, Any]) -> Path:
    return Path(settings["folder"]) / f"{settings['name'].replace(' ', '_')}.json"


def _worker(rank: int, ranks: int, port: int, settings: dict[str, Any]) -> None:
    """One step; log-probabilities before it and its unclipped gradient norm, into a file of rank 0."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    from megatron_dppo.algorithms.policy_loss import build_algorithm
    from megatron_dppo.trainer.token_loss import make_token_loss
    from megatron_dppo.trainer.trainer import Trainer

    config = policy_config(
        Path(settings["checkpoint"]),
        settings["dtype"],
        parallel={"world_size": ranks, "context": ranks},
        optimizer={"distributed": False},
        megatron=settings["megatron"],
    )
    trainer = Trainer(config)
    batch = random_batch(
        trainer.shape.vocab_size,
        settings["lengths"],
        pad_multiple=trainer.pad_multiple,
        sequence_multiple=trainer.share.sequence_multiple,
    )
    (log_probs,) = trainer.log_probs([batch])
    loss = make_token_loss(build_algorithm("dppo-binary-tv"))
    result = trainer.train_mini_batch([batch], loss, float(batch.loss_mask.sum()))
    if rank == 0:
        trained = log_probs.cpu()[batch.loss_mask].tolist()
        _report(settings).write_text(json.dumps({"log_probs": trained, "norm": result.grad_norm}))
    trainer.close()
