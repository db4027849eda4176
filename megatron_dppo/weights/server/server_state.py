"""The state of a running server as earlier weight updates left it, reported by the server itself.

SGLang reports neither whether it is paused nor which memory it has released. Trainer ranks that are started again have
not seen the earlier updates, and need both facts. Servers that ``engine.launch_server`` starts add a SchedulerState to
the ``internal_states`` of ``/server_info``. The scheduler adds this state, because the scheduler carries out all
control calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_dppo.engine.errors import EngineAnswerError
from megatron_dppo.engine.server import hooks
from megatron_dppo.weights.server import direct_loading

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
FIELD = "megatron_dppo"
_REPORT = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


@dataclass(frozen=True)
class SchedulerState:
    """The state of a server after the calls of earlier weight updates.

    Attributes:
        is_paused: whether the server holds back every request.
        released: tags of the memory that is released.
        has_session: whether an update session is open.
        groups: names of the weight groups that the server's ranks are in.
        places_directly: whether the server loads weight updates by direct placement.
    """

    is_paused: bool
    released: tuple[MemoryTag, ...]
    has_session: bool
    groups: tuple[Annotated[str, Field(max_length=200)], ...]
    places_directly: bool = False


_STATE = TypeAdapter(SchedulerState)


def state_of(url: str, info: Mapping[str, Any]) -> SchedulerState | None:
    """Return the state in an answer of ``/server_info``; None from a server that reports no state.

    Each attention replica reports its own state; the result joins them.

    Raises EngineAnswerError for an answer of another form.
    """
    try:
        reports = info.get("internal_states") or [{}]
        if any(FIELD not in report for report in reports):
            return None
        return _joined([_STATE.validate_python(report[FIELD]) for report in reports])
    except (TypeError, ValueError, ValidationError) as error:
        raise EngineAnswerError(
            f"{url}/server_info: a broken state of the server: {error}"
        ) from error


def _joined(states: Sequence[SchedulerState]) -> SchedulerState:
    """Return the state of a server whose attention replicas have ``states``.

    A call can fail in some replicas and change the other replicas. So if one replica is paused, has released memory,
    opened a session or joined a group, the server counts as having done so. The server places directly if all replicas
    do.
    """
    released: set[MemoryTag] = set()
    groups: set[str] = set()
    for state in states:
        released.update(state.released)
        groups.update(state.groups)
    return SchedulerState(
        any(state.is_paused for state in states),
        tuple(sorted(released)),
        any(state.has_session for state in states),
        tuple(sorted(groups)),
        all(state.places_directly for state in states),
    )


def register() -> None:
    """Register the hook, in each process of a server, before SGLang applies its plugins' hooks."""
    hooks.register(_REPORT, report, "after")


def report(answer: Any, scheduler: Any, *_: Any) -> None:
    """Add the state to SGLang's ``answer`` about the ``scheduler``."""
    # SGLang has two objects of this name: the scheduler's, and the model runner's, which has the weight groups.
    updater = scheduler.weight_updater
    runner = scheduler.tp_worker.model_runner
    groups = runner.weight_updater._model_update_group
    state = SchedulerState(
        bool(scheduler._engine_paused),
        tuple(sorted(updater.offload_tags)),
        updater._session is not None,
        tuple(groups),
        direct_loading.places_directly(runner.model),
    )
    answer.internal_state[FIELD] = asdict(state)
