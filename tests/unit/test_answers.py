"""Gold answers when data are loaded: the final answer of a solution, and answers that are refused or dropped."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dppo.config.data_schema import RewardTerm
from megatron_dppo.config.schema import RewardConfig, TrainConfig
from megatron_dppo.data.gold_answers import gold_answer
from megatron_dppo.data.problems import PromptForm
from megatron_dppo.data.records import DataError
from megatron_dppo.data.sampling import ProblemSampler
from megatron_dppo.data.seal import text_digest
from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.loop.inputs import RunData
from megatron_dppo.loop.run_identity import identity_of
from megatron_dppo.loop.scorer import Scorer
from megatron_dppo.rewards import RewardUnavailableError, find_reward
from megatron_dppo.rewards.answer_check import bad_answers
from megatron_dppo.rewards.checked_answers import checked_answers_file, hand_over, handed_over
from tests.messages import mentioning, mentions
from tests.tiny_models import tiny_tokenizer
from tests.unit.config_files import minimal


@pytest.fixture
def run_data(tmp_path: Path):
    def make(
        rows: list[dict],
        reward: str = "math_verify",
        environment: str | None = None,
        **data: object,
    ) -> RunData:
        tree = minimal(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "held_out.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
        tree["data"] |= {"apply_chat_template": False, **data}
        tree["data"]["evaluation"] = {"sums": str(tmp_path / "held_out.jsonl")}
        tree["reward"] = {"name": reward, "timeout_s": 30.0}
        tree["environment"] = {"name": environment}
        tree["rollout"]["prompts_per_step"] = tree["training"]["prompts_per_mini_batch"] = 3
        return RunData(TrainConfig.model_validate(tree))

    return make


def test_a_run_reads_the_files_of_folders(run_data, tmp_path, caplog):
    """The hash that a resume compares covers all files, and the error of a bad answer names its file."""
    for folder, answers in {"sums": ("1", "$"), "more": ("2", "3")}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "README.md").touch()
        for name, answer in zip("ab", answers, strict=True):
            text = json.dumps({"prompt": answer, "answer": answer})
            (tmp_path / folder / f"{name}.jsonl").write_text(text)
    train = [{"path": f"{tmp_path}/sums/"}, {"path": f"{tmp_path}/more/*.jsonl"}]
    with caplog.at_level("WARNING"):
        data = run_data([], train=train)
    assert [p.answer for p in data.train.problems] == ["1", "$", "2", "3"]
    assert [data.files.of(i) for i in range(4)] == ["sums", "sums", "more", "more"]
    assert data.train.line_of(3) == f"{tmp_path}/more/b.jsonl, line 1"
    assert "README.md" in caplog.text
    with pytest.raises(DataError, match=f"{tmp_path}/sums/b.jsonl, line 1: "):
        data.refuse_or_drop(data.bad_answers())
    before = data.train.sha256
    (tmp_path / "more" / "c.jsonl").write_text('{"prompt": "4", "answer": "4"}')
    assert run_data([], train=train).train.sha256 != before


def test_a_chat_templates_arguments_reach_prompts_and_turns(run_data):
    """The record of the template in saved rollouts includes the arguments, if there are any."""
    rows = [{"prompt": f"{i}", "answer": "1"} for i in range(3)]
    template = tiny_tokenizer().chat_template + "{{ word }}"

    def make_data(**data: object) -> RunData:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.tiny_models.CHAT_TEMPLATE", template)
            return run_data(rows, environment="calculator", apply_chat_template=True, **data)

    plain, extended = make_data(), make_data(chat_template_arguments={"word": "on"})
    for data, end in ((plain, "assistant\n"), (extended, "assistant\non")):
        problems = (*data.train.problems, *data.held_out["sums"])
        assert all(data.text_of(problem.prompt_ids).endswith(end) for problem in problems)
        assert data.turns is not None
        assert data.text_of(data.turns.delta([7], "8")).endswith(end)
    assert plain.origin().template != extended.origin().template
    assert plain.origin().template == text_digest(repr(template), repr(PromptForm()))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = <<48/2=24>>24\n#### 72", "72"),
        ("It costs a lot.\n#### 1,080", "1080"),
        ("#### 5 #### -1,234,567.5 ", "-1234567.5"),
        ("#### (1,2)", "(1,2)"),
        ("#### 10,20", "10,20"),
        (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{3}, then \boxed{ 4 } it is", "4"),
        (r"cut off: \boxed{4", r"cut off: \boxed{4"),
        (r"MATH's: $x = \boxed 4$, so", "4"),
        (r"and \fbox   \frac12", r"\frac12"),
        ("72", "72"),
        (r"x \in \{1,2\}", r"x \in \{1,2\}"),
    ],
)
def test_the_final_answer_of_a_solution(text, answer):
    assert gold_answer(text) == answer


def row(answer: object) -> dict:
    return {"prompt": "1", "answer": answer}


GOOD = [row("34"), row(r"\frac{1}{2}"), row("work\n#### 1,080"), row(r"so \boxed{\sqrt{2}}")]
BAD = [row("$"), row("\\"), row("7" * 600)]


def test_answers_that_can_be_matched_are_let_pass(run_data):
    data = run_data(GOOD)
    final = find_reward("math_verify").final
    answers = [final(p.answer) for p in data.train.problems]
    assert answers == ["34", r"\frac{1}{2}", "1080", r"\sqrt{2}"]
    data.refuse_or_drop(data.bad_answers())
    assert data.train.bad_answers == 0
    assert len(data.train) == 4


@pytest.mark.parametrize("order", [1, -1])
def test_each_reward_reads_an_answer_as_if_it_were_alone(run_data, order):
    """A built-in reward reads the final answer of a solution, and a user's reward the whole text, in either order."""
    solution = r"$x + 2 = 74$, so \boxed{72}"
    first, second = ["math_verify", "tests.unit.planted_rewards:is_the_answer"][::order]
    config = RewardConfig(name=first, further={"other": RewardTerm(name=second)})
    data = run_data([row(solution)] * 3, first)
    assert bad_answers({"x": data.train}, config) == {"x": []}
    with Scorer(config) as scorer:
        score = scorer.submit(data.train.problems[0], TurnText.plain(solution)).result()
    assert set(score.components.values()) == {1.0}


