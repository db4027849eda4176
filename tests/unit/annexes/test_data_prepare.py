"""Small sets in the forms of published ones: what is kept of each row, and what is reported of other rows."""

from __future__ import annotations

import builtins
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dppo.data.problems import DataKeys, read_problems
from megatron_dppo.data.published import SETS, Preparation, bare_problem, prepare
from megatron_dppo.data.records import DataError
from megatron_dppo.diagnostics.data import main
from tests.messages import mentioning, mentions

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo(problem: str, answer: str, index: str = "u") -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": DAPO_BEFORE + problem + DAPO_AFTER, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


OUT = "data/out.jsonl"


@pytest.fixture
def prepare_rows(tmp_path):
    def run(name: str, rows: list[dict], file: str = "set.parquet", **words) -> Preparation:
        # ``prepare`` makes the output's folder.
        return prepare(name, str(write(tmp_path / file, rows)), tmp_path / OUT, **words)

    return run


@pytest.mark.parametrize("file", ["dapo.parquet", "dapo.jsonl", "dapo.json", "data-00000.arrow"])
def test_every_format_and_the_file_that_comes_of_it(prepare_rows, tmp_path, file):
    rows = [dapo("What is $1+1$?", "2"), dapo("求 $x$。", "34")]
    assert prepare_rows("dapo-math-17k", rows, file).rows == 2
    assert [json.loads(line) for line in (tmp_path / OUT).read_text().splitlines()] == [
        {"problem": "What is $1+1$?", "answer": "2", "source": "dapo-math-17k"},
        {"problem": "求 $x$。", "answer": "34", "source": "dapo-math-17k"},
    ]


def test_duplicates_and_conflicts_are_left_out_and_counted(prepare_rows):
    rows = [dapo("a", "1", "x"), dapo("b", "2", "y"), dapo("c", "3", "z")] * 3
    rows += [dapo(" a ", "1.0"), dapo("b", "5")]  # a duplicate in another spelling; a conflict
    preparation = prepare_rows("dapo-math-17k", rows)
    assert preparation.answers == {"a": "1", "c": "3"}
    assert sorted(preparation.left_out.values()) == [2, 7]
    assert preparation.left_out["duplicates"] == 7
    assert preparation.rows == len(preparation.answers) + sum(preparation.left_out.values()) == 11
    assert len(preparation.instructed) == 2
    assert mentions(next(preparation.report()), 11, 2)


def test_the_english_subset(prepare_rows):
    rows = [dapo("a", "1"), dapo("设 $a$ 是", "2"), dapo("naïve Étude", "3")]
    preparation = prepare_rows("dapo-math-english", rows)
    assert list(preparation.answers) == ["a", "naïve Étude"]
    assert list(preparation.left_out.values()) == [1]


def test_the_papers_filter_is_the_training_rows_of_all_its_files(tmp_path):
    """The files differ in a column that nothing reads; the folder ``test`` has other problems."""
    first = dapo("设 $a$ 是", "2") | {"extra_info": {"index": "7"}}
    second = dapo("b", "3") | {"extra_info": {"index": 7, "split": "train"}}
    write(tmp_path / "in/train/part-0.parquet", [first])
    write(tmp_path / "in/train/part-1.parquet", [second])
    write(tmp_path / "in/test/aime24.parquet", [dapo("c", "4")])
    preparation = prepare("dapo-math-13k", str(tmp_path / "in"), tmp_path / "out.jsonl")
    assert preparation.answers == {"设 $a$ 是": "2", "b": "3"}


def test_the_solvable_problems_are_read_from_a_saved_data_set(tmp_path):
    """The library ``datasets`` saves an Arrow stream and two descriptions beside it."""
    rows = [{"problem": f"p{i}", "answer": rf"\frac{{{i}}}{{7}}"} for i in range(3)]
    folder = tmp_path / "math_1k5" / "train"
    write(folder / "data-00000-of-00001.arrow", rows)
    (folder / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    (folder / "dataset_info.json").write_text("{}")
    for source in (folder / "data-00000-of-00001.arrow", tmp_path / "math_1k5"):
        preparation = prepare("math-solvable-1460", str(source), tmp_path / "out.jsonl")
        assert preparation.answers == {row["problem"]: row["answer"] for row in rows}


HH = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: What is\n\nred?\n\nAssistant: A colour."


def test_conversations_lose_their_last_answer(tmp_path):
    rows = [
        {"chosen": HH, "rejected": "x"},
        {"chosen": HH + " Yes.", "rejected": "y"},
        {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "z"},
    ]
    path = tmp_path / "hh/helpful-base/train.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    write(tmp_path / "hh/red-team-attempts/train.jsonl", [{"transcript": "x"}])
    preparation = prepare("hh-rlhf", str(tmp_path / "hh"), tmp_path / "out.jsonl")
    assert dict(preparation.left_out) == {"duplicates": 1, "without a usable answer or problem": 1}
    assert mentions(preparation.faults[0], "row 3", "Human")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "What is\n\nred?"},
    ]
    assert (tmp_path / "out.jsonl").read_text() == (
        json.dumps({"messages": messages, "source": "hh-rlhf"}) + "\n"
    )
    problems = read_problems(tmp_path / "out.jsonl", DataKeys())
    assert problems.prompts == [messages]


