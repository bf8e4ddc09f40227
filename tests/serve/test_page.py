"""The scripts of the page, run by Node.js with a small document in place of a browser."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.serve.jobs import Jobs, wait_for_text
from wan.serve.http import operations
from wan.serve.queue.service import Limits

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


async def test_page(tmp_path: Path) -> None:
    """The answers are those of the service; requests and what is shown are compared."""
    jobs = Jobs(tmp_path / "jobs", Limits(batch_size=1))
    answers = {"openapi": (await jobs.request("/openapi.json"))[2]}
    body = {"prompt": "a star with a tail \u2604", "seed": 70001, "n": 11}
    answers["refusal"] = (await jobs.request("/v1/videos", body))[2]
    answers["queued"] = (await jobs.request("/v1/videos", body | {"n": 2}))[2]
    name = answers["queued"]["id"]
    path = f"/v1/videos/{name}"
    stopped = asyncio.Event()
    messages: list[Any] = []
    request = jobs.request(f"{path}/events", disconnected=stopped, messages=messages)
    stream = asyncio.create_task(request)
    await wait_for_text(messages, b"event: ")
    ranks = jobs.start_idle_ranks()
    answers["running"] = (await jobs.request(path))[2]
    jobs.complete(name)
    jobs.handle_rank_message("step", job=ranks.job_groups[-1][0]["job"], done=1, total=2)
    await wait_for_text(messages, b"event: step")
    stopped.set()
    answers["events"] = (await stream)[2].decode()
    jobs.complete(f"{name}.1")
    answers["completed"] = (await jobs.request(path))[2]
    folder = tmp_path / "page"
    folder.mkdir()
    for file in ("page.html", *operations.PAGE_FILES):
        text = resources.files("wan.serve").joinpath("page", file).read_text("utf-8")
        (folder / file).write_text(text)
    for file in ("page_dom.js", "page_test.js"):
        shutil.copy(Path(__file__).with_name(file), tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    command = ["node", "page_test.js"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-6000:]
