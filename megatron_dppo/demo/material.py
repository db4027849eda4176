"""Material of the demo: data, a random model, and the supervised warm start that RL begins from.

    python -m megatron_dppo.demo.material [--task sums] [--seed 1] [--root runs/tiny_moe/material] [key.path=value ...]

The program makes the folder ``<root>/seed-<seed>/`` with ``random/`` (the initial checkpoint) and ``warm/`` (the policy
that RL starts from, a Hugging Face folder). It writes the data as JSON Lines, in the form of DAPO-Math and AIME files:

``train.jsonl``, ``held_out.jsonl``: ``{"prompt", "answer"}``; no expression is in both. ``warm_start.jsonl``:
``{"prompt", "response"}`` for supervised learning, on expressions of the training split only.

The problems of the task ``sums`` are sums and differences of four small numbers, e.g. ``3+5-2+4`` with answer 10.

The warm start imitates the mixed styles of a base model's training text. 40% of its responses are worked out: ``8 6 =
10`` has the running totals, then the answer. The other responses are estimates, ``= 12``, which are wrong by up to
five. A model that imitates both is correct less than half of the time, and reinforcement learning can learn from the
reward that working out is better. The problems of the tasks ``calculator`` and ``python`` are products with a number
added or subtracted. In the warm start of these tasks, 15% of the conversations use the tool until the answer is found,
and the others answer earlier (``tool_pairs``).

Overrides apply to the warm start's configuration, warm_start.yaml. A finished folder is used again unless its sources,
seed or overrides have changed.

The model is a random Qwen3-MoE of 1.1 million parameters with a tokenizer of numbers, as a Hugging Face folder. It has
the features of its family: 8 experts, 2 per token, grouped-query attention, normalised queries and keys, an output
layer that is not tied to the embedding.

The task ``distillation`` has the problems and the policy of ``sums``, and a teacher in ``teacher/``: a dense Qwen3 of
0.25 million parameters with the same tokenizer, which has imitated worked-out responses alone.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_dppo import EXAMPLES
from megatron_dppo.environments import calculate
from megatron_dppo.launch.arguments import add_overrides
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.system.processes import feed
from megatron_dppo.system.secret_variables import split_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Pair = Mapping[str, Any]
"""A pair for supervised learning: ``prompt`` (text or chat messages) and ``response``."""
TERMS = 4
"""Number of terms of a sum."""
LARGEST_TERM = 5
HELD_OUT = 200
"""Number of held-out problems."""
WARM_START_PAIRS = 40_000
WORKED_OUT_SHARE = 0.4
"""Share of the warm start's responses to sums that are worked out; the other responses are estimates."""
ESTIMATE_RANGE = 5
"""Estimates are uniform within this distance of the answer, and not negative."""


def running_totals(expression: str) -> list[int]:
    """Return the value after each operation: ``3+5-2+4`` -> [8, 6, 10]."""
    signed = expression.replace("-", "+-").split("+")
    return list(itertools.accumulate(int(term) for term in signed))[1:]


def expressions() -> Iterator[str]:
    """Yield every expression whose running totals are all 0 or above."""
    terms = [str(i) for i in range(1, LARGEST_TERM + 1)]
    for signs in itertools.product("+-", repeat=TERMS - 1):
        for first_term, *later_terms in itertools.product(terms, repeat=TERMS):
            text = first_term
            for sign, term in zip(signs, later_terms, strict=True):
                text += sign + term
            if min(running_totals(text)) >= 0:
                yield text


def worked_out(expression: str) -> str:
    """Return a worked-out response: ``8 6 = 10``."""
    *steps, answer = running_totals(expression)
    return " ".join([*map(str, steps), "=", str(answer)])


def estimate(expression: str, rng: random.Random) -> str:
    """Return an estimate: ``= 12``."""
    answer = calculate(expression)
    low = max(0, answer - ESTIMATE_RANGE)
    high = answer + ESTIMATE_RANGE
    return f"= {rng.randint(low, high)}"


TOOL_SHARES = {"estimate": 0.6, "half way": 0.25, "to the end": 0.15}
"""Style -> share of the warm start's conversations in this style. A conversation answers at once ("estimate"), after
the first tool call ("half way"), or after the second ("to the end")."""
LARGEST_NUMBER = 99
"""Largest number that the tokenizer for products has."""


def products() -> Iterator[str]:
    """Yield every ``a*b+c`` and ``a*b-c`` of factors from 2 to 9 whose value is a number of the tokenizer."""
    for a, b, sign, c in itertools.product(range(2, 10), range(2, 10), "+-", range(1, 20)):
        text = f"{a}*{b}{sign}{c}"
        if 0 <= calculate(text) <= LARGEST_NUMBER:
            yield text


