"""The arena's runs in the real loop, with an SGLang server, weight updates, and rewards in separate processes.

Each mismatch of the lab's claims exists in the real loop too. Stale batches come from the loop's
``rollout.max_staleness``, which is the lab's age. Rounded weights and changed routing come from the server, whose
models ``engine_models`` changes. The words of the tasks ``rare`` and ``long`` are ``w0``, ``w1``, ...
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.arena.claims import Record
from examples.arena.lab import KEPT, Cell, errors_by_mu, rounded
from examples.arena.mismatches import MISMATCHES, Mismatch
from examples.arena.tasks import TASKS, Task, share_before_error, share_of_topic
from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.diagnostics.explain.seen_step import SeenStep
from megatron_dppo.metrics.records import ROLLOUTS_FOLDER, read_records

CONFIG = Path(__file__).with_name("real.yaml")
RUNS = Path("runs/arena/real")
SEED = 1
MEASURED_STEPS = 8
"""The mismatch is measured in this number of steps, the last steps of a run."""
ENGINE_MODELS = "examples.arena.engine_models"


def real_key(cell: Cell) -> str:
    """Return the key of the run in a file that also has the lab's runs."""
    return f"real/{cell.key}"


def run(cell: Cell) -> Record:
    """Train in the real loop; return the metrics that the lab keeps of a run.

    Raises RuntimeError, with the end of the run's output, if the run fails.
    """
    mismatch = MISMATCHES[cell.mismatch]
    directory = RUNS / cell.key.replace("/", "_")
    overrides = [
        f"run.directory={directory}",
        # Do not resume a failed run: its stale batches would be lost, so the staleness would begin at 0 again.
        "run.resume=never",
        f"run.seed={cell.seed}",
        f"algorithm.name={cell.algorithm}",
        *cell.changes,
        *settings_of(mismatch),
        *_task_changes(TASKS[cell.task]()),
    ]
    command = [sys.executable, "-m", "megatron_dppo", "train", str(CONFIG), *overrides]
    variables = os.environ | engine_variables(cell.mismatch)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{directory}: exit code {done.returncode}\n{done.stdout[-4000:]}")
    # Step 0 is the evaluation before the training.
    records = [record for record in read_records(directory) if record["step"]]
    values: dict[str, list[float]] = {}
    for name in KEPT:
        numbers = [record.get(name) for record in records]
        values[name] = [math.nan if number is None else number for number in numbers]
    if changes_engine(mismatch):
        values |= _mismatch(directory, len(records))
    # Remove the large folders: only the metrics are kept.
    for folder in (ROLLOUTS_FOLDER, "checkpoints"):
        shutil.rmtree(directory / folder, ignore_errors=True)
    return rounded(values)


def _mismatch(directory: Path, last: int) -> dict[str, list[float]]:
    """Return ``errors_by_mu`` of the first mini-batches of the last ``MEASURED_STEPS`` steps.

    The first mini-batch of a step uses the weights from before the step. ``last``: number of the last step.
    """
    config = load_config(directory / "config.yaml")
    size = config.training.prompts_per_mini_batch * config.rollout.group_size
    pi = []
    mu = []
    for step in range(max(1, last - MEASURED_STEPS + 1), last + 1):
        batch = load_batch(directory / ROLLOUTS_FOLDER, step)[:size]
        seen = SeenStep.of(batch, config.algorithm).inputs
        pi.append(seen.log_probs.exp())
        mu.append(seen.rollout_log_probs.exp())
    return errors_by_mu(torch.cat(pi), torch.cat(mu))


def changes_engine(mismatch: Mismatch) -> bool:
    """Return whether the server's computation is changed. Raises ValueError for a mismatch that only the lab has."""
    if mismatch.activations or mismatch.cache is not None:
        raise ValueError(f"{mismatch}: rounded activations and caches are the lab's alone")
    return mismatch.rounding is not None or mismatch.flips > 0 or mismatch.blocks


def settings_of(mismatch: Mismatch) -> list[str]:
    """Return the overrides of the run's configuration for ``mismatch``, in the form ``key.path=value``."""
    settings = [
        f"rollout.max_staleness={mismatch.age}",
        f"rollout.router_replay={str(mismatch.replays).lower()}",
    ]
    if changes_engine(mismatch):
        # The errors at rare and at likely tokens are measured with the saved batches.
        settings.append("rollout.save=true")
    if mismatch.blocks:
        settings.append("engine.quantization=fp8")
    elif changes_engine(mismatch):
        # The canary would find the mismatch and stop the run.
        settings.append("weight_sync.canary_every=0")
    if mismatch.flips:
        # Each pass over a prompt draws its own flips. With a cache of prompts, a response would use keys, values and
        # recorded routing of another pass.
        settings.append("sglang.disable_radix_cache=true")
    return settings


def engine_variables(name: str) -> dict[str, str]:
    """Return the variables of the server's environment for the mismatch ``name``.

    There are none if SGLang's own models have the mismatch.
    """
    mismatch = MISMATCHES[name]
    if not changes_engine(mismatch) or mismatch.blocks:
        return {}
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": ENGINE_MODELS, "ARENA_MISMATCH": name}


def _task_changes(task: Task) -> list[str]:
    if task.name == "moe":
        return ["data.evaluation={}"]
    if task.name == "moe-wide":
        # SGLang computes with FP8 weights only in 16-bit models, so the trainer uses bfloat16 too.
        return [
            "data.evaluation={}",
            f"model.hf_checkpoint={task.checkpoint}",
            "model.dtype=bfloat16",
            "parallel.world_size=1",
            "parallel.expert=1",
        ]
    folder = task.checkpoint.with_name(f"{task.name}-endless")
    if not folder.is_dir():
        write_words(task, folder)
    return [
        f"model.hf_checkpoint={folder}",
        f"data.train={folder / 'problems.jsonl'}",
        "data.evaluation={}",
        "data.apply_chat_template=false",
        f"reward.name=examples.arena.real_loop:reward_{task.name}",
        # Every response is truncated: all have the same number of tokens.
        "algorithm.truncated_responses=as-verified",
        "parallel.world_size=1",
        "parallel.expert=1",
        *task.settings,
    ]


def write_words(task: Task, folder: Path) -> None:
    """Write the task's checkpoint with a tokenizer, and its problems as text.

    No word ends a response, because all responses of the task have the same number of tokens.
    """
    staged = folder.with_suffix(".part")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(task.checkpoint, staged)
    for path in staged.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    size = json.loads((staged / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # The tokenizer has no special tokens: they would be missing in a response's text.
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(staged)
    rows = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in task.prompts.tolist()]
    (staged / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    staged.rename(folder)


def _ids(text: str) -> np.ndarray:
    return np.array([int(word[1:]) for word in text.split()], np.int64)


def reward_rare(prompt: str, response: str) -> float:
    return share_of_topic(_ids(prompt), _ids(response))


def reward_long(prompt: str, response: str) -> float:
    return share_before_error(_ids(prompt), _ids(response))


# ``_task_changes`` names the reward of a task by the task's name.
reward_longer = reward_long
