"""The commands that the demo names at its end."""

from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.demo.__main__ import next_commands
from megatron_dppo.diagnostics.doctor import __main__ as doctor
from megatron_dppo.diagnostics.explain import __main__ as explain
from megatron_dppo.diagnostics.explain import replay


def test_the_demo_names_commands_that_read_what_the_run_kept(tmp_path):
    """Each line is a command of the program with valid options. Without saved batches, the commands that need them are
    not named."""
    without_batches = [line.split() for line in next_commands(tmp_path)[1:]]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.safetensors").touch()
    with_batches = [line.split() for line in next_commands(tmp_path)[1:]]
    assert {words[1] for words in with_batches} - {words[1] for words in without_batches} == {
        "explain",
        "doctor",
        "replay",
    }
    parsers = {"explain": explain.parse, "doctor": doctor.parse, "replay": replay.parse}
    for program, command, directory, *_ in with_batches:
        assert program.endswith("megatron-dppo")
        assert directory == str(tmp_path)
        if command in parsers:
            assert parsers[command]([directory]).run == tmp_path
    (replay_words,) = [words for words in with_batches if words[1] == "replay"]
    assert replay_words[3] == "--algorithm"
    assert replay_words[4] in PRESETS
