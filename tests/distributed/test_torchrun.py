"""Whole runs under torchrun against a run of one process, and how they fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.dist import REPO, torchrun
from wan.cli import main as generate

pytestmark = pytest.mark.dist
QUICK = ["--size", "64*48", "--frame_num", "5", "--sample_steps", "3", "--base_seed", "7"]
QUICK += ["--save_latents"]
FAILING = str(REPO / "tests" / "failing.py")


def latents(video: Path) -> Any:
    return load_file(video.with_suffix(".latents.safetensors"))["latents"]


@pytest.fixture(scope="module")
def alone(tiny, picture, tmp_path_factory: pytest.TempPathFactory):
    """alone(task): arguments of a run, and the latents that one process makes of them."""
    base, made = tmp_path_factory.mktemp("alone"), {}

    def run(task: str, *more: str) -> tuple[list[str], Any]:
        arguments = ["--task", task, "--ckpt_dir", str(tiny(task)), *QUICK, *more]
        if task == "i2v-A14B":
            arguments += ["--image", str(picture)]
        if task == "ti2v-5B":  # its tokens are twice as large
            arguments += ["--size", "64*96"]
        key = (task, *more)
        if key not in made:
            out = base / f"{len(made)}.mp4"
            assert generate.main([*arguments, "--save_file", str(out)]) == 0
            made[key] = latents(out)
        return arguments, made[key]

    return run


def check(done: Any, video: Path, expected: Any, exact: bool = False) -> None:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    difference = (latents(video) - expected).abs().max().item()
    assert difference <= (0 if exact else 1e-4), difference
    assert sorted(p.suffix for p in video.parent.glob(f"{video.stem}.*")) == [
        ".json",
        ".mp4",
        ".safetensors",
    ]


def test_a_full_topology(alone, tmp_path: Path) -> None:
    """Guidance halves, all weights sharded, InsertComm; the record says so."""
    arguments, expected = alone("t2v-A14B")
    out = tmp_path / "v.mp4"
    flags = ["--cfg_size", "2", "--dit_fsdp", "--t5_fsdp", "--comm_type", "1"]
    done = torchrun(4, *arguments, *flags, "--save_file", out)
    check(done, out, expected)
    assert done.stdout.count("InsertComm, 10 x 2 heads per rank; ulysses 2 x ring 1 x cfg 2") == 1
    assert done.stdout.count("Chosen: --cfg_size 2 --ring_size 1 --ulysses_size 2") == 1
    used = json.loads(out.with_suffix(".json").read_text())["used"]
    assert used["comm_type"] == 1 and used["cfg_size"] == 2 and used["dit_fsdp"]


TABLE = [
    ("t2v-A14B", 2, ["--comm_type", "2"]),
    ("t2v-A14B", 2, ["--fa_alltoall_overlap"]),
    ("t2v-A14B", 2, ["--ulysses_size", "1"]),
    ("t2v-A14B", 4, ["--ring_size", "2", "--ring_type", "bidirectional", "--comm_type", "2"]),
    ("t2v-A14B", 4, ["--ulysses_size", "1", "--ring_type", "bidirectional"]),
    ("t2v-A14B", 8, ["--cfg_size", "2", "--ring_size", "2", "--comm_type", "1", "--dit_fsdp"]),
    ("t2v-A14B", 8, ["--ulysses_size", "8", "--comm_type", "1"]),
    ("t2v-A14B", 2, ["--offload_model", "true", "--t5_cpu", "--dit_fsdp"]),
    ("t2v-A14B", 2, ["--compile", "--comm_type", "1"]),
    ("i2v-A14B", 4, ["--cfg_size", "2", "--comm_type", "2"]),
    ("ti2v-5B", 4, ["--cfg_size", "2", "--comm_type", "1"]),
    ("ti2v-5B", 4, ["--ring_size", "2", "--dit_fsdp", "--t5_fsdp"]),
    ("t2v-1.3B", 4, ["--comm_type", "1"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "ranks", "flags"), TABLE, ids=lambda x: str(x).replace("--", ""))
def test_topologies(task: str, ranks: int, flags: list[str], alone, tmp_path: Path) -> None:
    arguments, expected = alone(task)
    out = tmp_path / "v.mp4"
    check(torchrun(ranks, *arguments, *flags, "--save_file", out), out, expected)


@pytest.mark.slow
def test_one_guidance_scale_is_1(alone, tmp_path: Path) -> None:
    arguments, expected = alone("t2v-A14B", "--sample_guide_scale", "1,4")
    out = tmp_path / "v.mp4"
    done = torchrun(2, *arguments, "--cfg_size", "2", "--save_file", out)
    check(done, out, expected)
    assert "Guidance is 1 for the low-noise expert" in done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def two_machines(first: list[object], second: list[object]) -> list[subprocess.Popen[str]]:
    """Two torchrun agents on the loopback device, one rank each."""
    port = free_port()
    base = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    base += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [
        subprocess.Popen(
            [*base, "--node_rank", str(node), "generate.py", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for node, arguments in enumerate((first, second))
    ]


def test_two_machines(alone, tmp_path: Path) -> None:
    arguments, expected = alone("t2v-A14B")
    out = tmp_path / "v.mp4"
    common, other = [*arguments, "--comm_type", "2", "--save_file"], tmp_path / "other" / "v.mp4"
    agents = two_machines([*common, out], [*common, other])
    ended = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], ended
    assert (latents(out) - expected).abs().max() <= 1e-4
    assert not other.parent.exists(), "only the main rank writes"


@pytest.mark.parametrize("wrong", ["folder", "argument", "weights"])
def test_ranks_that_differ_are_named(wrong: str, alone, tiny, tmp_path: Path) -> None:
    """A folder missing on one machine, other arguments or other weights: one sentence, no video."""
    arguments, _ = alone("t2v-A14B")
    out = tmp_path / "v.mp4"
    if wrong == "weights":
        from wan.pipeline.tiny import make_checkpoint

        folder: object = make_checkpoint("t2v-A14B", tmp_path / "other", seed=1)
    else:
        folder = tmp_path / "nowhere"
    extra = ["--sample_shift", "4"] if wrong == "argument" else ["--ckpt_dir", folder]
    common = [*arguments, "--save_file", out]
    agents = two_machines(common, [*common, *extra])
    texts = [agent.communicate(timeout=90)[1] for agent in agents]
    assert all(agent.returncode for agent in agents)
    said = [line for text in texts for line in text.splitlines() if "generate.py: " in line[:13]]
    assert len(said) == 2 and said[0] == said[1], texts
    assert "rank 1 on" in said[0], said
    words = {
        "folder": "does not exist",
        "argument": "--sample_shift is 4.0, but ",
        "weights": "content",
    }
    assert words[wrong] in said[0] and not list(tmp_path.glob("v.*"))


@pytest.mark.parametrize("kind", ["raise", "kill", "sleep"])
def test_one_failing_rank_ends_all(kind: str, alone, tmp_path: Path) -> None:
    """Exception, kill -9 and Ctrl-C: all ranks end in time, nothing is left over."""
    arguments, _ = alone("t2v-A14B")
    out = tmp_path / "v.mp4"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", FAILING, kind, "1", *arguments, "--save_file", str(out)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        start_new_session=True,
    )
    text = ""
    assert process.stdout is not None
    for line in process.stdout:
        text += line
        if "fault on rank" in line:
            break
    start = time.monotonic()
    if kind == "sleep":
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    text += process.communicate(timeout=40)[0]
    assert time.monotonic() - start < 30 and process.returncode != 0, text
    if kind == "raise":
        assert "rank 1 failed: RuntimeError: this rank was told to fail" in text, text
        assert text.count("RuntimeError: this rank was told to fail") == 2, text  # and a traceback
    assert not list(tmp_path.glob("v*")), text
    survivors = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True)
    assert survivors.stdout == "", survivors.stdout


def test_refused_once_by_all(tmp_path: Path) -> None:
    done = torchrun(2, "--sample_steps", "0", "--save_file", tmp_path / "v.mp4")
    said = [line for line in done.stderr.splitlines() if line.startswith("generate.py: ")]
    assert done.returncode != 0 and len(said) == 1 and "--sample_steps is 0" in said[0]
    assert "Traceback" not in done.stderr.split("ChildFailedError")[0].split("generate.py: ")[0]


def test_port_in_use(tmp_path: Path) -> None:
    """Ranks started by hand: rank 0 holds the store and finds its port taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env["MASTER_PORT"] = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "generate.py"],
            capture_output=True,
            text=True,
            cwd=REPO,
            env={**os.environ, **env},
            timeout=60,
        )
    said = done.stderr.strip().splitlines()
    assert done.returncode == 2 and said[-1].startswith("generate.py: "), done.stderr
    assert "--master_port" in said[-1] and "Traceback" not in done.stderr
