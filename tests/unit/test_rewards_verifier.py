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

from megatron_dppo.config.data_schema import RewardConfig
from megatron_dppo.rewards import RewardInput as Given
from megatron_dppo.rewards.verifier import Score, Verifier, VerifierError, require
from tests.messages import mentioning, mentions
from tests.patience import UNBOUNDED_S, happens, own_patience


def planted(function: str) -> str:
    return f"tests.unit.planted_rewards:{function}"


def test_inline_rewards_start_no_process():
    with Verifier("exact_integer", timeout_s=1.0, workers=2) as verifier:
        assert verifier._pool.workers == []
        assert verifier.score([Given("1+1=2", "2"), Given("3", "2")]) == [Score(1.0), Score(0.0)]


def test_order_is_kept_and_workers_share_the_work():
    with Verifier(planted("sleep_and_echo"), timeout_s=60.0, workers=2) as verifier:
        pairs = [Given(str(0.05 * (i % 3)), str(i / 10)) for i in range(10)]
        assert [s.value for s in verifier.score(pairs)] == [i / 10 for i in range(10)]
        assert verifier.score([]) == []
        assert verifier.score([Given("0", "1")]) == [Score(1.0)]


def test_a_runaway_check_is_killed_on_time_and_the_others_get_their_scores():
    with Verifier(planted("loop_on_request"), timeout_s=2.0, workers=2) as verifier:
        verifier.score([Given("", "")] * 4)  # both workers have started
        patience = own_patience(60)
        scores = verifier.score(
            [
                Given("ok", ""),
                Given("loop", ""),
                Given("ok", ""),
                Given("power", ""),
                Given("ok", ""),
            ]
        )
        is_late = patience.is_exhausted()
        assert [s.timed_out for s in scores] == [False, True, False, True, False]
        assert [s.value for s in scores] == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert not is_late
        assert verifier.score([Given("ok", "")]) == [Score(1.0)]


def test_a_worker_that_the_system_ends_costs_one_score():
    with Verifier(planted("die_on_request"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Given("ok", ""), Given("die", ""), Given("ok", "")])
        assert scores == [Score(1.0), Score(0.0, crashed=True), Score(1.0)]


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit('enough')"])
def test_a_check_that_exits_costs_one_score(code):
    with Verifier(planted("value_of"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Given(text, "") for text in ("1", code, "2")])
        assert scores == [Score(1.0), Score(0.0, crashed=True), Score(2.0)]


@pytest.mark.parametrize(("memory_gib", "is_enough"), [(4, False), (8, True)])
def test_a_worker_has_the_address_space_that_it_is_given(memory_gib, is_enough):
    with Verifier(planted("ask_for_gib"), 60.0, workers=1, memory_gib=memory_gib) as verifier:
        large = Score(1.0) if is_enough else Score(0.0, crashed=True)
        assert verifier.score([Given("1", ""), Given("5", ""), Given("1", "")]) == [
            Score(1.0),
            large,
            Score(1.0),
        ]
    terms = RewardConfig(name="exact_integer", memory_gib=memory_gib).terms
    assert Verifier.of(terms["exact_integer"])._memory_gib == memory_gib


def test_a_worker_that_dies_while_idle_is_found_out():
    with Verifier(planted("die_on_request"), timeout_s=60.0, workers=1) as verifier:
        verifier.score([Given("ok", "")])
        verifier._pool.workers[0]._process.kill()
        verifier._pool.workers[0]._process.wait()
        assert verifier.score([Given("ok", ""), Given("ok", "")]) == [Score(1.0), Score(1.0)]


def test_what_earlier_calls_left_in_a_process_costs_no_score():
    with Verifier(planted("hoard"), 60.0, workers=1, memory_gib=1) as verifier:
        # Alone each has room; the second not beside the first, which is still there.
        assert verifier.score([Given("600", "")] * 3) == [Score(1.0)] * 3
        assert verifier.score([Given("1200", ""), Given("1", "")]) == [
            Score(0.0, crashed=True),
            Score(1.0),
        ]


