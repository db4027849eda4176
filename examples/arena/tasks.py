"""The lab's tasks: prompts and rewards on token ids, and a start policy that two cores make within minutes.

- ``rare``: 2,048 words with a heavy tail. A problem's good words are the words of one topic. All good words are in the
  tail: together they have 3% of the start policy's mass. In this task, a bound on the ratio and a bound on the
  divergence treat rare tokens most differently.
- ``long``: 96 tokens, each the sum of the two digits before it, modulo 10, in any of five spellings. The start policy
  is right at 96% of the tokens. The reward is the share of the response before the first error, so early tokens decide.
- ``longer``: the task ``long`` with 256 tokens.
- ``moe``: the demo's arithmetic on its mixture of experts.
- ``moe-wide``: the policy of ``moe``, with widths that are multiples of 128, because block FP8 needs such widths.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.data.problems import PromptForm, load_problems, load_tokenizer
from megatron_dppo.demo.material import Material, prepare
from megatron_dppo.metrics.progress import progress
from megatron_dppo.rewards import exact_integer

MATERIAL = Path("runs/arena/material")
Reward = Callable[[int, np.ndarray], float]
"""(problem, response ids) -> reward in [0, 1]."""


@dataclass(frozen=True)
class Task:
    """A task of the lab.

    Attributes:
        name: key in ``TASKS``.
        checkpoint: Hugging Face folder of the start policy.
        prompts: int64 [problems, S].
        tokens: most tokens of a response.
        reward: scores a response.
        end: id of the token that ends a response; None: all responses have ``tokens`` tokens.
        settings: overrides of the run's configuration, in the form ``key.path=value``.
        teacher: Hugging Face folder of a teacher; None: the policy learns from rewards alone.
    """

    name: str
    checkpoint: Path
    prompts: Tensor
    tokens: int
    reward: Reward
    end: int | None = None
    settings: Sequence[str] = ()
    teacher: Path | None = None


# --- rare

WORDS, PROBLEMS, FIRST_WORD = 2048, 16, 64
LIKELY_WORDS = 50
"""Number of the likeliest words, which belong to no topic."""
STICKING = 0.5
"""Probability that the word after a word of a topic is drawn only from the words of this topic."""


def zipf() -> np.ndarray:
    """Return the words' probabilities [WORDS], proportional to 1 / rank; ids below ``FIRST_WORD`` have 0."""
    weights = np.zeros(WORDS)
    weights[FIRST_WORD:] = 1 / np.arange(1, WORDS - FIRST_WORD + 1)
    return weights / weights.sum()


@functools.cache
def topics() -> np.ndarray:
    """Return each word's topic, int64 [WORDS], drawn uniformly; -1 for the likeliest words and for other ids."""
    topic = np.full(WORDS, -1)
    tail = FIRST_WORD + LIKELY_WORDS
    topic[tail:] = np.random.default_rng(0).integers(PROBLEMS, size=WORDS - tail)
    return topic


def next_masses() -> np.ndarray:
    """Return the start policy's next-word probabilities [PROBLEMS + 1, WORDS].

    Row i is the distribution after a word of topic i. The last row is the distribution after a word without a topic.
    """
    rows = np.tile(zipf(), (PROBLEMS + 1, 1))
    for topic, row in enumerate(rows[:-1]):
        inside = zipf() * (topics() == topic)
        row[:] = STICKING * inside / inside.sum() + (1 - STICKING) * row
    return rows


def share_of_topic(prompt: np.ndarray, ids: np.ndarray) -> float:
    """Return the share of the response's words that have the prompt's topic; 0 for an empty response."""
    # The prompt of topic i ends with the id i + 2.
    return float((topics()[ids] == prompt[-1] - 2).sum()) / max(1, len(ids))


