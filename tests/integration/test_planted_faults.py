"""Faults planted in a real loop of Megatron-Core's trainer and an SGLang server: the doctor names the difference, and a
fault that contradicts a response's stamp stops the run within the step.

One server serves all runs. The only rank of each run is this process. For the time of a run, a fault replaces one of
the package's functions, or changes a field of requests.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from examples.arena import real_loop
from megatron_dppo.checkpoint_conversion.gathering import Gathered
from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.data.trajectory import Outline, Trajectory
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.engine import client
from megatron_dppo.fleet.generation import SamplingSeeds
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.logging import FatalError
from megatron_dppo.loop import run, run_parts, run_rank
from megatron_dppo.loop.rollout_sources import GeneratedRollouts, RolloutBatch
from megatron_dppo.metrics import table as names
from megatron_dppo.model.quantization import BLOCK, SCALE_SUFFIX
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.ports import free_port
from megatron_dppo.trainer import step
from megatron_dppo.trainer.router_replay import RECORDING, ModelReplay
from megatron_dppo.trainer.topology import destroy_topology
from megatron_dppo.trainer.weight_source import TrainerWeights
from megatron_dppo.weights.engine_weights import EngineWeights
from tests.integration.kept_fleet import KeptFleet
from tests.integration.runs import GROUP, PROMPTS, records_of, steps_of, write_material
from tests.integration.test_fp8_rollouts import SIZES
from tests.tiny_models import save_tiny_model
from tests.unit.test_seal import at, cut, with_row, with_token

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

TEMPERATURE, VOCABULARY, EXPERTS = 0.7, 512, 8
DETERMINISTIC = "engine.deterministic=true"
COMMON = (
    *("parallel.world_size=1", "parallel.tensor=1"),
    *("data.evaluation.sums=null", "checkpoint.every=1", "checkpoint.export_hf=false"),
    *(f"rollout.temperature={TEMPERATURE}", "rollout.max_response_tokens=16"),
    "reward.name=tests.unit.planted_rewards:of_every_character",
    # With a canary, the first update would already refuse wrong weights. The faults are planted in whole tensors.
    *("weight_sync.canary_every=0", "weight_sync.strategy=disk"),
)


REPLAY = "rollout.router_replay=true"


@dataclass(frozen=True)
class Place:
    """A configuration whose server is running.

    ``settings``: overrides that every run on this server needs. ``variables``: environment variables with which a rank
    finds the server.
    """

    config: Path
    settings: tuple[str, ...]
    variables: Mapping[str, str]


@contextmanager
def serve_config(folder: Path, *settings: str, **sizes: Any) -> Iterator[Place]:
    """Write a configuration and start its server. Every step has the same prompts.

    ``sizes``: sizes of the model that differ from the tiny model's.
    """
    config = write_material(folder)
    if sizes:
        shutil.rmtree(folder / "model")
        save_tiny_model(folder / "model", seed=1, dtype=torch.bfloat16, **sizes)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:PROMPTS]))
    own = [*COMMON, REPLAY, *settings, f"run.directory={folder}/fleet"]
    with KeptFleet(load_config(str(config), own)) as fleet:
        fleet.members(1)
        yield Place(config, settings, fleet.rank_variables)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    with serve_config(tmp_path_factory.mktemp("planted"), DETERMINISTIC) as place:
        yield place


@pytest.fixture(scope="module")
def other_place(tmp_path_factory) -> Iterator[Place]:
    """A server with a prefix cache. It is not deterministic, because on a CPU SGLang has no deterministic prefix cache.
    The server also has a fault: with any temperature, it reports log-probabilities at temperature 1."""
    with ExitStack() as stack:
        # Only this server has the variable: servers of later tests start while this one still runs.
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
            place = stack.enter_context(serve_config(tmp_path_factory.mktemp("other")))
        yield place


@pytest.fixture(scope="module")
def fp8_place(tmp_path_factory) -> Iterator[Place]:
    settings = "model.dtype=bfloat16", "engine.quantization=fp8", "rollout.largest_gap=1e-6"
    with serve_config(tmp_path_factory.mktemp("fp8"), *settings, **SIZES) as place:
        yield place


def with_models(package: str, **variables: str) -> AbstractContextManager[None]:
    """Let servers that start in this context use the models of ``package`` in place of SGLang's."""

    @contextmanager
    def environment() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"SGLANG_EXTERNAL_MODEL_PACKAGE": package, **variables}.items():
                patch.setenv(name, value)
            yield

    return environment()