def tool_pairs(call: str, expression: str, rng: random.Random) -> Iterator[Pair]:
    """Yield the turns of a conversation about a product such as ``7*8-5``, each as a pair.

    In the style "to the end", a conversation calls the tool for ``7*8``, then for ``56-5``, and answers ``= 51``. In
    the style "half way", it answers ``= 56`` after the first call, which is wrong. An estimate, ``= 47``, is seldom
    right. ``call``: format of a tool call, with ``{}`` for the expression.
    """
    style = rng.choices(list(TOOL_SHARES), weights=list(TOOL_SHARES.values()))[0]
    messages = [{"role": "user", "content": expression}]
    if style == "estimate":
        yield {"prompt": messages, "response": estimate(expression, rng)}
        return
    # Both factors have one digit, so the product has three characters.
    product, remainder = expression[:3], expression[3:]
    value = calculate(product)
    calculations = [product]
    if style == "to the end":
        calculations.append(f"{value}{remainder}")
    for calculation in calculations:
        turn = call.format(calculation)
        value = calculate(calculation)
        yield {"prompt": list(messages), "response": turn}
        messages += [
            {"role": "assistant", "content": turn},
            {"role": "user", "content": f"{value}"},
        ]
    yield {"prompt": messages, "response": f"= {value}"}


def sum_pairs(expression: str, rng: random.Random) -> Iterator[Pair]:
    """Yield a response to a sum, worked out or estimated."""
    is_worked_out = rng.random() < WORKED_OUT_SHARE
    response = worked_out(expression) if is_worked_out else estimate(expression, rng)
    yield {"prompt": expression, "response": response}


def make_data(folder: Path, seed: int, task: str = "sums") -> dict[str, int]:
    """Write the three files of data; return name -> number of lines."""
    rng = random.Random(seed)
    problems = list(TASKS[task].expressions())
    rng.shuffle(problems)
    held_out = problems[:HELD_OUT]
    train = problems[HELD_OUT:]
    return {
        "held_out": _write(folder / "held_out.jsonl", map(_exercise, held_out)),
        "train": _write(folder / "train.jsonl", map(_exercise, train)),
        "warm_start": _write(folder / "warm_start.jsonl", _pairs(train, rng, TASKS[task].pairs)),
    }


def _exercise(expression: str) -> dict[str, str]:
    return {"prompt": expression, "answer": str(calculate(expression))}


def _pairs(
    train: list[str], rng: random.Random, pairs_of: Callable[[str, random.Random], Iterable[Pair]]
) -> Iterator[Pair]:
    """Yield WARM_START_PAIRS pairs of random problems."""
    count = 0
    while True:
        for pair in pairs_of(rng.choice(train), rng):
            if count == WARM_START_PAIRS:
                return
            yield pair
            count += 1


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return len(lines)


SPECIAL = ["<pad>", "<user>", "<assistant>", "<end>", "<unknown>"]
NUMBERS = 28
"""The tokenizer for sums has the numbers 0 to 27: totals reach 20, and estimates 25.

With 28 numbers the tokenizer has 36 words, which a tensor-parallel size of 4 divides.
"""
WORDS = [*SPECIAL, *"+-=", *(str(i) for i in range(NUMBERS))]
TOOL_WORDS = [*SPECIAL, *"+-*=?(){}", "print", "error", *map(str, range(LARGEST_NUMBER + 1))]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% "
    "endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_COMMON_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "initializer_range": 0.05,
}
"""With two layers, and with larger initial weights than usual, the model learns the task in fewer steps."""
SHAPE: dict[str, Any] = {
    **_COMMON_SHAPE,
    "hidden_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 160,
    "intermediate_size": 256,
}
TEACHER_SHAPE: dict[str, Any] = {**_COMMON_SHAPE, "hidden_size": 96, "intermediate_size": 288}
TEACHER_STEPS = 300


@dataclass(frozen=True)
class DemoTask:
    """A task of the demo.

    Attributes:
        recipe: a file of examples/tiny_moe.
        expressions: yields all problems.
        pairs: yields pairs of the warm start for a problem.
        words: words of the tokenizer.
        gain: smallest expected gain of held-out accuracy.
        longest_s: most seconds that the demo, with the warm start, should take on two quiet cores.
        root: folder of the material of all seeds.
        has_teacher: whether the policy learns from a teacher.
    """

    recipe: str
    expressions: Callable[[], Iterator[str]]
    pairs: Callable[[str, random.Random], Iterable[Pair]]
    words: Sequence[str]
    gain: float
    longest_s: int
    root: Path
    has_teacher: bool = False


