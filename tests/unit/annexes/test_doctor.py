"""``megatron-dppo doctor`` names the axis of a fault. Models of transformers are engine and trainer of the batches,
which are healthy or have one fault."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import (
    DistillationConfig,
    ParallelConfig,
    TeacherConfig,
    TrainConfig,
)
from megatron_dppo.data.batch_file import load_batch, save_batch
from megatron_dppo.data.problems import Problem
from megatron_dppo.data.seal import Origin
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor import causes, diagnosis, sampling_evidence
from megatron_dppo.diagnostics.doctor.__main__ import last_examinable, main, weights_by_version
from megatron_dppo.diagnostics.doctor.causes import SampledRun, alternatives, at_temperature
from megatron_dppo.diagnostics.doctor.diagnosis import COARSE, Side
from megatron_dppo.diagnostics.doctor.reference import KnownWeights, Reference
from megatron_dppo.diagnostics.doctor.report import LAYOUT, Doctor
from megatron_dppo.diagnostics.doctor.sampling_evidence import (
    draws,
    prompt_faults,
    repetition_evidence,
)
from tests.patience import run_patiently
from tests.ranks import ROOT, run_ranks
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model

LogProbs = Callable[[Trajectory], np.ndarray]
TEMPERATURE = 0.7
PROMPTS, GROUP, TOKENS = 6, 4, 24


def with_tensors(source: Path, target: Path, change: Callable[[dict], None]) -> Path:
    """Copy a model's folder and change the weights of the copy."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def lerp_tensors(start: dict, after: dict, share: float, tensors: dict) -> None:
    for name in tensors:
        tensors[name] = torch.lerp(start[name], after[name], share)


def train_tensors(tensors: dict) -> None:
    """Change the weights as a step of training might do."""
    torch.manual_seed(5)
    for name, tensor in tensors.items():
        tensors[name] = tensor * (1 + 0.05 * torch.randn_like(tensor))


