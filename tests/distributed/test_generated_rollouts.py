"""Two leaders draw batches from a scripted engine: order, overlap, filtering and resumption without a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.generations import RecordedStarts
from tests.ranks import run_ranks
from tests.unit.config_files import minimal

MODULE = "tests.distributed.test_generated_rollouts"
PROMPTS, GROUP, STEPS = 6, 2, 4


class ScriptedEngine(RecordedStarts):
    """Answers as ``EngineSession`` does, with the weights of the start of a generation.

    If ``flat`` divides a problem's id, its responses have 3 tokens and no reward. Of any other problem the first
    response is right, and each response has 2 tokens.
    """

    def __init__(self, flat: int) -> None:
        super().__init__()
        self.version, self.events, self._flat = 0, [], flat
        self.seeds: list[int | None] = []
        self.request_counts: list[int] = []
        self.now = 0.0

    busy_s = 0.0

    def start(self, job, *arguments: Any, **done: Any):
        generation = super().start(job, *arguments, **done)
        self.events.append(f"start {generation.description}")
        self.request_counts.append(len(job.requests(generation.done)))
        self.seeds += [request.sampling.seed for request in job.requests()]
        generation.version, generation.seconds = self.version, 0.5
        generation.timed_out = len(job.problems)
        return generation

    def finish(self, generation, held: int, *, mixes: bool):
        self.events.append(f"finish {generation.description} held {held}")
        self.now += 1
        answers = {
            (i, s): self._answer(problem, s, generation.version)
            for i, problem in enumerate(generation.job.problems)
            for s in range(generation.job.group_size)
        }
        for key, trajectory in reversed(answers.items()):  # Responses may come in any order.
            if key not in generation.done:
                generation.on_response(key, trajectory)
        return list((answers | generation.done).values())

    def _answer(self, problem, sample: int, version: int):
        from megatron_dppo.data.trajectory import Trajectory

        useful = problem.problem_id % self._flat != 0
        count = 2 if useful else 3
        return Trajectory.of_response(
            problem.prompt_ids,
            [3, 4, 4][:count],
            problem_id=problem.problem_id,
            sample_index=sample,
            text="1" if sample == 0 and useful else "0",
            columns={
                "rollout_log_probs": [-0.5, -0.25, -0.5][:count],
                "weight_version": [version] * count,
            },
        )


def two_leaders() -> Any:
    import torch.distributed as dist

    from megatron_dppo.trainer.topology import Topology

    world = dist.group.WORLD
    return Topology(
        rank=dist.get_rank(), world_size=2, dp_rank=dist.get_rank(), dp_size=2,
        tp_rank=0, tp_size=1, cp_rank=0, cp_size=1, pp_rank=0, pp_size=1, leaders=(0, 1),
        data_group=world, tensor_group=world, context_group=world, pipeline_group=world,
    )  # fmt: skip


def source_of(
    folder: str, engine: ScriptedEngine, scorer, sampler, changes: dict[str, Any], spool=None
):

    import torch.distributed as dist

    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.data.trajectory import Problem
    from megatron_dppo.engine.protocol import SamplingParams
    from megatron_dppo.fleet.generation import GenerationJob, SamplingSeeds
    from megatron_dppo.loop.rollout_sources import GeneratedRollouts
    from megatron_dppo.metrics.phase_timer import PhaseTimer

    here = Path(folder) / str(dist.get_rank())
    here.mkdir(exist_ok=True)
    tree = minimal(here)
    tree["run"]["steps"] = STEPS
    tree["engine"] = {"deterministic": True}
    tree["rollout"] |= {"prompts_per_step": PROMPTS, "group_size": GROUP, **changes}
    problems = [Problem(i, "p", "1", (i, 1)) for i in range(64)]
    config = TrainConfig.model_validate(tree)
    return GeneratedRollouts(
        config.rollout,
        config.algorithm,
        two_leaders(),
        engine,  # type: ignore[arg-type]
        scorer,
        GenerationJob((), GROUP, SamplingParams(4), seeds=SamplingSeeds(config.run.seed, "", ())),
        problems,
        sampler,
        PhaseTimer(),
        steps=STEPS,
        spool=spool,
    )


def fresh_sampler() -> Any:
    from megatron_dppo.data.sampling import ProblemSampler, ReturningSampler

    return ReturningSampler(ProblemSampler(64, seed=3))


def scorer_without(response: int | None) -> Any:
    """Return a scorer without a reward for one response of rank 0: the one with this number in the order of scoring."""
    from itertools import count

    import torch.distributed as dist

    from megatron_dppo.config.data_schema import RewardConfig
    from megatron_dppo.loop.scorer import PendingScore, Scorer
    from megatron_dppo.rewards.verifier import Score

    class Unlucky(Scorer):
        numbers = count()

        def submit(self, problem, text):
            if next(self.numbers) == response and dist.get_rank() == 0:
                return PendingScore.known(Score.without_value("away"))
            return super().submit(problem, text)

    return Unlucky(RewardConfig(name="exact_integer"))


def run_steps(
    folder: str,
    changes: dict[str, Any],
    *,
    flat: int = 1000,
    resume_after: int = 0,
    without_reward: int | None = None,
) -> dict[str, Any]:
    """Return what a run of ``STEPS`` steps trains on. A new source resumes it after the step ``resume_after``.

    By the engine's clock, a wait for a batch takes 1 s, and training on it 3 s.
    """
    from megatron_dppo.loop import rollout_sources

    engine, sampler, batches = ScriptedEngine(flat), fresh_sampler(), []
    rollout_sources.time = SimpleNamespace(monotonic=lambda: engine.now)  # type: ignore[assignment]
    with scorer_without(without_reward) as scorer:
        source = source_of(folder, engine, scorer, sampler, changes)
        for step in range(1, STEPS + 1):
            batches.append(source.collect(step))
            engine.events.append(f"train {step}")
            engine.now += 3
            source.wait_before_update(step)
            engine.version = step
            engine.events.append(f"update {step}")
            source.run_ahead(step)
            if step == resume_after:
                sampler = fresh_sampler()
                sampler.load_state_dict(batches[-1].sampler)
                source = source_of(folder, engine, scorer, sampler, changes)
    return {
        "problems": [[t.problem_id for t in b.outlines[::GROUP]] for b in batches],
        "samples": [[t.sample_index for t in b.outlines] for b in batches],
        "versions": [[t.version_spans[0].weight_version for t in b.outlines] for b in batches],
        "figures": [b.figures for b in batches],
        "samplers": [b.sampler for b in batches],
        "events": engine.events,
        "seeds": engine.seeds,
    }


def open_spool(folder: str, step: int, *, staleness: int = 0, is_fresh: bool) -> Any:
    from functools import partial

    import torch.distributed as dist

    from megatron_dppo.data.trajectory import Problem
    from megatron_dppo.loop.ownership import own_positions
    from megatron_dppo.loop.spool import OwnShare, ResponseSpool

    oldest = lambda step: max(0, step - 1 - staleness)  # noqa: E731
    spool = ResponseSpool(Path(folder) / "spool", dist.get_rank(), oldest)
    problems = [Problem(i, "p", "1", (i, 1)) for i in range(64)]
    share = OwnShare(partial(own_positions, topology=two_leaders()), GROUP, problems)
    spool.open("settings", step, share, is_fresh=is_fresh)
    return spool


def restart_ranks(
    folder: str, changes: dict[str, Any], *, flat: int = 1000, same_weights: bool = True
) -> dict[str, Any]:
    """Ranks die after step 2 with three responses of step 3. New ranks continue from the checkpoint of step 1.

    Return the batches of both, and the number of requests for repeated steps and for the new step.
    """
    from contextlib import closing

    import torch.distributed as dist

    staleness = changes.get("max_staleness", 0)

    def digests(batch) -> list[Any]:
        held = sorted(batch.trajectories.items())
        return [[i, t.digests(), t.reward, t.advantage, t.text] for i, t in held]

    def upcoming(batch) -> list[int]:
        following = fresh_sampler()
        following.load_state_dict(batch.sampler)
        return following.next(20)

    first, second, states = [], [], []
    engine, sampler = ScriptedEngine(flat), fresh_sampler()
    with (
        scorer_without(None) as scorer,
        closing(open_spool(folder, 0, staleness=staleness, is_fresh=True)) as spool,
    ):
        source = source_of(folder, engine, scorer, sampler, changes, spool)
        for step in (1, 2):
            batch = source.collect(step)
            first.append([digests(batch), upcoming(batch)])
            states.append(batch.sampler)
            spool.sync(step)
            spool.note_trained(step, f"weights {step}")
            source.wait_before_update(step)
            engine.version = step
            source.run_ahead(step)
        if not source._drafts:
            source._begin(3)
        generation = source._drafts[0].generation._generation
        for key in ((0, 0), (0, 1), (1, 0)):
            if key not in generation.done:
                problem = generation.job.problems[key[0]]
                answer = engine._answer(problem, key[1], generation.version)
                generation.on_response(key, answer)
    dist.barrier()
    engine, sampler = ScriptedEngine(flat), fresh_sampler()
    engine.version = 2
    sampler.load_state_dict(states[0])
    with (
        scorer_without(None) as scorer,
        closing(open_spool(folder, 1, staleness=staleness, is_fresh=False)) as spool,
    ):
        source = source_of(folder, engine, scorer, sampler, changes, spool)
        batch = source.collect(2)
        second.append([digests(batch), upcoming(batch)])
        spool.note_trained(2, "weights 2" if same_weights else "others")
        source.wait_before_update(2)
        repeated = list(engine.request_counts)
        source.run_ahead(2)
        source.collect(3)
    return {
        "first": first[1:],
        "second": second,
        "repeated": repeated,
        "new": engine.request_counts[len(repeated)],
        "known": sorted(spool.known_digests),
    }


def damage_frame(step_folder: Path) -> None:
    frames = step_folder / "rank1.frames"
    content = bytearray(frames.read_bytes())
    content[-1] ^= 1
    frames.write_bytes(content)


def draw_others(step_folder: Path) -> None:
    draws = step_folder / "draws.jsonl"
    line = json.loads(draws.read_text())
    draws.write_text(json.dumps({**line, "problems": line["problems"][::-1]}) + "\n")


HARMS: dict[str, Callable[[Path], None]] = {
    "a damaged frame": damage_frame,
    "no file of a rank": lambda step_folder: (step_folder / "rank0.frames").unlink(),
    "no folder": shutil.rmtree,
    "other draws": draw_others,
    "no draws": lambda step_folder: (step_folder / "draws.jsonl").unlink(),
}


def restart_ranks_after_harm(folder: str, harm: Callable[[Path], None]) -> dict[str, Any]:
    """Ranks die after step 3. Files of step 2 are harmed. New ranks continue from step 0.

    Return the last step that they repeat, and the number of requests of this rank by step.
    """
    from contextlib import closing

    import torch.distributed as dist

    def run(spool, steps: range) -> list[int]:
        engine = ScriptedEngine(1000)
        with scorer_without(None) as scorer, closing(spool):
            source = source_of(folder, engine, scorer, fresh_sampler(), {}, spool)
            for step in steps:
                engine.version = step - 1
                source.collect(step)
                spool.sync(step)
                spool.note_trained(step, f"weights {step}")
        return engine.request_counts

    run(open_spool(folder, 0, is_fresh=True), range(1, 4))
    if dist.get_rank() == 0:
        harm(Path(folder) / "spool" / "step_000002")
    dist.barrier()
    spool = open_spool(folder, 0, is_fresh=False)
    repeated = spool.last_trained
    requests = run(spool, range(1, 4))
    # After another death everything is repeated.
    spool = open_spool(folder, 0, is_fresh=False)
    repeated_later = spool.last_trained
    return {"repeated": [repeated, repeated_later], "requests": [requests, run(spool, range(1, 4))]}


def fail_to_write(folder: str) -> dict[str, Any]:
    """Rank 1 can't write its responses of step 2. Return the steps that the next ranks repeat, and the failures."""
    import torch.distributed as dist

    spool = open_spool(folder, 0, is_fresh=True)
    failures = []
    if dist.get_rank() == 1:
        (Path(folder) / "spool" / "step_000002" / "rank1.frames").mkdir(parents=True)
    for step in (1, 2, 3):
        from megatron_dppo.data.response_frames import ScoredResponse
        from megatron_dppo.data.trajectory import Trajectory

        response = Trajectory.of_response([1], [2], problem_id=1)
        spool.keep(step, ScoredResponse((0, 0), response, {"value": 1.0}))
        spool.sync(step)
        spool.note_trained(step, f"weights {step}")
        failures.append(spool._failure)
    spool.close()
    trained = (Path(folder) / "spool" / "trained.jsonl").read_text().splitlines()
    return {"trained": [json.loads(line)["step"] for line in trained], "failures": failures}