@dataclass(frozen=True)
class LoopEnd:
    """A run's folder, and the error that ended it; None if it ended at the last step."""

    directory: Path
    error: str | None


def run_loop(place: Place, directory: Path, steps: int, *overrides: str) -> LoopEnd:
    """Run the whole loop in this process, as the only rank."""
    own = f"run.directory={directory}", f"run.steps={steps}"
    config = load_config(str(place.config), [*COMMON, *place.settings, *overrides, *own])
    directory.mkdir()
    RunDirectory(directory).config.write_text(resolved_yaml(config))
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**place.variables, **rank, "MASTER_PORT": str(free_port())}.items():
            patch.setenv(name, value)
        try:
            run_rank(config, RunSpec.of_checked(config))
        except FatalError as error:
            return LoopEnd(directory, str(error))
        finally:
            destroy_topology()
            # Later tests in this process make their own process groups.
            if dist.is_initialized():
                dist.destroy_process_group()
    return LoopEnd(directory, None)


def examine_step(directory: Path, step: int, *options: str) -> dict[str, Any]:
    """Return the doctor's figures about the batch of ``step``. They must take less than two minutes."""
    file, start = directory / "doctor.json", time.process_time()
    assert doctor([str(directory), "--step", str(step), "--json", str(file), *options]) == 0
    # The doctor promises this limit for each cause. It is thirty times the usual time, so it does not test the speed.
    # Processor time of this process does not grow when other processes compute.
    assert time.process_time() - start < 120
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


# --- faults

Plant = Callable[[pytest.MonkeyPatch], None]
Tensors = dict[str, torch.Tensor]


def in_updates(change: Callable[[Tensors, Tensors], Mapping[str, torch.Tensor]]) -> Plant:
    """Plant ``change`` in weight updates.

    ``change``: a function of the gathered tensors by name and of the first update's tensors. It returns the tensors
    that the engine receives.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        gather, first = TrainerWeights.gather, {}

        def wrong(self: TrainerWeights, plan: Any) -> Iterator[Gathered]:
            for bucket in gather(self, plan):
                tensors = dict(bucket.tensors)
                for name, tensor in tensors.items():
                    first.setdefault(name, tensor.clone())
                changed = change(tensors, first)
                yield replace(bucket, tensors=[(name, changed[name].clone()) for name in tensors])

        patch.setattr(TrainerWeights, "gather", wrong)

    return plant


def with_next_ranks_experts(tensors: Tensors, _: Tensors) -> Tensors:
    """Exchange the experts of two ranks, as a gather in the wrong order does."""

    def source(name: str) -> str:
        head, experts, tail = name.partition(".experts.")
        if not experts:
            return name
        number, rest = tail.split(".", 1)
        return f"{head}{experts}{(int(number) + EXPERTS // 2) % EXPERTS}.{rest}"

    return {name: tensors[source(name)] for name in tensors}


def with_norms_swapped(tensors: Tensors, _: Tensors) -> Tensors:
    norms = ("input_layernorm", "post_attention_layernorm")
    swapped = {}
    for name, tensor in tensors.items():
        swapped[name] = tensor
        for norm, other in (norms, norms[::-1]):
            if norm in name:
                swapped[name] = tensors[name.replace(norm, other)]
    return swapped


def with_stale_shard(tensors: Tensors, first: Tensors) -> Tensors:
    """Keep the experts of the second of two ranks as in the first update."""
    late = [f".experts.{e}." for e in range(EXPERTS // 2, EXPERTS)]
    return {n: first[n] if any(e in n for e in late) else t for n, t in tensors.items()}


def in_requests(change: Callable[[dict[str, Any], tuple[int, int]], None]) -> Plant:
    """Plant ``change`` in requests: a function of SGLang's sampling parameters and the key (problem, sample).

    The stamp of the response keeps the right parameters.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        request_body = client.request_body

        def wrong(requests: Any, *arguments: Any, **options: Any) -> bytes:
            body = json.loads(request_body(requests, *arguments, **options))
            change(body["sampling_params"], requests[0].key)
            return json.dumps(body).encode()

        patch.setattr(client, "request_body", wrong)

    return plant


