"""``megatron-dppo watch``: its answers about a run's folder over HTTP, and the page in a real browser.

The browser's test needs Chromium (Debian: chromium-headless-shell, which ``.ci/run`` installs). Without Chromium, the
test is skipped, or fails if ``CI`` is set.
"""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.diagnostics.pages import render_page
from megatron_dppo.diagnostics.watch import WatchServer, main, thinned
from megatron_dppo.fleet.record import FleetRecord, Server
from megatron_dppo.metrics.records import (
    ENVIRONMENT_FAULTS_FILE,
    MASKED_TOKENS_FILE,
    SAMPLES_FILE,
    MetricsWriter,
    StepLines,
)
from megatron_dppo.metrics.samples import Sample
from megatron_dppo.metrics.table import METRICS
from tests.browser import browser_tab
from tests.messages import mentions
from tests.unit.config_files import minimal

WARNED = "2026-11-23 20:00:00.000 [rank0] WARNING megatron_dppo.x: engine0 is suspended"
HOSTILE = "</script><img src=x onerror=document.title='taken'><b>5</b> " + "wide" * 60


def sample(step: int, reward: float, response: str = "5", **changes) -> dict:
    values: dict[str, Any] = {
        "step": step, "set": "training", "problem": 3, "sample": 1, "prompt": "2+3=", "response": response,
        "answer": "5", "reward": reward, "reason": "'5' is right", "truncated": False, "tokens": 7,
        "advantage": 0.5, "masked": 0,
    }  # fmt: skip
    return Sample(**(values | changes)).to_json()


def record(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.25 + step / 64, "evaluation/sums/accuracy": 0.5, "policy/entropy": 1.5,
        "rollout/truncated": 0.5, "time/generate_s": 3.0, "time/train_s": 1.0 + step % 3,
    }  # fmt: skip


def write_run(folder: Path, steps: int) -> MetricsWriter:
    """Write a run's folder with the run's own writers, and a hostile response. Returns the writer of the metrics."""
    config = TrainConfig.model_validate(minimal(folder))
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(resolved_yaml(config))
    (folder / "logs" / "rank0.log").write_text(f"{WARNED}\n")
    fleet = FleetRecord(folder)
    fleet.publish(Server("engine0", "http://127.0.0.1:30000", 1))
    fleet.publish_status(4, {"engine0": "serving"})
    fleet.begin_ranks(3)
    writer = MetricsWriter(folder)
    for step in range(steps):
        writer.write(step, record(step))
    samples = [
        sample(1, 1.0),
        sample(2, 0.0, HOSTILE),
        sample(2, 1.0, masked=2),
        sample(2, 0.0, set="sums", truncated=True),
    ]
    StepLines(folder / SAMPLES_FILE, 0).write(samples)
    token = {"id": 7, "raised": 1, "lowered": 2, "text": HOSTILE[:40]}
    masked = [{"step": step, "tokens": [token]} for step in (1, 2)]
    StepLines(folder / MASKED_TOKENS_FILE, 0).write(masked)
    faults = [{"step": step, "environment": "games", "faults": {HOSTILE: step}} for step in (1, 2)]
    StepLines(folder / ENVIRONMENT_FAULTS_FILE, 0).write(faults)
    return writer


@contextmanager
def serve(folder: Path):
    """Serve the folder. Yields the page's address."""
    with WatchServer(folder, 0) as server:
        yield server.page


def get(url: str):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def refusal(url: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=30)
    return refused.value.code


# --- the answers


