"""The SGLang server as a child process.

Light: imports neither torch nor sglang.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.engine.child_server import ChildServer, Runtime
from megatron_dppo.engine.options import (
    ServerHosts,
    ServerSections,
    server_environment,
    server_options,
    write_options,
)

if TYPE_CHECKING:
    from megatron_dppo.engine.http_client import Answer, HttpClient


_STAGE_LINES = 400
_WARM_UP_PROMPT = tuple(range(1, 9))
_STAGES = (
    ("Load weight begin", "loading weights"),
    ("Load weight end", "laying out its cache"),
    ("CUDA graph begin", "capturing CUDA graphs"),
)
"""What SGLang logs at the beginning of a stage of its start, in order, and the stage in words."""


class EngineProcess(ChildServer):
    """One SGLang server.

    Args:
        config: the run's sections.
        port: where it listens.
        log_path: its output is appended there; its options go beside it.
        seed: of its sampling. Give each server and each restart another one, or it repeats the
            samples of the other.
        api_key: opens generation and information; None leaves them open.
        admin_api_key: opens whatever changes the server.
        host: address where it listens; ``engine.host`` by default.
        first_device: the first of its GPUs on its host, or on each of them.
        hosts: where it runs over several; ``runtime`` then starts one task on each.
        runtime: where it runs, and with which Python.
    """

    what = "the engine"
    port_key = "engine.port"

    def __init__(
        self,
        config: ServerSections,
        *,
        port: int,
        log_path: Path,
        seed: int,
        api_key: str | None,
        admin_api_key: str,
        host: str | None = None,
        first_device: int = 0,
        hosts: ServerHosts | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        where = config.engine.host if host is None else host
        super().__init__(where, port, log_path, config.engine.start_timeout_s, runtime)
        self.options_path = log_path.with_suffix(".yaml")
        self._config = config
        self._keys = {"api_key": api_key, "admin_api_key": admin_api_key}
        self._options = server_options(
            config, host=where, port=port, seed=seed, first_device=first_device, hosts=hosts
        )
        self._variables = server_environment(config, hosts)

    def start(self) -> None:
        """As ChildServer's, with the options in a file beside the log."""
        if self._process is None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            write_options(self._options, self.options_path)
        super().start()

    def _stage(self) -> str:
        log = self.log_tail(_STAGE_LINES)
        reached = [words for said, words in _STAGES if said in log]
        return reached[-1] if reached else super()._stage()

    def _command(self) -> Sequence[str]:
        module = "megatron_dppo.engine.launch_server"
        return ["-m", module, "--config", str(self.options_path)]

    def _environment(self) -> Mapping[str, str]:
        return self._variables

    def _secrets(self) -> Mapping[str, str | None]:
        return self._keys

    def _probe(self) -> tuple[str, str | None]:
        return "/model_info", self._keys["api_key"]

    async def _warm_up(self, client: HttpClient) -> None:
        """Draw two tokens with training's sampling and two with evaluation's.

        On GPUs the first request of a kind compiles its kernels (flashinfer's for top_p < 1), minutes in
        which the scheduler stands still: later that would look like a hang.
        """
        from megatron_dppo.engine.protocol import request_body
        from megatron_dppo.engine.requests import GenerationRequest, SamplingParams

        rollout, evaluation = self._config.rollout, self._config.evaluation
        temperatures = {(rollout.temperature, rollout.top_p)} | {
            (evaluation.temperature, evaluation.top_p)
        }
        columns = {"topk": rollout.topk_log_probs} if rollout.topk_log_probs else {}
        for number, (temperature, top_p) in enumerate(sorted(temperatures)):
            sampling = SamplingParams(2, temperature, top_p, ignore_eos=True)
            asked = GenerationRequest(number, _WARM_UP_PROMPT, sampling, columns)
            body = request_body([asked], f"warm-up-{number}")
            await client.request("POST", "/generate", body, timeout_s=None)

    def _accepts(self, answer: Answer) -> bool:
        """It takes our key and serves our model."""
        if answer.status != 200:
            return False
        try:
            said = json.loads(answer.body)
        except (ValueError, RecursionError):  # no server of SGLang
            return False
        return isinstance(said, dict) and said.get("model_path") == self._options["model_path"]
