"""The demo's data and model: disjoint splits, correct answers, a tokenizer that has every word, and reuse of what an
earlier start of the demo has made.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from megatron_dppo.config import check_config, load_config
from megatron_dppo.data.problems import PromptForm, load_problems, load_tokenizer
from megatron_dppo.demo import material as prepare_module
from megatron_dppo.demo.__main__ import RECIPES, judge, set_aside, verdict
from megatron_dppo.demo.__main__ import main as demo_main
from megatron_dppo.demo.material import (
    ESTIMATE_RANGE,
    TASKS,
    TOOL_SHARES,
    WORKED_OUT_SHARE,
    engine_overrides,
    expressions,
    make_data,
    make_model,
    make_tokenizer,
    prepare,
    products,
    running_totals,
    tool_pairs,
    trainer_overrides,
    worked_out,
)
from megatron_dppo.environments.turn_template import TurnTemplate
from megatron_dppo.launch.placement import Allocation, Host, place
from megatron_dppo.rewards import find_reward
from megatron_dppo.spec import Roles

pytestmark = pytest.mark.second


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data(folder, seed=1)
    return {name: read(folder / f"{name}.jsonl") for name in ("train", "held_out", "warm_start")}


def test_a_wrong_key_is_told_before_any_material_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert demo_main(["checkpoint.evry=1"]) == 2
    assert "checkpoint.evry: unknown key" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_running_totals_by_hand():
    assert running_totals("3+5-2+4") == [8, 6, 10]
    assert running_totals("5-5+1-1") == [0, 1, 0]
    assert worked_out("3+5-2+4") == "8 6 = 10"


def test_expressions_are_distinct_and_never_negative():
    everything = list(expressions())
    assert len(set(everything)) == len(everything) == 2955
    assert all(min(running_totals(e)) >= 0 for e in everything)
    assert "1-1-1+5" not in everything


def test_splits_are_disjoint_and_answers_right(data):
    train, held_out = ({r["prompt"] for r in data[name]} for name in ("train", "held_out"))
    assert len(held_out) == 200
    assert not train & held_out
    assert train | held_out == set(expressions())
    assert {r["prompt"] for r in data["warm_start"]} <= train
    for record in data["train"] + data["held_out"]:
        assert record["answer"] == str(eval(record["prompt"]))


def test_the_warm_start_mixes_two_writers(data):
    reward = find_reward("exact_integer").load()
    worked = [r for r in data["warm_start"] if not r["response"].startswith("=")]
    guessed = [r for r in data["warm_start"] if r["response"].startswith("=")]
    assert len(worked) / len(data["warm_start"]) == pytest.approx(WORKED_OUT_SHARE, abs=0.02)
    for record in worked:
        assert reward(record["response"], str(eval(record["prompt"]))) == 1.0
    errors = [int(r["response"][1:]) - eval(r["prompt"]) for r in guessed]
    assert {abs(e) for e in errors} == set(range(ESTIMATE_RANGE + 1))
    assert errors.count(0) / len(errors) < 0.15


def test_problems_for_tools_are_distinct_and_their_numbers_are_words():
    everything = list(products())
    assert len(set(everything)) == len(everything) == 2281
    assert all(0 <= eval(e) <= 99 for e in everything)


def conversations(call, style):
    """Return those of 400 conversations about 7*8-5 in which the policy has as many turns as in ``style``."""
    every = [list(tool_pairs(call, "7*8-5", random.Random(seed))) for seed in range(400)]
    return [c for c in every if len(c) == 1 + list(TOOL_SHARES).index(style)]


def test_a_conversation_by_hand():
    user, call, value, second, total = (
        {"role": "user", "content": "7*8-5"},
        {"role": "assistant", "content": "{ print(7*8) }"},
        {"role": "user", "content": "56"},
        {"role": "assistant", "content": "{ print(56-5) }"},
        {"role": "user", "content": "51"},
    )
    to_the_end = conversations("{{ print({}) }}", "to the end")
    assert to_the_end[0] == [
        {"prompt": [user], "response": "{ print(7*8) }"},
        {"prompt": [user, call, value], "response": "{ print(56-5) }"},
        {"prompt": [user, call, value, second, total], "response": "= 51"},
    ]
    half_way = conversations("{{ print({}) }}", "half way")
    assert half_way[0][1] == {"prompt": [user, call, value], "response": "= 56"}
    for style, of_style in (("to the end", to_the_end), ("half way", half_way)):
        assert len(of_style) / 400 == pytest.approx(TOOL_SHARES[style], abs=0.06)
    estimates = {c[0]["response"] for c in conversations("? {}", "estimate")}
    assert estimates == {f"= {n}" for n in range(46, 57)}


@pytest.mark.parametrize("name", ["calculator", "python"])
def test_every_word_of_a_conversation_is_one_of_the_tokenizer(name, tmp_path):
    task = TASKS[name]
    tokenizer = make_tokenizer(task.words)
    # Tensor parallelism of 4 divides the vocabulary.
    assert len(task.words) == len(set(task.words)) == 116
    assert make_data(tmp_path, 1, name) == {"held_out": 200, "train": 2081, "warm_start": 40_000}
    for record in read(tmp_path / "warm_start.jsonl")[:300]:
        text = tokenizer.apply_chat_template(record["prompt"], tokenize=False) + record["response"]
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
    # The tokenizer has the environment's words, too, and what follows a turn does not depend on earlier messages.
    observation = TurnTemplate(tokenizer, "user").delta([tokenizer.eos_token_id], "56\n")
    assert tokenizer.convert_ids_to_tokens(observation) == ["<user>", "56", "<assistant>"]
    recipe, folder = load_config(RECIPES / task.recipe), task.root / "seed-1"
    assert recipe.environment.name == name
    assert recipe.model.hf_checkpoint == str(folder / "warm")
    make_model(tmp_path / "warm", 1, task.words)
    paths = [
        f"model.hf_checkpoint={tmp_path}/warm",
        f"data.train={tmp_path}/train.jsonl",
        f"data.evaluation.held_out={tmp_path}/held_out.jsonl",
    ]
    check_config(load_config(RECIPES / task.recipe, paths), name)


def test_seeds_give_other_splits(tmp_path, data):
    make_data(tmp_path / "a", seed=1)
    make_data(tmp_path / "b", seed=2)
    assert read(tmp_path / "a" / "held_out.jsonl") == data["held_out"]
    assert read(tmp_path / "b" / "held_out.jsonl") != data["held_out"]


def test_tokenizer_round_trip_and_chat_template(tmp_path, data):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("8 6 = 10")
    assert tokenizer.convert_ids_to_tokens(ids) == ["8", "6", "=", "10"]
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "8 6 = 10"
    for record in data["warm_start"][:500]:
        assert tokenizer.decode(tokenizer.encode(record["response"])) == record["response"]
        assert tokenizer.unk_token_id not in tokenizer.encode(record["prompt"])
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "3+5-2+4", "answer": "10"}')
    (problem,) = load_problems(path, tokenizer, max_prompt_tokens=9, form=PromptForm()).problems
    tokens = tokenizer.convert_ids_to_tokens(list(problem.prompt_ids))
    assert tokens == ["<user>", "3", "+", "5", "-", "2", "+", "4", "<assistant>"]


def test_the_model_is_a_qwen3_moe_in_small(tmp_path):
    parameters = make_model(tmp_path, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    config = model.config
    assert 1_000_000 <= parameters == sum(p.numel() for p in model.parameters()) <= 4_000_000
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.num_key_value_heads < config.num_attention_heads
    assert not config.tie_word_embeddings
    assert config.vocab_size == len(load_tokenizer(tmp_path))
    assert any("q_norm" in name for name, _ in model.named_parameters())


@pytest.fixture
def calls(monkeypatch):
    """Replace the warm start by a folder at the place of its result. Returns the list of its calls."""
    recorded_calls = []

    def stand_in(folder, name, checkpoint, data, seed, overrides):
        recorded_calls.append((seed, list(overrides)))
        assert checkpoint.is_dir()
        assert data.is_file()
        (folder / name).mkdir()

    monkeypatch.setattr(prepare_module, "_imitate", stand_in)
    return recorded_calls


def test_material_is_made_once(tmp_path, calls, capsys):
    material = prepare(1, tmp_path)
    assert material.train.is_file()
    assert material.held_out.is_file()
    assert material.warm_checkpoint.is_dir()
    assert prepare(1, tmp_path) == material
    assert calls == [(1, [])]
    assert "is there" in capsys.readouterr().out


def test_a_teacher_is_made_beside_the_policy_that_another_task_has_made(tmp_path, calls):
    assert not prepare(1, tmp_path).teacher.exists()
    material = prepare(1, tmp_path, task="distillation")
    assert material.teacher.is_dir()
    assert calls == [(1, []), (1, ["run.steps=300", "parallel.expert=1"])]
    pairs = read(material.folder / "teacher.jsonl")
    assert {p["prompt"] for p in pairs} <= {p["prompt"] for p in read(material.train)}
    assert all(p["response"] == worked_out(p["prompt"]) for p in pairs[:100])
    assert prepare(1, tmp_path, task="distillation") == material
    assert len(calls) == 2


def test_another_seed_lies_beside_and_other_overrides_make_it_anew(tmp_path, calls):
    prepare(1, tmp_path)
    assert prepare(2, tmp_path).folder != prepare(1, tmp_path).folder
    assert calls == [(1, []), (2, [])]
    prepare(1, tmp_path, ["run.steps=5"])
    prepare(1, tmp_path)
    assert calls[2:] == [(1, ["run.steps=5"]), (1, [])]


def test_material_that_was_interrupted_is_made_again(tmp_path, calls):
    folder = prepare(1, tmp_path).folder
    (folder / "made_from.json").unlink()
    (folder / "rubbish").touch()
    prepare(1, tmp_path)
    assert len(calls) == 2
    assert not (folder / "rubbish").exists()


def test_a_failed_warm_start_ends_the_demo_and_leaves_nothing_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "SUPERVISED", "megatron_dppo.no_such_module")
    with pytest.raises(SystemExit, match="the supervised run ended with exit code 1"):
        prepare(1, tmp_path)
    assert not (tmp_path / "seed-1" / "made_from.json").exists()


SLOW_TO_STOP = """
import signal, sys, time
stopped = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: stopped.append(number))
print("ready", flush=True)
while not stopped:
    time.sleep(0.05)
