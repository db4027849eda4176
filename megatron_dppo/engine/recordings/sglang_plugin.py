"""SGLang's side, through its own entry point for plugins (group ``sglang.srt.plugins``).

A finished request's recording is written to shared memory by the scheduler, on any device: SGLang has
brought it to the host by then. The answer carries a notice in its place. The process that speaks HTTP
offers the file at ``/routed_experts/ID``, under the API key. Nothing happens in a server that was not
started by ``engine.launch_server``. On a CPU seen to work; written against SGLang's source for a GPU,
where it has not yet been run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from megatron_dppo.engine.recordings.store import FOLDER_VARIABLE, RecordingStore, path_of

_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor"
COLLECTED = f"{_PROCESSOR}.SchedulerBatchResultProcessor._maybe_collect_routed_experts"
ROUTE = "/routed_experts/{recording}"


def register() -> None:
    """Called by SGLang in each of its processes; changes the scheduler's alone."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or _PROCESSOR not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(COLLECTED, Outlet(RecordingStore(Path(folder))), HookType.AFTER)


class Outlet:
    """Called after SGLang has collected a request's recording: puts it into ``store``."""

    def __init__(self, store: RecordingStore) -> None:
        self._store = store

    def __call__(self, result: Any, processor: Any, request: Any) -> None:
        """Leave a notice in place of the recording, where it can be stored."""
        import torch
        from sglang.srt.managers.schedule_batch import FINISH_ABORT
        from sglang.srt.runtime_context import get_parallel

        recorded = request.routed_experts
        aborted = isinstance(request.finished_reason, FINISH_ABORT)
        if recorded is None or aborted or get_parallel().attn_tp_rank != 0:
            return  # the first rank alone answers
        notice = self._store.put(recorded.numpy())
        if notice is not None:
            request.routed_experts = torch.frombuffer(bytearray(notice.encode()), dtype=torch.uint8)


def offer(folder: Path) -> None:
    """Have this process's HTTP server hand out, and remove, the files in ``folder``."""
    from fastapi.responses import FileResponse, Response
    from sglang.srt.entrypoints.http_server import app

    async def fetch(recording: str) -> Response:
        path = path_of(folder, recording)
        if path is None or not path.is_file():
            return Response(status_code=404)
        return FileResponse(path, media_type="application/octet-stream")

    async def remove(recording: str) -> Response:
        path = path_of(folder, recording)
        if path is not None:
            path.unlink(missing_ok=True)
        return Response(status_code=204)

    app.add_api_route(ROUTE, fetch, methods=["GET"], response_class=Response)
    app.add_api_route(ROUTE, remove, methods=["DELETE"], response_class=Response)
