"""docs/configuration.md equals the reference that the schema generates, which describes every key."""

from pathlib import Path

from megatron_dppo.config.errors import dotted_paths
from megatron_dppo.config.schema import SupervisedConfig, TrainConfig
from tools.config_reference import reference

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "configuration.md"


def test_the_document_is_current():
    assert DOCUMENT.read_text() == reference(), (
        "python tools/config_reference.py > docs/configuration.md"
    )


def test_a_row_says_what_a_key_takes_and_means():
    rows = reference().splitlines()
    assert (
        "| `prompts_per_step` | integer > 0 and <= 1048576 | required | Prompts in a rollout batch. |"
        in rows
    )
    assert "| `lr` | number > 0 | required | Learning rate after the warm-up. |" in rows
    # Options that are not taken for one reason share a row.
    assert "| `hidden_dropout`, `attention_dropout` | with dropout pi would differ" in "\n".join(
        rows
    )
    assert "| unless off: `fp8_param`, `fp4_param` | " in "\n".join(rows)


def test_keys_that_equal_those_of_another_table_are_named_and_not_repeated():
    text = reference()
    assert (
        "A table in `evaluation`:\n\nAs in `train`: `path`, `prompt_key`, `answer_key`, `metadata_key`, `metadata`."
        in text
    )
    # `name` has a default only in the section itself.
    further = text.partition("A table in `further`:\n")[2].partition("### ")[0]
    assert "| `name` | text | required |" in further
    assert "| `weight` |" not in further
    assert "As in this section: `weight`, `options`, `reads`, " in further
    assert text.count("| `metadata_key` |") == 1
    supervised = text.partition("## `megatron-dppo supervised`")[2]
    assert "| `sequences_per_step` |" in supervised
    assert "As above: `micro_batch_tokens`, `recompute`." in supervised


def test_every_key_of_both_kinds_of_run_is_there_and_explained():
    rows = [line.split(" | ") for line in reference().splitlines() if line.startswith("| `")]
    explained = {row[0].strip("| `") for row in rows if row[-1].strip(" |")}
    headings = {line.strip("# `") for line in reference().splitlines() if line.startswith("### ")}
    for schema in (TrainConfig, SupervisedConfig):
        for path in dotted_paths(schema):
            assert path in headings or path.split(".")[-1] in explained, path