def in_head(**options: Any) -> Plant:
    """Let the trainer's output layer compute with these ``options``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        head_stats = step.head_stats

        def wrong(*arguments: Any, **given: Any) -> Any:
            dtype = options.get("dtype", given["options"].dtype)
            head_options = replace(given["options"], dtype=dtype)
            temperature = options.get("temperature", given["temperature"])
            return head_stats(
                *arguments, **{**given, "options": head_options, "temperature": temperature}
            )

        patch.setattr(step, "head_stats", wrong)

    return plant


def with_slow_positions(patch: pytest.MonkeyPatch) -> None:
    """Scale the trainer's rotary embedding for a context of double length."""
    # Megatron-Core may not be imported before our trainer is.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    build = RotaryEmbedding.__init__

    def wrong(self: Any, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        self.inv_freq = self.inv_freq / 2

    patch.setattr(RotaryEmbedding, "__init__", wrong)


def in_replay(layers: int, tokens: int) -> Plant:
    """Give the trainer's routers the recorded routing ``layers`` layers and ``tokens`` tokens too late."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        load = ModelReplay.load

        def wrong(self: ModelReplay, batches: Any) -> None:
            shifted_batches = []
            for batch in batches:
                shifted = batch.columns[RECORDING].roll((tokens, layers), (0, 1))
                columns = {**batch.columns, RECORDING: shifted}
                shifted_batches.append(replace(batch, columns=columns))
            load(self, shifted_batches)

        patch.setattr(ModelReplay, "load", wrong)

    return plant


def without_flush(patch: pytest.MonkeyPatch) -> None:
    """Let the engine keep keys and values through an update."""

    async def skip_flush(self: EngineWeights, wait_s: float) -> bool:
        return True

    patch.setattr(EngineWeights, "_flush", skip_flush)


def both(first: Plant, second: Plant) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        first(patch)
        second(patch)

    return plant


@dataclass(frozen=True)
class Fault:
    """``findings``: beginnings of the doctor's lines; the run warned of the gap and kept what the engine's tensors
    were, so that wrong weights also have a line about the tensors. ``step``: the first step that shows the fault."""

    plant: Plant
    findings: tuple[str, ...]
    step: int = 1
    overrides: tuple[str, ...] = ()
    place: str = "place"


def set_parameter(name: str, value: Any) -> Callable[[dict[str, Any], Any], None]:
    return lambda sampling, _: sampling.update({name: value})


FAULTS = {
    "wrong EP gather": Fault(
        in_updates(with_next_ranks_experts),
        (
            "engine: weights: each of 2 ranks has the experts of the next",
            "engine: weights: 4 tensors, such as model.layers.0.mlp.experts.w13_weight: differs",
        ),
        overrides=(REPLAY,),
    ),
    "stale shard": Fault(
        in_updates(with_stale_shard),
        (
            "engine: weights: experts of rank 1 of 2 of version 0",
            "engine: weights: 4 tensors, such as model.layers.0.mlp.experts.w13_weight: differs",
        ),
        2,
    ),
    "swapped norm": Fault(
        in_updates(with_norms_swapped),
        (
            "engine: weights: input_layernorm and post_attention_layernorm exchanged",
            "engine: weights: 4 tensors, such as model.layers.0.input_layernorm.weight: differs",
        ),
    ),
    "temperature missing in the trainer": Fault(
        in_head(temperature=1.0), ("trainer: sampling transform: temperature 1, not 0.7",)
    ),
    "temperature missing in both": Fault(
        both(in_head(temperature=1.0), in_requests(set_parameter("temperature", 1.0))),
        (
            "engine: sampling transform: temperature 1, not 0.7",
            "trainer: sampling transform: temperature 1, not 0.7",
        ),
    ),
    "wrong RoPE scaling": Fault(with_slow_positions, ("trainer: positions: positions times 0.5",)),
    "routing shifted by a layer": Fault(
        in_replay(1, 0),
        ("trainer: routing: recorded experts of the layer before",),
        overrides=(REPLAY,),
    ),
    "replayed rows of another token": Fault(
        in_replay(0, 1),
        ("trainer: routing: recorded experts of the token before",),
        overrides=(REPLAY,),
    ),
    "top-p mismatch": Fault(in_requests(set_parameter("top_p", 0.8)), ("sampling: the ",)),
    "old prefix cache": Fault(
        without_flush,
        ("engine: cache: prompts' keys and values of version 0",),
        2,
        ("rollout.temperature=1",),
        "other_place",
    ),
    "truncated vocabulary": Fault(
        in_requests(
            set_parameter("logit_bias", {str(i): -1e9 for i in range(VOCABULARY * 3 // 4, 512)})
        ),
        ("engine: sampling transform: vocabulary without the last of 4 shards", "sampling: the "),
    ),
    "bf16 head": Fault(in_head(dtype=torch.bfloat16), ("trainer: precision: output layer",)),
    "weights one version old": Fault(
        in_updates(lambda _, first: first),
        (
            "engine: staleness: weights of version 0",
            "engine: weights: 21 tensors, such as model.embed_tokens.weight: is the tensor of version 0",
        ),
        2,
    ),
    "duplicate seeds": Fault(
        in_requests(
            lambda sampling, key: sampling.update(sampling_seed=100 * key[0] + key[1] // 2)
        ),
        ("seeds: ",),
    ),
}


@pytest.mark.parametrize("overrides", [(), (REPLAY,)], ids=["natural", "replayed"])
def test_a_healthy_run_has_no_finding(place, tmp_path, overrides):
    end = run_loop(place, tmp_path / "run", 2, *overrides)
    assert end.error is None
    for number in (1, 2):
        figures = examine_step(end.directory, number)
        assert figures["findings"] == []
        sides = ["engine", "trainer", *(["recording"] if REPLAY in overrides else [])]
        assert [side["side"] for side in figures["sides"]] == sides
        assert {side["axis"] for side in figures["sides"]} == {"healthy"}


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_names(request, tmp_path, monkeypatch, name):
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    place = request.getfixturevalue(fault.place)
    end = run_loop(place, tmp_path / "run", fault.step, *fault.overrides)
    monkeypatch.undo()
    findings = examine_step(end.directory, fault.step)["findings"]
    assert len(findings) == len(fault.findings), findings
    for finding, expected in zip(findings, fault.findings, strict=True):
        assert finding.startswith(expected)


def test_a_disk_that_is_full_for_a_sample_ends_the_run_with_a_checkpoint(
    place, tmp_path, monkeypatch
):
    """No checkpoint is due, and the disk has no room for the samples of step 2. The run ends and saves a checkpoint of
    this step, from which a later start continues."""
    step_of = run.Run.step

    def step_on_full_disk(self: run.Run) -> None:
        if self.state.step == 1:
            samples = Path(self.config.run.directory) / "samples.jsonl"
            samples.unlink()
            samples.symlink_to("/dev/full")
        step_of(self)

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "step", step_on_full_disk)
        end = run_loop(place, tmp_path / "run", 4, "checkpoint.every=50")
    assert end.error is not None
    assert "RecordingError" in end.error
    assert "No space left" in end.error
    assert steps_of(end.directory)[-1] == 2
    assert checkpoints_of(end.directory) == ["step_000002"]


def test_the_doctor_names_a_tokenizer_that_drifted(place, tmp_path):
    """Two tokens have exchanged their ids since the run."""
    model = tmp_path / "model"
    shutil.copytree(place.config.parent / "model", model)
    end = run_loop(place, tmp_path / "run", 1, f"model.hf_checkpoint={model}")
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["+"], ids["="] = ids["="], ids["+"]
    file.write_text(json.dumps(tokenizer))
    findings = examine_step(end.directory, 1)["findings"]
    assert len(findings) == 1
    assert findings[0].startswith(f"tokenizer: {PROMPTS * GROUP} prompts differ; ")


def test_a_gap_that_stops_a_run_leaves_what_the_doctor_needs(place, tmp_path, monkeypatch):
    """No checkpoint is due. The run saves the previous step's weights for the doctor, because the batch was not trained
    on. No later start continues from them."""
    fault = FAULTS["weights one version old"]
    fault.plant(monkeypatch)
    own = ("checkpoint.every=50", "rollout.largest_gap=1e-6")
    end = run_loop(place, tmp_path / "run", 3, *own)
    monkeypatch.undo()
    assert end.error is not None
    assert "GapError" in end.error
    assert steps_of(end.directory)[-1] == 1
    finding, of_tensors = examine_step(end.directory, 2)["findings"]
    assert finding.startswith(fault.findings[0])
    assert of_tensors.startswith("engine: weights: ")
    assert "is the tensor of version 0" in of_tensors
    assert checkpoints_of(end.directory) == ["step_000001.suspect"]


V_PROJ = "model.layers.1.self_attn.v_proj.weight"


def with_larger_scales(tensors: Tensors) -> None:
    if V_PROJ in tensors:
        tensors[V_PROJ + SCALE_SUFFIX][1] *= 1.5


def with_swapped_blocks(tensors: Tensors) -> None:
    if V_PROJ in tensors:
        tensors[V_PROJ] = torch.cat([*reversed(tensors[V_PROJ].split(BLOCK))])


def in_quantiser(change: Callable[[Tensors], None]) -> Plant:
    """Plant ``change`` in the quantiser: engines receive, and are expected to hold, the changed tensors."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        encode = EngineWeights.encode

        def wrong(self: EngineWeights, bucket: Any) -> list[tuple[str, torch.Tensor]]:
            tensors = dict(encode(self, bucket))
            change(tensors)
            return list(tensors.items())

        patch.setattr(EngineWeights, "encode", wrong)

    return plant


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda _: None, None),
        (with_larger_scales, "scales of block row 1 times 1.5"),
        (with_swapped_blocks, "values of block (1, 0) in the place of (0, 0), block (0, 0) in "),
    ],
)
def test_the_tensors_of_servers_are_told_from_the_gap_of_quantisation(
    fp8_place, tmp_path, monkeypatch, change, difference
):
    """Any gap ends the run here. The servers' tensors are kept with the batch."""
    in_quantiser(change)(monkeypatch)
    end = run_loop(fp8_place, tmp_path / "run", 1)
    monkeypatch.undo()
    assert end.error is not None
    assert "GapError" in end.error
    figures = examine_step(end.directory, 1)
    of_tensors = [finding for finding in figures["findings"] if V_PROJ in finding]
    if difference is None:
        assert figures["findings"] == []
        assert not any("tensors" in name for name in figures["unexamined"])
    else:
        (finding,) = of_tensors
        assert finding.startswith(f"engine: quantisation: {V_PROJ}: {difference}")
    assert len(figures["tensor_faults"]) == len(of_tensors)


