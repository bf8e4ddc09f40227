"""Complete runs of several ranks against a run of one process, and their failures.

Ranks are forked, or started by torchrun where its behavior is tested too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import failing
from tests.conftest import Tiny
from tests.dist import REPO, TORCHRUN, Ranks, exec_torchrun, free_port, make_rank_envs
from tests.refusals import check_refusals
from wan.cli import main as generate
from wan.testing.random_checkpoint import make_checkpoint

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("torchrun")]  # it takes no pools
QUICK = ["--size", "64*48", "--frame_num", "5", "--sample_steps", "3", "--base_seed", "7"]
QUICK += ["--save_latents"]
FAILING = str(REPO / "tests" / "failing.py")
GENERATE = str(REPO / "generate.py")


def latents(video: Path) -> Any:
    return load_file(video.with_suffix(".latents.safetensors"))["latents"]


def make_arguments(task: str, tiny: Tiny, *extra_flags: str) -> list[str]:
    return ["--task", task, "--ckpt_dir", str(tiny(task)), *QUICK, *extra_flags]


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Any]:
    """The arguments of a run, and its latents made by one process."""
    arguments, out = make_arguments("t2v-A14B", tiny), tmp_path_factory.mktemp("alone") / "v.mp4"
    with Ranks([{}], generate.main, [*arguments, "--save_file", str(out)]) as process:
        assert process.wait_for_exit() == [0], process.format_outputs()
    return arguments, latents(out)


def generate_each(arguments: list[list[str]], fault: str | None) -> int:
    """On one rank: run generate.py with this rank's arguments. fault: a kind of `failing`."""
    own = arguments[int(os.environ.get("RANK", "0")) % len(arguments)]
    return generate.main(own) if fault is None else failing.main(fault, "0", *own)


def run_machine(arguments: list[list[str]]) -> int:
    """Run torchrun with one rank as one of two machines."""
    node = os.environ["NODE"]
    base = ["--nnodes", "2", "--nproc_per_node", "1", "--node_rank", node]
    base += ["--master_addr", "127.0.0.1", "--master_port", os.environ["PORT"]]
    return exec_torchrun(*base, *arguments[int(node)])


def start_machines(*arguments: list[str]) -> Ranks:
    port = free_port()
    variables = [{**TORCHRUN, "NODE": node, "PORT": port} for node in "01"]
    return Ranks(variables, run_machine, arguments)


@pytest.mark.slow
def test_two_machines(alone, tmp_path: Path) -> None:
    arguments, expected = alone
    arguments = [GENERATE, *arguments, "--comm_type", "2", "--save_file"]
    out, other = tmp_path / "v.mp4", tmp_path / "other" / "v.mp4"
    with start_machines([*arguments, str(out)], [*arguments, str(other)]) as agents:
        codes = agents.wait_for_exit(180)
    assert not any(codes), agents.format_outputs()
    assert (latents(out) - expected).abs().max() <= 1e-4
    assert not other.parent.exists(), "only rank 0 writes"


def test_early_ends_are_one_sentence(tiny: Tiny, tmp_path: Path) -> None:
    """Runs that fail early end with one sentence, without a traceback or a partial video.

    Ranks with different arguments are on two machines, and both print the sentence.
    """
    make_checkpoint("t2v-A14B", tmp_path / "weights", seed=1)
    (tmp_path / "cache").touch()  # a file where a folder is needed
    default, started = make_arguments("t2v-A14B", tiny), dict[str, Ranks]()
    differences = {
        "another argument": ["--sample_shift", "4"],
        "another folder": ["--ckpt_dir", str(tmp_path / "absent")],
        "other weights": ["--ckpt_dir", str(tmp_path / "weights")],
    }
    cached = make_rank_envs(2, XDG_CACHE_HOME=str(tmp_path / "cache"))
    beyond = {"WORLD_SIZE": "2", "RANK": "7", "LOCAL_RANK": "1"}
    faults = {"memory": "memory", "SIGTERM": "wait", "SIGINT": "wait"}
    runs: dict[str, tuple[list[dict[str, str]], list[list[str]]]] = {
        name: ([{**rank, "LOCAL_RANK": "0"} for rank in make_rank_envs(2)], [default, default + x])
        for name, x in differences.items()
    }
    runs["refused by both"] = make_rank_envs(2), [["--sample_steps", "0"]]
    runs |= {"no demo checkpoint": (cached, [["--task", "ti2v-5B"]]), "beyond": ([beyond], [[]])}
    runs |= {name: ([{}], [default]) for name in faults}
    with ExitStack() as stack:
        for name, (variables, lines) in runs.items():
            saved = [[*line, "--save_file", str(tmp_path / name / "v.mp4")] for line in lines]
            ranks = Ranks(variables, generate_each, saved, faults.get(name))
            started[name] = stack.enter_context(ranks)
        for name in ("SIGTERM", "SIGINT"):
            started[name].wait_for_output(0, "fault")
            os.kill(started[name].processes[0].pid, signal.Signals[name])
        codes = {name: ranks.wait_for_exit() for name, ranks in started.items()}
    single = {"memory": [1], "SIGTERM": [143], "SIGINT": [130], "beyond": [2]}
    assert codes == {name: single.get(name, [2, 2]) for name in started}
    lines_by_name = {name: ranks.lines() for name, ranks in started.items()}
    assert {name: len(x) for name, x in lines_by_name.items()} == {
        n: 1 + (n in differences) for n in lines_by_name
    }
    assert all(len(set(lines)) == 1 for lines in lines_by_name.values())
    hidden = [rf"\b{socket.gethostname()}\b", r"(?<=/cache/wan/)\S+"]
    check_refusals(
        "ranks: runs that end early", {n: x[0] for n, x in lines_by_name.items()}, hidden
    )
    assert not [name for name, ranks in started.items() if "Traceback" in ranks.format_outputs()]
    assert not list(tmp_path.glob("**/v*"))


