"""The files of examples/serve use only flags of the service."""

from __future__ import annotations

import re

import pytest

from tests.dist import REPO
from wan.serve import __main__ as command

FOLDER = REPO / "examples" / "serve"


def test_their_flags_are_those_of_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.run_service(["--help"])
    service_flags = set(re.findall(r"--\w+", capsys.readouterr().out))
    for name in ("kubernetes.yaml", "leader_worker_set.yaml", "ray_app.py", "Dockerfile.cuda"):
        text = (FOLDER / name).read_text().replace("--shm-size", "").replace("--gpus", "")
        service_part = re.split(r"(?m)^\s+- --$|-- --ckpt_dir|\"--\",", text)[0]
        example_flags = set(
            re.findall(r"(?<![\w-])--[a-z]\w+", service_part.split("pip install")[-1])
        )
        assert example_flags and example_flags <= service_flags, (
            name,
            example_flags - service_flags,
        )
