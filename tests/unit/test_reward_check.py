"""``megatron-dppo data check-rewards`` on problems made up here, written the way official solutions are."""

from __future__ import annotations

import json

import pytest

from megatron_dppo.diagnostics.data import main
from megatron_dppo.diagnostics.reward_checks import read_checks

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
