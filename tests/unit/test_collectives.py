"""The errors that a rank reports of a failed action of all ranks, in a group of one rank."""

from __future__ import annotations

import logging

import pytest

from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.trainer.collectives import on_every_rank

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    ("failure", "text", "has_traceback"),
    [
        (IndexError("a mistake"), "rank 0: IndexError: a mistake", True),
        (RuntimeError("a mistake"), "rank 0: RuntimeError: a mistake", True),
        (ValueError("a mistake"), "rank 0: ValueError: a mistake", True),
        (CheckpointError("damaged"), "rank 0: damaged", False),
        (FileNotFoundError(2, "none", "x"), "rank 0: [Errno 2] none: 'x'", False),
    ],
)
def test_a_fault_in_the_code_leaves_its_traceback(caplog, failure, text, has_traceback):
    def fail() -> None:
        raise failure

    with caplog.at_level(logging.ERROR), pytest.raises(CheckpointError) as caught:
        on_every_rank(fail, error=CheckpointError)
    assert str(caught.value) == text
    tracebacks = [record.exc_text or "" for record in caplog.records if record.exc_info]
    assert len(tracebacks) == has_traceback
    assert ("in fail" in caplog.text) == has_traceback
