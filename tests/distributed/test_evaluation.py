"""Two leaders evaluate: the figures are those of all problems, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_generated_rollouts import ScriptedEngine, two_leaders
from tests.ranks import run_ranks
from tests.unit.config_files import minimal

MODULE = "tests.distributed.test_evaluation"


def worker(folder: str) -> dict[str, Any]:
    """Evaluate a set of five problems. Return the figures and the samples of this rank."""
    import torch.distributed as dist

    from megatron_dppo.config.data_schema import RewardConfig
    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.data.trajectory import Problem
    from megatron_dppo.engine.protocol import SamplingParams
    from megatron_dppo.fleet.generation import GenerationJob
    from megatron_dppo.loop.evaluation import Evaluator
    from megatron_dppo.loop.scorer import Scorer
    from tests.unit.test_evaluation import sample_maker

    dist.init_process_group("gloo")
    here = Path(folder) / str(dist.get_rank())
    here.mkdir()
    tree = minimal(here)
    tree["evaluation"] = {"samples_per_prompt": 2}
    config = TrainConfig.model_validate(tree)
    problems = [Problem(i, "p", "1", (i, 1)) for i in (1, 2, 3, 4, 5)]
    engine: Any = ScriptedEngine(flat=2)
    with Scorer(RewardConfig(name="exact_integer")) as scorer:
        evaluator = Evaluator(
            {"sums": problems}, config.evaluation, GenerationJob((), 2, SamplingParams(4)),
            config.algorithm, two_leaders(), engine, scorer, sample_maker(problems),
        )  # fmt: skip
        figures, samples = evaluator.finish(evaluator.begin(0), 0)
    return {"figures": figures, "samples": [sample.to_json() for sample in samples]}


@pytest.mark.distributed
def test_an_accuracy_is_of_the_problems_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 has the problems 1, 3 and 5, with one right response of two each. Rank 1 has 2 and 4, with none."""
    first, second = run_ranks(f"{MODULE}:worker", 2, str(tmp_path))
    assert first["figures"] == {"evaluation/sums/accuracy": 3 / 10}
    assert second == first
