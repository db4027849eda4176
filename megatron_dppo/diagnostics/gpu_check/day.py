"""The parts of a day with few minutes of a GPU, in their order: ``megatron-dppo gpu-check --day``.

The order is by worth: a part whose figures are missing comes before a part that repeats known figures. The day goes on
after a failure with the parts that can still work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_dppo.diagnostics.gpu_check import CheckPart
from megatron_dppo.diagnostics.gpu_check.runner import PartResult
from megatron_dppo.system.toolkit import TORCH_LAYERS_VARIABLE

SECONDS = 840.0
"""Default length of a day: fifteen minutes with a reserve of one."""


@dataclass(frozen=True)
class Stage:
    """A part of the day.

    Attributes:
        part: name of the part.
        seconds: seconds after which the part is ended.
        needs_server: whether the part starts a server.
        shows: ``layers`` or ``server``, if this part shows that Transformer Engine's layers or a server work.
    """

    part: str
    seconds: float
    needs_server: bool = False
    shows: str = ""


STAGES = (
    Stage("machine", 30),
    Stage("layers", 60, shows="layers"),
    # The first server compiles SGLang's kernels one after the other, about ten seconds each.
    Stage("generation", 200, needs_server=True, shows="server"),
    Stage("r3", 100, needs_server=True),
    Stage("slice", 330, needs_server=True),
    Stage("colocated", 120, needs_server=True),
    Stage("full_layer", 60),
    Stage("weights", 120, needs_server=True),
    Stage("mismatch", 100, needs_server=True),
    Stage("mask", 60),
    Stage("optimizer_state", 60),
    Stage("cpu_twin", 90),
    Stage("handles", 30),
    Stage("head", 60),
    Stage("kernels", 60),
)
LEAST_S = 10.0
"""A part that has fewer seconds left is not started."""
NO_SERVER = "no server: the part {part} of this day did not get one to work"
NO_TIME = "no time is left of this day's {seconds:.0f} s"
RunStage = Callable[[CheckPart, float], PartResult]


def run_day(
    parts: Sequence[CheckPart],
    run: RunStage,
    seconds: float = SECONDS,
    stages: Sequence[Stage] = STAGES,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[PartResult]:
    """Run the stages in their order within ``seconds``, and yield the result of each.

    If a part with ``shows`` = ``layers`` crashes, Transformer Engine is left out of all later processes, and the part
    runs once more with layers of torch modules. If a part with ``shows`` = ``server`` gets no server to work, the parts
    that need a server are ``lacking``, and the time goes to the other parts.

    Args:
        parts: the check's parts.
        run: runs a part for at most a number of seconds.
        seconds: length of the day.
        stages: the stages.
        clock: returns seconds.
    """
    part_of_name = {part.name: part for part in parts}
    end = clock() + seconds
    without_server = ""
    for stage in stages:
        part = part_of_name[stage.part]
        left = end - clock()
        if stage.needs_server and without_server:
            yield PartResult(part.name, part.shows, "lacking", without_server)
            continue
        if left < LEAST_S:
            yield PartResult(part.name, part.shows, "lacking", NO_TIME.format(seconds=seconds))
            continue
        result = run(part, min(stage.seconds, left))
        yield result
        is_broken = result.verdict in ("crashed", "timed out")
        if stage.shows == "server" and (is_broken or result.verdict == "lacking"):
            without_server = NO_SERVER.format(part=part.name)
        if stage.shows == "layers" and is_broken and TORCH_LAYERS_VARIABLE not in os.environ:
            os.environ[TORCH_LAYERS_VARIABLE] = "1"
            print(
                f"  from here on without Transformer Engine: {TORCH_LAYERS_VARIABLE}=1", flush=True
            )
            yield run(part, min(stage.seconds, max(LEAST_S, end - clock())))
