"""Rewards for tests, most of which misbehave when the response asks for it. Imported by verifier
workers, not by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_dppo.rewards import RewardInput, RewardResult, RewardUnavailableError


def even_length(response: str, answer: str) -> float:
    """1 where the response's number of characters is even: a random policy earns it every other time."""
    return float(len(response) % 2 == 0)


def sleep_and_echo(response: str, answer: str) -> float:
    time.sleep(float(response))
    return float(answer)


def loop_on_request(response: str, answer: str) -> float:
    while response == "loop":
        pass
    if response == "power":  # one C call that holds the interpreter
        return float(9 ** (9**9**9) > 0)
    return 1.0


def die_on_request(response: str, answer: str) -> float:
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def ask_for_gib(response: str, answer: str) -> float:
    """Of memory, none of which it touches."""
    return float(len(bytes(int(response) << 30)) > 0)


def hoard(response: str, answer: str) -> float:
    """So many MiB, untouched, for as long as the process lives."""
    kept.append(bytes(int(response) << 20))
    return 1.0


kept: list[bytes] = []


def raise_on_request(response: str, answer: str) -> float:
    if response == "raise":
        raise RuntimeError("planted fault")
    return 1.0


def length_and_print(response: str, answer: str) -> float:
    print("a library's chatter\n" * 1000, flush=True)
    return len(response) / 1e6


def value_of(response: str, answer: str) -> object:
    """Whatever the response says in Python."""
    return eval(response)


def refuse_on_request(response: str, answer: str) -> float:
    if response == "refuse":
        raise ValueError("no such answer")
    return 1.0


def leave_children(response: str, answer: str) -> float:
    """Starts a child in a session of its own and a grandchild without a parent, whose ids it puts into the
    file ``answer``; then it ends as the response says."""
    orphan = (
        "import subprocess as s\n"
        "print(s.Popen(['sleep', '300'], start_new_session=True, stdout=s.DEVNULL).pid)"
    )
    command = [sys.executable, "-c", orphan]
    found = subprocess.check_output(command, text=True)
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(answer).write_text(f"{child.pid} {found}")
    if response == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    while response == "loop":
        time.sleep(1)
    return 1.0


def of_every_character(response: str, answer: str) -> float:
    """Another number for almost every response, from 0 to 1."""
    return zlib.crc32(response.encode()) / 2**32


def is_the_answer(response: str, answer: str) -> float:
    """1 where they are equal."""
    return float(response == answer)


def end_at_once(response: str, answer: str) -> float:
    """Ends its worker."""
    os._exit(3)


def forge_on_request(response: str, answer: str) -> float:
    """The number that the response is; else it says where an answer comes from that none may send: a forked
    child, to the next call; or this process, before its own."""
    if response.isdigit():
        return float(response)
    if response == "forked":
        child = multiprocessing.get_context("fork").Process(target=send_forged, args=(2,))
        child.start()
        child.join()
    else:
        send_forged(1)
    return 0.0


