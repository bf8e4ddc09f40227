"""infer_t2v.sh and infer_i2v.sh: refused values and forwarded arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dist import REPO
from wan.media import images
from wan.settings.attention_modes import MODES

SCRIPTS = ("infer_t2v.sh", "infer_i2v.sh")


@pytest.fixture
def call(tmp_path: Path):
    """call(script, *arguments, **environment): runs a copy whose torchrun prints its arguments."""
    for name in (*SCRIPTS, "tools/infer.sh", "examples/star.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    fake = tmp_path / "bin" / "torchrun"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; env | grep -E "OMP|NPU|TASK_Q"; true\n')
    fake.chmod(0o755)

    def run(script: str, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
        path = f"{fake.parent}:{os.environ['PATH']}"
        result = subprocess.run(
            ["bash", str(tmp_path / script), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            env={"PATH": path, **environment},
        )
        return result.returncode, result.stdout.splitlines(), result.stderr

    return run


def get_flag_value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_comm_type_is_checked_and_forwarded(script: str, call) -> None:
    *some, last = map(str, MODES)
    for value in ("99", "-1", "one", "01", " "):
        code, out, error = call(script, COMM_TYPE=value)
        assert (code, out, error) == (1, [], f"COMM_TYPE must be {', '.join(some)}, or {last}\n")
    for value in (*map(str, MODES), None):
        code, argv, _ = call(script, **({} if value is None else {"COMM_TYPE": value}))
        assert code == 0 and get_flag_value(argv, "--comm_type") == (value or "0")
        assert get_flag_value(argv, "--task") == ("t2v-14B" if "t2v" in script else "i2v-14B")
        assert "--nproc_per_node=8" in argv and get_flag_value(argv, "--ulysses_size") == "8"
        assert "OMP_NUM_THREADS=1" in argv
        patterns = ("davinci[0-9]*", "nvidia[0-9]*", "kfd")  # drivers that do not support forks
        has_accelerators = any(path for name in patterns for path in Path("/dev").glob(name))
        assert ("--start_method=fork" in argv) != has_accelerators


def test_ranks_and_sizes(call) -> None:
    _, argv, _ = call("infer_t2v.sh", NPROC_PER_NODE="4")
    assert "--nproc_per_node=4" in argv and get_flag_value(argv, "--ulysses_size") == "4"
    _, argv, _ = call("infer_t2v.sh", "--ulysses_size", "2", "--ring_size=4")
    assert argv.count("--ulysses_size") == 1 and get_flag_value(argv, "--ulysses_size") == "2"
    _, argv, _ = call("infer_t2v.sh", "--cfg_size", "2")
    assert "--ulysses_size" not in argv  # generate.py chooses what fits
    code, _, error = call("infer_t2v.sh", NPROC_PER_NODE="many")
    assert code == 1 and "NPROC_PER_NODE is 'many'" in error and error.count("\n") == 1


def test_arguments_pass_through_unchanged(call) -> None:
    argv = ["--prompt", "two  words * $HOME 'q' \"d\"", "--save_file", ""]
    forwarded = call("infer_t2v.sh", *argv)[1]
    first = forwarded.index("--prompt")
    assert forwarded[first : first + 4] == argv


def test_example_image(call) -> None:
    argv = call("infer_i2v.sh")[1]
    assert images.read_image(Path(get_flag_value(argv, "--image"))).size == (256, 256)
    for flags in (["--image", "cat.jpg"], ["--image=cat.jpg"]):
        argv = call("infer_i2v.sh", *flags)[1]
        assert sum("--image" in word for word in argv) == 1
    assert "--image" not in call("infer_t2v.sh")[1]


def test_no_torchrun(tmp_path: Path, call) -> None:
    (tmp_path / "bin" / "torchrun").unlink()
    code, _, error = call("infer_t2v.sh", PATH=f"{tmp_path}/bin:/usr/bin:/bin")
    assert code == 1 and "make setup" in error
