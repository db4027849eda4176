"""The modules that a server's processes share: they are imported before the processes are forked."""

import sys

# If Megatron-Core is installed, SGLang's dumper imports it, for use in a trainer. A server does not need Megatron-Core.
_MEGATRON = "megatron.core"
sys.modules[_MEGATRON] = None  # type: ignore[assignment]
try:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry  # noqa: F401
finally:
    del sys.modules[_MEGATRON]
