"""The modules that the processes of a server import, before they are forked."""

import sys

# SGLang's dumper imports Megatron-Core, for use in a trainer, where it is installed. A server has no use for it.
_MEGATRON = "megatron.core"
sys.modules[_MEGATRON] = None  # type: ignore[assignment]
try:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry  # noqa: F401
finally:
    del sys.modules[_MEGATRON]