def send_forged(number: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                connection = Connection(os.dup(descriptor))
                connection.send_bytes(number.to_bytes(8))
                connection.send_bytes(json.dumps([[1.0]]).encode())
                connection.close()


# --- every form of a reward


def with_metadata(response: str, metadata: dict) -> RewardResult:
    """The metadata's number times the response's, in parts."""
    parts = {"given": float(response), "factor": float(metadata["factor"])}
    return RewardResult(parts["given"] * parts["factor"], parts, f"{response} x {parts['factor']}")


def whole_record(record: RewardInput) -> float:
    return len(record.prompt) + len(record.messages) / 10 + len(record.response) / 100


def in_batches(records: list[RewardInput]) -> list[float]:
    """The size of the batch, unless a response says otherwise."""
    for record in records:
        if record.response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if record.response == "short":
            return []
    return [float(len(records)) for _ in records]


async def together(response: str) -> float:
    """1 once as many as the response says are asked at the same time."""
    waiting.append(None)
    while len(waiting) < int(response):
        await asyncio.sleep(0.01)
    return 1.0


waiting: list[None] = []


async def away(response: str) -> float:
    await asyncio.sleep(float(response))
    return 1.0


async def dying(response: str) -> float:
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def with_options(response: str, *, longest: int, penalty: float = 1.0) -> float:
    return -penalty * max(0, len(response) - longest)


class Counting:
    """Answers with its number of calls so far; fails for the first ones of each response as configured."""

    def __init__(self, fails: int = 0, error: str = "RewardUnavailableError") -> None:
        self.fails, self.seen = fails, Counter()
        self.error = {"RewardUnavailableError": RewardUnavailableError, "OSError": OSError}[error]

    def __call__(self, response: str) -> float:
        self.seen[response] += 1
        if self.seen[response] <= self.fails:
            raise self.error(f"away for the {self.seen[response]}. time")
        return float(self.seen[response])


def with_columns(response: str, difficulty: int, factor: int = 1) -> float:
    return float(len(response) * difficulty * factor)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, bonus: float = 0
) -> Any:
    """In verl's form."""
    if solution_str == "plain":
        return 0.25
    is_right = solution_str == ground_truth
    is_of_train = data_source == "gsm8k" and extra_info["split"] == "train"
    score = is_right + bonus
    return {"score": score, "acc": is_right, "of_train": float(is_of_train), "pred": solution_str}


def unnamed(text: str, gold: str) -> float:
    return 1.0


def mixed(records: list[RewardInput], answer: str) -> list[float]:
    return []


def unlucky(response: str) -> RewardResult:
    """Can't be had for ``bad``; a component beside it."""
    if response == "bad":
        raise RewardUnavailableError("the service is away")
    return RewardResult(float(len(response)), {"length": len(response)})


def flaky(response: str) -> float:
    """1, unless the response is one of a fifth for which it can't be had, whenever it is asked."""
    if zlib.crc32(response.encode()) % 5 == 0:
        raise RewardUnavailableError("away for a fifth of the responses")
    return 1.0


def away_for_two(response: str, answer: str) -> float:
    if answer == "2":
        raise ConnectionRefusedError("nobody listens")
    return float(response == answer)


def variables_seen(response: str) -> RewardResult:
    """Of the variables that the response names, which are set here: in Python, and in a program that this starts."""
    names = response.split()
    here = [name for name in names if name in os.environ]
    done = subprocess.run(["env"], capture_output=True, text=True, check=True)
    there = [name for name in names if f"\n{name}=" in f"\n{done.stdout}"]
    return RewardResult(0.0, reason=json.dumps([here, there]))


def key_on_request(response: str) -> float:
    """Of the variable that the response names."""
    return float(len(os.environ[response]))


def key_named_in_an_error(response: str) -> float:
    """Raise an error that names the variable in the response."""
    raise LookupError(f"the service refuses {response}")


class VariablesSeen:
    """As ``variables_seen``, with a key that its options name."""

    def __init__(self, api_key_variable: str) -> None:
        self._variable = api_key_variable

    def __call__(self, response: str) -> RewardResult:
        return variables_seen(response)


class FailingToStart:
    """Its constructor raises what no constructor should."""

    def __init__(self) -> None:
        raise KeyError("planted")

    def __call__(self, response: str) -> float:
        return 0.0


def last_line(response: str, answer: str) -> float:
    """Fails on an empty response, which has no line."""
    return float(response.splitlines()[-1] == answer)


def boxed(response: str) -> float:
    """Fails on a formula that is not closed, as a truncated response has one."""
    return float(response.partition("{")[2].index("}")) if "{" in response else 0.0


def short_only(response: str) -> float:
    """Refuses a long response."""
    if len(response) > 200:
        raise ValueError("too long for this reward")
    return 0.0
