"""Each process has a log file, only rank 0 writes to the terminal, and a fatal error is a message, not a traceback."""

import errno
import io
import logging
import os
import sys
import textwrap

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_dppo import logging as run_logging
from tests.messages import mentions
from tests.patience import run_patiently


@pytest.fixture
def terminal(monkeypatch):
    """Give the process a new console, and restore its logging settings after the test."""
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(run_logging, "_console", console)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield console
    for handler in [handler for handler in root.handlers if handler not in before[0]]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[1])
    logging.captureWarnings(False)


def test_rank_0_logs_to_both_with_time_and_rank(tmp_path, terminal):
    run_logging.configure_logging(tmp_path, 0)
    logging.getLogger("megatron_dppo.loop").info("word " * 40)
    logging.getLogger("urllib3").info("noise")
    logging.getLogger("urllib3").warning("retrying")
    terminal_lines = terminal.file.getvalue().splitlines()
    assert len(terminal_lines) == 2
    assert terminal_lines[0].split("]")[0].endswith(" [rank0")
    assert terminal_lines[1].endswith("retrying")
    log_lines = (tmp_path / "logs" / "rank0.log").read_text().splitlines()
    assert "[rank0] INFO megatron_dppo.loop: word word" in log_lines[0]
    assert len(log_lines) == 2


def test_a_line_is_never_folded(terminal):
    run_logging.say("word " * 40)
    assert terminal.file.getvalue() == "word " * 40 + "\n"


def test_other_ranks_log_to_their_files_alone(tmp_path, terminal):
    run_logging.configure_logging(tmp_path, 3)
    logging.getLogger("megatron_dppo").error("lost a peer")
    assert terminal.file.getvalue() == ""
    assert "[rank3] ERROR" in (tmp_path / "logs" / "rank3.log").read_text()


def test_lines_for_a_terminal_that_was_handed_down_are_copied_plain(monkeypatch):
    reading, writing = os.pipe()
    monkeypatch.setattr(run_logging, "_console", None)
    monkeypatch.setenv(run_logging.TERMINAL_VARIABLE, str(writing))
    output = io.StringIO()
    monkeypatch.setattr(sys, "stdout", output)
    console = run_logging.shared_console()
    assert run_logging.TERMINAL_VARIABLE not in os.environ
    console.print(Text("a line of words", style="red"), soft_wrap=True)
    console.print(Table())  # a table is not text: it goes only to the terminal
    console.quiet = True
    console.print("not for rank 1")
    assert os.read(reading, 1000).startswith(b"a line of words\n")
    assert output.getvalue() == "a line of words\n"
    os.close(reading)
    console.quiet = False
    console.print("nobody reads")
    os.close(writing)
    assert output.getvalue() == "a line of words\nnobody reads\n"


def test_a_second_call_replaces_the_first(tmp_path, terminal):
    run_logging.configure_logging(None, None)
    run_logging.configure_logging(tmp_path, None)
    logging.getLogger("megatron_dppo").info("once")
    assert terminal.file.getvalue().count("once") == 1
    assert (tmp_path / "logs" / "supervisor.log").read_text().count("once") == 1


def run(code, tmp_path):
    return run_patiently([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], 60)


def test_fatal_ends_with_a_message_and_status_2(tmp_path):
    result = run(
        """
        import sys
        from megatron_dppo.logging import configure_logging, fatal
        configure_logging(sys.argv[1], 0)
        fatal("data.train: no such file: x.jsonl")
        """,
        tmp_path,
    )
    assert result.returncode == 2
    assert result.stderr == "error: data.train: no such file: x.jsonl\n"
    assert result.stdout == ""
    assert "CRITICAL" in (tmp_path / "logs" / "rank0.log").read_text()


def test_an_uncaught_exception_is_in_the_rank_s_log_and_on_standard_error(tmp_path):
    result = run(
        """
        import sys
        from megatron_dppo.logging import configure_logging
        configure_logging(sys.argv[1], 1)
        raise ValueError("batch 7")
        """,
        tmp_path,
    )
    assert result.returncode == 1
    assert "ValueError: batch 7" in result.stderr
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert "uncaught exception" in log
    assert "ValueError: batch 7" in log


def test_no_torch_where_a_terminal_is_all_that_is_needed():
    names = ("logging", "metrics.progress")
    code = f"import sys\nfor n in {names}: __import__('megatron_dppo.' + n)\n"
    result = run_patiently([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], 60)
    assert result.returncode == 0


def test_a_full_disk_is_said_once(tmp_path, terminal, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank3.log").symlink_to("/dev/full")
    run_logging.configure_logging(tmp_path, 3)
    for number in range(20):
        logging.getLogger("megatron_dppo").error("step %d", number)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert mentions(lines[0], "rank3.log", os.strerror(errno.ENOSPC))