def _tool_task(name: str, call: str) -> DemoTask:
    """Return the task ``name``: the policy computes products by a tool. ``call`` is the template of a call."""
    return DemoTask(
        recipe=f"{name}.yaml",
        expressions=products,
        pairs=partial(tool_pairs, call),
        words=TOOL_WORDS,
        gain=0.4,
        longest_s=900,
        root=Path("runs/tiny_moe", name),
    )


_SUMS = DemoTask(
    recipe="config.yaml",
    expressions=expressions,
    pairs=sum_pairs,
    words=WORDS,
    gain=0.25,
    longest_s=600,
    root=Path("runs/tiny_moe/material"),
)
TASKS = {
    "sums": _SUMS,
    "distillation": replace(_SUMS, recipe="distillation.yaml", has_teacher=True),
    "calculator": _tool_task("calculator", "? {}"),
    "python": _tool_task("python", "{{ print({}) }}"),
}


def make_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each number, sign and word; spaces are ignored."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"[0-9]+|[a-z]+|[^0-9a-z]"), "isolated"),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unknown>",
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    folder: Path,
    seed: int,
    words: Sequence[str] = WORDS,
    shape: Mapping[str, Any] = SHAPE,
    family: str = "qwen3_moe",
) -> int:
    """Write the checkpoint of a random model into ``folder``; return the number of parameters.

    ``family``: the name of the model's type in transformers.
    """
    # Import here, so that a demo with existing material needs no torch.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = make_tokenizer(words)
    torch.manual_seed(seed)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        family, vocab_size=len(words), **shape, **ids, bos_token_id=None, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_config(config)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


HERE = Path(__file__).resolve().parent
ROOT = TASKS["sums"].root
WARM_START = EXAMPLES / "tiny_moe" / "warm_start.yaml"
SOURCES = (HERE / "material.py", WARM_START)
SUPERVISED = "megatron_dppo.supervised"
INTERRUPTED_CODES = (129, 130, 143)
"""Exit codes of a run that SIGHUP, Ctrl-C or SIGTERM stopped."""
STAMP = "made_from.json"
"""File that is written last; a folder without it is incomplete."""