def checkpoints_of(directory: Path) -> list[str]:
    return sorted(folder.name for folder in (directory / "checkpoints").glob("*"))


def test_a_bit_that_flips_in_a_weight_is_neither_trained_on_nor_saved(place, tmp_path, monkeypatch):
    """The bit flips while the batch of step 3 is generated. The engine has the weights from before the flip."""
    step_of = run.Run.step

    def step_with_flip(self: run.Run) -> None:
        if self.state.step == 2:
            weight = next(iter(self.trainer.base_weights().values()))
            weight.view(-1)[0] = -1.8e36
        step_of(self)

    monkeypatch.setattr(run.Run, "step", step_with_flip)
    settings = ("checkpoint.every=50", "checkpoint.export_hf=true")
    end = run_loop(place, tmp_path / "run", 4, *settings)
    assert end.error is not None
    assert "AlteredWeightsError" in end.error
    assert steps_of(end.directory)[-1] == 2
    assert checkpoints_of(end.directory) == []
    assert not (end.directory / "hf").exists()


def test_the_doctor_names_a_recording_of_other_experts_than_the_engine_used(tmp_path):
    with (
        with_models("tests.integration.wrong_recording"),
        serve_config(tmp_path / "served", DETERMINISTIC) as place,
    ):
        end = run_loop(place, tmp_path / "run", 1, REPLAY)
    assert end.error is None
    (finding,) = examine_step(end.directory, 1)["findings"]
    assert finding.startswith("recording: ")