def late_weights(folder: str) -> str:
    """Return the error of a batch whose weights are older than a synchronous run allows."""
    from megatron_dppo.config.data_schema import RewardConfig
    from megatron_dppo.loop.rollout_figures import StalenessError
    from megatron_dppo.loop.scorer import Scorer

    with Scorer(RewardConfig(name="exact_integer")) as scorer:
        source = source_of(folder, ScriptedEngine(5), scorer, fresh_sampler(), {})
        source.collect(1)
        try:
            source.collect(2)
        except StalenessError as error:
            return str(error)
    return ""


def read_saved_batch(folder: str) -> dict[str, Any]:
    """Return what this leader reads of a saved batch of three groups, and its errors if the data have changed."""

    import torch.distributed as dist

    from megatron_dppo.config.schema import RolloutConfig
    from megatron_dppo.data.batch_file import BatchFormatError, save_batch
    from megatron_dppo.data.sampling import ProblemSampler
    from megatron_dppo.data.seal import Origin
    from megatron_dppo.data.trajectory import Problem, Trajectory
    from megatron_dppo.loop.rollout_sources import ReplayedRollouts

    sampler_order, saved = ProblemSampler(64, seed=3).next(3), Path(folder) / "saved"
    batch = [
        Trajectory.of_response(
            [p, 1], [3] * (1 + s), problem_id=p, sample_index=s, reward=float(s),
            columns={"weight_version": [1] * (1 + s), "loss_trains": [True] * (1 + s)},
        )
        for p in sampler_order
        for s in range(GROUP)
    ]  # fmt: skip
    if dist.get_rank() == 0:
        save_batch(saved, 2, batch)
    dist.barrier()
    found: dict[str, Any] = {}
    kinds = {"same": 1, "another prompt": sampler_order[1], "another group size": 1}
    for kind, other in kinds.items():
        # Only rank 1 reads the group at position 1.
        problems = [Problem(i, "p", "1", (i, 9 if i == other else 1)) for i in range(64)]
        size = GROUP + 1 if "size" in kind else GROUP
        rollout = RolloutConfig(
            prompts_per_step=3, group_size=size, max_response_tokens=4, replay_from=str(saved)
        )
        sampler = ProblemSampler(64, seed=3)
        origin = Origin({}, "", size, {p.problem_id: p for p in problems})
        source = ReplayedRollouts(rollout, two_leaders(), problems, sampler, origin)
        try:
            got = source.collect(2)
            found[kind] = {
                "own": {
                    i: (t.token_ids.tolist(), sorted(t.columns))
                    for i, t in got.trajectories.items()
                },
                "outlines": [
                    (t.problem_id, t.sample_index, t.length, t.reward) for t in got.outlines
                ],
                "reward": got.figures["reward/mean"],
            }
        except BatchFormatError as error:
            found[kind] = str(error)
    return found | {"drawn": sampler_order}


