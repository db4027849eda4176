"""A prompt that crashes real servers ends a real run. The error names the data's line and the servers' exception."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import TrainingRun, write_material
from tests.tiny_models import tiny_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

LINE = 3
CHARACTER = "~"


def test_a_prompt_that_servers_die_of_ends_the_run_by_name(tmp_path: Path) -> None:
    config = write_material(tmp_path)
    data = tmp_path / "train.jsonl"
    rows = data.read_text().splitlines()
    rows[LINE - 1] = json.dumps({"prompt": f"{CHARACTER * 4}=", "answer": "1"})
    data.write_text("\n".join(rows) + "\n")
    (token,) = tiny_tokenizer().encode(CHARACTER)
    variables = {
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.integration.deadly_prompt",
        "SGLANG_DEADLY_ID": str(token),
    }
    overrides = ("data.shuffle=false", "data.evaluation={}", "run.steps=1")
    with TrainingRun(config, *overrides, variables=variables) as run:
        run.finish(code=1, timeout=900)
    text = " ".join(run.text.split())
    assert f"{data}, line {LINE}" in text
    assert "IndexError: planted: the deadly token" in text
    assert not (run.directory / "checkpoints").exists()
    # Two losses make the prompt a suspect. A third server receives only this prompt.
    assert len(list((run.directory / "logs").glob("engine0-*.log"))) <= 4