time.sleep(0.7)  # longer than subprocess.run would wait, as long as a checkpoint takes
print("saved", flush=True)
sys.exit(128 + stopped[0])
"""


@pytest.mark.parametrize(
    ("send", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)]
)
def test_ctrl_c_and_a_passed_on_sigterm_let_a_child_end_in_its_own_way(send, number):
    code = (
        "import sys; from megatron_dppo.demo.material import run_to_the_end; "
        f"sys.exit(run_to_the_end([sys.executable, '-c', {SLOW_TO_STOP!r}]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    send(parent.pid, number)
    assert parent.stdout.read() == "saved\n"
    assert parent.wait(30) == 128 + number


SUMMARY = {
    "steps": 40,
    "eval_accuracy_start": 0.35,
    "eval_accuracy_end": 0.7,
    "train_reward_start": 0.4,
    "train_reward_end": 0.8,
    "mean_abs_prob_gap": 1e-7,
    "weight_updates": 41,
    "weight_updates_verified": 41,
    "hf_export_max_logprob_diff": 1e-6,
}


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True, None, True, True, True]),
        ({"eval_accuracy_end": 0.59}, [False, None, True, True, True]),
        ({"steps": 39, "eval_accuracy_end": 0.4}, [None, None, True, True, True]),
        ({"mean_abs_prob_gap": 2e-4}, [True, None, False, True, True]),
        ({"weight_updates_verified": 40}, [True, None, True, False, True]),
        ({"weight_updates": 40, "weight_updates_verified": 40}, [True, None, True, False, True]),
        ({"hf_export_max_logprob_diff": None}, [True, None, True, True, False]),
    ],
)
def test_the_demo_judges_its_results(changes, verdicts):
    assert [p.holds for p in judge(SUMMARY | changes, recipe_steps=40)] == verdicts


def test_a_task_asks_for_a_gain_of_its_own():
    assert judge(SUMMARY, 40, gain=0.4)[0].holds is False
    assert judge(SUMMARY | {"eval_accuracy_end": 0.75}, 40, gain=0.4)[0].holds is True


GAIN = "held-out accuracy 0.350 -> 0.700, expected up by 0.25 or more"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"learned: {GAIN}"),
        (
            {"eval_accuracy_end": 0.4, "weight_updates_verified": 40},
            "FAILED: held-out accuracy 0.350 -> 0.400, expected up by 0.25 or more; "
            "weight updates verified 40 of 41, expected all; 41 or more",
        ),
        ({"steps": 39}, f"not judged, because evaluations or steps are missing: {GAIN}"),
    ],
)
def test_a_demo_ends_with_a_verdict(changes, line):
    assert verdict(judge(SUMMARY | changes, 40)) == line


def test_each_task_says_how_long_it_takes():
    assert {name: task.longest_s for name, task in TASKS.items()} == {
        "sums": 600,
        "distillation": 600,
        "calculator": 900,
        "python": 900,
    }


def test_bfloat16_has_bounds_of_its_own():
    rounded = {"mean_abs_prob_gap": 4e-3, "hf_export_max_logprob_diff": 0.2}
    assert [p.holds for p in judge(SUMMARY | rounded, 40, "bfloat16")] == [
        p.holds for p in judge(SUMMARY, 40)
    ]
    assert [p.holds for p in judge(SUMMARY | rounded, 40)].count(False) == 2


@pytest.mark.parametrize(
    ("gpus", "ranks", "shares_the_gpu", "dtype"),
    [
        (0, 2, False, "float32"),
        (1, 1, True, "bfloat16"),
        (2, 1, False, "bfloat16"),
        (3, 2, False, "bfloat16"),
    ],
)
def test_the_recipe_fits_the_gpus(gpus, ranks, shares_the_gpu, dtype):
    overrides = [*trainer_overrides(gpus), *engine_overrides(gpus)]
    config = load_config("examples/tiny_moe/config.yaml", overrides)
    assert (config.parallel.world_size, config.model.dtype) == (ranks, dtype)
    assert (config.sglang.get("base_gpu_id") == 0) is shares_the_gpu
    assert (config.weight_sync.strategy == "tensor") is shares_the_gpu
    if gpus:
        hosts = (Host("here", "127.0.0.1", gpus),)
        placement = place(Roles.of(config), Allocation(hosts, first_port=None))
        assert [rank.device for rank in placement.ranks] == list(range(ranks))
        assert placement.servers[0].first_device == (0 if shares_the_gpu else ranks)


def test_a_demo_goes_on_or_is_set_aside(tmp_path):
    directory = tmp_path / "demo"

    def write_run(seed, algorithm):
        directory.mkdir(exist_ok=True)
        config = {"run": {"seed": seed}, "algorithm": {"name": algorithm}}
        (directory / "config.yaml").write_text(json.dumps(config))

    write_run(1, "dppo-binary-tv")
    set_aside(directory, 1, [])
    assert directory.exists()
    set_aside(directory, 1, ["algorithm.name=grpo"])
    assert not directory.exists()
    write_run(2, "dppo-binary-tv")
    set_aside(directory, 2, ["run.steps=3"])
    assert directory.exists()
    (directory / "summary.json").write_text("{}")
    set_aside(directory, 2, [])
    assert not directory.exists()
    write_run(1, "dppo-binary-tv")
    set_aside(directory, 1, [], recipe=RECIPES / "calculator.yaml")
    assert not directory.exists()