def test_answers_that_nothing_can_match_are_refused_with_file_and_line(run_data, tmp_path):
    data = run_data([*GOOD, *BAD, row("5")])
    bad = data.bad_answers()
    assert [where for where, _ in bad[str(tmp_path / "train.jsonl")]] == [4, 5, 6]
    with pytest.raises(DataError) as caught:
        data.refuse_or_drop(bad)
    message = str(caught.value)
    assert message.startswith(f"3 answers can't be used: {tmp_path}/train.jsonl, line 5: ")
    assert mentions(message, f"{tmp_path}/train.jsonl, line 7", 600)
    assert "data.on_bad_answer=drop" in message


def test_they_are_dropped_and_counted_where_the_recipe_says_so(run_data, caplog):
    data = run_data([*GOOD, *BAD, row("5")], on_bad_answer="drop")
    with caplog.at_level(logging.WARNING):
        data.refuse_or_drop(data.bad_answers())
    assert [p.problem_id for p in data.train.problems] == [0, 1, 2, 3, 7]
    assert data.train.bad_answers == 3
    assert mentions(caplog.text, 3, "line 5")
    none_left = run_data(BAD, on_bad_answer="drop")
    with pytest.raises(DataError, match=r"train\.jsonl"):
        none_left.refuse_or_drop(none_left.bad_answers())


def test_empty_answers_are_bad_answers(run_data, tmp_path):
    """Empty and missing answers are counted together with the answers that the reward refuses."""
    rows = [*GOOD, row(""), row("$"), row(None)]
    path = str(tmp_path / "train.jsonl")
    data = run_data(rows)
    with pytest.raises(DataError, match=rf"^3 .*: {path}, line 5: 'answer' is \"\""):
        data.refuse_or_drop(data.bad_answers())
    data = run_data(rows, on_bad_answer="drop")
    data.refuse_or_drop(data.bad_answers())
    assert ([p.problem_id for p in data.train.problems], data.train.bad_answers) == (
        [0, 1, 2, 3],
        3,
    )


def test_fewer_problems_than_a_step_draws_are_refused_with_the_reasons(run_data, tmp_path, caplog):
    long = {"prompt": "1+2" * 200, "answer": "1"}
    rows = [*GOOD[:2], long, long, row("$")]
    with caplog.at_level(logging.WARNING):
        data = run_data(rows, on_bad_answer="drop", max_prompt_tokens=100)
    warning = "2 of 5 prompts are longer than data.max_prompt_tokens = 100 and were left out; 3 problems are"
    assert warning in caplog.text
    with pytest.raises(DataError) as caught:
        data.refuse_or_drop(data.bad_answers())
    counts = (2, 5, 2, "data.max_prompt_tokens = 100", 1, "rollout.prompts_per_step = 3")
    assert mentions(str(caught.value), *counts)