class Policy:
    """A model of transformers that samples, scores, and returns the experts that its routers choose."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def logits(self, ids) -> torch.Tensor:
        tokens = torch.as_tensor(np.asarray(ids, np.int64))[None]
        return self.model(tokens).logits[0].double()

    @torch.no_grad()
    def routing(self, t: Trajectory) -> np.ndarray:
        ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
        answer = self.model(ids, output_router_logits=True)
        layers = [logits.topk(2, -1).indices for logits in answer.router_logits]
        return torch.stack(layers, 1)[:-1].numpy().astype(np.uint8)

    def log_probs(self, t: Trajectory, temperature: float = TEMPERATURE) -> np.ndarray:
        rows = self.logits(t.token_ids)[len(t.prompt_ids) - 1 : -1] / temperature
        ids = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
        return rows.log_softmax(-1).gather(1, ids)[:, 0].float().numpy()

    def draw(
        self, prompt: list[int], seeds: list[int], temperature: float, top_p: float
    ) -> np.ndarray:
        """Return a response for each seed: [seeds, TOKENS]."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        ids = torch.tensor([prompt] * len(seeds))
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = self.model(ids).logits[:, -1].double() / temperature
            p, order = logits.softmax(-1).sort(descending=True)
            p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
            places = [
                torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)
            ]
            ids = torch.cat([ids, order.gather(1, torch.stack(places))], 1)
        return ids[:, len(prompt) :].numpy()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """A run with the batch of step 2, which weight version 1 sampled and on which version 1 was trained."""
    folder = tmp_path_factory.mktemp("doctor")
    start = save_tiny_model(folder / "start", "qwen3_moe", seed=1, vocab_size=512)
    after = with_tensors(start, folder / "after", train_tensors)
    sizes = {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_response_tokens": TOKENS}
    config = small_config(
        folder,
        start,
        rollout={**sizes, "temperature": TEMPERATURE, "save": True},
        training={"prompts_per_mini_batch": PROMPTS, "micro_batch_tokens": 256},
    )
    policy = Policy(after)
    return SimpleNamespace(
        folder=folder, start=start, after=after, config=config, policy=policy,
        batch=sample_batch(policy, lambda problem, sample: 100 * problem + sample),
    )  # fmt: skip


def sample_batch(
    policy: Policy,
    seed_of: Callable[[int, int], int],
    temperature: float = TEMPERATURE,
    top_p: float = 1.0,
) -> list[Trajectory]:
    """Sample a batch. Both sides have the policy's log-probabilities at the configured temperature."""
    rng, batch = np.random.default_rng(3), []
    for problem in range(PROMPTS):
        prompt = rng.integers(3, 512, size=8 + problem).tolist()
        seeds = [seed_of(problem, sample) for sample in range(GROUP)]
        for sample, response in enumerate(policy.draw(prompt, seeds, temperature, top_p)):
            t = Trajectory.of_response(prompt, response, problem_id=problem, sample_index=sample)
            batch.append(with_sides(t, policy.log_probs(t), policy.log_probs(t), policy.routing(t)))
    return batch


def with_sides(
    t: Trajectory, engine: np.ndarray, trainer: np.ndarray, routing: np.ndarray
) -> Trajectory:
    return t.with_columns(
        rollout_log_probs=engine.astype(np.float32), loss_log_probs=trainer.astype(np.float32),
        loss_trains=np.ones(t.sampled, bool), weight_version=np.ones(t.sampled, np.int32),
        routed_experts=routing,
    )  # fmt: skip


def examine(run: SimpleNamespace, batch: list[Trajectory], converted: Path):
    weights = KnownWeights({0: run.start, 1: run.after}, run.start, converted)
    return Doctor(run.config, batch, weights).report(2)


def axes(examination) -> list[str]:
    return [verdict.axis for verdict in examination.diagnoses]


def test_a_healthy_batch_has_no_finding(run, tmp_path):
    examination = examine(run, run.batch, tmp_path)
    assert axes(examination) == ["healthy", "healthy"]
    assert examination.findings == []
    assert all(v.gap < 1e-6 for v in examination.diagnoses)
    assert examination.draws.tokens == PROMPTS * GROUP * TOKENS


def test_a_response_without_a_token_keeps_its_place(run, tmp_path):
    """The empty response keeps its place, so no response of the second mini-batch, with other weights, moves up."""
    t = run.batch[1]
    empty = Trajectory.of_response(t.prompt_ids, [], problem_id=t.problem_id, sample_index=1)
    nothing = np.empty(0, np.float32)
    empty = with_sides(empty, nothing, nothing, t.column("routed_experts")[: empty.length - 1])
    half = run.config.training.model_copy(update={"prompts_per_mini_batch": PROMPTS // 2})
    config = run.config.model_copy(update={"training": half})
    late = Policy(run.start)
    first = PROMPTS * GROUP // 2
    batch = [
        t if i < first else t.with_columns(loss_log_probs=late.log_probs(t))
        for i, t in enumerate([run.batch[0], empty, *run.batch[2:]])
    ]
    (tmp_path / "config.yaml").write_text(resolved_yaml(config))
    save_batch(tmp_path / "rollouts", 2, batch)
    file = tmp_path / "figures.json"
    assert main([str(tmp_path), "--weights", f"1={run.after}", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert [side["axis"] for side in figures["sides"]] == ["healthy", "healthy"]
    assert figures["draws"]["tokens"] == (PROMPTS * GROUP - 1) * TOKENS


def swap_norms(tensors: dict) -> None:
    for name in [n for n in tensors if "input_layernorm" in n]:
        other = name.replace("input_layernorm", "post_attention_layernorm")
        tensors[name], tensors[other] = tensors[other].clone(), tensors[name].clone()


def move_experts(tensors: dict) -> None:
    """Give each of two ranks the other rank's four experts."""
    experts = {n: t.clone() for n, t in tensors.items() if ".experts." in n}
    for name, tensor in experts.items():
        head, tail = name.split(".experts.")
        expert, rest = tail.split(".", 1)
        tensors[f"{head}.experts.{(int(expert) + 4) % 8}.{rest}"] = tensor


def test_each_rank_gets_the_experts_of_the_next_rank(run):
    """There are eight experts on four ranks."""
    reference = Reference(run.after)
    experts = {n: t.data.clone() for n, t in reference.tensors.items() if ".experts." in n}
    assert experts
    with reference.experts_moved(4):
        for name, before in experts.items():
            moved_tensor = reference.tensors[name].data
            assert torch.equal(moved_tensor, before[[2, 3, 4, 5, 6, 7, 0, 1]])
    for name, before in experts.items():
        assert torch.equal(reference.tensors[name].data, before)


def stale_embedding(start: Path) -> Callable[[dict], None]:
    def change(tensors: dict) -> None:
        tensors["model.embed_tokens.weight"] = load_file(start / "model.safetensors")[
            "model.embed_tokens.weight"
        ]

    return change


def round_head(run: SimpleNamespace, _: Path, results: torch.dtype) -> LogProbs:
    policy = Policy(run.after)
    weight = policy.model.lm_head.weight.data.bfloat16()
    policy.model.lm_head.forward = lambda x: torch.nn.functional.linear(
        x.bfloat16().to(results), weight.to(results)
    ).float()
    return policy.log_probs


def scale_positions(run: SimpleNamespace, folder: Path) -> LogProbs:
    shutil.copytree(run.after, folder)
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(values))
    return Policy(folder).log_probs


def log_probs_with(run: SimpleNamespace, folder: Path, change: Callable[[dict], None]) -> LogProbs:
    return Policy(with_tensors(run.after, folder, change)).log_probs


def after_old_prompt(policy: Policy, old: Policy, t: Trajectory) -> np.ndarray:
    prompt = len(t.prompt_ids)
    ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
    cache = old.model(ids[:, : prompt - 1], use_cache=True).past_key_values
    rows = policy.model(ids[:, prompt - 1 :], past_key_values=cache).logits[0, :-1].double()
    response = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
    return (rows / TEMPERATURE).log_softmax(-1).gather(1, response)[:, 0].float().numpy()


FAULTS: dict[str, Callable[[SimpleNamespace, Path], LogProbs]] = {
    "version": lambda run, _: Policy(run.start).log_probs,
    "norms": lambda run, folder: log_probs_with(run, folder, swap_norms),
    "experts": lambda run, folder: log_probs_with(run, folder, move_experts),
    "shard": lambda run, folder: log_probs_with(run, folder, stale_embedding(run.start)),
    "temperature": lambda run, _: partial(run.policy.log_probs, temperature=1.0),
    "bfloat16": lambda run, _: Policy(run.after, torch.bfloat16).log_probs,
    "head": partial(round_head, results=torch.bfloat16),
    "head's inputs": partial(round_head, results=torch.float32),
    "positions": scale_positions,
    "vocabulary": lambda run, _: partial(truncated_log_probs, run.policy),
    "cache": lambda run, _: partial(after_old_prompt, run.policy, Policy(run.start)),
    "shift": lambda run, _: lambda t: np.roll(run.policy.log_probs(t), 1),
}
"""Each entry makes a function that computes log p of a trajectory's sampled tokens with the fault."""


def truncated_log_probs(policy: Policy, t: Trajectory) -> np.ndarray:
    """Return log p with a sum of exponentials that lacks the last quarter of the vocabulary."""
    rows = policy.logits(t.token_ids)[len(t.prompt_ids) - 1 : -1] / TEMPERATURE
    ids = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
    return (rows.gather(1, ids)[:, 0] - rows[:, :384].logsumexp(-1)).float().numpy()


@torch.no_grad()
@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize(
    ("fault", "axis", "name"),
    [
        ("version", "staleness", "weights of version 0"),
        ("norms", "weights", "input_layernorm and post_attention_layernorm exchanged"),
        ("experts", "weights", "each of 2 ranks has the experts of the next"),
        ("shard", "weights", "embed_tokens of version 0"),
        ("temperature", "sampling transform", "temperature 1, not 0.7"),
        ("bfloat16", "precision", "all in bfloat16"),
        ("head", "precision", "output layer in bfloat16"),
        ("head's inputs", "precision", "inputs and weights of the output layer in bfloat16"),
        ("positions", "positions", "positions times 0.5"),
        (
            *("vocabulary", "sampling transform"),
            "normaliser without the last of 4 shards of the vocabulary",
        ),
        ("cache", "cache", "prompts' keys and values of version 0"),
        ("shift", "tokens", "log-probabilities of the token before"),
    ],
)
def test_the_axis_of_a_fault_is_named(run, tmp_path, side, fault, axis, name):
    column = {"engine": "rollout_log_probs", "trainer": "loss_log_probs"}[side]
    log_probs = FAULTS[fault](run, tmp_path / "changed")
    batch = [t.with_columns(**{column: log_probs(t)}) for t in run.batch]
    examination = examine(run, batch, tmp_path / "converted")
    expected = ["healthy", "healthy"]
    expected[side == "trainer"] = axis
    assert axes(examination) == expected
    verdict = examination.diagnoses[side == "trainer"]
    assert verdict.cause.name == name
    assert verdict.gaps[name] < 0.3 * verdict.gap or fault == "bfloat16"
    assert len(examination.findings) == 1
    worst = verdict.tokens[0]
    t = batch[worst.response]
    assert worst.token_id == t.response_ids[worst.position]
    assert worst.side == pytest.approx(float(np.exp(t.column(column)[worst.position])))


class BFloat16Cache(DynamicCache):
    def update(self, key_states, value_states, layer_idx, *more, **options):
        keys, values = (x.bfloat16().float() for x in (key_states, value_states))
        return super().update(keys, values, layer_idx, *more, **options)


@torch.no_grad()
def decoded_log_probs(policy: Policy, t: Trajectory, *, prefill: bool) -> np.ndarray:
    """Return log p of decoding by token with a bfloat16 cache. ``prefill``: one pass without it reads the prompt."""
    ids = torch.from_numpy(t.token_ids.astype(np.int64))[None]
    cache, rows, start = BFloat16Cache(), [], 0
    if prefill:
        start = len(t.prompt_ids)
        answer = policy.model(ids[:, :start], use_cache=True)
        rows = list(answer.logits[0])
        for layer, (keys, values, *_) in enumerate(answer.past_key_values):
            cache.update(keys, values, layer)
    for position in range(start, t.length - 1):
        token = ids[:, position : position + 1]
        rows.append(policy.model(token, past_key_values=cache, use_cache=True).logits[0, 0])
    logits = torch.stack(rows[len(t.prompt_ids) - 1 :]).double()
    response = torch.from_numpy(t.response_ids.astype(np.int64))[:, None]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, response)[:, 0].float().numpy()


@pytest.mark.parametrize(
    ("prefill", "name"),
    [
        (False, "keys and values in bfloat16"),
        (True, "keys and values in bfloat16, except in the pass over the prompt"),
    ],
)
def test_an_engine_that_decodes_from_a_rounded_cache_is_named(run, tmp_path, prefill, name):
    batch = [
        t.with_columns(rollout_log_probs=decoded_log_probs(run.policy, t, prefill=prefill))
        for t in run.batch[: 2 * GROUP]
    ]
    examination = examine(run, batch, tmp_path)
    assert axes(examination) == ["cache", "healthy"]
    assert examination.diagnoses[0].cause.name == name


class CountedWeights(KnownWeights):
    """Records the largest number of models that are in memory after a load."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.largest, self._models = 0, weakref.WeakSet()

    def reference(self, version: int) -> Reference:
        reference = super().reference(version)
        self._models.add(reference)
        self.largest = max(self.largest, len(self._models))
        return reference


@pytest.mark.parametrize(("engine", "name"), [(1, "version 1"), (4, "version 4")])
def test_weights_of_two_steps_before_are_named_beside_those_of_one_and_newer_ones_too(
    run, tmp_path, engine, name
):
    """The batch claims version 3, but another version sampled it. Versions 0 to 4 are equally far apart."""
    start, after = (load_file(folder / "model.safetensors") for folder in (run.start, run.after))
    folders = {
        version: with_tensors(
            run.start, tmp_path / f"{version}", partial(lerp_tensors, start, after, version / 4)
        )
        for version in (1, 2, 3, 4)
    }
    claimed, actual = (Policy(folders[version]) for version in (3, engine))
    batch = [
        with_sides(t, actual.log_probs(t), claimed.log_probs(t), claimed.routing(t)).with_columns(
            weight_version=np.full(t.sampled, 3, np.int32)
        )
        for t in run.batch[: 2 * GROUP]
    ]
    weights = CountedWeights(folders, run.start, tmp_path / "converted")
    (diagnosed, trainer), _ = Doctor(run.config, batch, weights).diagnose(4)
    assert (diagnosed.axis, diagnosed.cause.name) == ("staleness", f"weights of {name}")
    assert diagnosed.gaps[f"weights of {name}"] < diagnosed.noise
    assert diagnosed.gaps["weights of version 2"] > 0.25 * diagnosed.gap
    assert trainer.axis == "healthy"
    assert weights.largest == 2


def two_ranks_that_round_sums(folder: str, config: dict) -> list[torch.Tensor]:
    """Return log pi of the batch by a trainer of two ranks that add their parts of each layer in bfloat16."""
    from megatron_dppo.diagnostics.doctor.ladder import Rung, log_probs_of
    from megatron_dppo.trainer.trainer import Trainer

    loaded = TrainConfig.model_validate(config)
    trainer = Trainer.read(loaded)
    # Megatron-Core may not be imported before our trainer is.
    from megatron.core.tensor_parallel import mappings

    add = mappings._reduce_scatter_along_first_dim
    mappings._reduce_scatter_along_first_dim = lambda values, *more, **options: add(
        values.bfloat16(), *more, **options
    ).to(values.dtype)
    try:
        batch = load_batch(Path(folder), 2)
        rung = Rung("", Path(folder), TEMPERATURE, False, "float32")
        log_probs = log_probs_of(trainer, loaded.training.micro_batch_tokens, rung, batch)
        return list(log_probs.split([t.sampled for t in batch]))
    finally:
        trainer.close()


def test_a_sum_over_ranks_that_is_rounded_is_the_layout(run, tmp_path):
    """The size of the gap would also fit a fault of precision."""
    batch = run.batch[: 2 * GROUP]
    save_batch(tmp_path, 2, batch)
    model = run.config.model.model_copy(update={"hf_checkpoint": str(run.after)})
    layout = {"parallel": ParallelConfig(world_size=2, tensor=2), "model": model}
    config = run.config.model_copy(update=layout)
    target = "tests.unit.annexes.test_doctor:two_ranks_that_round_sums"
    by_rank = run_ranks(target, 2, str(tmp_path), config.model_dump(mode="json"))
    batch = [
        t.with_columns(loss_log_probs=values.numpy().astype(np.float32))
        for t, values in zip(batch, by_rank[0], strict=True)
    ]
    weights = KnownWeights({1: run.after}, run.start, tmp_path / "converted")
    (engine, trainer), _ = Doctor(config, batch, weights).diagnose(2)
    assert (engine.axis, trainer.axis) == ("healthy", "layout")
    assert next(iter(trainer.gaps)) == LAYOUT
    assert trainer.gaps[LAYOUT] < trainer.noise
    # By its size alone, the gap would be called rounding.
    assert trainer.gap / COARSE < trainer.gaps[causes.ROUNDED] < trainer.gap * COARSE
    assert all(token.with_cause is None for token in trainer.tokens)


def log_probs_by(folder: Path, batch: list[Trajectory], rows_of) -> list[np.ndarray]:
    """Return log p of a policy that uses the experts ``rows_of(trajectory)`` for all tokens but the last."""
    policy = Policy(folder)
    rows: list[torch.Tensor] = []

    def replace_choice(gate, hidden, answer, layer):
        logits, _, chosen = answer
        chosen = torch.cat([rows[0][:, layer], chosen[len(rows[0]) :]])
        p = logits.softmax(-1).gather(-1, chosen)
        return logits, p / p.sum(-1, keepdim=True), chosen

    for layer, block in enumerate(policy.model.model.layers):
        block.mlp.gate.register_forward_hook(
            lambda gate, x, answer, layer=layer: replace_choice(gate, x, answer, layer)
        )
    log_probs = []
    for t in batch:
        rows[:] = [torch.from_numpy(rows_of(t).astype(np.int64))]
        log_probs.append(policy.log_probs(t))
    return log_probs


def moved_rows(t: Trajectory, layers: int, tokens: int) -> np.ndarray:
    return np.roll(t.column("routed_experts"), (tokens, layers), (0, 1))


MOVES = [
    (1, 0, "recorded experts of the layer before"),
    (0, 1, "recorded experts of the token before"),
]


@pytest.mark.parametrize(("layers", "tokens", "name"), MOVES)
def test_rows_that_were_replayed_elsewhere_are_named(run, tmp_path, layers, tokens, name):
    """The trainer uses the engine's recorded rows at another layer or token."""
    trainer_log_probs = log_probs_by(run.after, run.batch, lambda t: moved_rows(t, layers, tokens))
    batch = [
        t.with_columns(loss_log_probs=x) for t, x in zip(run.batch, trainer_log_probs, strict=True)
    ]
    examination = examine(run, batch, tmp_path)
    assert axes(examination) == ["healthy", "routing"]
    assert examination.diagnoses[1].cause.name == name


@pytest.mark.parametrize(("layers", "tokens", "name"), MOVES)
def test_a_recording_of_another_place_is_named(run, tmp_path, layers, tokens, name):
    """The engine computes correctly, but records the rows of another layer or token. The trainer follows these rows.
    Each side is healthy by itself."""
    recorded = [t.with_columns(routed_experts=moved_rows(t, -layers, -tokens)) for t in run.batch]
    trainer_log_probs = log_probs_by(run.after, recorded, lambda t: t.column("routed_experts"))
    batch = [
        t.with_columns(loss_log_probs=x) for t, x in zip(recorded, trainer_log_probs, strict=True)
    ]
    replaying = run.config.rollout.model_copy(update={"router_replay": True})
    config = run.config.model_copy(update={"rollout": replaying})
    examination = examine(SimpleNamespace(**{**vars(run), "config": config}), batch, tmp_path)
    assert axes(examination) == ["healthy", "healthy", "routing"]
    assert examination.diagnoses[2].cause.name == name
    assert examination.findings[0].startswith(f"recording: routing: {name} (mean |p - reference| ")
    # A correct recording is healthy.
    examination = examine(SimpleNamespace(**{**vars(run), "config": config}), run.batch, tmp_path)
    assert axes(examination) == ["healthy"] * 3
    assert examination.findings == []


@pytest.mark.parametrize(
    ("temperature", "top_p", "sampler"),
    [(1.0, 1.0, "temperature 1, not 0.7"), (TEMPERATURE, 0.9, "top_p 0.9")],
)
def test_tokens_drawn_otherwise_than_both_sides_say_are_seen(
    run, tmp_path, temperature, top_p, sampler
):
    batch = sample_batch(run.policy, lambda p, s: 100 * p + s, temperature, top_p)
    examination = examine(run, batch, tmp_path)
    assert axes(examination) == ["healthy", "healthy"]
    assert examination.draws.sampler == sampler
    assert examination.findings[0].startswith("sampling: ")


def test_equal_seeds_are_seen(run, tmp_path):
    examination = examine(
        run, sample_batch(run.policy, lambda problem, sample: sample // 2), tmp_path
    )
    copies = [(g + i, g + i + 1) for g in range(0, PROMPTS * GROUP, GROUP) for i in (0, 2)]
    assert examination.draws.copies == copies
    assert examination.draws.expected_copies < 1e-6
    assert examination.findings[0].startswith("seeds: 12 pairs")


def test_a_prompt_that_is_made_otherwise_now_is_told(run):
    ids_by_problem = {t.problem_id: tuple(t.prompt_ids.tolist()) for t in run.batch}

    def faults(**changes):
        problems = {i: Problem(i, "", "", ids) for i, ids in ids_by_problem.items()}
        return prompt_faults(run.batch, Origin({}, "", GROUP, problems, **changes))

    assert faults() == []
    original_ids = ids_by_problem[1]
    ids_by_problem[1] = (*original_ids[:-1], original_ids[-1] + 1)
    assert len(faults()) == GROUP
    assert faults()[0] == (
        "response 0 to problem 1: its prompt of 9 tokens is not what data, tokenizer and template make now (9 tokens)"
    )
    # An environment may make the prompt, or append its first observation to the problem's prompt.
    assert faults(makes_prompts=True) == []
    ids_by_problem[1] = original_ids[:-2]
    assert len(faults(generation_tokens=0)) == 0
    assert len(faults()) == GROUP
    del ids_by_problem[1]
    assert faults()[0].endswith("make now (no such problem)")


def test_the_command_writes_figures_and_page(run, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    layout = ParallelConfig(world_size=2, expert=2)
    config = run.config.model_copy(update={"parallel": layout})
    (folder / "config.yaml").write_text(resolved_yaml(config))
    stale, half = Policy(run.start), np.float32(np.log(0.5))
    # No alternative explains the trainer's error, and a trainer of one process does not have it.
    batch = [
        t.with_columns(
            rollout_log_probs=stale.log_probs(t),
            loss_log_probs=t.column("loss_log_probs") + half * np.float32(np.arange(t.sampled) % 2),
        )
        for t in run.batch
    ]
    save_batch(folder / "rollouts", 2, batch)
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    command = ["doctor", str(folder), "--weights", f"1={run.after}", *files]
    result = run_patiently(
        [sys.executable, "-m", "megatron_dppo", *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    finding = "engine: staleness: weights of version 0"
    assert finding in result.stdout
    assert "prompts not examined: " in result.stdout
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["findings"][0].startswith(finding)
    assert [side["axis"] for side in figures["sides"]] == ["staleness", "layout"]
    assert "trainer: layout: the same trainer in one process does not differ" in result.stdout
    page = (tmp_path / "a.html").read_text()
    assert finding in page
    # The eight responses of each side, and a legend above them.
    for css in ("explained", "left"):
        spans = re.findall(rf'<span class="{css}" style="--tv:([0-9.]+)"', page)
        assert len(spans) == 8 * TOKENS + 2
        assert max(map(float, spans)) == 1
    assert "\nweights of version 0: 0." in page
    # Without the weights of either side, the report does not say that nothing is wrong.
    assert main([str(folder)]) == 2
    missing = "not examined: the weights of version 1 are not known"
    error = capsys.readouterr().err
    assert "examined: " in error
    assert f"engine {missing}" in error
    assert f"trainer {missing}" in error
    assert main([str(folder), "--weights", "one"]) == 2
    assert "expected VERSION=FOLDER" in capsys.readouterr().err


def test_what_was_not_examined_is_not_said_to_be_well(run, tmp_path):
    """The trainer's weights are known. The engine's weights are three versions older and not known."""
    batch = [t.with_columns(weight_version=np.full(t.sampled, -2, np.int32)) for t in run.batch]
    examination = examine(run, batch, tmp_path)
    assert examination.findings == []
    assert examination.conclusions == ["trainer: nothing is wrong; the engine was not examined"]
    assert "version -2" in examination.unexamined["engine"]
    batch = [t.with_columns(weight_version=np.arange(t.sampled, dtype=np.int32)) for t in run.batch]
    assert (
        examine(run, batch, tmp_path).unexamined["engine"]
        == "no response of the batch was sampled by a single weight version"
    )
    lora = run.config.lora.model_copy(update={"rank": 4, "dropout": 0.1})
    adapted = SimpleNamespace(
        **{**vars(run), "config": run.config.model_copy(update={"lora": lora})}
    )
    assert "dropout" in examine(adapted, run.batch, tmp_path).unexamined["trainer"]
    section = DistillationConfig(teachers={"far": TeacherConfig(hf_checkpoint=str(run.start))})
    taught = SimpleNamespace(
        **{**vars(run), "config": run.config.model_copy(update={"distillation": section})}
    )
    assert "unused.jsonl" in examine(taught, run.batch[:2], tmp_path).unexamined["teachers"]


def test_without_a_step_the_last_batch_whose_weights_are_there_is_examined():
    assert last_examinable([1, 2, 20, 21, 40], {0: "start", 20: "step_000020", 40: "hf"}) == 21
    assert last_examinable([5, 6], {0: "start"}) == 6


def test_of_a_run_with_adapters_or_no_end_no_weights_are_taken_for_the_policys(run, tmp_path):
    folder = tmp_path / "run"
    suspects = ("checkpoints/step_000001.suspect", "checkpoints/step_1000003.suspect")
    for name in ("checkpoints/step_000001", *suspects, "hf"):
        (folder / name).mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    options = argparse.Namespace(run=folder, weights=["7=merged"])
    last = run.config.model_copy(update={"run": run.config.run.model_copy(update={"steps": 5})})
    checkpoints = {1: folder / "checkpoints" / "step_000001", 1_000_003: folder / suspects[1]}
    of_whole = {0: Path(run.start), **checkpoints, 7: Path("merged")}
    assert weights_by_version(options, last) == of_whole
    (folder / "metrics.jsonl").write_text('{"step": 4}\n')
    assert weights_by_version(options, last) == of_whole
    (folder / "metrics.jsonl").write_text('{"step": 4}\n{"step": 5}\n')
    assert weights_by_version(options, last) == {**of_whole, 5: folder / "hf"}

    def of_adapters(**settings):
        lora = run.config.lora.model_copy(update={"rank": 4, **settings})
        return weights_by_version(options, run.config.model_copy(update={"lora": lora}))

    assert of_adapters() == {0: Path(run.start), 7: Path("merged")}
    assert of_adapters(start_from="adapters") == {7: Path("merged")}


def test_a_neighbour_that_cant_be_read_is_an_alternative_less(run, tmp_path):
    stale = Policy(run.start)
    batch = [t.with_columns(rollout_log_probs=stale.log_probs(t)) for t in run.batch]
    (tmp_path / "broken").mkdir()
    weights = KnownWeights(
        {0: run.start, 1: run.after, 2: tmp_path / "broken"}, run.start, tmp_path / "converted"
    )
    examination = Doctor(run.config, batch, weights).report(2)
    assert axes(examination) == ["staleness", "healthy"]
    assert next(iter(examination.unexamined)) == "weights of version 2"


def test_responses_of_other_lengths_are_no_excuse():
    """All tokens have the same difference, so responses of any lengths show no spread."""
    for lengths in ([130], [128, 10], [100, 5, 5], [120, 8, 8, 8]):
        assert diagnosis._spread([torch.full((n,), 0.2) for n in lengths]) < 1e-6
    # By hand: the sums are 4 and 0, the mean is 1 per token. The residuals of the sums are 2 and -2: sqrt(8), 4 tokens.
    spread = diagnosis._spread([torch.tensor([2.0, 2.0]), torch.tensor([0.0, 0.0])])
    assert spread == pytest.approx(diagnosis.SPREADS * 8**0.5 * 2**0.5 / 4)


def test_a_trainer_that_replays_is_judged_by_the_rows_that_hold(run, tmp_path):
    """An update interrupted one response, and the engine lost the recording of another one. There the trainer uses its
    own experts. Elsewhere it uses the recorded experts, which differ from its own."""
    reference = Reference(run.after)
    batch = [t.with_columns(routed_experts=(t.column("routed_experts") + 1) % 8) for t in run.batch]
    batch[0] = batch[0].with_columns(
        weight_version=np.repeat(np.array([0, 1], np.int32), [4, batch[0].sampled - 4])
    )
    batch[1] = batch[1].without("routed_experts")
    assert batch[0].discarded_rows == 4

    def valid_rows(t: Trajectory) -> torch.Tensor | None:
        if "routed_experts" not in t.columns:
            return None
        experts = torch.from_numpy(t.column("routed_experts").astype(np.int64))
        if t is batch[0]:
            start = len(t.prompt_ids) - 1
            experts[start : start + 4] = -1
        return experts

    with reference.routed(valid_rows):
        logits = reference.sampled_logits(batch)
    sampling = at_temperature(TEMPERATURE)
    replayed = [
        t.with_columns(
            loss_log_probs=sampling(x)
            .gather(-1, torch.from_numpy(t.response_ids.astype(np.int64))[:, None])[:, 0]
            .float()
            .numpy()
        )
        for t, x in zip(batch, logits, strict=True)
    ]
    rollout = run.config.rollout.model_copy(update={"router_replay": True})
    config = run.config.model_copy(update={"rollout": rollout})
    weights = KnownWeights({0: run.start, 1: run.after}, run.start, tmp_path)
    trainer = next(
        d for d in Doctor(config, replayed, weights).report(2).diagnoses if d.side == "trainer"
    )
    assert trainer.axis == "healthy"
    assert trainer.gap < 1e-6
    assert trainer.gaps[causes.NATURAL] > 1e-4
    # Without recorded rows, the router chooses.
    own = sampling(reference.sampled_logits(replayed[1:2])[0])
    assert torch.allclose(sampling(logits[1]), own, atol=1e-6)


# --- what a healthy run shows by chance


def examine_in_bfloat16(
    run: SimpleNamespace, batch: list[Trajectory], log_probs: LogProbs, tmp_path: Path
):
    """Examine a run in bfloat16 whose engine returns ``log_probs`` and whose trainer is healthy."""
    half = Policy(run.after, torch.bfloat16)
    model = run.config.model.model_copy(update={"dtype": "bfloat16"})
    coarse = SimpleNamespace(
        **{**vars(run), "config": run.config.model_copy(update={"model": model})}
    )
    batch = [
        with_sides(t, log_probs(t), half.log_probs(t), t.column("routed_experts")) for t in batch
    ]
    return examine(coarse, batch, tmp_path)


def test_rounding_is_no_finding_in_bfloat16_and_old_weights_are(run, tmp_path):
    healthy = examine_in_bfloat16(
        run, run.batch, Policy(run.after, torch.bfloat16).log_probs, tmp_path
    )
    assert healthy.findings == []
    assert all(1e-5 < v.gap < v.noise for v in healthy.diagnoses)
    late = examine_in_bfloat16(
        run, run.batch, Policy(run.start, torch.bfloat16).log_probs, tmp_path
    )
    assert axes(late) == ["staleness", "healthy"]


def test_one_response_alone_is_chance_and_half_of_them_is_not(run, tmp_path):
    """A near tie of a router changes the rest of one response. A stale server of two changes half of all responses."""
    half, late = (Policy(folder, torch.bfloat16) for folder in (run.after, run.start))

    def mix(count: int) -> LogProbs:
        of_late = {id(t) for t in run.batch[:count]}
        return lambda t: (late if id(t) in of_late else half).log_probs(t)

    assert examine_in_bfloat16(run, run.batch, mix(1), tmp_path).findings == []
    examination = examine_in_bfloat16(run, run.batch, mix(len(run.batch) // 2), tmp_path)
    assert axes(examination) == ["unexplained", "healthy"]
    # In float32, too, one response is chance, and a quarter of the responses is not.
    few = {id(t) for t in run.batch[: len(run.batch) // 4]}
    old = Policy(run.start)
    for of_old, expected in (({id(run.batch[0])}, "healthy"), (few, "unexplained")):
        batch = [
            t.with_columns(rollout_log_probs=old.log_probs(t)) if id(t) in of_old else t
            for t in run.batch
        ]
        assert axes(examine(run, batch, tmp_path)) == [expected, "healthy"]


def test_repetitions_that_the_policy_likes_are_no_evidence():
    # The second and the third draw have the chance 1/2 to repeat an earlier one; one does: 1 - 2 log(1 + (e - 1) / 2).
    log = math.log
    group = [("a", log(0.5)), ("a", log(0.5)), ("b", log(0.25))]
    assert repetition_evidence([group]) == pytest.approx(1 - 2 * log(0.5 + 0.5 * math.e))
    # For two draws of a fair coin and one factor, exp(evidence) has a mean of 1 over the outcomes.
    outcomes = [[("a", log(0.5)), (second, log(0.5))] for second in ("a", "b")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_evidence, "FACTORS", (2,))
        means = [math.exp(repetition_evidence([outcome])) for outcome in outcomes]
    assert sum(means) / 2 == pytest.approx(1)
    # Each of two unlikely repetitions counts nearly 16.
    rare = [("a", log(1e-12)), ("a", log(1e-12)), ("a", log(1e-12))]
    assert repetition_evidence([rare]) == pytest.approx(32, abs=1e-3)


def test_equal_responses_count_as_often_as_they_came():
    """Without them a policy that is sure of its answers would look hotter than it is."""
    ids = [5] * 7 + [6]
    batch = [
        Trajectory.of_response([1], [x], problem_id=0, sample_index=i) for i, x in enumerate(ids)
    ]

    def log_probs(likely: float) -> list[torch.Tensor]:
        values = [math.log(likely if x == 5 else 1 - likely) for x in ids]
        return list(torch.tensor(values, dtype=torch.float64).split(1))

    side = Side("engine", 0, tuple(range(8)), tuple(log_probs(0.9)))
    sampling = draws(batch, side, side.log_probs, {"hotter": log_probs(0.6)})
    assert sampling.evidence == pytest.approx(7 * math.log(0.6 / 0.9) + math.log(0.4 / 0.1))
    assert (sampling.tokens, sampling.sampler, sampling.has_copies) == (8, None, False)


def test_draws_that_rewards_chose_among_are_not_examined(run, tmp_path):
    rollout = run.config.rollout.model_copy(update={"drop_zero_variance_groups": True})
    config = run.config.model_copy(update={"rollout": rollout})
    examination = examine(SimpleNamespace(**{**vars(run), "config": config}), run.batch, tmp_path)
    assert examination.draws is None
    assert (
        "draws not examined: rewards or lengths chose among the responses" in examination.all_facts
    )


def test_the_model_s_own_rotary_base_is_no_alternative(run):
    reference = Reference(run.after)
    base = reference._model.config.rope_parameters["rope_theta"]
    names = {c.name for c in alternatives(SampledRun(1.0, 1, 1), reference, is_recorded=False)}
    bases = {f"rotary base {theta:g}, unscaled" for theta in causes.THETAS}
    assert bases - names == {f"rotary base {base:g}, unscaled"}
