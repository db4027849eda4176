"""The verifier: order, kills, crashes, faults. Planted rewards live in
``tests.unit.planted_rewards``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_dppo.rewards import RewardInput as Input
from megatron_dppo.rewards.verifier import Score, VerifierError, require
from tests.messages import mentioning, mentions
from tests.patience import UNBOUNDED_S, happens, own_patience
from tests.verifiers import verifier_of


def reward_name(function: str) -> str:
    return f"tests.unit.planted_rewards:{function}"


def test_inline_rewards_start_no_process():
    with verifier_of("exact_integer", timeout_s=1.0, workers=2) as verifier:
        assert verifier._pool.workers == []
        assert verifier.score([Input("1+1=2", "2"), Input("3", "2")]) == [Score(1.0), Score(0.0)]


def test_an_inline_reward_refuses_an_option_that_it_lacks():
    for name in ("exact_integer", "environment"):
        verifier = verifier_of(name, timeout_s=1.0, workers=1, options={"answer_in": "box"})
        with verifier, pytest.raises(VerifierError, match="answer_in"):
            verifier.form()


def test_order_is_kept_and_workers_share_the_work():
    with verifier_of(reward_name("sleep_and_echo"), timeout_s=60.0, workers=2) as verifier:
        pairs = [Input(str(0.05 * (i % 3)), str(i / 10)) for i in range(10)]
        assert [s.value for s in verifier.score(pairs)] == [i / 10 for i in range(10)]
        assert verifier.score([]) == []
        assert verifier.score([Input("0", "1")]) == [Score(1.0)]


def test_a_runaway_check_is_killed_on_time_and_the_others_get_their_scores():
    with verifier_of(reward_name("loop_on_request"), timeout_s=2.0, workers=2) as verifier:
        verifier.score([Input("", "")] * 4)  # both workers have started
        patience = own_patience(60)
        scores = verifier.score(
            [
                Input("ok", ""),
                Input("loop", ""),
                Input("ok", ""),
                Input("power", ""),
                Input("ok", ""),
            ]
        )
        is_late = patience.is_exhausted()
        assert [s.timed_out for s in scores] == [False, True, False, True, False]
        assert [s.value for s in scores] == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert not is_late
        assert verifier.score([Input("ok", "")]) == [Score(1.0)]


def test_a_worker_that_the_system_ends_costs_one_score():
    with verifier_of(reward_name("die_on_request"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Input("ok", ""), Input("die", ""), Input("ok", "")])
        assert scores == [Score(1.0), Score(0.0, crashed=True), Score(1.0)]


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit('enough')"])
def test_a_check_that_exits_costs_one_score(code):
    with verifier_of(reward_name("value_of"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Input(text, "") for text in ("1", code, "2")])
        assert scores == [Score(1.0), Score(0.0, crashed=True), Score(2.0)]


@pytest.mark.parametrize(("memory_gib", "is_enough"), [(4, False), (8, True)])
def test_a_worker_has_the_address_space_that_it_is_given(memory_gib, is_enough):
    with verifier_of(
        reward_name("ask_for_gib"), 60.0, workers=1, memory_gib=memory_gib
    ) as verifier:
        large = Score(1.0) if is_enough else Score(0.0, crashed=True)
        assert verifier.score([Input("1", ""), Input("5", ""), Input("1", "")]) == [
            Score(1.0),
            large,
            Score(1.0),
        ]


def test_a_worker_that_dies_while_idle_is_found_out():
    with verifier_of(reward_name("die_on_request"), timeout_s=60.0, workers=1) as verifier:
        verifier.score([Input("ok", "")])
        verifier._pool.workers[0]._process.kill()
        verifier._pool.workers[0]._process.wait()
        assert verifier.score([Input("ok", ""), Input("ok", "")]) == [Score(1.0), Score(1.0)]


def test_what_earlier_calls_left_in_a_process_costs_no_score():
    with verifier_of(reward_name("hoard"), 60.0, workers=1, memory_gib=1) as verifier:
        # Each call has room alone, but not beside the memory of the call before, which the process still holds.
        assert verifier.score([Input("600", "")] * 3) == [Score(1.0)] * 3
        assert verifier.score([Input("1200", ""), Input("1", "")]) == [
            Score(0.0, crashed=True),
            Score(1.0),
        ]


@pytest.mark.parametrize(("where", "value"), [("forked", 0.0), ("here", 1.0)])
def test_no_answer_counts_for_another_response(where, value):
    """A forked child cannot send an answer. A forged answer of the reward's own process counts for this call only."""
    with verifier_of(reward_name("forge_on_request"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Input(text, "") for text in (where, "10", "20", "30")])
        assert [s.value for s in scores] == [value, 10.0, 20.0, 30.0]