def test_every_file_that_can_not_be_read_is_told_of(run_data, tmp_path):
    (tmp_path / "other.jsonl").write_text("no\n")
    files = [{"path": str(tmp_path / name)} for name in ("train.jsonl", "other.jsonl")]
    with pytest.raises(DataError, match=mentioning("train.jsonl, line 1", "other.jsonl, line 1")):
        run_data([{"a": 1}], train=files)


def test_a_prompt_s_place_is_found_by_its_tokens(run_data):
    """A response may follow the prompt. If a prompt is the beginning of another, the longer one is the place."""
    data = run_data([{"prompt": p, "answer": "1"} for p in ("12", "123", "5")])
    for number, problem in enumerate(data.train.problems, 1):
        place = data.place_of((*problem.prompt_ids, 7, 7))
        assert place is not None
        assert place.endswith(f"train.jsonl, line {number}")
    place = data.place_of(data.held_out["sums"][0].prompt_ids)
    assert place is not None
    assert place.endswith("held_out.jsonl, line 1")
    assert data.place_of(()) is None


def test_a_run_compares_prompts_with_the_model_s_embedding(run_data, tmp_path):
    data = run_data(GOOD)
    highest = max(token for p in data.train.problems for token in p.prompt_ids)
    config = tmp_path / "model" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"vocab_size": highest + 1}))
    assert len(RunData(data._config).train) == 4
    config.write_text(json.dumps(values | {"vocab_size": highest}))
    with pytest.raises(DataError, match=rf"line 1: .* {highest} .* {highest} rows"):
        RunData(data._config)


def test_the_integer_reward_wants_integers(run_data, tmp_path):
    bad = run_data([row(3), row("x"), row("#### 1,000")], reward="exact_integer").bad_answers()
    assert [where for where, _ in bad[str(tmp_path / "train.jsonl")]] == [1]


def test_a_reward_of_ones_own_gets_answers_as_they_stand(run_data, tmp_path):
    """Such a reward need not return 1 for the answer itself, but it must accept the answer."""
    name = "tests.unit.planted_rewards:refuse_on_request"
    data = run_data([row("a #### 1"), row("refuse")], reward=name)
    assert data.train.problems[0].answer == "a #### 1"
    ((where, why),) = data.bad_answers()[str(tmp_path / "train.jsonl")]
    assert where == 1
    assert mentions(why, "planted_rewards.py")


def test_an_outage_is_nothing_that_an_answer_is_dropped_for(run_data):
    name = "tests.unit.planted_rewards:away_for_two"
    data = run_data([row(n) for n in range(4)], reward=name, on_bad_answer="drop")
    with pytest.raises(RewardUnavailableError) as caught:
        data.bad_answers()
    assert mentions(str(caught.value), 1, 4, "nobody")


def test_each_different_answer_is_checked_once(run_data, tmp_path):
    paths = [tmp_path / "first", tmp_path / "second"]
    name = "tests.unit.planted_rewards:append_line"
    data = run_data([row(str(path)) for path in paths * 25], reward=name)
    assert bad_answers({"f": data.train}, RewardConfig(name=name, workers=1)) == {"f": []}
    assert [path.read_text() for path in paths] == ["called\n"] * 2


def test_equal_answers_have_the_same_error(run_data):
    name = "tests.unit.planted_rewards:sleep_and_echo"
    settings = RewardConfig(name=name, timeout_s=0.3, workers=1)
    data = run_data([row("0.9")] * 50, reward=name)
    (complaints,) = bad_answers({"f": data.train}, settings).values()
    assert len(complaints) == 50
    assert all(mentions(why, "reward.timeout_s = 0.3 s") for _, why in complaints)