FILTER = {"drop_zero_variance_groups": True, "oversampling": 2.0, "max_generation_rounds": 3}


RETRACT = {"interrupt": "retract"}


RESTARTS: dict[str, tuple[dict[str, Any], int]] = {
    "synchronous": ({}, 1000),
    "ahead": (RETRACT | {"max_staleness": 1}, 1000),
    "filtered": (FILTER, 2),
    "filtered ahead": (FILTER | RETRACT | {"max_staleness": 1}, 2),
}


def worker(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ahead = {"max_staleness": 1}
    return {
        "synchronous": run_steps(folder, {}),
        "ahead": run_steps(folder, ahead),
        "resumed": run_steps(folder, ahead, resume_after=2),
        "filtered": run_steps(folder, FILTER, flat=2),
        "filtered ahead": run_steps(folder, FILTER | ahead, flat=2),
        "filtered, resumed": run_steps(folder, FILTER | ahead, flat=2, resume_after=2),
        "far ahead": run_steps(folder, RETRACT | {"max_staleness": 3}),
        "further than the run": run_steps(folder, RETRACT | {"max_staleness": 8}),
        "far ahead, drained": run_steps(folder, {"max_staleness": 2}),
        "replaced": run_steps(
            folder, {"max_staleness": 2}, without_reward=2 * PROMPTS // 2 * GROUP
        ),
        "far ahead, resumed": run_steps(folder, RETRACT | {"max_staleness": 3}, resume_after=1),
        "filtered far ahead": run_steps(folder, FILTER | RETRACT | {"max_staleness": 2}, flat=2),
        "filtered far ahead, resumed": run_steps(
            folder, FILTER | RETRACT | {"max_staleness": 2}, flat=2, resume_after=2
        ),
        "hopeless": run_steps(folder, FILTER, flat=1),
        **{
            f"restarted, {name}": restart_ranks(folder, case[0], flat=case[1])
            for name, case in RESTARTS.items()
        },
        "restarted, others": restart_ranks(folder, RETRACT, same_weights=False),
        "harmed": {name: restart_ranks_after_harm(folder, harm) for name, harm in HARMS.items()},
        "unwritten": fail_to_write(folder),
        "late": late_weights(folder),
        "replayed": read_saved_batch(folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(f"{MODULE}:worker", 2, str(tmp_path_factory.mktemp("generated")))


@pytest.fixture
def runs(ranks) -> dict[str, Any]:
    """The results of rank 0. ``test_both_ranks_see_the_same`` compares them with those of rank 1."""
    return ranks[0]


@pytest.mark.parametrize("mode", RESTARTS)
def test_ranks_that_start_again_repeat_steps_and_sample_what_is_missing(ranks, mode):
    for rank in ranks:
        run = rank[f"restarted, {mode}"]
        assert run["second"] == run["first"]
        assert set(run["repeated"]) == {0}
        first_round = PROMPTS // 2 * GROUP * (2 if "filtered" in mode else 1)
        assert run["new"] == first_round - 3
    assert ranks[0]["restarted, ahead"]["known"] == [1]


def test_responses_of_other_weights_are_sampled_anew(ranks):
    """The repeated steps gave other weights, as they may on a GPU."""
    for rank in ranks:
        assert rank["restarted, others"]["new"] == PROMPTS // 2 * GROUP


@pytest.mark.parametrize("harm", HARMS)
def test_ranks_repeat_no_step_that_lacks_a_response_on_one_rank(ranks, harm):
    whole = PROMPTS // 2 * GROUP
    lost = {"a damaged frame": [0, 1], "no file of a rank": [whole, 0], "no draws": [0, 0]}
    for number, rank in enumerate(ranks):
        run = rank["harmed"][harm]
        assert run["repeated"] == [1, 3]
        # Step 1 is repeated. Responses to other problems than the drawn ones are sampled anew.
        assert run["requests"][0] == [0, lost.get(harm, [whole, whole])[number], whole]
        assert run["requests"][1] == [0, 0, 0]


def test_all_ranks_stop_keeping_when_one_rank_cannot_write(ranks):
    for rank in ranks:
        assert rank["unwritten"]["trained"] == [1]
        own_steps = rank["unwritten"]["failures"]
        assert own_steps[0] is None
        assert all("rank 1 can" in failure and "spool" in failure for failure in own_steps[1:])


def sampler_order(seed: int = 3) -> list[int]:
    from megatron_dppo.data.sampling import ProblemSampler

    return ProblemSampler(64, seed).next(64 * 2)


def test_both_ranks_see_the_same(ranks):
    for name in ("synchronous", "ahead", "filtered", "filtered ahead", "hopeless"):
        for what in ("problems", "samples", "versions", "samplers"):
            assert ranks[0][name][what] == ranks[1][name][what], (name, what)


def test_batches_follow_the_sampler_whatever_the_mode(runs):
    expected = [sampler_order()[i * PROMPTS : (i + 1) * PROMPTS] for i in range(STEPS)]
    unfiltered = [mode for mode, run in runs.items() if "problems" in run and "filter" not in mode]
    for mode in set(unfiltered) - {"hopeless"}:
        assert runs[mode]["problems"] == expected, mode
        assert runs[mode]["samples"] == [[0, 1] * PROMPTS] * STEPS


def test_one_step_ahead_means_one_version_behind(runs):
    expected = {
        "synchronous": [0, 1, 2, 3],
        "ahead": [0, 0, 1, 2],
        "resumed": [0, 0, 2, 2],
        "far ahead": [0, 0, 0, 0],
        "far ahead, drained": [0, 0, 0, 1],
        "far ahead, resumed": [0, 1, 1, 1],
    }
    for mode, versions in expected.items():
        assert runs[mode]["versions"] == [[v] * PROMPTS * GROUP for v in versions], mode
    figures = runs["ahead"]["figures"]
    assert [f["rollout/staleness"] for f in figures] == [0, 1, 1, 1]
    assert [f["rollout/staleness_max"] for f in figures] == [0, 1, 1, 1]


def test_generation_runs_beside_training_and_never_beside_an_update(runs):
    assert runs["ahead"]["events"] == [
        "start step 1: generate",
        "finish step 1: generate held 0",
        "start step 2: generate",
        "train 1",
        "finish step 2: generate held 1",
        "update 1",
        "start step 3: generate",
        "train 2",
        "finish step 3: generate held 2",
        "update 2",
        "start step 4: generate",
        "train 3",
        "finish step 4: generate held 3",
        "update 3",
        "train 4",
        "update 4",
    ]


def test_a_replacement_is_waited_for_under_the_weights_that_the_trainer_has_by_then(runs):
    """The batch of step 3 is generated ahead. A replacement for its missing reward is generated only in step 3."""
    assert [e for e in runs["replaced"]["events"] if "step 3" in e] == [
        "start step 3: generate",
        "finish step 3: generate held 1",
        "start step 3: generate, replacement 1",
        "finish step 3: generate, replacement 1 held 2",
    ]


def test_no_batch_begins_before_the_gate_opens(runs):
    """Batch n begins once the trainer holds version n - 1 - eta, right after that update, and never before."""
    for mode, eta in {"far ahead": 3, "far ahead, drained": 2, "further than the run": 8}.items():
        events = runs[mode]["events"]
        for step in range(1, STEPS + 1):
            begun = events.index(f"start step {step}: generate")
            updates = sum(e.startswith("update") for e in events[:begun])
            assert updates == max(0, step - 1 - eta), (mode, step)


def test_a_wait_counts_when_it_happened_whichever_batch_it_was_for(runs):
    """Step 2 waits for its own batch and then for that of step 3: 2 s of 5 s. Step 4 waits for none."""
    shares = [f["rollout/trainers_waited"] for f in runs["far ahead, drained"]["figures"]]
    assert shares == [1 / 1, 2 / 5, 1 / 4, 0 / 3]


def test_an_update_that_interrupts_waits_for_no_batch(runs):
    events = runs["far ahead"]["events"]
    finished = [e for e in events if e.startswith(("finish", "update"))]
    assert finished[:3] == [
        "finish step 1: generate held 0",
        "update 1",
        "finish step 2: generate held 1",
    ]


def test_a_run_resumed_far_ahead_of_its_data_trains_on_every_prompt_once(runs):
    """Later batches took the problems of their first rounds before the checkpointed batch took its last problems."""
    whole, resumed = runs["filtered far ahead"], runs["filtered far ahead, resumed"]
    assert any("returned" in sampler for sampler in whole["samplers"])
    assert resumed["problems"] == whole["problems"]
    assert resumed["samplers"] == whole["samplers"]


def next_problems(state: dict[str, Any]) -> list[int]:
    """Return the problems that a run takes next if it resumes from ``state``."""
    sampler = fresh_sampler()
    sampler.load_state_dict(state)
    return sampler.next(PROMPTS * STEPS)


def test_the_checkpointed_position_is_the_one_before_prefetched_problems(runs):
    stream = sampler_order()
    for mode in ("synchronous", "ahead", "resumed", "far ahead", "far ahead, resumed"):
        for step, state in enumerate(runs[mode]["samplers"], start=1):
            begin = PROMPTS * step
            assert next_problems(state) == stream[begin : begin + PROMPTS * STEPS], (mode, step)


def expected_filtered(flat: int) -> tuple[list[list[int]], list[dict[str, int]]]:
    """Return the batches and counts of ``FILTER``, computed from its rule: each round has twice the missing groups."""
    stream, position, batches, counts = sampler_order(), 0, [], []
    for _ in range(STEPS):
        candidates: list[int] = []
        useful, rounds = [], 0
        while len(useful) < PROMPTS and rounds < 3:
            count = 2 * (PROMPTS - len(useful))
            candidates += stream[position : position + count]
            position += count
            rounds += 1
            useful = [p for p in candidates if p % flat]
        batches.append(useful[:PROMPTS])
        counts.append(
            {
                "rollout/groups_generated": len(candidates),
                "rollout/groups_surplus": len(useful) - PROMPTS,
                "rollout/groups_dropped": len(candidates) - len(useful),
                "rollout/groups_filled": 0,
                "rollout/generation_rounds": rounds,
            }
        )
    return batches, counts


def test_groups_without_spread_are_replaced_in_the_sampler_s_order(runs):
    batches, counts = expected_filtered(flat=2)
    assert any(c["rollout/generation_rounds"] > 1 for c in counts)
    assert any(c["rollout/groups_surplus"] > 0 for c in counts)
    for mode in ("filtered", "filtered ahead", "filtered, resumed"):
        assert runs[mode]["problems"] == batches, mode
        for found, expected in zip(runs[mode]["figures"], counts, strict=True):
            assert {k: found[k] for k in expected} == expected
    positions = {
        mode: [next_problems(s) for s in runs[mode]["samplers"]]
        for mode in ("filtered", "filtered ahead")
    }
    assert positions["filtered ahead"] == positions["filtered"]


def test_no_two_responses_are_drawn_with_one_seed(ranks):
    """Seeds differ between ranks and rounds. A run that generates ahead has the same seeds as a synchronous run."""
    for mode in ("synchronous", "filtered"):
        seeds = [seed for found in ranks for seed in found[mode]["seeds"]]
        assert len(seeds) >= STEPS * PROMPTS * GROUP
        assert None not in seeds
        assert len(set(seeds)) == len(seeds), mode
    assert ranks[1]["ahead"]["seeds"] == ranks[1]["synchronous"]["seeds"]


def test_the_reported_reward_is_that_of_all_generated_groups(runs):
    for figures in runs["filtered"]["figures"]:
        flat, count = figures["rollout/groups_dropped"], figures["rollout/groups_generated"]
        assert figures["reward/mean"] == pytest.approx(0.5 * (count - flat) / count)
        assert figures["reward/groups_without_spread"] == pytest.approx(flat / count)
        assert figures["reward/mean_trained"] == 0.5
        assert figures["rollout/tokens"] == GROUP * (2 * count + flat)
        # The scripted engine reports that it sampled one response of each group again.
        assert figures["rollout/timed_out"] == count
        assert figures["rollout/response_length"] == pytest.approx(2 + flat / count)
        assert figures["rollout/response_length_trained"] == 2


def test_a_batch_that_finds_no_spread_is_filled_up(runs):
    assert runs["hopeless"]["problems"][0] == sampler_order()[:PROMPTS]
    figures = runs["hopeless"]["figures"][0]
    assert figures["rollout/groups_filled"] == PROMPTS
    assert figures["rollout/generation_rounds"] == 3
    assert figures["rollout/groups_generated"] == 36


def test_further_rounds_of_a_prefetched_batch_run_before_the_update(runs):
    events = runs["filtered ahead"]["events"]
    again = [i for i, e in enumerate(events) if "start" in e and "round 2" in e]
    assert again
    for i in again:
        step = int(events[i].split()[2].rstrip(":"))
        before = [e for e in events[:i] if e.startswith(("train", "update"))]
        assert before[-1:] == ([f"train {step - 1}"] if step > 1 else [])


def test_rollouts_of_older_weights_are_refused(runs):
    assert "step 2" in runs["late"]
    assert "(rollout.max_staleness: 0)" in runs["late"]


def test_a_leader_reads_its_own_part_of_a_saved_batch(ranks):
    sampler_order = ranks[0]["replayed"]["drawn"]
    for rank, groups in enumerate(([0, 2], [1])):
        found = ranks[rank]["replayed"]["same"]
        assert found["own"] == {
            p * GROUP + s: ([sampler_order[p], 1] + [3] * (1 + s), ["weight_version"])
            for p in groups
            for s in range(GROUP)
        }
        assert found["outlines"] == [
            (p, s, 3 + s, float(s)) for p in sampler_order for s in range(GROUP)
        ]
        assert found["reward"] == 0.5


def test_what_one_leader_finds_wrong_in_a_saved_batch_every_rank_raises(ranks):
    for rank in ranks:
        found = rank["replayed"]
        wrong = f"problem {found['drawn'][1]} in the batch of step 2"
        assert wrong in found["another prompt"]
        assert "group_size 3" in found["another group size"]