def test_a_reward_that_raises_is_an_error_with_its_traceback():
    with (
        verifier_of(reward_name("raise_on_request"), timeout_s=60.0, workers=1) as verifier,
        pytest.raises(VerifierError, match=mentioning("RuntimeError", "planted")),
    ):
        verifier.score([Input("raise", "")])


def test_a_worker_that_cannot_start_is_an_error_with_its_output():
    with (
        verifier_of(reward_name("no_such_function"), timeout_s=60.0, workers=1) as verifier,
        pytest.raises(VerifierError, match="no_such_function"),
    ):
        verifier.score([Input("", "")])


def test_long_unicode_responses_and_prints_of_the_reward_pass():
    with verifier_of(reward_name("length_and_print"), timeout_s=60.0, workers=1) as verifier:
        assert verifier.score([Input("é\n\u2028" * 100_000, "")]) == [Score(0.3)]


def test_calls_from_several_threads_get_their_own_scores():
    with verifier_of(reward_name("sleep_and_echo"), timeout_s=60.0, workers=2) as verifier:
        results: dict[int, list[float]] = {}

        def call(k: int) -> None:
            results[k] = [s.value for s in verifier.score([Input("0.01", str(k / 2))] * 5)]

        threads = [threading.Thread(target=call, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == {k: [k / 2] * 5 for k in range(3)}


def test_processes_are_gone_after_closing():
    with verifier_of(reward_name("loop_on_request"), timeout_s=60.0, workers=2) as verifier:
        pids = [worker.pid for worker in verifier._pool.workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ValueError, match="open"):
        verifier.score([Input("", "")])


def test_bombs_in_mathematics_do_not_hang():
    bombs = [r"\boxed{9^{9^{9^9}}}", r"\boxed{" + "(" * 400 + "}", r"\boxed{999999999!}"]
    pairs = [Input(bomb, "5") for bomb in bombs] + [Input(r"\boxed{5}", "5")]
    with verifier_of("math_verify", timeout_s=2.0, workers=1) as verifier:
        scores = verifier.score(pairs)
    assert [s.value for s in scores] == [0.0, 0.0, 0.0, 1.0]


def test_impossible_settings():
    with pytest.raises(ValueError, match="'nope'"):
        verifier_of("nope", timeout_s=1.0, workers=1)
    with pytest.raises(ValueError, match="timeout_s"):
        verifier_of("math_verify", timeout_s=0, workers=1)
    with pytest.raises(ValueError, match="workers"):
        verifier_of("math_verify", timeout_s=1, workers=0)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("float('nan')", "it returned nan, expected a finite number"),
        ("float('inf')", "it returned inf, expected a finite number"),
        ("None", "it returned a NoneType, expected a finite number or a RewardResult"),
        ("'1'", "it returned a str, expected a finite number or a RewardResult"),
        ("(1, 2)", "it returned a tuple, expected a finite number or a RewardResult"),
        ("int('x')", "invalid literal for int() with base 10: 'x' (<string>, line 1)"),
        ("1e39", "it returned 1e+39, expected a finite number from -1e+18 to 1e+18"),
        ("10 ** 400", "it returned 1000"),
        ("10 ** 5000", "it returned a number of thousands of digits, expected a finite number"),
    ],
)
def test_anything_but_a_score_is_one_line(value, complaint):
    with verifier_of(reward_name("value_of"), timeout_s=60.0, workers=1) as verifier:
        with pytest.raises(VerifierError) as caught:
            verifier.score([Input("0.5", "a"), Input(value, "b" * 999)])
        # The worker goes on. NumPy's numbers, integers and booleans are scores.
        kinds = ["__import__('numpy').float32(0.5)", "0", "1", "True", "False", "-1.5"]
        scores = verifier.score([Input(kind, "") for kind in kinds])
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("reward tests.unit.planted_rewards:value_of: ")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    assert [s.value for s in scores] == [0.5, 0.0, 1.0, 1.0, 0.0, -1.5]


