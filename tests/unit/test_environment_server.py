"""Environments of GEM, verifiers and OpenEnv: ``tools/serve_environment.py`` serves them from a process with other
packages, and the workers of ``environment.name: over-http`` send requests to it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from megatron_dppo.data.trajectory import Problem
from megatron_dppo.environments import Environment, EnvironmentFaultError, Step, Turn
from megatron_dppo.environments.over_http import OverHttp
from megatron_dppo.environments.workers import EnvironmentPool, EnvironmentSpec
from tests.extras import LACKS_REASONING_GYM, extra_packages, python_of
from tests.ranks import ROOT

KEY, VARIABLE = "5c0ffee5-games", "MEGATRON_DPPO_TEST_GAMES_KEY"


@contextmanager
def serve(python: str | Path, path: Path, *words: str) -> Iterator[str]:
    """Start a server with the interpreter ``python``, and with ``path`` for further modules. Yields its address."""
    command = [str(python), str(ROOT / "tools" / "serve_environment.py"), *words, "--port", "0"]
    variables = {"PYTHONPATH": str(path), "SERVE_ENVIRONMENT_KEY": KEY}
    with subprocess.Popen(
        command, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@contextmanager
def serve_gem(game: str) -> Iterator[str]:
    """Start a server of a game of GEM, which imports reasoning-gym. Yields its address."""
    if LACKS_REASONING_GYM:
        pytest.skip("reasoning-gym is not installed: make setup said why")
    with serve(sys.executable, extra_packages("gem"), "gem", game) as url:
        yield url


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_gem("game:GuessTheNumber-v0-easy") as url:
        yield url


@pytest.fixture(scope="module")
def sudoku_url() -> Iterator[str]:
    with serve_gem("game:Sudoku-v0-easy") as url:
        yield url


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def run_episodes(
    url: str, play: Callable[[list[Environment]], Awaitable[None]], **options: str
) -> None:
    """Run ``play`` with two open episodes of one worker."""
    spec = EnvironmentSpec("over-http", {"url": url, "api_key_variable": VARIABLE, **options}, 60.0)

    async def work() -> None:
        pool = EnvironmentPool(spec, workers=1)
        try:
            await play([await pool.open(), await pool.open()])
        finally:
            pool.close()

    asyncio.run(work())


def guess(number: int) -> Turn:
    return Turn(f"I say \\boxed{{{number}}}.", (1,))


def problem(seed: int, prompt: str = "Play.") -> Problem:
    return Problem(7, prompt, "", (1, 2), metadata={"seed": seed})


def test_a_game_is_played_to_its_end_and_begins_alike_for_the_same_problem(url):
    async def play(episodes: list[Environment]) -> None:
        one, other = episodes
        for episode in episodes:
            text = str(await episode.reset(problem(11)))
            assert text.startswith("You are playing Guess The Number.")
            assert "between 1 and 10 (inclusive) within 4 turns" in text
        # Four turns suffice to find one of ten numbers by halving.
        low, high, rewards = 1, 10, []
        while True:
            middle = (low + high) // 2
            step = await one.step(guess(middle))
            if step.done:
                break
            rewards.append(step.reward)
            if f"is higher than {middle}." in str(step.observation):
                low = middle + 1
            else:
                assert f"is lower than {middle}." in str(step.observation)
                high = middle - 1
        assert set(rewards) <= {0.0}
        assert not step.is_scored
        won = await other.step(guess(middle))
        assert won == Step(won.observation, 1.0, done=True)
        assert (
            won.observation
            == f"Congratulations! You guessed the correct number {middle} in 1 turns."
        )
        for episode in episodes:
            await episode.close()

    run_episodes(url, play)


def test_what_is_no_guess_costs_something(url):
    async def play(episodes: list[Environment]) -> None:
        await episodes[0].reset(problem(3))
        step = await episodes[0].step(Turn("five", (1,)))
        assert step == Step("At turn 1, you did not provide a valid guess.", -0.1, done=True)

    run_episodes(url, play)


BOARD_ROW = re.compile(r"^R\d (.*)$", re.MULTILINE)


def board_of(observation: str) -> list[list[str]]:
    """The cells of the board that an observation of Sudoku shows, by row; an empty cell is a dot."""
    return [row.replace("|", "").split() for row in BOARD_ROW.findall(observation)]


def solution_of(board: list[list[str]]) -> list[list[str]]:
    """The one solution of a board of 4 x 4 cells, found by trying numbers cell by cell; empty if there is none."""
    empty = [(i, j) for i in range(4) for j in range(4) if board[i][j] == "."]
    if not empty:
        return board
    i, j = empty[0]
    rows = range(2 * (i // 2), 2 * (i // 2) + 2)
    columns = range(2 * (j // 2), 2 * (j // 2) + 2)
    taken = {*board[i], *(row[j] for row in board), *(board[k][m] for k in rows for m in columns)}
    for number in {"1", "2", "3", "4"} - taken:
        filled = [list(row) for row in board]
        filled[i][j] = number
        solved = solution_of(filled)
        if solved:
            return solved
    return []


def test_a_sudoku_is_solved_from_the_boards_that_observations_show(sudoku_url):
    """The paper's Sudoku, Appendix F.5. GEM shows its board only in the ``suffix`` of an observation."""

    async def play(episodes: list[Environment]) -> None:
        one, other = episodes
        text = str(await one.reset(problem(5)))
        board = board_of(text)
        solution = solution_of(board)
        moves = [(i, j) for i in range(4) for j in range(4) if board[i][j] == "."]
        assert len(moves) > 2
        for i, j in moves:
            move = rf"I take \boxed{{{i + 1} {j + 1} {solution[i][j]}}}."
            step = await one.step(Turn(move, (1,)))
            assert step.reward == pytest.approx(1 / len(moves))
            assert step.done == ((i, j) == moves[-1])
            if not step.done:
                assert board_of(str(step.observation))[i][j] == solution[i][j]
        # The same seed shows the same puzzle. A turn without a move ends the episode.
        assert await other.reset(problem(5)) == text
        step = await other.step(Turn("no move", (1,)))
        assert step == Step("You did not provide a valid guess.", -0.1, done=True)
        for episode in episodes:
            await episode.close()

    run_episodes(sudoku_url, play)


