"""A run that needs no server: a tiny model, problems, and saved batches that the run replays."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import yaml

from megatron_dppo.algorithms.advantages import group_relative
from megatron_dppo.config import load_config
from megatron_dppo.data.batch_file import save_batch
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.loop.inputs import RunData
from tests.tiny_models import save_tiny_model

PROMPTS, GROUP, LONGEST = 2, 2, 6


def make_material(folder: Path, steps: int) -> Path:
    """Write everything that a replayed run of ``steps`` steps reads into ``folder``; return its configuration file.

    Weights, problems and responses are random, and equal in each call.
    """
    save_tiny_model(folder / "model", "qwen3_moe", seed=1)
    rng = random.Random(0)
    rows = ""
    for _ in range(16):
        a, b = rng.randrange(10), rng.randrange(10)
        rows += f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n'
    (folder / "train.jsonl").write_text(rows)
    sections = {
        "run": {"directory": str(folder / "run"), "steps": steps, "show_sample_every": 1},
        "model": {"hf_checkpoint": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_response_tokens": LONGEST,
            "replay_from": str(folder / "batches"),
            "save": True,
        },
        "reward": {"name": "exact_integer"},
        "parallel": {"world_size": 1},
        "training": {"prompts_per_mini_batch": 1, "micro_batch_tokens": 256},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 1, "keep": 2},
        "evaluation": {"every": 100},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    (folder / "batches").mkdir()
    _save_batches(folder, path, steps)
    return path


def _save_batches(folder: Path, path: Path, steps: int) -> None:
    data = RunData(load_config(str(path)))
    sampler, generator = data.sampler(), np.random.default_rng(0)
    for step in range(1, steps + 1):
        indices = sampler.next(PROMPTS)
        trajectories: list[Trajectory] = []
        rewards = generator.integers(0, 2, PROMPTS * GROUP).astype(float).tolist()
        advantages = group_relative(rewards, GROUP, "group-mean").tolist()
        for index in indices:
            problem = data.train.problems[index]
            for sample in range(GROUP):
                response = generator.integers(3, 500, LONGEST).tolist()
                position = len(trajectories)
                trajectories.append(
                    Trajectory.of_response(
                        problem.prompt_ids,
                        response,
                        problem_id=problem.problem_id,
                        sample_index=sample,
                        reward=rewards[position],
                        advantage=advantages[position],
                        columns={
                            "rollout_log_probs": [-6.0] * LONGEST,
                            "weight_version": np.full(LONGEST, step - 1, np.int32),
                        },
                    )
                )
        save_batch(folder / "batches", step, trajectories)
