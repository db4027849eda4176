"""The modules that the processes of a server import, before they are forked."""

import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.model_executor.model_runner
import sglang.srt.models.registry  # noqa: F401
