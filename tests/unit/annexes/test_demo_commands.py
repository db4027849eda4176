"""The commands that the demo names at its end."""

from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.demo.__main__ import next_commands
from megatron_dppo.diagnostics.doctor import __main__ as doctor
from megatron_dppo.diagnostics.explain import __main__ as explain
from megatron_dppo.diagnostics.explain import replay


def test_the_demo_names_commands_that_read_what_the_run_kept(tmp_path):
    """Each is one of the program's commands, and its options are understood; without batches those that need them are
    not named."""
    without = [line.split() for line in next_commands(tmp_path)[1:]]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.safetensors").touch()
    named = [line.split() for line in next_commands(tmp_path)[1:]]
    assert {words[1] for words in named} - {words[1] for words in without} == {
        "explain",
        "doctor",
        "replay",
    }
    parsers = {"explain": explain.parse, "doctor": doctor.parse, "replay": replay.parse}
    for program, command, directory, *_ in named:
        assert program.endswith("megatron-dppo")
        assert directory == str(tmp_path)
        if command in parsers:
            assert parsers[command]([directory]).run == tmp_path
    (replayed,) = [words for words in named if words[1] == "replay"]
    assert replayed[3] == "--algorithm"
    assert replayed[4] in PRESETS