def test_what_is_told_of_a_run(tmp_path):
    write_run(tmp_path, 5)
    with serve(tmp_path) as url:
        state = get(f"{url}state")
        assert (state["step"], state["steps"]) == (4, 10)
        assert state["title"] == "dppo-binary-tv | 1 rank, bf16 | model | seed 1"
        assert state["phases"]["steps"] == [1, 2, 3, 4]
        seconds = {"generate": [3.0] * 4, "train": [2.0, 3.0, 1.0, 2.0]}
        assert state["phases"]["seconds"] == seconds
        assert state["masked"] == [[HOSTILE[:40], 7, 2, 4]]
        assert state["fleet"]["version"] == 4
        server, ranks = state["fleet"]["servers"]
        assert server == ["engine0", "http://127.0.0.1:30000", "serving"]
        assert ranks[0] == "ranks"
        assert "start 3" in ranks[2]
        assert state["lines"] == [WARNED]
        assert state["faults"] == [["games", 3, HOSTILE]]
        ((step, finding, _),) = state["unusual"]
        assert step == 4
        assert mentions(finding, "50%", "10%")
        meanings = dict(state["names"])
        assert meanings["reward/mean"] == "mean reward of all generated groups"
        assert state["axes"] == {"rollout/truncated": [0, 1], "evaluation/sums/accuracy": [0, 1]}
        assert state["bounds"] == {"rollout/truncated": METRICS["rollout/truncated"].normal.high}
        # The normal range ends below 1%, so the axis ends at 1%.
        assert METRICS["mask/masked_positive"].axis() == (0, 0.01)
        curves = get(f"{url}curves?name=time/train_s&name=no/such")
        assert curves == {"time/train_s": [[0, 1, 2, 3, 4], [1, 2, 3, 1, 2]], "no/such": [[], []]}


def test_the_gap_of_a_run_with_fp8_servers_has_its_own_normal_range(tmp_path):
    config = minimal(tmp_path)
    bounds = {}
    for dtype, engine in (("bfloat16", {}), ("fp8", {"quantization": "fp8"})):
        folder = tmp_path / dtype
        folder.mkdir()
        own = {**config, "engine": {**config.get("engine", {}), **engine}}
        (folder / "config.yaml").write_text(resolved_yaml(TrainConfig.model_validate(own)))
        gap = {"mismatch/mean_abs_prob_gap": 0.01, "policy/abs_prob_gap": 0.03}
        MetricsWriter(folder).write(1, gap)
        with serve(folder) as url:
            state = get(f"{url}state")
        bounds[dtype] = state["bounds"]
        assert len(state["unusual"]) == (2 if dtype == "bfloat16" else 0)
    assert bounds["bfloat16"] == {"mismatch/mean_abs_prob_gap": 0.005, "policy/abs_prob_gap": 0.02}
    assert bounds["fp8"] == {"mismatch/mean_abs_prob_gap": 0.025, "policy/abs_prob_gap": 0.045}