@pytest.mark.parametrize(("where", "value"), [("forked", 0.0), ("here", 1.0)])
def test_no_answer_counts_for_another_response(where, value):
    """What a reward forks can't answer; what its own process sends is its own answer, and no later one."""
    with Verifier(planted("forge_on_request"), timeout_s=60.0, workers=1) as verifier:
        scores = verifier.score([Given(text, "") for text in (where, "10", "20", "30")])
        assert [s.value for s in scores] == [value, 10.0, 20.0, 30.0]


def test_a_reward_that_raises_is_an_error_with_its_traceback():
    with (
        Verifier(planted("raise_on_request"), timeout_s=60.0, workers=1) as verifier,
        pytest.raises(VerifierError, match=mentioning("RuntimeError", "planted")),
    ):
        verifier.score([Given("raise", "")])


def test_a_worker_that_cannot_start_is_an_error_with_its_output():
    with (
        Verifier(planted("no_such_function"), timeout_s=60.0, workers=1) as verifier,
        pytest.raises(VerifierError, match="no_such_function"),
    ):
        verifier.score([Given("", "")])


def test_long_unicode_responses_and_prints_of_the_reward_pass():
    with Verifier(planted("length_and_print"), timeout_s=60.0, workers=1) as verifier:
        assert verifier.score([Given("é\n\u2028" * 100_000, "")]) == [Score(0.3)]