def test_a_start_s_check_tells_the_ranks_what_it_found(run_data, monkeypatch):
    """The ranks check no answers again, unless their answers or their reward differ from those of the start's check."""
    data = run_data(GOOD + BAD)
    bad = data.bad_answers()
    with checked_answers_file() as path:
        assert handed_over(data.answer_check_inputs) is None  # nothing is there yet
        hand_over(Path(path), data.answer_check_inputs, bad)
        # From here on, a check of answers calls None.
        monkeypatch.setattr("megatron_dppo.loop.inputs.bad_answers", None)
        assert run_data(GOOD + BAD).bad_answers() == bad
        with pytest.raises(TypeError):
            run_data(GOOD).bad_answers()
        with pytest.raises(TypeError):
            run_data(GOOD + BAD, "exact_integer").bad_answers()
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert not Path(path).exists()
    assert handed_over(data.answer_check_inputs) is None


def test_several_files_are_one_training_set(run_data, tmp_path):
    """Problem ids count on from file to file, also if a problem is dropped; each file is checked once."""
    second = tmp_path / "second.parquet"
    rows = [{"q": {"text": "2+2"}, "gold": 4.0}, {"q": {"text": "3"}, "gold": 3.0}]
    pq.write_table(pa.Table.from_pylist(rows), second)
    files = [
        {"path": str(tmp_path / "train.jsonl"), "weight": 1.0},
        {"path": str(second), "weight": 3.0, "prompt_key": "q.text", "answer_key": "gold"},
    ]
    data = run_data([row("$"), row("1")], train=files, on_bad_answer="drop")
    data.refuse_or_drop(data.bad_answers())
    assert [(p.problem_id, p.prompt, p.answer) for p in data.train.problems] == [
        (1, "1", "1"),
        (2, "2+2", "4"),
        (3, "3", "3"),
    ]
    positions = data.sampler().next(8)
    assert sorted(positions) == [0, 0, 1, 1, 1, 2, 2, 2]
    plain = run_data([row("1")], train=[{"path": f["path"]} for f in files[:1]])
    # A single file is sampled without weights.
    assert plain.sampler().state_dict().keys() == ProblemSampler(1, seed=0).state_dict().keys()


def test_each_file_may_have_rewards_and_an_environment_of_its_own(run_data, tmp_path):
    """A file adds values to its problems' metadata, by which rewards and environments are chosen."""
    (tmp_path / "words.jsonl").write_text(json.dumps(row("no integer")) + "\n")
    sums, words = str(tmp_path / "train.jsonl"), str(tmp_path / "words.jsonl")
    train = [
        {"path": sums, "metadata": {"reward": "exact_integer"}},
        {"path": words, "metadata": {"reward": "is_the_answer"}},
    ]
    held_out = {"words": {"path": words, "metadata": {"reward": "is_the_answer"}}}

    def config_of(data: RunData, **changes: object) -> TrainConfig:
        further = {"is_the_answer": {"name": "tests.unit.planted_rewards:is_the_answer"}}
        reward = {"name": "exact_integer", "further": further, "column": "reward"}
        tree = data._config.model_dump() | {"reward": reward} | changes
        tree["data"] |= {"evaluation": held_out}
        return TrainConfig.model_validate(tree)

    plain = run_data([row("1"), row("2")], train=[{"path": file["path"]} for file in train])
    with pytest.raises(DataError, match=rf"{sums}, line 1: .*'reward'.*reward\.column"):
        RunData(config_of(plain))
    data = run_data([row("1"), row("2")], train=train)
    data = RunData(config_of(data))
    assert [dict(p.metadata) for p in data.train.problems] == [
        {"reward": "exact_integer"},
        {"reward": "exact_integer"},
        {"reward": "is_the_answer"},
    ]
    # Only the first reward requires integers, and it does not score the second file.
    assert not any(data.bad_answers().values())
    assert not data.reward_faults()
    environments = {"calc": {"name": "calculator"}, "one": {"name": "single-turn"}}
    environment = {"name": "by-problem", "options": {"environments": environments}}
    with pytest.raises(DataError, match=rf"{sums}, line 1: .*'environment'.*calc, one"):
        RunData(config_of(data, environment=environment))
    identities = [identity_of(config, "") for config in (data._config, plain._config)]
    assert identities[0]["reward.column"] == "reward"
    assert identities[0]["data.train (keys)"] != identities[1]["data.train (keys)"]


def test_a_bad_answer_in_parquet_is_named_by_its_row(run_data, tmp_path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row("1"), row("$")]), path)
    data = run_data([], train=str(path))
    with pytest.raises(DataError, match=rf"{path}, row 2: .* 0 "):
        data.refuse_or_drop(data.bad_answers())