def test_the_trainer_follows_an_engine_with_other_routing(tmp_path):
    """In the arena's engine, half of the routed tokens have the next best expert in place of their last expert."""
    with (
        with_models(real_loop.ENGINE_MODELS, ARENA_MISMATCH="flips-r3"),
        serve_config(tmp_path / "served", DETERMINISTIC) as place,
    ):
        ends = {
            replays: run_loop(
                place, tmp_path / f"run-{replays}", 1, f"rollout.router_replay={replays}"
            )
            for replays in ("true", "false")
        }
    records = {}
    for replays, end in ends.items():
        assert end.error is None
        records[replays] = records_of(end.directory)[-1]
    assert records["true"][names.GAP_ON_POLICY] < 1e-6
    assert records["false"][names.GAP_ON_POLICY] > 1e-4
    assert 0.35 < records["true"][names.ROUTING_AGREEMENT_FIRST] < 0.65
    # With the recorded rows, the trainer reproduces the engine's values. The engine is at fault.
    (finding,) = examine_step(ends["true"].directory, 1)["findings"]
    assert finding.startswith("engine: routing: experts as recorded")


def test_the_frequency_canary_stops_a_temperature_that_both_forgot(
    other_place, tmp_path, monkeypatch
):
    """The sampler samples at temperature 0.5, but engine and trainer compute with 1. The run keeps the weights."""
    in_head(temperature=1.0)(monkeypatch)
    own = ("rollout.temperature=0.5", "rollout.max_response_tokens=64", "checkpoint.every=50")
    end = run_loop(other_place, tmp_path / "run", 20, *own)
    monkeypatch.undo()
    assert end.error is not None
    assert "FrequencyError: sampled tokens are " in end.error
    assert "less surprising" in end.error
    # The last step has no record, but its batch is kept.
    findings = examine_step(end.directory, len(steps_of(end.directory)))["findings"]
    cause = "sampling transform: temperature 1, not 0.5"
    assert [finding.split(" (")[0] for finding in findings] == [
        f"engine: {cause}",
        f"trainer: {cause}",
    ]


