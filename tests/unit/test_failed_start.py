"""A real start whose reward workers die: the rank ends with an error that names the dead worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks
from tests.unit.config_files import minimal

HERE = "tests.unit.test_failed_start"


def starting_worker(tree: dict[str, Any]) -> str:
    """Run a rank, and return the message of the error that ends it."""
    from megatron_dppo.config.schema import TrainConfig
    from megatron_dppo.logging import FatalError
    from megatron_dppo.loop.run import run_rank
    from megatron_dppo.spec import RunSpec

    config = TrainConfig.model_validate(tree)
    try:
        run_rank(config, RunSpec.of_checked(config))
    except FatalError as error:
        return str(error)
    return "nothing failed"


def test_a_dead_reward_worker_is_named(tmp_path: Path) -> None:
    """No check of the configuration ran before this start, so rank 0 scores the reference answers itself."""
    from tests.tiny_models import save_tiny_model, tiny_tokenizer

    tree = minimal(tmp_path)
    save_tiny_model(tmp_path / "model", "qwen3", vocab_size=64, layers=1)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": "1", "answer": "1"}) for _ in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    tree["data"]["apply_chat_template"] = False
    tree["parallel"] = {"world_size": 1}
    tree["reward"] = {"name": "tests.unit.planted_rewards:end_at_once"}
    tree["model"]["dtype"] = "float32"
    (error,) = run_ranks(f"{HERE}:starting_worker", 1, tree)
    assert error.startswith("RankError: rank 0: VerifierError: ")
    assert "worker ended with exit code 3" in error
