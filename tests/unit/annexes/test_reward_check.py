"""``megatron-dppo data check-rewards`` on invented problems, written in the style of official solutions."""

from __future__ import annotations

import json
import os
import sys

import pytest

from megatron_dppo.diagnostics.data import main
from megatron_dppo.diagnostics.reward_checks import read_checks
from tests.patience import run_patiently
from tests.ranks import ROOT

SOLUTIONS = [
    (r"$a + b = \boxed{7}$. Or: $7$ by symmetry, \framebox{7} minutes. -someone, 2024", "7"),
    (r"Hence $xy = \boxed{25}$.", "025"),
    (r"\begin{align*} x &= \boxed{\textbf{(033)}} \end{align*} ~ www.example.org", "033"),
    (r"so $\frac{m}{n} = \boxed{\frac{3}{4}}$", "0.75"),
]


def write(path, rows):
    path.write_text("".join(json.dumps({"solution": s, "answer": a}) + "\n" for s, a in rows))
    return str(path)


def test_good_solutions_pass(tmp_path, capsys):
    assert main(["check-rewards", write(tmp_path / "good.jsonl", SOLUTIONS), "--workers", "1"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 solutions score 1 against the given answer" in out
    assert "4 of 4 solutions score 0 against a wrong answer" in out


def test_a_solution_that_disagrees_is_shown(tmp_path, capsys):
    rows = [*SOLUTIONS, (r"\boxed{8}", "9")]
    assert main(["check-rewards", write(tmp_path / "bad.jsonl", rows), "--workers", "1"]) == 1
    out = capsys.readouterr().out
    assert "line 5: scored" in out
    assert "4 of 5 solutions score 1" in out


@pytest.mark.parametrize(
    ("reward", "solution", "cause"),
    [("loop_on_request", "loop", "timed out"), ("die_on_request", "die", "killed")],
)
def test_a_check_without_a_score_is_neither_right_nor_wrong(
    tmp_path, capsys, reward, solution, cause
):
    """A solution without a score has 0, which would count as right against a wrong answer."""
    words = ["check-rewards", write(tmp_path / "x.jsonl", [("7", "7"), (solution, "8")])]
    words += ["--reward", f"tests.unit.planted_rewards:{reward}", "--workers", "1"]
    assert main([*words, "--timeout", "1"]) == 1
    out = capsys.readouterr().out
    assert "1 of 1 solutions score 1 against the given answer" in out
    # The planted rewards give 1 to every other response, whatever its answer.
    assert "0 of 1 solutions score 0 against a wrong answer" in out
    lines = out.splitlines()
    assert (
        len([line for line in lines if line.startswith("line 2: no score") and cause in line]) == 2
    )
    assert len([line for line in lines if line.startswith("1 solutions") and cause in line]) == 2


def test_unusable_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["check-rewards", str(tmp_path / "none.jsonl")])
    assert refused.value.code == 2
    assert "No such file" in capsys.readouterr().err
    path = tmp_path / "x.jsonl"
    for content, message in (
        ("{", "line 1: not JSON"),
        ('{"question": "1", "answer": "2"}', r"'solution'.*\['answer', 'question'\]"),
        ('{"solution": "1"}', "line 1: no 'answer'"),
        ('{"answer": "1"}', "no line has a 'solution'"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_checks(path)


def test_modules_are_found_in_the_folder_that_one_is_in(tmp_path):
    (tmp_path / "my_rewards.py").write_text(
        "def score(response, answer):\n    return float(answer in response)\n"
    )
    (tmp_path / "solved.jsonl").write_text(
        '{"problem": "1+1", "answer": "2", "solution": "It is 2."}\n'
    )
    words = [
        "data",
        "check-rewards",
        "solved.jsonl",
        "--reward",
        "my_rewards:score",
        "--workers",
        "1",
    ]
    # Like the installed script, leave the folder out of ``sys.path``, where python -c puts it.
    code = (
        "import sys; sys.path.remove(''); from megatron_dppo.__main__ import main; sys.exit(main())"
    )
    result = run_patiently(
        [sys.executable, "-c", code, *words],
        120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