def test_a_check_hands_back_what_a_reward_refuses():
    with verifier_of(reward_name("refuse_on_request"), timeout_s=60.0, workers=1) as verifier:
        good, bad = verifier.check([Input("", ""), Input("refuse", "")])
    assert good == Score(1.0)
    assert bad.value == 0.0
    assert mentions(bad.refusal or "", "planted_rewards.py")
    with verifier_of("exact_integer", timeout_s=1.0, workers=1) as verifier:
        (refused,) = verifier.check([Input("1", "one")])
    assert "'one'" in (refused.refusal or "")


def children_of(path: Path) -> list[psutil.Process]:
    """Return the processes that ``leave_children`` noted and that still run."""
    ids = [int(word) for word in path.read_text().split()]
    assert len(ids) == 2
    return [psutil.Process(i) for i in ids if psutil.pid_exists(i) and is_running(i)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("response", ["ok", "die", "loop"])
def test_what_a_check_started_ends_with_it(tmp_path, response):
    """This includes a process in another session or with another parent, and a check that crashed or was killed."""
    ids_file = tmp_path / "children"
    with verifier_of(reward_name("leave_children"), timeout_s=4.0, workers=1) as verifier:
        [score] = verifier.score([Input(response, str(ids_file))])
        assert (score.crashed, score.timed_out) == (response == "die", response == "loop")
        assert happens(lambda: children_of(ids_file) == [])


def test_what_a_check_started_ends_with_whoever_wanted_its_score(tmp_path):
    """A trainer rank that is killed in the middle of a check leaves nothing behind."""
    ids_file = tmp_path / "children"
    code = (
        "from megatron_dppo.rewards import RewardInput\n"
        "from tests.verifiers import verifier_of\n"
        f"with verifier_of({reward_name('leave_children')!r}, timeout_s=300, workers=1) as verifier:\n"
        f"    verifier.score([RewardInput('loop', {str(ids_file)!r})])\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        assert happens(lambda: ids_file.exists() and len(ids_file.read_text().split()) == 2)
        assert rank.poll() is None
        workers = psutil.Process(rank.pid).children(recursive=True)
    finally:
        rank.kill()
        rank.wait()
    assert happens(
        lambda: not any(is_running(p.pid) for p in workers) and not children_of(ids_file)
    )


@pytest.mark.parametrize("reward", ["exact_integer", reward_name("is_the_answer")])
def test_what_arrives_is_scored_while_nobody_waits(reward):
    with verifier_of(reward, timeout_s=5, workers=1) as verifier:
        futures = [verifier.submit(Input(str(i), "3")) for i in range(5)]
        assert reward != "exact_integer" or all(f.done() for f in futures)
        assert [f.result(timeout=UNBOUNDED_S).value for f in futures] == [0, 0, 0, 1, 0]
        assert verifier.submit(Input("3", "3")).result(timeout=UNBOUNDED_S).value == 1


def test_an_error_reaches_who_waits_and_later_responses_are_scored():
    with verifier_of(reward_name("raise_on_request"), timeout_s=60.0, workers=1) as verifier:
        with pytest.raises(VerifierError, match=mentioning("RuntimeError", "planted")):
            verifier.submit(Input("raise", "")).result(timeout=UNBOUNDED_S)
        assert verifier.submit(Input("ok", "")).result(timeout=UNBOUNDED_S) == Score(1.0)


def test_closing_ends_what_is_being_checked_and_what_waits():
    with verifier_of(reward_name("loop_on_request"), timeout_s=60.0, workers=1) as verifier:
        verifier.score([Input("ok", "")])
        first, second = (verifier.submit(Input("loop", "")) for _ in range(2))
        while not first.running():
            time.sleep(0.01)
        patience = own_patience(30)
    assert not patience.is_exhausted()
    assert first.result(timeout=0) == Score(0.0, crashed=True)
    assert second.cancelled() or second.result(timeout=0).crashed
    assert verifier._pool.workers == []


def test_a_refusal_that_came_early_is_an_error_where_it_is_used():
    require([Score(1.0)], [Input("1", "1")])
    with pytest.raises(VerifierError, match=mentioning("reward x", "no", "'r'", "'a'")):
        require([Score(0.0, refusal="no")], [Input("r", "a")], "reward x: ")
