"""The figures of an evaluation against values computed by hand, and a checkpoint that an evaluation refuses."""

from __future__ import annotations

import pytest

from megatron_dppo.evaluate import SetResult, main
from megatron_dppo.logging import REFUSED
from tests.unit.config_files import minimal, minimal_config, write_config


def test_the_average_is_over_all_responses():
    result = SetResult([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]], 3, 12.0)
    assert result.average == pytest.approx(3 / 8)
    # The means of the problems are 1/2 and 1/4: their standard deviation is 0.25 / sqrt(2).
    assert result.standard_error == pytest.approx(0.125)
    assert SetResult([[1.0]], 0, 1.0).standard_error is None


def test_pass_at_k_is_the_unbiased_estimator():
    result = SetResult([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], 0, 1.0)
    # One of four responses to the first problem passes: pass@1 is 1/4, pass@2 is 1 - C(3,2)/C(4,2) = 1/2, pass@4 is 1.
    # For the second problem all are 0.
    assert result.pass_at(1, 0.5) == pytest.approx(1 / 8)
    assert result.pass_at(2, 0.5) == pytest.approx(1 / 4)
    assert result.pass_at(4, 0.5) == pytest.approx(1 / 2)
    assert result.pass_at(1, 0.0) == 1.0
    assert result.to_json(0.5)["pass"] == {"1": 0.125, "2": 0.25, "4": 0.5}


def test_cons_at_k_is_the_reward_of_the_most_frequent_answer():
    rewards = [
        [1.0, 1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.5, 0.0],
    ]
    answers = [["7", "7", "8", ""], ["7", "8", "8", ""], ["7", "8", "", ""], ["", "", "", ""]]
    result = SetResult(rewards, 0, 1.0, answers)
    # 7 wins the first problem and 8 the second. The third is a tie of rewards 1 and 0, and the last has no answer.
    assert result.consensus == pytest.approx((1 + 0 + 1 / 2 + 1 / 8) / 4)
    assert result.to_json(0.5)["consensus"] == result.consensus
    assert SetResult(rewards, 0, 1.0).consensus is None


def test_an_evaluation_may_be_greedy(tmp_path):
    config = minimal_config(tmp_path, evaluation={"temperature": 0.0})
    assert config.evaluation.temperature == 0
    with pytest.raises(ValueError, match="temperature"):
        minimal_config(tmp_path, evaluation={"temperature": -0.1})


def test_three_responses_have_figures_of_one_and_two_tries():
    assert set(SetResult([[0.0, 1.0, 0.0]], 0, 1.0).to_json(0.5)["pass"]) == {"1", "2"}  # type: ignore[call-overload]


def test_a_checkpoint_without_weights_is_refused(tmp_path, capsys):
    (tmp_path / "step_3").mkdir()
    tree = minimal(tmp_path)
    tree["data"]["evaluation"] = {"held": tree["data"]["train"]}
    with pytest.raises(SystemExit) as ended:
        main([str(write_config(tmp_path, tree)), "--checkpoint", str(tmp_path / "step_3")])
    assert ended.value.code == REFUSED
    assert "step_3" in capsys.readouterr().err
