"""Every field of a request with odd values: refused in one sentence, and no job is left."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.serve.jobs import PROMPT, Jobs
from wan.serve import fields
from wan.settings.flags import FLAGS

NAMES = sorted({*FLAGS, *fields.NAMES, *fields._OWN, *fields.UPLOADS, fields.FOLDER})
NEVER = {  # JSON -> what no field takes
    "null": "null",
    "object": '{"a": 1}',
    "empty object": "{}",
    "list of lists": "[[1]]",
    "list with null": "[null]",
    "deep": "[" * 50 + "]" * 50,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "above float64": "1e400",
    "digits": "9" * 5000,
    "1e308": "1e308",
    "-1e308": "-1e308",
    "10**30": str(10**30),
    "lone surrogate": '"\\ud800"',
    "long": json.dumps("x" * 100_000),
}
NO_NUMBER = ("nan", "inf", "-inf", "many", "", "1,,1", "9" * 5000, "\0")
TEXTS = ("prompt", "negative_prompt")


@pytest.mark.parametrize("name", NAMES)
def test_odd_values(name: str, tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")
    texts = {} if name in TEXTS else {text: json.dumps(text) for text in NO_NUMBER}

    async def ask() -> None:
        for what, value in (NEVER | texts).items():
            prompt = "" if name == "prompt" else f'"prompt": "{PROMPT}", '
            body = f'{{{prompt}"{name}": {value}}}'.encode()
            status, _, answer = await jobs.ask("/v1/videos", body)
            assert 400 <= status < 500, (what, status, answer)
            sentence = answer["error"]["message"]
            assert 0 < len(sentence) < 700 and "\n" not in sentence, (what, sentence)
        _, _, listed = await jobs.ask("/v1/videos")
        assert listed["data"] == []
        assert (await jobs.ask("/health"))[2]["queued"] == 0

    asyncio.run(asyncio.wait_for(ask(), 60))