def test_instructions_without_answers_are_kept(tmp_path):
    rows = [{"instruction": "Name a colour.", "output": "Red.", "generator": "g", "dataset": "d"}]
    source = write(tmp_path / "alpaca_eval.json", rows)
    prepare("alpaca-eval", str(source), tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "problem": "Name a colour.",
        "source": "alpaca-eval",
    }


@pytest.mark.parametrize(
    ("name", "row", "problem", "answer"),
    [
        (
            "dapo-math-13k",
            dapo("q", "7") | {"prompt": "q", "solution": "7", "source_prompt": []},
            "q",
            "7",
        ),
        ("dapo-math-13k", {"prompt": "q", "ground_truth": "7", "dataset": "math"}, "q", "7"),
        (
            "dapo-math-17k",
            {"messages": [{"role": "user", "content": "q"}], "ground_truth": ["7"]},
            "q",
            "7",
        ),
        (
            "dapo-math-17k",
            {"prompt": [{"role": "user", "content": DAPO_BEFORE + "q"}], "label": "7"},
            "q",
            "7",
        ),
        (
            "math",
            {
                "problem": "p",
                "level": "Level 5",
                "type": "Algebra",
                "solution": r"First \boxed{3}. So $\boxed{\frac{1}{\sqrt{2}}}$.",
            },
            "p",
            r"\frac{1}{\sqrt{2}}",
        ),
        ("math", {"problem": "p", "solution": r"Then $x = \boxed 2$."}, "p", "2"),
        ("math500", {"problem": "p", "solution": "s", "answer": r"\left( 3, \pi \right)"}, "p",
         r"\left( 3, \pi \right)"),
        ("gsm8k", {"question": "q", "answer": "a <<2*540=1080>>\n#### 1,080"}, "q", "1080"),
        ("aime24", {"id": 60, "problem": "p", "solution": "s", "answer": "025", "year": "2024"},
         "p", "25"),
        ("aime24", {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 204}, "p", "204"),
        ("aime24", {"id": 1, "problem": "p", "solution": r"\boxed{073}"}, "p", "73"),
        ("aime25", {"question": "q", "answer": r"336^\circ"}, "q", "336"),
        ("aime25", {"problem_idx": 1, "problem": "p", "answer": 70, "problem_type": ["A"]}, "p", "70"),
        ("amc23", {"id": 0, "question": "q", "answer": 27.0, "url": "https://x/2023_AMC_12A"}, "q",
         "27"),
        ("amc23", {"id": 0, "problem": "p", "answer": 0.5, "url": "x"}, "p", "0.5"),
        ("amc23", {"id": 0, "question": "q", "answer": "27.0"}, "q", "27"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("file", ["set.parquet", "set.jsonl"])
def test_published_schemas(prepare_rows, name, row, problem, answer, file):
    assert prepare_rows(name, [row], file).answers == {problem: answer}


def test_other_years_are_left_out(prepare_rows):
    rows = [
        {"problem": f"p{year}", "answer": "1", "url": f"https://x.org/{year}_AIME_I_Problems/1"}
        for year in (2022, 2023, 2024)
    ]
    preparation = prepare_rows("aime24", rows)
    assert (list(preparation.answers), list(preparation.left_out.values())) == (["p2024"], [2])


def test_rows_that_cannot_be_used_are_named(prepare_rows, tmp_path):
    rows = [
        {"problem": "p", "solution": "no mark"},
        {"problem": " ", "solution": r"\boxed{1}"},
        {"problem": "r", "solution": None},
        {"problem": "s", "solution": r"\boxed{}"},
        {"problem": "t", "solution": r"\boxed{1}"},
    ]
    preparation = prepare_rows("math", rows, "set.jsonl")
    assert preparation.answers == {"t": "1"}
    where = f"{tmp_path}/set.jsonl"
    expected = [
        ("row 1", "solution", "####"),
        ("row 2", "problem", '" "'),
        ("row 3", "answer", "null"),
    ]
    for fault, values in zip(preparation.faults, expected, strict=True):
        assert mentions(fault, where, *values)
    assert list(preparation.left_out.values()) == [4]
    with pytest.raises(DataError, match=" 0 to 999"):
        prepare_rows("aime25", [{"problem": "p", "answer": "1000"}])
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    with pytest.raises(DataError, match=mentioning("set.parquet", "left")):
        prepare_rows("dapo-math-17k", [{"prompt": messages, "label": "1"}])


def test_a_system_message_is_the_publishers_instruction(prepare_rows):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "q"}]
    assert prepare_rows("dapo-math-17k", [{"prompt": messages, "label": "1"}]).answers == {"q": "1"}


def test_a_folder_with_splits_and_configurations(tmp_path):
    rows = [{"question": name, "answer": f"#### {i}"} for i, name in enumerate("abcd")]
    write(tmp_path / "in/main/train-00000-of-00001.parquet", rows[:1])
    write(tmp_path / "in/main/test-00000-of-00001.parquet", rows[1:2])
    write(tmp_path / "in/socratic/train-00000-of-00001.parquet", rows[2:3])
    write(tmp_path / "in/.cache/train.jsonl", rows[3:])
    (tmp_path / "in/dataset_infos.json").write_text("{}")
    out, source = tmp_path / "out.jsonl", str(tmp_path / "in")
    assert list(prepare("gsm8k", source, out).answers) == ["a"]
    assert list(prepare("gsm8k", source, out, "test").answers) == ["b"]
    with pytest.raises(DataError, match=mentioning(tmp_path / "in", "dev", "main/train-00000")):
        prepare("gsm8k", source, out, "dev")


def test_math_as_it_was_first_published(tmp_path):
    for i, split in enumerate(["train", "test"]):
        path = tmp_path / f"MATH/{split}/algebra/{i}.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"problem": split, "solution": r"\boxed{1}"}, indent=1))
    assert list(prepare("math", str(tmp_path), tmp_path / "out.jsonl").answers) == ["train"]


QWEN = r"Please reason step by step, and put your final answer within \boxed{}."
GSM8K = 'Let\'s think step by step and output the final answer after "####".'
VERL = r"Let's think step by step and output the final answer within \boxed{}."


@pytest.mark.parametrize(
    "text", [DAPO_BEFORE + "q" + DAPO_AFTER, f"q\n{QWEN}", f"q {GSM8K}", f"q {VERL}", "q"]
)
def test_known_instructions_are_taken_away(text):
    assert bare_problem(text) == "q"


def test_unknown_columns_and_what_is_not_there(prepare_rows, tmp_path):
    with pytest.raises(DataError, match=r"\['a'\].*question "):
        prepare_rows("gsm8k", [{"a": 1}])
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"broken\.parquet: .*Parquet"):
        prepare("math", str(broken), tmp_path / "out.jsonl")
    with pytest.raises(DataError, match=r"none\.parquet: .*test\.jsonl"):
        prepare("math500", "none.parquet", tmp_path / "out.jsonl")
    with pytest.raises(DataError, match=mentioning("out.jsonl", "broken.parquet")):
        prepare("math500", str(tmp_path), broken / "out.jsonl")


@pytest.mark.parametrize("name", SETS)
def test_without_the_hub_the_wanted_file_is_named(name, tmp_path, monkeypatch, capsys):
    real_import = builtins.__import__

    def import_without_datasets(module, *rest):
        if module == "datasets":
            raise ImportError(module)
        return real_import(module, *rest)

    monkeypatch.setattr(builtins, "__import__", import_without_datasets)
    with pytest.raises(SystemExit) as end:
        main(["prepare", name, "--from", "who/what", "--out", str(tmp_path / "out.jsonl")])
    output = capsys.readouterr().err
    assert end.value.code == 2
    assert mentions(output, "pip", "datasets")
    assert mentions(output, SETS[name].file, f"https://huggingface.co/datasets/{SETS[name].hub}")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_says_what_it_did(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", [{"problem": "p", "answer": 70}] * 2)
    main(["prepare", "aime25", "--from", str(source), "--out", str(tmp_path / "out.jsonl")])
    first, counts, left_out = capsys.readouterr().out.splitlines()[-3:]
    assert first == f"{tmp_path}/out.jsonl: aime25"
    assert mentions(counts, 2, 1)
    assert mentions(left_out, 1, "duplicates")