def test_calls_from_several_threads_get_their_own_scores():
    with Verifier(planted("sleep_and_echo"), timeout_s=60.0, workers=2) as verifier:
        results: dict[int, list[float]] = {}

        def call(k: int) -> None:
            results[k] = [s.value for s in verifier.score([Given("0.01", str(k / 2))] * 5)]

        threads = [threading.Thread(target=call, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert results == {k: [k / 2] * 5 for k in range(3)}


def test_processes_are_gone_after_closing():
    with Verifier(planted("loop_on_request"), timeout_s=60.0, workers=2) as verifier:
        pids = [worker.pid for worker in verifier._pool.workers]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(ValueError, match="open"):
        verifier.score([Given("", "")])


def test_bombs_in_mathematics_do_not_hang():
    bombs = [r"\boxed{9^{9^{9^9}}}", r"\boxed{" + "(" * 400 + "}", r"\boxed{999999999!}"]
    pairs = [Given(bomb, "5") for bomb in bombs] + [Given(r"\boxed{5}", "5")]
    with Verifier("math_verify", timeout_s=2.0, workers=1) as verifier:
        scores = verifier.score(pairs)
    assert [s.value for s in scores] == [0.0, 0.0, 0.0, 1.0]


def test_impossible_settings():
    with pytest.raises(ValueError, match="'nope'"):
        Verifier("nope", timeout_s=1.0, workers=1)
    with pytest.raises(ValueError, match=r"timeout_s.* 0 .*1"):
        Verifier("math_verify", timeout_s=0, workers=1)
    with pytest.raises(ValueError, match=r"workers.* 1 .*0"):
        Verifier("math_verify", timeout_s=1, workers=0)


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
    with Verifier(planted("value_of"), timeout_s=60.0, workers=1) as verifier:
        with pytest.raises(VerifierError) as caught:
            verifier.score([Given("0.5", "a"), Given(value, "b" * 999)])
        # The worker lives on, and numbers of other libraries, 0, 1 and truth values are scores.
        kinds = ["__import__('numpy').float32(0.5)", "0", "1", "True", "False", "-1.5"]
        scores = verifier.score([Given(kind, "") for kind in kinds])
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("reward tests.unit.planted_rewards:value_of: ")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    assert [s.value for s in scores] == [0.5, 0.0, 1.0, 1.0, 0.0, -1.5]


def test_a_check_hands_back_what_a_reward_refuses():
    with Verifier(planted("refuse_on_request"), timeout_s=60.0, workers=1) as verifier:
        good, bad = verifier.check([Given("", ""), Given("refuse", "")])
    assert good == Score(1.0)
    assert bad.value == 0.0
    assert mentions(bad.refusal or "", "planted_rewards.py")
    with Verifier("exact_integer", timeout_s=1.0, workers=1) as verifier:
        (refused,) = verifier.check([Given("1", "one")])
    assert "'one'" in (refused.refusal or "")


def children_of(path: Path) -> list[psutil.Process]:
    """Those that ``leave_children`` noted, where they still run."""
    ids = [int(word) for word in path.read_text().split()]
    assert len(ids) == 2
    return [psutil.Process(i) for i in ids if psutil.pid_exists(i) and runs(i)]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("response", ["ok", "die", "loop"])
def test_what_a_check_started_ends_with_it(tmp_path, response):
    """Also where it took another session, or another parent, and the check crashed or was killed."""
    noted = tmp_path / "children"
    with Verifier(planted("leave_children"), timeout_s=4.0, workers=1) as verifier:
        [score] = verifier.score([Given(response, str(noted))])
        assert (score.crashed, score.timed_out) == (response == "die", response == "loop")
        assert happens(lambda: children_of(noted) == [])


def test_what_a_check_started_ends_with_whoever_wanted_its_score(tmp_path):
    """A trainer rank that is killed in the middle of a check leaves nothing behind."""
    noted = tmp_path / "children"
    code = (
        "from megatron_dppo.rewards import RewardInput\n"
        "from megatron_dppo.rewards.verifier import Verifier\n"
        f"with Verifier({planted('leave_children')!r}, timeout_s=300, workers=1) as verifier:\n"
        f"    verifier.score([RewardInput('loop', {str(noted)!r})])\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        assert happens(lambda: noted.exists() and len(noted.read_text().split()) == 2)
        assert rank.poll() is None
        workers = psutil.Process(rank.pid).children(recursive=True)
    finally:
        rank.kill()
        rank.wait()
    assert happens(lambda: not any(runs(p.pid) for p in workers) and not children_of(noted))


@pytest.mark.parametrize("reward", ["exact_integer", planted("is_the_answer")])
def test_what_arrives_is_scored_while_nobody_waits(reward):
    with Verifier(reward, timeout_s=5, workers=1) as verifier:
        futures = [verifier.submit(Given(str(i), "3")) for i in range(5)]
        assert reward != "exact_integer" or all(f.done() for f in futures)
        assert [f.result(timeout=UNBOUNDED_S).value for f in futures] == [0, 0, 0, 1, 0]
        assert verifier.submit(Given("3", "3")).result(timeout=UNBOUNDED_S).value == 1


def test_an_error_reaches_who_waits_and_later_responses_are_scored():
    with Verifier(planted("raise_on_request"), timeout_s=60.0, workers=1) as verifier:
        with pytest.raises(VerifierError, match=mentioning("RuntimeError", "planted")):
            verifier.submit(Given("raise", "")).result(timeout=UNBOUNDED_S)
        assert verifier.submit(Given("ok", "")).result(timeout=UNBOUNDED_S) == Score(1.0)


def test_closing_ends_what_is_being_checked_and_what_waits():
    with Verifier(planted("loop_on_request"), timeout_s=60.0, workers=1) as verifier:
        verifier.score([Given("ok", "")])
        first, second = (verifier.submit(Given("loop", "")) for _ in range(2))
        while not first.running():
            time.sleep(0.01)
        patience = own_patience(30)
    assert not patience.is_exhausted()
    assert first.result(timeout=0) == Score(0.0, crashed=True)
    assert second.cancelled() or second.result(timeout=0).crashed
    assert verifier._pool.workers == []


def test_a_refusal_that_came_early_is_an_error_where_it_is_used():
    require([Score(1.0)], [Given("1", "1")])
    with pytest.raises(VerifierError, match=mentioning("reward x", "no", "'r'", "'a'")):
        require([Score(0.0, refusal="no")], [Given("r", "a")], "reward x: ")
