"""``megatron-dppo gpu-check``, the first command to run on a GPU machine (docs/gpu_check.md).

A part of the check is a function with the decorator ``@part`` in a module of ``parts/``. The check finds all such
functions, so no list names them. This module also has what the parts share: models, batches, and a trainer's
configuration without a run.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.demo.material import make_model
from megatron_dppo.metrics.row import Dtype
from megatron_dppo.metrics.verdict import VerdictRow
from megatron_dppo.model.families import load_stored_shape
from megatron_dppo.model.mapping import hf_tensors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from megatron_dppo.data.packing import PackedBatch

PARTS = "megatron_dppo.diagnostics.gpu_check.parts"
"""The package whose modules define the parts."""


class LackingError(Exception):
    """A part can't run on this machine; the message says what is missing."""


@dataclass(frozen=True)
class CheckRow(VerdictRow):
    """A row of a part. ``figures``: the measured numbers by name, for programs."""

    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The resources of a part.

    Attributes:
        folder: the folder for the files that the part keeps.
        gpus: number of GPUs.
        overrides: ``key.path=value`` words that replace values in the configuration of each run and server of a part.
    """

    folder: Path
    gpus: int
    overrides: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """torch's name for the kind of device that the part checks."""
        if self.gpus:
            return "cuda"
        return "cpu"

    @property
    def dtype(self) -> Dtype:
        """The dtype of runs whose figures depend on no rounding: float32 is for CPUs alone."""
        if self.gpus:
            return "bfloat16"
        return "float32"


@dataclass(frozen=True)
class CheckPart:
    """A part of the check.

    Attributes:
        run: yields a row for each measurement, and raises ``LackingError`` if the machine lacks a requirement.
        shows: the claim that the part checks, in one line.
        limit_s: seconds after which the part is killed.
    """

    run: Callable[[Bench], Iterator[CheckRow]]
    shows: str
    limit_s: float

    @property
    def name(self) -> str:
        """The name of the part's function. The command line selects the part by this name."""
        return self.run.__name__


def part(
    shows: str, limit_s: float
) -> Callable[[Callable[[Bench], Iterator[CheckRow]]], CheckPart]:
    """Return the decorator that replaces a function by a part with this function as its ``run``."""

    def part_of(run: Callable[[Bench], Iterator[CheckRow]]) -> CheckPart:
        return CheckPart(run, shows, limit_s)

    return part_of


def discover(package: str = PARTS) -> list[CheckPart]:
    """Return all parts in the modules of ``package``, sorted by time limit, the shortest first."""
    folder = importlib.import_module(package).__path__
    modules = [importlib.import_module(f"{package}.{m.name}") for m in pkgutil.iter_modules(folder)]
    parts: list[CheckPart] = []
    for module in modules:
        parts += [value for value in vars(module).values() if isinstance(value, CheckPart)]
    return sorted(parts, key=lambda p: (p.limit_s, p.name))


def at_most(label: str, measured: float, bound: float, unit: str = "") -> CheckRow:
    """Return a row that holds if ``measured`` is finite and at most ``bound``."""
    holds = math.isfinite(measured) and measured <= bound
    figures = {"measured": measured}
    return CheckRow(label, f"{measured:.2g}{unit}", f"at most {bound:.2g}{unit}", holds, figures)


def run_command(arguments: Sequence[str]) -> int:
    """Run ``megatron-dppo`` with ``arguments``, with its output in the part's log. Return the exit code."""
    print(" ".join(["megatron-dppo", *arguments]), flush=True)
    return subprocess.run(
        [sys.executable, "-m", "megatron_dppo", *arguments], check=False
    ).returncode


def must_run(arguments: Sequence[str]) -> None:
    """Run a command like ``run_command``. Raises RuntimeError for an exit code other than 0."""
    code = run_command(arguments)
    if code:
        raise RuntimeError(f"megatron-dppo {' '.join(arguments)} ended with exit code {code}")


def tiny_model(folder: Path) -> Path:
    """Write the demo's model with random weights into ``folder``: Qwen3-MoE, 2 layers, 8 experts, fp32."""
    make_model(folder, seed=1)
    return folder


def random_model(
    folder: Path,
    config: Mapping[str, Any],
    *,
    device: str = "cpu",
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a checkpoint of ``config`` (as in config.json) with small random weights in its dtype.

    ``device`` draws the weights: a GPU draws billions of values in a second, a CPU in a minute. ``tokenizer`` is
    written beside the weights.
    """
    import torch

    from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint

    source = folder / "config"
    source.mkdir(parents=True)
    if tokenizer is not None:
        tokenizer.save_pretrained(source)
    (source / "config.json").write_text(json.dumps(dict(config)))
    shape = load_stored_shape(source)
    dtype = getattr(torch, shape.dtype)
    seeded = torch.Generator(device).manual_seed(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, dims in hf_tensors(shape).items():
            if len(dims) == 1:
                yield name, torch.ones(dims, dtype=dtype)
            else:
                values = torch.empty(dims, dtype=dtype, device=device)
                yield name, values.normal_(0, 0.02, generator=seeded).cpu()

    write_hf_checkpoint(folder / "model", shape, dtype, tensors(), side_files_from=source)
    return folder / "model"


def policy_config(checkpoint: Path, dtype: str, **sections: Mapping[str, Any]) -> PolicyConfig:
    """Build the policy configuration of a trainer with one rank; ``sections`` add to it."""
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": str(checkpoint.parent), "steps": 1},
        "model": {"hf_checkpoint": str(checkpoint), "dtype": dtype},
        "training": {"micro_batch_tokens": 1024},
        "optimizer": {"lr": 1e-6},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return PolicyConfig.model_validate(values)


def random_batch(
    vocab: int, lengths: list[int], *, pad_multiple: int = 1, sequence_multiple: int = 1
) -> PackedBatch:
    """Return a micro-batch of sequences of random tokens. The first token of each sequence is the prompt.

    ``pad_multiple`` and ``sequence_multiple`` are arguments of ``pack``.
    """
    from megatron_dppo.data.packing import pack
    from megatron_dppo.data.trajectory import Trajectory

    rng = random.Random(0)

    def sequence(number: int, length: int) -> Trajectory:
        tokens = [rng.randrange(vocab) for _ in range(length)]
        mu = {"rollout_log_probs": [-8.0] * (length - 1)}
        return Trajectory.of_response(
            tokens[:1], tokens[1:], problem_id=number, advantage=(-1.0) ** number, columns=mu
        )

    sequences = [sequence(i, length) for i, length in enumerate(lengths)]
    return pack(sequences, pad_multiple=pad_multiple, sequence_multiple=sequence_multiple)


def logits_of_transformers(
    folder: Path, sequences: Iterable[Sequence[int]], dtype: str = "float32", device: str = "cpu"
) -> Iterator[torch.Tensor]:
    """Yield the logits that transformers computes for each sequence of token ids, float32 [T, V] on ``device``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    torch.nn.Module.to(model, device)
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.as_tensor(sequence, dtype=torch.long, device=device)
            yield model(ids[None]).logits[0].float()
