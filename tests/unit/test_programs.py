"""Programs whose output is captured."""

from __future__ import annotations

import sys

import pytest

from megatron_dppo.system.programs import ProgramError, output_of
from tests.messages import mentioning


def test_a_program_reads_its_content_and_its_variables() -> None:
    program = "import os, sys; print(sys.stdin.read(), os.environ['WORD'])"
    command = [sys.executable, "-c", program]
    assert output_of(command, 60, content="hello", environment={"WORD": "world"}) == "hello world\n"


@pytest.mark.parametrize(
    ("program", "message", "output"),
    [
        ("import sys; sys.exit('first\\nlast')", "last", "first\nlast"),
        ("print('out'); raise SystemExit(1)", "out", "out"),
        ("raise SystemExit(3)", "exit code 3", ""),
    ],
)
def test_the_last_line_of_a_failed_program_is_the_message(
    program: str, message: str, output: str
) -> None:
    with pytest.raises(ProgramError, match=f"^{message}$") as caught:
        output_of([sys.executable, "-c", program], 60)
    assert caught.value.output == output


def test_a_program_that_is_not_there_or_does_not_end_is_an_error() -> None:
    with pytest.raises(ProgramError, match="No such file"):
        output_of(["/no/such/program"], 60)
    with pytest.raises(ProgramError, match=mentioning("no answer", 1)):
        output_of([sys.executable, "-c", "import time; time.sleep(60)"], 1)