@dataclass(frozen=True)
class Material:
    """Paths of the demo's inputs."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def held_out(self) -> Path:
        """Problems for evaluation; neither RL nor the warm start trains on them."""
        return self.folder / "held_out.jsonl"

    @property
    def warm_checkpoint(self) -> Path:
        """The policy that RL starts from: a Hugging Face folder."""
        return self.folder / "warm"

    @property
    def teacher(self) -> Path:
        """The teacher of the task ``distillation``: a Hugging Face folder."""
        return self.folder / "teacher"


def prepare(
    seed: int, root: Path | None = None, overrides: Sequence[str] = (), task: str = "sums"
) -> Material:
    """Make the material if needed and return its paths. Raises SystemExit if the warm start fails."""
    root = TASKS[task].root if root is None else root
    folder = root / f"seed-{seed}"
    made_from = fingerprint(seed, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    with open(root / f"seed-{seed}.lock", "w") as lock:
        # A second demo with this seed waits here until the first demo has made the material.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamp(folder) == made_from:
            print(f"material: {folder} is there", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder, seed, overrides, task)
            (folder / STAMP).write_text(json.dumps(made_from, indent=1) + "\n")
        material = Material(folder)
        if TASKS[task].has_teacher and not material.teacher.exists():
            _make_teacher(material, seed, overrides)
    return material


def _make(folder: Path, seed: int, overrides: Sequence[str], task: str) -> None:
    start_time = time.monotonic()
    counts = make_data(folder, seed, task)
    lines = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"material: lines of data: {lines}", flush=True)
    parameters = make_model(folder / "random", seed, TASKS[task].words)
    print(f"material: a random Qwen3-MoE of {parameters:,} parameters", flush=True)
    print("material: supervised warm start", flush=True)
    _imitate(folder, "warm", folder / "random", folder / "warm_start.jsonl", seed, overrides)
    print(f"material: {folder} made in {time.monotonic() - start_time:.0f} s", flush=True)


def fingerprint(seed: int, overrides: Sequence[str]) -> dict[str, object]:
    """Return what the material of a task depends on: the seed, the overrides, and hashes of the source files."""
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in SOURCES}
    return {"seed": seed, "overrides": list(overrides), "sources": digests}


def _stamp(folder: Path) -> object:
    path = folder / STAMP
    if path.is_file():
        return json.loads(path.read_text())
    return None


def _make_teacher(material: Material, seed: int, overrides: Sequence[str]) -> None:
    """Make the model that imitates worked-out responses to the training problems."""
    print("material: the teacher learns", flush=True)
    problems = [json.loads(line)["prompt"] for line in material.train.read_text().splitlines()]
    rng = random.Random(seed)
    pairs: list[Pair] = []
    for expression in rng.choices(problems, k=WARM_START_PAIRS):
        pairs.append({"prompt": expression, "response": worked_out(expression)})
    data = material.folder / "teacher.jsonl"
    _write(data, pairs)
    start = material.folder / "teacher_start"
    make_model(start, seed, WORDS, TEACHER_SHAPE, "qwen3")
    settings = (f"run.steps={TEACHER_STEPS}", "parallel.expert=1", *overrides)
    _imitate(material.folder, "teacher", start, data, seed, settings)


def _imitate(
    folder: Path, name: str, checkpoint: Path, data: Path, seed: int, overrides: Sequence[str]
) -> None:
    """Train ``checkpoint`` on the pairs of ``data`` by warm_start.yaml, and put the result at ``folder/name``."""
    run = folder / f"{name}_run"
    command = [
        sys.executable,
        "-m",
        SUPERVISED,
        str(WARM_START),
        f"run.directory={run}",
        f"run.seed={seed}",
        f"model.hf_checkpoint={checkpoint}",
        f"data.train={data}",
        *overrides,
    ]
    # The matrices are too small for two threads.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = run_to_the_end(command, env=one_thread)
    if code in INTERRUPTED_CODES:
        raise SystemExit(code)
    if code != 0:
        raise SystemExit(f"the supervised run ended with exit code {code}; its output is above")
    (run / "hf").rename(folder / name)


def run_to_the_end(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    errors: int | None = None,
    started: Callable[[subprocess.Popen[bytes]], None] | None = None,
    inherited: Sequence[int] = (),
) -> int:
    """Run ``command`` and return its exit code. After a signal to this process, wait until the command has ended.

    Args:
        command: program and arguments.
        env: environment of the command; None: the environment of this process.
        errors: standard error of the command, as an argument of ``subprocess.Popen``; None: this process's stream.
        started: called with the command's process once it runs.
        inherited: descriptors that the command inherits, under the same numbers.

    A terminal sends SIGINT (Ctrl-C) and SIGHUP (when the terminal closes) to this process and to the command.
    ``subprocess.run`` would then kill the command after 0.25 s. This function ignores both signals and waits until the
    command has saved its state and ended. SIGTERM, which only this process receives, is passed on to the command.
    """
    plain, secrets = split_environment(os.environ if env is None else env)
    # Start the command before this process ignores signals: a child process inherits ignored signals.
    process = subprocess.Popen(
        command, env=plain, stdin=subprocess.PIPE, stderr=errors, pass_fds=tuple(inherited)
    )
    feed(process, secrets)

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.terminate()

    handlers: dict[int, Any] = {
        signal.SIGINT: signal.SIG_IGN,
        signal.SIGHUP: signal.SIG_IGN,
        signal.SIGTERM: pass_on,
    }
    previous_handlers = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        if started is not None:
            started(process)
        return process.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--task", choices=TASKS, default="sums")
    add_overrides(parser)
    arguments = parser.parse_intermixed_args()
    prepare(arguments.seed, arguments.root, arguments.overrides, arguments.task)


EXPORT_BOUNDS: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 2.0}
"""Largest accepted difference of one token's log-probability, nats.

With the tests' tiny gpt_oss in bfloat16, tokens differ by up to 0.04 if trainer and export choose the same experts. A
token differs by up to 1.13 if trainer and export choose different experts for it after a near tie in the router.
"""
_ONE_RANK = ("parallel.world_size=1", "parallel.expert=1")
SHARED_GPU = (
    "sglang.base_gpu_id=0",
    "sglang.mem_fraction_static=0.3",
    "weight_sync.strategy=tensor",
)
"""Overrides with which the run's server shares the only GPU with the rank."""


def trainer_overrides(gpus: int) -> tuple[str, ...]:
    """Return overrides for the warm start and the run.

    Without GPUs, and with three or more GPUs, the run has the recipe's two ranks. With one or two GPUs the run has only
    one rank, because the server needs a GPU too. Transformer Engine and SGLang's CUDA server work in bfloat16. The
    overrides for GPUs have not been run on a GPU.
    """
    if gpus == 0:
        return ()
    if gpus > 2:
        return ("model.dtype=bfloat16",)
    return ("model.dtype=bfloat16", *_ONE_RANK)


def engine_overrides(gpus: int) -> tuple[str, ...]:
    """Return overrides for the run's server.

    If there is one GPU, the server shares it with the rank and receives weights by CUDA IPC, because NCCL does not
    connect two processes on one GPU. The attention backend is SGLang's Triton, which accepts heads of size 32.
    """
    if gpus == 0:
        return ()
    if gpus == 1:
        return ("sglang.attention_backend=triton", *SHARED_GPU)
    return ("sglang.attention_backend=triton",)


if __name__ == "__main__":
    main()