@pytest.mark.parametrize(
    ("query", "rewards"),
    [
        ("", [0.0, 1.0, 0.0, 1.0]),
        ("?kind=right", [1.0, 1.0]),
        ("?kind=wrong&set=training", [0.0]),
        ("?kind=truncated", [0.0]),
        ("?kind=masked", [1.0]),
        ("?set=sums", [0.0]),
        ("?kind=../../etc", [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_samples_by_kind_and_set(tmp_path, query, rewards):
    write_run(tmp_path, 1)
    with serve(tmp_path) as url:
        answer = get(f"{url}samples{query}")
    assert answer["sets"] == ["sums", "training"]
    assert [float(s["right"]) for s in answer["samples"]] == rewards


def test_nothing_new_is_told_as_such_and_a_new_step_is_seen(tmp_path):
    writer = write_run(tmp_path, 2)
    with serve(tmp_path) as url:
        version = get(f"{url}state")["version"]
        assert get(f"{url}state?version={version}") == {"unchanged": True}
        writer.write(2, record(2))
        assert get(f"{url}state?version={version}")["step"] == 2


def test_an_end_that_changes_no_file_is_seen(tmp_path, monkeypatch):
    write_run(tmp_path, 2)
    monkeypatch.setattr("megatron_dppo.diagnostics.watch._STATE_S", 0.0)
    states = ["runs as process 1"]
    monkeypatch.setattr("megatron_dppo.diagnostics.watch.RunView._state", lambda _: states[0])
    with serve(tmp_path) as url:
        version = get(f"{url}state")["version"]
        assert get(f"{url}state?version={version}") == {"unchanged": True}
        states[0] = "ended: vanished"
        assert get(f"{url}state?version={version}")["state"] == "ended: vanished"


def test_a_folder_that_is_not_there_yet_is_waited_for(tmp_path):
    with serve(tmp_path / "later") as url:
        state = get(f"{url}state")
        assert state["state"] == "waiting: this folder does not exist yet"
        assert (state["step"], state["names"], state["lines"]) == (None, [], [])
        assert get(f"{url}samples") == {"sets": [], "samples": []}
        assert not (tmp_path / "later").exists()
        (tmp_path / "later").mkdir()
        assert "no start of a run is noted" in get(f"{url}state")["state"]


def test_damage_is_told_and_serving_goes_on(tmp_path):
    write_run(tmp_path, 2)
    whole = (tmp_path / "metrics.jsonl").read_text()
    with serve(tmp_path) as url:
        (tmp_path / "metrics.jsonl").write_text("{\n" + whole)
        assert "metrics.jsonl, line 1: not JSON" in get(f"{url}state")["error"]
        (tmp_path / "metrics.jsonl").write_text(whole)
        assert get(f"{url}state")["step"] == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "tokens": 5}',
        '{"step": 1, "tokens": [5]}',
        '{"step": 1, "tokens": [{"id": [], "raised": 1, "lowered": 1, "text": ""}]}',
        '{"step": 1, "tokens": [{"id": 7, "raised": "1", "lowered": 1, "text": ""}]}',
        '{"step": 1}',
        "[" * 100_000,
        "5",
    ],
    ids=lambda line: line[:60],
)
def test_masked_tokens_of_another_type_are_told_and_serving_goes_on(tmp_path, line):
    write_run(tmp_path, 2)
    path = tmp_path / MASKED_TOKENS_FILE
    whole = path.read_text()
    with serve(tmp_path) as url:
        path.write_text(line + "\n")
        assert MASKED_TOKENS_FILE in get(f"{url}state")["error"]
        path.write_text(whole)
        assert get(f"{url}state")["step"] == 1


@pytest.mark.parametrize("target", ["http://[/", "//[/state", "http://[::1/state?x[=1"])
def test_an_address_that_is_none_is_refused(tmp_path, target):
    write_run(tmp_path, 1)
    with serve(tmp_path) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
            connection.sendall(f"GET {target} HTTP/1.0\r\n\r\n".encode())
            answer = connection.makefile("rb").read()
            assert answer.split()[1] in (b"400", b"404")
            assert b"Traceback" not in answer


def test_only_the_routes_under_the_key_are_answered(tmp_path):
    write_run(tmp_path, 1)
    with serve(tmp_path) as url:
        base = url.rsplit("/", 2)[0]
        assert base.startswith("http://127.0.0.1:")
        guessed = "/aaaaaaaaaaaaaaaaaaaaaa/"
        wrong = ["/", "/state", guessed, f"{guessed}state", "//etc/passwd"]
        assert {refusal(base + path) for path in wrong} == {404}
        inside = ["config.yaml", "../config.yaml", "..%2fconfig.yaml", "state/x", "nothing"]
        assert {refusal(url + path) for path in inside} == {404}


def test_two_servers_have_two_keys(tmp_path):
    with serve(tmp_path) as one, serve(tmp_path) as other:
        assert one.split("/")[3] != other.split("/")[3]
        assert len(one.split("/")[3]) >= 20


@pytest.mark.parametrize("count", [2, 9, 10, 11, 57])
def test_a_long_curve_keeps_its_ends_and_its_extremes(count):
    values = [float(i % 7) for i in range(count)]
    values[count // 2], values[count // 3] = 100.0, -100.0
    steps, kept = thinned(list(range(count)), values, max_points=10)
    assert len(steps) <= 10
    assert (steps[0], steps[-1]) == (0, count - 1)
    assert steps == sorted(set(steps))
    assert {max(values), min(values)} <= set(kept)
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    with serve(tmp_path) as url, pytest.raises(SystemExit):
        main([str(tmp_path), "--port", url.split(":")[2].split("/")[0]])
    assert mentions(capsys.readouterr().err, os.strerror(errno.EADDRINUSE), "--port 0")


def test_the_command_serves_until_ctrl_c(tmp_path):
    write_run(tmp_path, 2)
    command = [sys.executable, "-m", "megatron_dppo", "watch", str(tmp_path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert get(line.split()[2] + "state")["step"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


# --- the page

WIDEST = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("body *")].filter(e => e.checkVisibility()
    && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e =>
    parseFloat(getComputedStyle(e).fontSize) * (e.tagName === "text"
    ? e.ownerSVGElement.getBoundingClientRect().width / e.ownerSVGElement.viewBox.baseVal.width : 1)))"""


LEFTMOST_LABEL = """() => {
    const card = curve("reward/mean", "", [1, 2], [-0.001234, 0.004494]);
    document.body.append(card);
    const left = Math.min(...[...card.querySelectorAll("svg text")].map(t => t.getBBox().x));
    card.remove();
    return left;
}"""
"""The position of the leftmost label of a curve with the widest numbers."""


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_page_in_a_browser(tmp_path, width, height):
    folder = tmp_path / "run"

    async def look(url: str) -> None:
        async with browser_tab(tmp_path / "browser") as tab:
            await tab.open(url, width, height)
            await tab.until("document.body.innerText.includes('this folder does not exist yet')")
            folder.mkdir()
            writer = write_run(folder, 12)
            await tab.until("document.querySelector('#step').textContent === 'step 11 of 10'")
            await tab.until("document.querySelectorAll('.sample').length === 4")
            assert await tab.ask("document.querySelectorAll('#curves svg path').length") == 4
            assert await tab.ask("document.querySelectorAll('#phases rect').length") == 22
            text_of_page = await tab.ask("document.body.innerText")
            for text in (
                "engine0",
                "serving",
                "truncated responses 50%",
                "is suspended",
                "train: ",
            ):
                assert text in text_of_page
            # No HTML of a response or of an environment's fault became part of the page.
            inserted = "document.querySelectorAll('#samples img, #samples b, #faults img, #faults b').length"
            assert await tab.ask(inserted) == 0
            assert HOSTILE in await tab.ask("document.querySelector('#faults').textContent")
            assert HOSTILE in await tab.ask("document.querySelector('#samples').textContent")
            assert "taken" not in await tab.ask("document.title")
            assert text_of_page.count("normal: at most 0.1") == 1
            assert await tab.ask("document.querySelectorAll('#curves [data-bound]').length") == 1
            # The page fits the window and can be read.
            assert await tab.ask(WIDEST) <= width
            assert await tab.ask(SMALLEST_TEXT) >= 10
            assert await tab.ask(f"({LEFTMOST_LABEL})()") >= 0
            assert await tab.ask("ends([0, 1], [0, 0])") == [0, 1]
            assert await tab.ask("ends([0, 0.01], [0.02, 0.03])") == [0, 0.03]
            assert await tab.ask("ends(undefined, [2, 4])") == [2, 4]
            await tab.picture(tmp_path / "page.png")
            # Choose a kind of samples and a metric, and write a step while the page is open.
            await tab.ask(
                "at('kind').value = 'masked', at('kind').dispatchEvent(new Event('change')), 0"
            )
            await tab.until("document.querySelectorAll('.sample').length === 1")
            await tab.ask(
                "at('find').value = 'time/train', at('find').dispatchEvent(new Event('input')), 0"
            )
            await tab.ask("document.querySelector('#choice input').click()")
            await tab.until("document.querySelectorAll('#curves svg path').length === 5")
            writer.write(12, record(12))
            await tab.until("document.querySelector('#step').textContent === 'step 12 of 10'")
            assert tab.errors == []

    with serve(folder) as url:
        asyncio.run(look(url))
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(p.info["cmdline"])]
    assert left == []


def test_the_page_loads_nothing_from_elsewhere():
    text = render_page("watch.html", nonce="x").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text.replace("https", "http")
    assert "innerHTML" not in text