# Failing ranks under torchrun, and signals to torchrun

DEFECT = "rank 1 failed: RuntimeError: "
ENDINGS = {
    "raise": (None, DEFECT),
    "kill": (
        None,
        "Rank 1 ended unexpectedly (killed, or out of memory); the video was not written.",
    ),
    "memory": (None, "Out of memory; "),
    "interrupt": (signal.SIGINT, "interrupted; the video was not written."),
    "terminate": (signal.SIGTERM, "terminated; the video was not written."),
    "kill torchrun": (
        signal.SIGKILL,
        "torchrun has ended unexpectedly; the video was not written.",
    ),
}


def check_ending(sentence: str, number: signal.Signals | None, *argv: object) -> None:
    """Check that all ranks end and print one sentence."""
    with Ranks([TORCHRUN], exec_torchrun, "--standalone", "--nproc_per_node=2", *argv) as agent:
        agent.wait_for_output(0, "fault", 300)
        if number is not None:
            os.kill(agent.processes[0].pid, number)
        (code,) = agent.wait_for_exit(300)  # with its ranks; long, because the machine may be busy
    line, *others = agent.lines()
    assert not others, agent.format_outputs()
    assert code and line.startswith(sentence), agent.format_outputs()
    reasons = agent.texts[0].count("RuntimeError: ")  # a traceback and the sentence
    assert reasons == (2 if sentence == DEFECT else 0), agent.format_outputs()


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--run_path", "--start_method=fork"]])
@pytest.mark.parametrize("how", ENDINGS)
def test_all_ranks_end(how: str, options: list[str], alone, tmp_path: Path) -> None:
    """All ranks end and no file is left, also if they are forked as by `infer_t2v.sh`."""
    arguments, _ = alone
    number, sentence = ENDINGS[how]
    kind = how if number is None else "wait"
    argv = [*options, FAILING, kind, "1", *arguments, "--save_file", tmp_path / "v.mp4"]
    check_ending(sentence, number, *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["rank", "agent"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_or_agent_of_two_machines_is_killed(killed: str, node: int) -> None:
    """The other machine prints which rank was lost."""
    work = ["-m", "tests.distributed.test_launch", "exchange"]
    with start_machines(work, work) as agents:
        for number in range(2):
            agents.wait_for_output(number, f"rank {number} is ", 120)
        worker = int(agents.texts[node].split(f"rank {node} is ")[1].split()[0])
        os.kill(worker if killed == "rank" else agents.processes[node].pid, signal.SIGKILL)
        agents.wait_for_exit(60)
    lines = [line for line in agents.texts[1 - node].splitlines() if "generate.py: " in line]
    (sentence,) = lines
    assert f"Rank {node} ended unexpectedly" in sentence, agents.format_outputs()
    assert sentence.endswith("the video was not written.")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["defect", "die"])
def test_torchrun_ends_ranks_on_a_busy_machine(fault: str) -> None:
    """With eight times as many busy processes as cores."""
    loop = [sys.executable, "-c", "import os; own = os.getppid()\nwhile os.getppid() == own: pass"]
    busy = [subprocess.Popen(loop) for _ in range(8 * (os.cpu_count() or 1))]
    try:
        sentence = ENDINGS["raise" if fault == "defect" else "kill"][1]
        check_ending(sentence, None, "-m", "tests.distributed.test_launch", fault)
    finally:
        for process in busy:
            process.kill()