@pytest.mark.parametrize(
    ("path", "key", "message"),
    [
        ("", "other", r"reset: ValueError: .*/reset: status 401: .*the key as a bearer token"),
        ("/games", KEY, r"reset: ValueError: .*/games/reset: status 404: .*expected one of /reset"),
    ],
)
def test_what_the_server_refuses_is_a_fault(url, path, key, message, monkeypatch):
    monkeypatch.setenv(VARIABLE, key)

    async def play(episodes: list[Environment]) -> None:
        with pytest.raises(EnvironmentFaultError, match=message):
            await episodes[0].reset(problem(3))

    run_episodes(url + path, play)


def test_what_the_game_raises_and_a_server_that_is_away_are_faults(url):
    async def play(episodes: list[Environment]) -> None:
        with pytest.raises(
            EnvironmentFaultError, match=r"status 500: .*ValueError: invalid literal"
        ):
            await episodes[0].reset(Problem(7, "Play.", "", (1,), metadata={"seed": "x"}))

    run_episodes(url, play)

    async def reset_without_server(episodes: list[Environment]) -> None:
        with pytest.raises(EnvironmentFaultError, match=r"Cannot connect to host 127\.0\.0\.1:9"):
            await episodes[0].reset(problem(3))

    run_episodes("http://127.0.0.1:9", reset_without_server)


def test_an_address_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"url: got 'games:1', expected http://host:port"):
        OverHttp("games:1")


# --- verifiers and OpenEnv, each in a Python environment of its own

HERE = Path(__file__).parent


def serve_openenv(name: str, **options: str) -> AbstractContextManager[str]:
    """Serve the environment ``name`` of ``planted_openenv``."""
    words = ("openenv", f"planted_openenv:{name}", "--action", "planted_openenv:GuessAction")
    return serve(python_of("openenv"), HERE, *words, "--options", json.dumps(options))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rollout_of_verifiers_is_played_turn_by_turn():
    async def play(episodes: list[Environment]) -> None:
        one, other = episodes
        # The environment's row has the prompt of the problem, so the observation is empty.
        assert await one.reset(problem(3, "3+1")) == ""
        # Here the row has another prompt than the problem, so the row's prompt is the observation.
        assert await other.reset(problem(3)) == "3+1"
        assert await one.step(Turn("7", (1,))) == Step("No, not 7.")
        assert await other.step(Turn("5", (1,))) == Step("No, not 5.")
        # The rubric's score is the last turn's reward, and turns end by verifiers' own rules.
        assert await one.step(Turn("4", (1,))) == Step(reward=1.0, done=True)
        assert await other.step(Turn("6", (1,))) == Step(reward=0.0, done=True)
        for episode in episodes:
            await episode.close()

    async def close_early(episodes: list[Environment]) -> None:
        assert await episodes[0].reset(problem(0, "0+1")) == ""
        await episodes[0].close()
        with pytest.raises(EnvironmentFaultError, match="IndexError"):
            await episodes[1].reset(problem(5))

    words = ("verifiers", "planted-verifiers", "--options", '{"max_turns": 2}')
    with serve(python_of("verifiers"), HERE, *words) as url:
        run_episodes(url, play)
        run_episodes(url, close_early)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_environment_of_openenv_is_played_and_closed(tmp_path):
    closed = tmp_path / "closed"
    number = random.Random(3).randint(1, 10)

    async def play(episodes: list[Environment]) -> None:
        one, broken = episodes
        assert await one.reset(problem(3)) == "Guess, from 1 to 10."
        assert await one.step(Turn("1", (1,))) == Step("It is higher.", reward=-0.25)
        with pytest.raises(EnvironmentFaultError, match="ValueError: invalid literal for int"):
            await one.step(Turn("one", (1,)))
        assert await one.step(Turn(str(number), (1,))) == Step("Right.", reward=1.0, done=True)
        assert not closed.exists()
        # An episode whose reset failed has no name for the client, so the server closes it.
        with pytest.raises(EnvironmentFaultError, match="RuntimeError: planted"):
            await broken.reset(problem(0))
        assert closed.read_text() == "closed\n"
        await one.close()
        while closed.read_text() != "closed\n" * 2:
            await asyncio.sleep(0.02)

    with serve_openenv("Guess", closed=str(closed)) as url:
        run_episodes(url, play)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_reset_without_a_seed_and_an_observation_without_the_field():
    async def play(episodes: list[Environment]) -> None:
        first = json.loads(str(await episodes[0].reset(problem(3))))
        assert first == {"text": "Guess, from 1 to 10.", "guesses": 0}
        step = await episodes[0].step(Turn("1", (1,)))
        assert json.loads(str(step.observation)) == {"text": "It is higher.", "guesses": 1}

    with serve_openenv("Seedless") as url:
        run_episodes(url, play)
