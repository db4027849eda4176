"""Serve environments of GEM, verifiers or OpenEnv to ``environment.name: over-http``. This file imports nothing of the
project, so it runs in the Python environment of these libraries:

    python serve_environment.py gem game:GuessTheNumber-v0-easy --port 30020
    python serve_environment.py verifiers my-environment --options '{"max_turns": 4}'
    python serve_environment.py openenv my_package:MyEnvironment --action my_package:MyAction --field message

``megatron_dppo/environments/over_http.py`` describes the protocol. The seed of an episode is the problem's
``metadata.seed``, or the ``problem_id`` if there is no seed. For verifiers, this number is the row of the data. So all
responses of a group begin alike. Turns are plain text: an environment that parses tool calls gets the policy's text.

The server listens on loopback. On another address (``--host``) it needs a key, the value of SERVE_ENVIRONMENT_KEY.
Episodes without a request for an hour are closed.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib
import inspect
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_VARIABLE = "SERVE_ENVIRONMENT_KEY"
LARGEST_BYTES = 1 << 24
FORGOTTEN_S = 3600.0
"""An episode without a request for this time is closed."""


def seed_of(problem: dict[str, Any]) -> int:
    return int(problem["metadata"].get("seed", problem["problem_id"]))


def attribute(name: str) -> Any:
    """Return the object with the name ``package.module:name``."""
    module, _, attribute_name = name.partition(":")
    return getattr(importlib.import_module(module), attribute_name)


class Gem:
    """An episode of ``gem.make(name)``.

    An observation is the text of the environment between ``prefix`` and ``suffix`` of its ``info``, as in GEM's own
    observation wrapper. Many games show their state (a board, a grid) only there.
    """

    # Resets run one at a time, because a reset seeds Python's global generator.
    _resetting = threading.Lock()
    _make: Any

    @classmethod
    def load(cls, options: argparse.Namespace) -> None:
        import gem

        cls._make = partial(gem.make, options.name, **options.options)

    def __init__(self) -> None:
        self._environment = self._make()

    def reset(self, problem: dict[str, Any]) -> str:
        with self._resetting:
            observation, info = self._environment.reset(seed=seed_of(problem))
        return self._whole(observation, info)

    def step(self, text: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self._environment.step(text)
        done = bool(terminated or truncated)
        text = str(observation) if done else self._whole(observation, info)
        return {"observation": text, "reward": float(reward), "done": done}

    def close(self) -> None:
        pass

    @staticmethod
    def _whole(observation: Any, info: dict[str, Any]) -> str:
        text = str(observation)
        if "suffix" in info and not text.endswith("\n"):
            text += "\n"
        return f"{info.get('prefix', '')}{text}{info.get('suffix', '')}"


class OpenEnv:
    """An episode of an ``Environment`` of openenv-core, in this process.

    ``options.action``: the class of its actions. The field ``options.field`` of an action is the policy's text. The
    policy receives this field of an observation, or the whole observation as JSON if there is no such field. A
    ``reset`` that takes no seed is called without one.
    """

    _make: Any
    _action: Any
    _field: str

    @classmethod
    def load(cls, options: argparse.Namespace) -> None:
        cls._make = partial(attribute(options.name), **options.options)
        cls._action, cls._field = attribute(options.action), options.field

    def __init__(self) -> None:
        self._environment = self._make()

    def reset(self, problem: dict[str, Any]) -> str:
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters.values()
        takes_seed = any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters)
        return self._text(reset(seed=seed_of(problem)) if takes_seed else reset())

    def step(self, text: str) -> dict[str, Any]:
        observation = self._environment.step(self._action(**{self._field: text}))
        reward = float(observation.reward or 0.0)
        return {
            "observation": self._text(observation),
            "reward": reward,
            "done": bool(observation.done),
        }

    def close(self) -> None:
        self._environment.close()

    def _text(self, observation: Any) -> str:
        text = getattr(observation, self._field, None)
        if isinstance(text, str):
            return text
        return observation.model_dump_json(exclude={"done", "reward", "metadata"})


class Verifiers:
    """An episode of ``verifiers.load_environment(name)`` (classic environments, 0.1). Its own rollout runs, and the
    policy replaces the client that the rollout calls."""

    _loop: asyncio.AbstractEventLoop
    _environment: Any

    @classmethod
    def load(cls, options: argparse.Namespace) -> None:
        import verifiers

        cls._environment = verifiers.load_environment(options.name, **options.options)
        cls._loop = asyncio.new_event_loop()
        threading.Thread(target=cls._loop.run_forever, daemon=True).start()

    def __init__(self) -> None:
        self._turns: asyncio.Queue[str] = asyncio.Queue()
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self._rollout: asyncio.Task[Any] | None = None

    def reset(self, problem: dict[str, Any]) -> str:
        row = self._environment.get_dataset()[seed_of(problem)]
        messages = self._wait(self._begin(row))
        if not isinstance(messages, list):
            raise ValueError("the episode ended before its first turn")
        # The policy already has the problem's prompt: repeat nothing of it.
        prompt = [m["content"] for m in problem["messages"]] or [problem["prompt"]]
        texts = [str(m.content) for m in messages]
        return "" if texts == prompt else "\n\n".join(texts)

    def step(self, text: str) -> dict[str, Any]:
        result = self._wait(self._answer(text))
        if isinstance(result, list):
            last_turn = max((i for i, m in enumerate(result) if m.role == "assistant"), default=-1)
            return {"observation": "\n\n".join(str(m.content) for m in result[last_turn + 1 :])}
        return {"reward": float(result["reward"] or 0.0), "done": True}

    def close(self) -> None:
        if self._rollout is not None:
            self._loop.call_soon_threadsafe(self._rollout.cancel)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self, row: dict[str, Any]) -> Any:
        run = self._environment._run_rollout_state(dict(row), self._client(), "policy", {})
        self._rollout = asyncio.ensure_future(run)
        return await self._next()

    async def _answer(self, text: str) -> Any:
        await self._turns.put(text)
        return await self._next()

    async def _next(self) -> Any:
        """Return the messages before the next turn, or the state of the ended rollout. Raises the rollout's error."""
        assert self._rollout is not None
        call = asyncio.ensure_future(self._calls.get())
        await asyncio.wait({call, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if call.done():
            return call.result()
        call.cancel()
        state = self._rollout.result()
        if state.get("error") is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        return state

    def _client(self) -> Any:
        from verifiers.clients import Client
        from verifiers.types import Response, ResponseMessage

        episode = self

        async def get_response(_: Any, prompt: Any, model: str, *__: Any, **___: Any) -> Any:
            await episode._calls.put(list(prompt))
            text = await episode._turns.get()
            message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return Response(
                id=uuid.uuid4().hex, created=int(time.time()), model=model, message=message
            )

        methods = dict.fromkeys(Client.__abstractmethods__, get_response)
        return type("Policy", (Client,), {**methods, "get_response": get_response})(None)


KINDS: dict[str, type[Any]] = {"gem": Gem, "openenv": OpenEnv, "verifiers": Verifiers}


class Episode:
    """One environment. It answers one request at a time."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.lock = threading.Lock()
        self.last_request_at = time.monotonic()


class Episodes:
    """All open episodes, by name."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: dict[str, Episode] = {}

    def reset(self, body: dict[str, Any]) -> dict[str, Any]:
        for name, episode in list(self._open.items()):
            if time.monotonic() - episode.last_request_at > FORGOTTEN_S:
                self.close({"episode": name})
        name, episode = uuid.uuid4().hex, Episode(self._make())
        self._open[name] = episode
        try:
            observation = episode.environment.reset(body["problem"])
        # No client has the episode's name, so close the episode here.
        except BaseException:
            self.close({"episode": name})
            raise
        return {"episode": name, "observation": observation}

    def step(self, body: dict[str, Any]) -> dict[str, Any]:
        episode = self._open[body["episode"]]
        with episode.lock:
            episode.last_request_at = time.monotonic()
            return episode.environment.step(body["text"])

    def close(self, body: dict[str, Any]) -> dict[str, Any]:
        episode = self._open.pop(body["episode"], None)
        if episode is not None:
            episode.environment.close()
        return {}


def handler(episodes: Episodes, key: str) -> type[BaseHTTPRequestHandler]:
    routes = {"/reset": episodes.reset, "/step": episodes.step, "/close": episodes.close}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, answer = self._answer_of_route()
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _answer_of_route(self) -> tuple[int, dict[str, Any]]:
            size = int(self.headers.get("Content-Length", 0))
            if size > LARGEST_BYTES:
                self.close_connection = True
                return 413, {"error": f"{size} bytes, expected at most {LARGEST_BYTES}"}
            content = self.rfile.read(size)
            sent_key = self.headers.get("Authorization", "")
            if key and not hmac.compare_digest(sent_key.encode(), f"Bearer {key}".encode()):
                return 401, {"error": "expected the key as a bearer token"}
            if self.path not in routes:
                return 404, {"error": f"{self.path}: expected one of {', '.join(routes)}"}
            try:
                return 200, routes[self.path](json.loads(content))
            # The client receives any error of the environment.
            except Exception as error:
                return 500, {"error": f"{type(error).__name__}: {error}"}

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("name", help="as the library names it; of OpenEnv package.module:Class")
    parser.add_argument("--options", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--action", help="of OpenEnv: package.module:Class of its actions")
    parser.add_argument("--field", default="message", help="of OpenEnv: of action and observation")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30020)
    options = parser.parse_args()
    key = os.environ.get(KEY_VARIABLE, "")
    if options.kind == "openenv" and options.action is None:
        parser.error("--action: expected the class of the environment's actions")
    if options.host not in ("127.0.0.1", "localhost", "::1") and not key:
        parser.error(f"--host {options.host}: expected a key in {KEY_VARIABLE}")
    # Load in the main thread: verifiers installs handlers of signals, and only the main thread may do that.
    KINDS[options.kind].load(options)
    server = ThreadingHTTPServer(
        (options.host, options.port), handler(Episodes(KINDS[options.kind]), key)
    )
    server.daemon_threads = True
    print(f"http://{options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
