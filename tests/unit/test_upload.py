"""``convert upload`` and ``checkpoint.upload``: the real huggingface_hub client against a local server with the hub's
routes for small files.

The tests never connect to huggingface.co, and do not cover its storage of large files.
"""

import base64
import json
import os
import sys

import pytest
from huggingface_hub import constants

from megatron_dppo.checkpoint_conversion.uploading import export_files
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.convert.__main__ import main
from megatron_dppo.launch.library_checks import check_everything
from tests.messages import mentions
from tests.patience import run_patiently
from tests.tiny_models import save_tiny_model
from tests.unit.config_files import minimal, write_config
from tests.unit.small_hub import small_hub

pytestmark = pytest.mark.second


@pytest.fixture
def hub():
    with small_hub() as hub:
        yield hub


@pytest.fixture
def export(tmp_path):
    folder = tmp_path / "sums" / "hf"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder.parent / "metrics.jsonl").write_text("not of the export")
    return folder


def upload(folder, endpoint, *words):
    command = ["-m", "megatron_dppo", "convert", "upload", "--hf", str(folder), *words]
    return run_python(endpoint, *command)


def run_python(endpoint, *words):
    """Run Python in a child process, because the library reads the hub's address while it is imported."""
    variables = {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    return run_patiently([sys.executable, *words], 120, env={**os.environ, **variables})


@pytest.mark.parametrize(("words", "visibility"), [((), "private"), (("--public",), "public")])
def test_an_export_is_one_commit_of_its_own_files(hub, export, words, visibility):
    result = upload(export, hub.url, "--repo", "me/sums", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"{export}: {hub.url}/me/sums/commit/abc"
    (create,) = [json.loads(body) for path, body in hub.asked if path.endswith("/create")]
    assert (create["organization"], create["name"]) == ("me", "sums")
    assert create["visibility"] == visibility
    ((path, body),) = [(p, b) for p, b in hub.asked if "/commit/" in p]
    assert path == "/api/models/me/sums/commit/main"
    lines = [json.loads(line) for line in body.splitlines()]
    files = [line["value"] for line in lines if line["key"] == "file"]
    sent = {file["path"]: base64.b64decode(file["content"]) for file in files}
    assert sent == {"config.json": b"{}", "model.safetensors": b"weights"}
    assert lines[0]["value"]["summary"] == "Export of sums"


def test_what_is_no_file_of_the_model_stays_and_is_named(hub, export):
    model_files = ("tokenizer.json", "chat_template.jinja", "README.md", "model[1].safetensors")
    other_files = (
        ".env",
        "notes.txt",
        "optimizer.pt",
        "logs/rank0.log",
        "checkpoint/model.safetensors",
    )
    for name in (*model_files, *other_files):
        (export / name).parent.mkdir(exist_ok=True)
        (export / name).write_text("x")
    result = upload(export, hub.url, "--repo", "me/sums")
    assert result.returncode == 0, result.stderr
    (body,) = [b for p, b in hub.asked if "/commit/" in p]
    files = [json.loads(line)["value"] for line in body.splitlines()]
    sent = {file["path"] for file in files if "path" in file}
    assert sent == {"config.json", "model.safetensors", *model_files}
    for name in (".env", "notes.txt", "optimizer.pt", "logs", "checkpoint"):
        assert name in result.stderr


def test_what_a_certificate_lists_is_a_part_of_the_model(tmp_path):
    converted = tmp_path / "made"
    save_tiny_model(tmp_path / "hf", "qwen3")
    (tmp_path / "hf" / "remark.txt").write_text("beside the weights")
    assert main(["hf-to-megatron", "--hf", str(tmp_path / "hf"), "--out", str(converted)]) == 0
    back = tmp_path / "back"
    assert main(["megatron-to-hf", "--megatron", str(converted), "--out", str(back)]) == 0
    (back / "later.txt").write_text("not of the conversion")
    sent, left = export_files(back)
    assert left == ["later.txt"]
    assert "remark.txt" in sent
    assert {"config.json", "conversion.json", "model.safetensors"} <= set(sent)


@pytest.mark.parametrize(("words", "is_public"), [((), True), ((), False), (("--public",), True)])
def test_a_repository_that_is_public_unasked_is_told(hub, export, words, is_public):
    hub.is_public = is_public
    result = upload(export, hub.url, "--repo", "me/sums", *words)
    assert result.returncode == 0, result.stderr
    assert ("me/sums was public before" in result.stderr) == (is_public and not words)


def test_nobody_who_answers_is_an_error_in_a_line(export):
    result = upload(export, "http://127.0.0.1:9", "--repo", "me/sums")
    assert result.returncode == 2
    line = result.stderr.splitlines()[-1]
    assert line.startswith(f"error: {export} is not sent to me/sums: ")
    assert "Traceback" not in result.stderr


UPLOAD_AFTER_RUN = """
import logging, sys
from megatron_dppo.trainer.run_export import upload_export
logging.basicConfig(format="%(levelname)s %(message)s", level="INFO", stream=sys.stdout)
logging.getLogger("httpx").setLevel("ERROR")
upload_export(sys.argv[1], "me/sums", 7)
"""


def test_a_finished_run_sends_its_export_and_a_failure_is_no_error(hub, export):
    run = str(export.parent)
    result = run_python(hub.url, "-c", UPLOAD_AFTER_RUN, run)
    assert result.returncode == 0, result.stderr
    assert f"INFO {export} is sent: {hub.url}/me/sums/commit/abc" in result.stdout.splitlines()
    (create,) = [json.loads(body) for path, body in hub.asked if path.endswith("/create")]
    assert create["visibility"] == "private"
    note = export.parent / "upload.json"
    assert json.loads(note.read_text()) == {"repository": "me/sums", "steps": 7}
    note.unlink()
    result = run_python("http://127.0.0.1:9", "-c", UPLOAD_AFTER_RUN, run)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("WARNING")]
    assert line.startswith(f"WARNING {export} is not sent to me/sums: ")
    command = f"megatron-dppo convert upload --hf {export} --repo me/sums"
    assert line.endswith(f"; the run itself is finished. This repeats it: {command}")
    assert note.is_file()


def test_a_start_without_a_token_is_refused(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    overrides = ["checkpoint.upload=me/sums", "engine.urls=['http://127.0.0.1:1']"]
    config = load_config(write_config(tmp_path, minimal(tmp_path)), overrides)
    with pytest.raises(ConfigError) as caught:
        check_everything(config, "config", weights=False)
    (fault,) = caught.value.faults
    assert mentions(fault, "checkpoint.upload", "'me/sums'", "huggingface.co", "HF_TOKEN")
    (tmp_path / "token").write_text("hf_x")
    assert check_everything(config, "config", weights=False)


def test_a_package_that_is_not_there_is_a_line_that_says_how_to_get_it(export, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["upload", "--hf", str(export), "--repo", "me/sums"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("'megatron-dppo[hub]'")


def test_a_folder_that_is_no_export_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["upload", "--hf", str(tmp_path), "--repo", "me/sums"]) == 2
    assert mentions(capsys.readouterr().err, tmp_path, "config.json", "*.safetensors")