def rare() -> Task:
    """Return the task ``rare``."""
    topic, masses = topics(), next_masses()
    prompts = torch.stack([torch.tensor([1, 2 + p]) for p in range(PROBLEMS)])
    rows = prompts.numpy()

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        ids = np.concatenate([prompts[rng.integers(PROBLEMS, size=64)], np.zeros((64, 4), int)], 1)
        target = np.zeros((64, 4, WORDS))
        for t in range(4):
            # The topic -1, of a word without a topic, selects the last row of the masses.
            target[:, t] = masses[topic[ids[:, t + 1]]]
            ids[:, t + 2] = _drawn(target[:, t], rng)
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(target).float()

    shape = {"vocab_size": WORDS, "hidden_size": 48, "num_hidden_layers": 1}
    checkpoint = start_policy("rare", shape, batch, steps=600)
    return Task(
        "rare", checkpoint, prompts, 4, lambda p, ids: share_of_topic(rows[p], ids),
        settings=("rollout.max_response_tokens=4",),
    )  # fmt: skip


def _drawn(masses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw an index for each row of ``masses`` [B, V]."""
    sums = masses.cumsum(-1)
    return (sums > sums[:, -1:] * rng.random((len(masses), 1))).argmax(-1)


# --- long

SPELLINGS, RIGHT, LENGTH = 5, 0.96, 96
FIRST_DIGIT = 4
DIGIT_WORDS = 10 * SPELLINGS


def _digits(ids: np.ndarray) -> np.ndarray:
    return (ids - FIRST_DIGIT) // SPELLINGS


def next_words(before: np.ndarray) -> np.ndarray:
    """Return the start policy's probabilities [..., 64] after two words with the ids ``before`` [..., 2].

    Each spelling of a digit is half as likely as the spelling before it.
    """
    spelling = 0.5 ** np.arange(SPELLINGS)
    right = _digits(before).sum(-1) % 10
    table = np.full((10, 64), 0.0)
    table[:, FIRST_DIGIT : FIRST_DIGIT + DIGIT_WORDS] = (1 - RIGHT) / DIGIT_WORDS
    for digit, row in enumerate(table):
        start = FIRST_DIGIT + digit * SPELLINGS
        row[start : start + SPELLINGS] += RIGHT * spelling / spelling.sum()
    return table[right]


def share_before_error(prompt: np.ndarray, ids: np.ndarray) -> float:
    """Return the share of a response before its first wrong word; 0 for an empty response.

    A word is right if its digit is the sum of the two digits before it, modulo 10.
    """
    digits = _digits(np.concatenate([prompt[-2:], ids]))
    is_digit = (ids >= FIRST_DIGIT) & (ids < FIRST_DIGIT + DIGIT_WORDS)
    is_right = is_digit & (digits[2:] == (digits[1:-1] + digits[:-2]) % 10)
    # The cumulative product is 1 before the first wrong word and 0 from there on.
    right_words = np.cumprod(is_right).sum()
    return float(right_words) / max(1, len(ids))


def long() -> Task:
    return _of_digits("long", LENGTH)


def longer() -> Task:
    return _of_digits("longer", 256)


def _of_digits(name: str, length: int) -> Task:
    pairs = np.array([(a, b) for a in range(10) for b in range(10)]) * SPELLINGS + FIRST_DIGIT
    prompts = torch.from_numpy(np.concatenate([np.ones((100, 1), np.int64), pairs], 1))

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        ids = np.zeros((32, 3 + length), np.int64)
        ids[:, :3] = prompts[rng.integers(100, size=32)]
        masses = np.zeros((32, length, 64))
        for t in range(length):
            masses[:, t] = next_words(ids[:, t + 1 : t + 3])
            ids[:, t + 3] = _drawn(masses[:, t], rng)
        return torch.from_numpy(ids[:, :-1]), torch.from_numpy(masses).float()

    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
    checkpoint = start_policy(name, shape, batch, steps=1200)
    rows = prompts.numpy()
    return Task(
        name, checkpoint, prompts, length, lambda p, ids: share_before_error(rows[p], ids),
        settings=(
            f"rollout.max_response_tokens={length}",
            "rollout.prompts_per_step=4",
            "training.prompts_per_mini_batch=1",
        ),
    )  # fmt: skip


# --- moe

INNER_NEURONS = 256
"""Number of inner neurons of an expert in ``moe-wide``."""


def moe() -> Task:
    material = prepare(1)
    return _arithmetic("moe", material, material.warm_checkpoint)


def moe_taught() -> Task:
    """Return ``moe`` with the teacher of the demo ``distillation``."""
    material = prepare(1, task="distillation")
    task = _arithmetic("moe-taught", material, material.warm_checkpoint)
    return replace(task, teacher=material.teacher)


def moe_wide_taught() -> Task:
    """Return ``moe-wide`` with the same teacher."""
    return replace(moe_wide(), name="moe-wide-taught", teacher=moe_taught().teacher)


def moe_wide() -> Task:
    material = prepare(1)
    folder = MATERIAL / "moe-wide"
    if not folder.is_dir():
        write_wide(material.warm_checkpoint, folder)
    return _arithmetic("moe-wide", material, folder)


def _arithmetic(name: str, material: Material, checkpoint: Path) -> Task:
    tokenizer = load_tokenizer(checkpoint)
    problems = load_problems(
        material.train, tokenizer, max_prompt_tokens=32, form=PromptForm()
    ).problems
    prompts = torch.tensor([p.prompt_ids for p in problems])
    end = int(tokenizer.eos_token_id)

    def reward(problem: int, ids: np.ndarray) -> float:
        is_truncated = ids[-1] != end
        if is_truncated:
            return 0.0
        return exact_integer(str(tokenizer.decode(ids[:-1])), problems[problem].answer)

    return Task(
        name, checkpoint, prompts, 16, reward, end,
        settings=("rollout.max_response_tokens=16", "algorithm.truncated_responses=zero-reward"),
    )  # fmt: skip


def write_wide(source: Path, folder: Path) -> None:
    """Write the demo's checkpoint with widths that are multiples of 128, as a policy of the same probabilities.

    Each expert gets 256 inner neurons instead of 160. The added neurons have weights of 0, whose gradients are 0 too.
    Each head of keys and values is copied for every query head that uses it.
    """
    config = json.loads((source / "config.json").read_text())
    copies = config["num_attention_heads"] // config["num_key_value_heads"]
    weights = load_file(source / "model.safetensors")
    added_neurons = INNER_NEURONS - config["moe_intermediate_size"]
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (-1, config["head_dim"]))
            weights[name] = heads.repeat_interleave(copies, 0).flatten(0, 1)
        elif ".experts." in name:
            # The neurons are the columns of down_proj, and the rows of gate_proj and up_proj.
            padding: tuple[int, ...] = (0, 0, 0, added_neurons)
            if name.endswith("down_proj.weight"):
                padding = (0, added_neurons)
            weights[name] = torch.nn.functional.pad(weight, padding)
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "moe_intermediate_size": INNER_NEURONS,
    }
    staged = folder.with_suffix(".part")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(source, staged, ignore=shutil.ignore_patterns("conversion.json"))
    (staged / "config.json").write_text(json.dumps(config))
    save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})
    staged.rename(folder)


TASKS: dict[str, Callable[[], Task]] = {
    "rare": rare,
    "long": long,
    "longer": longer,
    "moe": moe,
    "moe-wide": moe_wide,
    "moe-taught": moe_taught,
    "moe-wide-taught": moe_wide_taught,
}


# --- start policies

Batch = Callable[[np.random.Generator], tuple[Tensor, Tensor]]
"""Draws token ids [B, S], and the distributions [B, N, V] of the next token after each of the last N tokens."""


def start_policy(name: str, shape: Mapping[str, int], batch: Batch, steps: int) -> Path:
    """Return the Hugging Face folder of a Qwen3 of ``shape`` with the distributions of ``batch``.

    If the folder is missing, the model is trained.
    """
    folder = MATERIAL / name
    if folder.is_dir():
        return folder
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    hidden = shape["hidden_size"]
    values = {
        **shape, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": hidden // 2,
        "intermediate_size": 4 * hidden, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "dtype": torch.float32,
    }  # fmt: skip
    config = Qwen3Config.from_dict(values)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    with progress(f"start policy of {name}", steps) as bar:
        for _ in range(steps):
            ids, target = batch(rng)
            logits = model(ids).logits[:, -target.shape[1] :]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            bar.advance()
    entropy = torch.special.entr(target).sum(-1).mean()
    print(f"arena: start policy of {name}: {loss - entropy:.4f} nats a token above its target")
    disable_progress_bar()
    staged = folder.with_suffix(".part")
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    staged.rename(folder)
    return folder
