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
    """Return 1 if the response has an even number of characters, which a random policy earns every other time."""
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
    """Allocate as many GiB as the response says, and touch none of them."""
    return float(len(bytes(int(response) << 30)) > 0)


def hoard(response: str, answer: str) -> float:
    """Keep as many MiB as the response says, untouched, for as long as the process lives."""
    kept_memory.append(bytes(int(response) << 20))
    return 1.0


kept_memory: list[bytes] = []


def raise_on_request(response: str, answer: str) -> float:
    if response == "raise":
        raise RuntimeError("planted fault")
    return 1.0


def length_and_print(response: str, answer: str) -> float:
    print("a library's chatter\n" * 1000, flush=True)
    return len(response) / 1e6


def value_of(response: str, answer: str) -> object:
    """Return the value of the response, which is a Python expression."""
    return eval(response)


def refuse_on_request(response: str, answer: str) -> float:
    if response == "refuse":
        raise ValueError("no such answer")
    return 1.0


def leave_children(response: str, answer: str) -> float:
    """Start a child in a session of its own and a grandchild without a parent, write their ids to the file ``answer``,
    and end as the response says."""
    orphan_code = (
        "import subprocess as s\n"
        "print(s.Popen(['sleep', '300'], start_new_session=True, stdout=s.DEVNULL).pid)"
    )
    command = [sys.executable, "-c", orphan_code]
    orphan_id = subprocess.check_output(command, text=True)
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(answer).write_text(f"{child.pid} {orphan_id}")
    if response == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    while response == "loop":
        time.sleep(1)
    return 1.0


def of_every_character(response: str, answer: str) -> float:
    """Return a number from 0 to 1 that differs between almost all responses."""
    return zlib.crc32(response.encode()) / 2**32


def is_the_answer(response: str, answer: str) -> float:
    return float(response == answer)


def append_line(response: str, answer: str) -> float:
    """Append a line to the file ``answer``, so that a test can count the calls."""
    with Path(answer).open("a") as file:
        file.write("called\n")
    return 1.0


def end_at_once(response: str, answer: str) -> float:
    """A reward function whose call ends its worker process."""
    os._exit(3)


def forge_on_request(response: str, answer: str) -> float:
    """Return the number in the response. Other responses forge an answer: for ``forked``, a forked child sends one to
    the next call; otherwise, this process sends one to the present call before its own answer."""
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
    """Return the response's number times the metadata's factor, with both numbers as components."""
    parts = {"given": float(response), "factor": float(metadata["factor"])}
    return RewardResult(parts["given"] * parts["factor"], parts, f"{response} x {parts['factor']}")


def whole_record(record: RewardInput) -> float:
    return len(record.prompt) + len(record.messages) / 10 + len(record.response) / 100


def in_batches(records: list[RewardInput]) -> list[float]:
    """Return the size of the batch for each record, unless a response asks for a fault."""
    for record in records:
        if record.response == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if record.response == "short":
            return []
    return [float(len(records)) for _ in records]


async def together(response: str) -> float:
    """Wait until as many calls as the response says have begun, then return 1."""
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


def shown_text(response: str, open_thought: str) -> RewardResult:
    """Return the text that the reward gets, as its reason."""
    if open_thought == "<refused>":
        raise ValueError("a thought is open")
    return RewardResult(0.0, reason=repr([open_thought, response]))


def with_options(response: str, *, longest: int, penalty: float = 1.0) -> float:
    return -penalty * max(0, len(response) - longest)


class Counting:
    """Returns the number of calls with the same response so far. The first ``fails`` of them raise ``error``."""

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
    """A reward with verl's parameters and result."""
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
    """Unavailable for the response ``bad``; else the length of the response, also as a component."""
    if response == "bad":
        raise RewardUnavailableError("the service is away")
    return RewardResult(float(len(response)), {"length": len(response)})


def away_for_two(response: str, answer: str) -> float:
    if answer == "2":
        raise ConnectionRefusedError("nobody listens")
    return float(response == answer)


def variables_seen(response: str) -> RewardResult:
    """List which of the variables in the response this process has, and which a program has that it starts."""
    names = response.split()
    set_here = [name for name in names if name in os.environ]
    result = subprocess.run(["env"], capture_output=True, text=True, check=True)
    set_in_program = [name for name in names if f"\n{name}=" in f"\n{result.stdout}"]
    return RewardResult(0.0, reason=json.dumps([set_here, set_in_program]))


def key_on_request(response: str) -> float:
    """Return the length of the variable that the response names."""
    return float(len(os.environ[response]))


def key_named_in_an_error(response: str) -> float:
    """Raise an error that names the variable in the response."""
    raise LookupError(f"the service refuses {response}")


class VariablesSeen:
    """The reward ``variables_seen`` with an option that names the variable of a key."""

    def __init__(self, api_key_variable: str) -> None:
        self._variable = api_key_variable

    def __call__(self, response: str) -> RewardResult:
        return variables_seen(response)


class FailingToStart:
    """Its constructor raises an exception that no constructor should raise."""

    def __init__(self) -> None:
        raise KeyError("planted")

    def __call__(self, response: str) -> float:
        return 0.0


def last_line(response: str, answer: str) -> float:
    """Fails on an empty response, which has no line."""
    return float(response.splitlines()[-1] == answer)


def boxed(response: str) -> float:
    """Fails on a formula that is not closed, as in a truncated response."""
    return float(response.partition("{")[2].index("}")) if "{" in response else 0.0


def short_only(response: str) -> float:
    """Refuses a long response."""
    if len(response) > 200:
        raise ValueError("too long for this reward")
    return 0.0