# --- faults of data, which a stamp or a seal shows

Responses = list[Trajectory]


def in_batches(change: Callable[[Responses], Responses]) -> Plant:
    """Plant ``change`` between generation and trainer: a function of a batch's responses."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        collect = GeneratedRollouts.collect

        def wrong(self: GeneratedRollouts, number: int) -> RolloutBatch:
            batch = collect(self, number)
            responses = change([t for _, t in sorted(batch.trajectories.items())])
            outlines = [Outline.of(t) for t in responses]
            return replace(batch, outlines=outlines, trajectories=dict(enumerate(responses)))

        patch.setattr(GeneratedRollouts, "collect", wrong)

    return plant


def with_traded_prompts(responses: Responses) -> Responses:
    """A response follows the prompt of another problem."""
    one, other = responses[0], responses[GROUP]
    first = replace(one, token_ids=np.concatenate([other.prompt_ids, one.response_ids]))
    return [first, *responses[1:]]


def with_traded_rewards(responses: Responses) -> Responses:
    """Two groups exchange rewards and advantages. Each group is consistent in itself."""
    others = [*responses[GROUP : 2 * GROUP], *responses[:GROUP], *responses[2 * GROUP :]]
    return [
        replace(t, reward=other.reward, advantage=other.advantage)
        for t, other in zip(responses, others, strict=True)
    ]


def with_other_finish_reason(t: Trajectory) -> Trajectory:
    return replace(t, finish_reason="stop" if t.finish_reason == "length" else "length")


def with_equal_seeds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SamplingSeeds, "of", lambda self, problem, sample: 100 * problem + sample // 2)


def with_an_evaluations_top_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_parts, "SamplingParams", partial(run_parts.SamplingParams, top_p=0.95))


def with_the_batch_before(patch: pytest.MonkeyPatch) -> None:
    collect, before = GeneratedRollouts.collect, []

    def wrong(self: GeneratedRollouts, number: int) -> RolloutBatch:
        before.append(collect(self, number))
        # The learner removes the trajectories from its batch, so give it a copy.
        return replace(before[0], trajectories=dict(before[0].trajectories))

    patch.setattr(GeneratedRollouts, "collect", wrong)


DATA_FAULTS: dict[str, tuple[Plant, str]] = {
    "wrong version": (in_batches(at(1, with_row("weight_version", 0, 9))), "are of version 9"),
    "traded prompts": (
        in_batches(with_traded_prompts),
        "its prompt is not the prompt of the problem",
    ),
    "changed token": (in_batches(at(2, with_token)), "token_ids: got"),
    "changed log-probability": (
        in_batches(at(2, with_row("rollout_log_probs", 0, -9.0))),
        "rollout_log_probs: got",
    ),
    "routing of another row": (
        in_batches(
            at(0, lambda t: t.with_columns(routed_experts=t.column("routed_experts")[::-1]))
        ),
        "routed_experts: got",
    ),
    "truncated response": (in_batches(at(1, cut)), "loss_mask: got"),
    "rewards of another group": (in_batches(with_traded_rewards), "reward: got"),
    "another advantage": (
        in_batches(at(0, lambda t: replace(t, advantage=0.25))),
        "advantage: got 0.25",
    ),
    "a response twice": (in_batches(lambda a: [a[0], *a[:1], *a[2:]]), "group 0: got"),
    "an end that wasn't": (in_batches(at(0, with_other_finish_reason)), "finish_reason: got"),
    "equal seeds": (with_equal_seeds, "32 responses were drawn with 16 seeds"),
    "an evaluation's top-p": (
        with_an_evaluations_top_p,
        "top_p: 32 responses were asked for with 0.95, expected 1.0",
    ),
}


@pytest.mark.parametrize("name", DATA_FAULTS)
def test_a_data_fault_stops_the_run_within_the_step(place, tmp_path, monkeypatch, name):
    plant, message = DATA_FAULTS[name]
    plant(monkeypatch)
    end = run_loop(place, tmp_path / "run", 2, REPLAY)
    assert end.error is not None
    assert "SealError: the batch of step 1 is not what its seal says" in end.error
    assert message in end.error
    assert steps_of(end.directory) == [0]


def test_a_batch_that_comes_twice_stops_the_run(place, tmp_path, monkeypatch):
    with_the_batch_before(monkeypatch)
    end = run_loop(place, tmp_path / "run", 3)
    assert end.error is not None
    assert "the batch of step 2 is not what its seal says" in end.error
    assert "all responses are those of the batch before" in end.error
    assert steps_of(end.directory) == [0, 1]
