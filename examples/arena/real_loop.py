"""The arena's runs in the real loop: an SGLang server samples, its weights are updated, rewards have their processes.

Each mismatch of the lab's claims is here too. Staleness is the loop's own, up to as many batches as the lab's; rounded
weights and other routing are the server's, whose models ``engine_models`` changes. The words of ``rare`` and ``long``
are ``w0``, ``w1``, ...
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
from examples.arena.lab import KEPT, Cell, errors_by_mu
from examples.arena.mismatches import MISMATCHES, Mismatch
from examples.arena.tasks import TASKS, Task, share_before_error, share_of_topic
from megatron_dppo.config.loading import load_config
from megatron_dppo.data.batch_file import load_batch
from megatron_dppo.diagnostics.explain.seen_step import SeenStep
from megatron_dppo.metrics.records import ROLLOUTS_FOLDER, read_records

CONFIG = Path(__file__).with_name("real.yaml")
RUNS = Path("runs/arena/real")
SEED, SEEN = 1, 8
ENGINE_MODELS = "examples.arena.engine_models"


def real_key(cell: Cell) -> str:
    """Names the run among those of the lab."""
    return f"real/{cell.key}"


def run(cell: Cell) -> Record:
    """Train in the real loop; what is kept, as of a run of the lab.

    Raises RuntimeError where the run fails, with the end of what it said.
    """
    mismatch = MISMATCHES[cell.mismatch]
    directory = RUNS / cell.key.replace("/", "_")
    overrides = [
        f"run.directory={directory}",
        # What a run that failed has left is not gone on with: staleness would begin anew.
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
    steps = [r for r in read_records(directory) if r["step"]]
    values = {name: [math.nan if (x := s.get(name)) is None else x for s in steps] for name in KEPT}
    if changes_engine(mismatch):
        values |= _mismatch(directory, len(steps))
    # A run of the same name starts anew; what it weighs is not kept.
    for folder in (ROLLOUTS_FOLDER, "checkpoints"):
        shutil.rmtree(directory / folder, ignore_errors=True)
    return {name: [float(f"{x:.5g}") for x in of] for name, of in values.items()}


def _mismatch(directory: Path, last: int) -> dict[str, list[float]]:
    """``errors_by_mu`` of the first mini-batches, which their step had not moved yet, of the ``SEEN`` last steps."""
    config = load_config(directory / "config.yaml")
    first = config.training.prompts_per_mini_batch * config.rollout.group_size
    pi, mu = [], []
    for step in range(max(1, last - SEEN + 1), last + 1):
        batch = load_batch(directory / ROLLOUTS_FOLDER, step)[:first]
        seen = SeenStep.of(batch, config.algorithm).inputs
        pi.append(seen.log_probs.exp())
        mu.append(seen.rollout_log_probs.exp())
    return errors_by_mu(torch.cat(pi), torch.cat(mu))


def changes_engine(mismatch: Mismatch) -> bool:
    """Whether the server computes otherwise than the trainer. Raises ValueError for what only the lab's copy can do."""
    if mismatch.activations or mismatch.cache is not None:
        raise ValueError(f"{mismatch}: rounded activations and caches are the lab's alone")
    return mismatch.rounding is not None or mismatch.flips > 0 or mismatch.blocks


def settings_of(mismatch: Mismatch) -> list[str]:
    """Of the run, in the form ``key.path=value``."""
    settings = [
        f"rollout.max_staleness={mismatch.age}",
        f"rollout.router_replay={str(mismatch.replays).lower()}",
    ]
    if changes_engine(mismatch):
        # Of the batches the mismatch is measured at rare and at likely tokens.
        settings.append("rollout.save=true")
    if mismatch.blocks:
        settings.append("engine.quantization=fp8")
    elif changes_engine(mismatch):
        # The canary would stop the run for the mismatch.
        settings.append("weight_sync.canary_every=0")
    if mismatch.flips:
        # Each pass over a prompt has flips of its own: a response that takes another's keys and values would have a
        # first token of its own flips, and a recording of the other's.
        settings.append("sglang.disable_radix_cache=true")
    return settings


def engine_variables(name: str) -> dict[str, str]:
    """Of the server's environment under the mismatch ``name``."""
    mismatch = MISMATCHES[name]
    if not changes_engine(mismatch) or mismatch.blocks:
        return {}
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": ENGINE_MODELS, "ARENA_MISMATCH": name}


def _task_changes(task: Task) -> list[str]:
    if task.name == "moe":
        return ["data.evaluation={}"]
    if task.name == "moe-wide":
        # SGLang computes with FP8 weights in 16 bits only, and what stands beside it has the same dtype.
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
        "algorithm.truncated_responses=as-verified",  # all have the same number of tokens
        "parallel.world_size=1",
        "parallel.expert=1",
        *task.settings,
    ]


def write_words(task: Task, folder: Path) -> None:
    """The task's checkpoint with a tokenizer, and its problems as text. No word ends a response: in the lab all have
    the same number of tokens."""
    staged = folder.with_suffix(".part")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(task.checkpoint, staged)
    for path in staged.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))
    size = json.loads((staged / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without special ones, which a response's text would leave out.
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


reward_longer = reward_long
