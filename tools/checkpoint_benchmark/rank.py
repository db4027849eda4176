"""One rank of the benchmark: builds a trainer with a filled optimizer, saves it several times, and writes the seconds.

tools/bench_checkpoint.py starts this program, and measures the memory of all ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Megatron's writer starts a process that imports this module again, so functions import large libraries lazily.
if TYPE_CHECKING:
    from megatron_dppo.trainer.trainer import Trainer

Timings = list[dict[str, float]]


def make_trainer(material: str, ranks: int, expert: int, *, distributed: bool) -> Trainer:
    """A bfloat16 trainer of the model in ``material``, its optimizer filled as after a step."""
    import torch

    from megatron_dppo.config import schema as s
    from megatron_dppo.trainer.trainer import Trainer

    config = s.TrainConfig(
        run=s.RunConfig(directory="unused", steps=1),
        model=s.ModelConfig(hf_checkpoint=material, dtype="bfloat16"),
        data=s.DataConfig(train="unused"),
        rollout=s.RolloutConfig(prompts_per_step=2, group_size=2, max_response_tokens=64),
        training=s.TrainingConfig(prompts_per_mini_batch=2, micro_batch_tokens=128),
        optimizer=s.OptimizerConfig(lr=1e-3, distributed=distributed),
        parallel=s.ParallelConfig(world_size=ranks, expert=expert),
    )
    trainer = Trainer.read(config)
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            group["step"] = 1  # Megatron's own state dict needs this value
            for p in group["params"]:
                state = part.optimizer.state[p]
                state.update({n: torch.rand_like(p.data) for n in ("exp_avg", "exp_avg_sq")})
                state["step"] = torch.tensor(1.0)
    trainer.step_count = 1
    return trainer


def save_with_store(trainer: Trainer, folder: Path, saves: int, *, background: bool) -> Timings:
    """Save with this project's store. Pass ``background`` only if it is set: an older checkout lacks this option."""
    from megatron_dppo.trainer.checkpoint.store import CheckpointStore

    options: dict[str, Any] = {"background": True} if background else {}
    store = CheckpointStore(folder, 1, **options)

    def save(step: int) -> Callable[[], None] | None:
        store.save(trainer, step, {})
        return store.finish if background else None

    return [time_save(partial(save, step)) for step in range(saves)]


def save_with_megatron(trainer: Trainer, folder: Path, saves: int, *, background: bool) -> Timings:
    """Megatron-Core's ``torch_dist``: each replica writes a share, and the state has the form ``dp_reshardable``."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    inner = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
    strategy = FullyParallelSaveStrategyWrapper(inner, group, do_cache_distribution=True)
    calls = AsyncCallsQueue()
    metadata = {"dp_cp_group": group, "distrib_optim_sharding_type": "dp_reshardable"}

    def save(step: int) -> Callable[[], None] | None:
        target = folder / f"step_{step}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True)
        dist.barrier()
        model = {
            f"m{i}": c.sharded_state_dict(metadata=metadata) for i, c in enumerate(trainer.chunks)
        }
        state = {
            **model,
            "optimizer": trainer.optimizer.sharded_state_dict(model, metadata=metadata),
        }
        request = dist_checkpointing.save(
            state,
            str(target),
            strategy,
            async_sharded_save=background,
            validate_access_integrity=False,
        )
        if not background:
            return None
        calls.schedule_async_request(request)
        return lambda: calls.maybe_finalize_async_calls(blocking=True)

    return [time_save(partial(save, step)) for step in range(saves)]


def time_save(save: Callable[[], Callable[[], None] | None]) -> dict[str, float]:
    """Seconds of ``save``, during which the trainer stands still, and seconds until all files are written."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    finish = save()
    dist.barrier()
    still_s = time.perf_counter() - start
    if finish is not None:
        finish()
        dist.barrier()
    return {"stood_still": still_s, "until_there": time.perf_counter() - start}


def main() -> None:
    """Run one mode with the arguments of bench_checkpoint.py, as JSON."""
    import torch
    import torch.distributed as dist

    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    trainer = make_trainer(
        settings["material"],
        settings["ranks"],
        settings["expert"],
        distributed=settings["distributed"],
    )
    save = save_with_megatron if settings["mode"].startswith("megatron") else save_with_store
    dist.barrier()
    rank = os.environ["RANK"]
    Path(settings["folder"], f"ready{rank}").touch()
    while not Path(settings["folder"], "go").exists():
        time.sleep(0.05)
    background = settings["mode"].endswith("background")
    timings = save(
        trainer, Path(settings["folder"], "saved"), settings["saves"], background=background
    )
    Path(settings["folder"], f"timings{rank}.json").write_text(json.dumps(timings))
    dist.barrier()
    os._exit(0)  # a normal exit would wait for Megatron's helper processes


if __name__ == "__main__":
    main()
