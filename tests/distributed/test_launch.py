"""Ranks started through `wan.distributed.rendezvous` with toy work: start-up, agreement and end.

All cases of a test run at the same time, because they mostly wait.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as collectives

from tests.dist import Ranks, free_port, make_rank_envs
from tests.pipelines import make_layer
from tests.refusals import check_refusals
from wan import device as devices
from wan.app.failures import describe_error, print_error, raise_on_sigterm
from wan.app.launch import execute_run
from wan.app.run import Run
from wan.distributed.gloo_group import GlooGroup
from wan.distributed.mesh import ParallelGroups
from wan.distributed.rank_env import RankEnv
from wan.distributed.rendezvous import (
    PreparedRun,
    RankStatus,
    RunOncePerNode,
    Timeouts,
    find_first_mismatch,
    run_ranks,
)
from wan.distributed.watchdog import Watchdog
from wan.settings.errors import InputError
from wan.utils import system

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]
DEFAULT_TIMEOUTS, SHORT_TIMEOUTS = (
    Timeouts(),
    Timeouts(first_notice=0.5, notice_interval=0.5, limit=2),
)
HOST, KILLED = socket.gethostname(), -signal.SIGKILL
HIDDEN = (rf"\b{HOST}\b", r"(?<=:)\d{4,5}\b")


class Case(NamedTuple):
    """Work of ranks with these environment variables; `act` is called while they run."""

    variables: list[dict[str, str]]
    work: Callable[..., int]
    args: tuple[object, ...]
    codes: list[int] | None  # None: the test checks them itself
    act: Callable[[Ranks], object] = lambda _: None


def run_cases(cases: Mapping[str, Case]) -> dict[str, Ranks]:
    """Run all cases to their end, check the exit codes and return the ranks."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(Ranks(case.variables, case.work, *case.args))
            for name, case in cases.items()
        }
        for name, ranks in started.items():
            cases[name].act(ranks)
        codes = {name: ranks.wait_for_exit() for name, ranks in started.items()}
    wrong = [name for name in cases if cases[name].codes not in (None, codes[name])]
    reports = [
        f"{name} ended with {codes[name]}\n{started[name].format_outputs()}" for name in wrong
    ]
    assert not wrong, "\n".join(reports)
    return started


def check_sentences(table: str, ranks: Mapping[str, Ranks]) -> None:
    """Check that all ranks print the same sentence and no traceback."""
    check_refusals(
        table, {name: "\n".join(processes.lines()) for name, processes in ranks.items()}, HIDDEN
    )
    assert not [
        name for name, processes in ranks.items() if "Traceback" in processes.format_outputs()
    ]


def rank() -> int:
    return int(os.environ["RANK"])


def print_line(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # unbuffered


def make_run(invariants: Any = None) -> PreparedRun[int]:
    """Prepare a run whose only state is its seed."""
    world = int(os.environ["WORLD_SIZE"])
    cpu = devices.select_device("cpu")
    return PreparedRun(
        rank(), lambda s: s, cpu, (1, 1, world), timedelta(minutes=1), invariants or {}
    )


def start_rank(
    prepare: Callable[[RunOncePerNode], PreparedRun[int]] = lambda _: make_run(),
    work: Callable[[int, ParallelGroups], None] = lambda *_: None,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    print_message: Callable[[str], None] = print_error,
) -> int:
    def run_work(seed: int, team: ParallelGroups) -> int:
        work(seed, team)
        return 0

    with raise_on_sigterm():
        return run_ranks(prepare, run_work, describe_error, print_message, timeouts)


class Closed(collectives.PrefixStore):
    """The store of a process that has ended."""

    def clone(self) -> collectives.Store:
        raise collectives.DistNetworkError("connection reset by peer")


def test_a_store_that_fails_at_once_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = collectives.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": store.port}
    for name, value in {"MASTER_ADDR": "localhost", **variables}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(collectives, "PrefixStore", Closed)
    assert (
        run_ranks(lambda _: make_run(), lambda *_: 0, describe_error, print_error, SHORT_TIMEOUTS)
        == 2
    )
    output = "".join(capfd.readouterr())
    assert "store has ended; start again" in output and "Traceback" not in output


def wait_for_all_ranks(team: ParallelGroups) -> None:
    """Wait for all ranks."""
    collectives.all_reduce(torch.zeros(1))


@contextmanager
def connect_rank1(machine: str | None = None, hello: str = "") -> Iterator[tuple[Watchdog, Any]]:
    """Rank 0's watchdog and the connection of rank 1. hello: instead of rank 0's token."""
    store = collectives.HashStore()
    watchdog = Watchdog(RankEnv(0, 2, 0, "", "", 0, False, True, "0"), store, print_error)
    port, token, peer = json.loads(store.get("rank 0"))
    peer |= {"rank": 1} | ({} if machine is None else {"machine": machine})
    with socket.create_connection(("localhost", port)) as rank1:
        rank1.sendall(json.dumps(["hello", hello or token, peer]).encode() + b"\n")
        yield watchdog, rank1


def check_end(hello: str, last_message: str, is_lost: bool) -> int:
    """Rank 1 sends a message and ends; returns 0 if it is lost as expected."""
    with connect_rank1(hello=hello) as (watchdog, rank1):
        rank1.sendall(json.dumps([last_message]).encode() + b"\n")
    sentence = watchdog.describe_loss(2 if is_lost else 0.3)
    return int((sentence is not None and "Rank 1 ended unexpectedly" in sentence) != is_lost)


def test_who_is_lost() -> None:
    """Not a rank that has signed off, nor a program without the token."""
    cases = {"gone": ("", "pong", True), "signed off": ("", "left", False)}
    cases |= {"other program": ("a guess", "pong", False)}
    run_cases({name: Case([{}], check_end, args, [0]) for name, args in cases.items()})


class PausedClock:
    """Replaces `time` in the watchdog: it sleeps only between pings, and jumps over pauses."""

    def __init__(self, pauses: list[float]) -> None:
        self.started, self.slept = threading.Event(), threading.Event()
        self._pauses, self._now = pauses, 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        if not self.started.is_set():
            time.sleep(0.01)
        elif self._pauses:
            self._now += seconds + self._pauses.pop(0)
        else:
            self.slept.set()
            threading.Event().wait()


def check_silence(pauses: list[float], is_lost: bool) -> int:
    """Rank 1 does not answer a ping for some seconds; returns 0 if it is lost as expected."""
    clock = PausedClock(pauses)
    with (
        mock.patch("wan.distributed.watchdog.time", clock),
        connect_rank1(machine="another") as (watchdog, rank1),
    ):
        watchdog.silence_limit = 5
        rank1.recv(100)
        clock.started.set()
        if not is_lost:
            clock.slept.wait(20)
        sentence = watchdog.describe_loss(20 if is_lost else 0)
    return int((sentence is not None and "has not answered for 5 s" in sentence) != is_lost)


def test_a_pause_of_this_rank_is_no_silence_of_others() -> None:
    """A process that was suspended counts at most two seconds of its pause."""
    cases = {"paused": ([100.0, 0.0], False), "waited": ([0.0] * 5, False)}
    cases |= {"silent": ([0.0] * 9, True), "silent and paused": ([100.0] * 9, True)}
    run_cases({name: Case([{}], check_silence, args, [0]) for name, args in cases.items()})


# How ranks start and agree


def read_limits() -> int:
    """Prints the limit of a run's groups."""

    def execute(run: Run, groups: ParallelGroups | None) -> int:
        assert groups is not None and groups.timeout is not None
        print_line(f"{groups.timeout.total_seconds():g} s")
        gloo = GlooGroup(groups)
        assert gloo.gather(rank()) == [0, 1] and gloo.all_reduce_max(rank()) == 1
        options = gloo._group._get_backend(torch.device("cpu")).options
        assert options._timeout == groups.timeout
        return 3 + rank()

    flags = make_layer({"device": "cpu", "dist_timeout": 0.5})
    return execute_run(lambda: flags, execute)


def test_limits_of_a_run() -> None:
    """--dist_timeout is in minutes; a hung rank is reported ten seconds before groups give up."""
    ranks = run_cases({"run": Case(make_rank_envs(2), read_limits, (), [3, 4])})["run"]
    assert [text.splitlines()[-1] for text in ranks.texts] == ["40 s"] * 2


def start_equal_ranks() -> int:
    def work(seed: int, team: ParallelGroups) -> None:
        print_line(f"seed {seed}, {team.rank} of {team.group('ulysses').size()}")
        team.close()

    return start_rank(work=work)


def start_differing_ranks(kind: str) -> int:
    def prepare(_: RunOncePerNode) -> PreparedRun[int]:
        if rank() == 1 and kind == "refuses":
            raise InputError("There is no such folder.")
        if kind == "all refuse":
            raise InputError("--sample_steps is 0.")
        if rank() == 1 and kind == "fails":
            raise TypeError("a defect")
        line = {"hash": rank() if kind == "line" else 0}
        return make_run({"--frame_num": 5 + (rank() if kind == "fact" else 0), "line 2": line})

    return start_rank(prepare)


def test_invariants_of_a_single_rank_are_compared() -> None:
    without_lora, with_lora = {"--frame_num": 5}, {"--frame_num": 5, "--lora": "a"}
    for first, second, how in (
        (without_lora, with_lora, "a, but not given"),
        (with_lora, without_lora, "not given, but a"),
    ):
        statuses = [RankStatus(r, "here", invariants=x) for r, x in enumerate((first, second))]
        sentence = f"rank 1 on here: --lora is {how} on rank 0; start all ranks alike."
        assert find_first_mismatch(statuses) == sentence


def start_preparing_once(outcome: str) -> int:
    def prepare_once() -> None:
        print_line("made")
        if outcome == "fails":
            raise InputError("The disk is full.")

    def prepare(once: RunOncePerNode) -> PreparedRun[int]:
        once(prepare_once)
        print_line("ready")
        return make_run()

    return start_rank(prepare)


def test_how_ranks_meet() -> None:
    """All ranks use the seed of rank 0; once-per-node work runs once, before the ranks continue."""
    results = run_cases(
        {
            "seed": Case(make_rank_envs(3), start_equal_ranks, (), [0, 0, 0]),
            "made": Case(make_rank_envs(3), start_preparing_once, ("works",), [0, 0, 0]),
        }
    )
    assert results["seed"].texts == [f"seed 0, {i} of 3\n" for i in range(3)]
    assert results["made"].texts == ["made\nready\n", "ready\n", "ready\n"]


def test_one_sentence_where_ranks_differ() -> None:
    cases = {
        kind: Case(
            make_rank_envs(3), start_differing_ranks, (kind,), [1 if kind == "fails" else 2] * 3
        )
        for kind in ("fact", "line", "refuses", "all refuse", "fails")
    }
    results = run_cases(
        {**cases, "maker": Case(make_rank_envs(3), start_preparing_once, ("fails",), [2, 2, 2])}
    )
    assert "ready" not in results["maker"].format_outputs(), "nobody goes on"
    defect = results.pop("fails")
    assert defect.lines() == [f"rank 1 on {HOST}: TypeError: a defect."]
    assert ["Traceback" in text for text in defect.texts] == [False, True, False]
    check_sentences("ranks: what they differ in", results)


def refuse_and_print_slowly() -> int:
    def refuse(_: RunOncePerNode) -> PreparedRun[int]:
        raise InputError("the size is wrong")

    def print_slowly(line: str) -> None:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does when another rank has ended
        print_line(f"{time.monotonic()} {line}")

    code = start_rank(refuse, print_message=print_slowly)
    if rank() > 0:
        print_line(f"{time.monotonic()} ended")
    return code


def test_a_refusal_is_printed_before_a_rank_ends() -> None:
    """torchrun ends all ranks as soon as one has ended, also the rank that prints."""
    with Ranks(make_rank_envs(2), refuse_and_print_slowly) as ranks:
        assert ranks.wait_for_exit() == [2, 2]
        (printed, *words), (ended, _) = (text.split() for text in ranks.texts)
    assert " ".join(words) == "the size is wrong." and float(printed) < float(ended)


def test_ranks_that_torchrun_restarts_do_not_read_of_earlier_ones() -> None:
    """The store of torchrun's agent is kept, and the cause of the first refusal is gone."""
    port, patience = int(free_port()), timedelta(seconds=60)
    store = collectives.TCPStore("127.0.0.1", port, None, True, patience, wait_for_workers=False)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    run_cases(
        {
            "refused": Case(
                make_rank_envs(2, **variables), start_differing_ranks, ("refuses",), [2, 2]
            )
        }
    )
    restarted = make_rank_envs(2, **variables, TORCHELASTIC_RESTART_COUNT="1")
    run_cases({"again": Case(restarted, start_equal_ranks, (), [0, 0])})


# Missing ranks and machines


def start_with_short_timeouts() -> int:
    return start_rank(timeouts=SHORT_TIMEOUTS)


def prepare_long() -> int:
    def prepare(_: RunOncePerNode) -> PreparedRun[int]:
        if rank() == 1:
            signal.pause()
        return make_run()

    return start_rank(prepare, timeouts=SHORT_TIMEOUTS)


def start_unreachable() -> int:
    """Rank 0 listens on an address that the other rank cannot reach, as with a firewall."""
    create, blocked = socket.create_server, socket.socket()
    blocked.bind(("127.0.0.1", 0))  # and does not listen; no other program takes the port
    port = blocked.getsockname()[1]
    socket.create_server = lambda *_, **__: create(("127.0.0.2", port))
    return start_rank()


def kill_after_notice(ranks: Ranks) -> None:
    ranks.wait_for_output(0, "rank 1 of 4 to prepare")
    for process in ranks.processes:
        process.kill()


def check_absent(table: str, cases: Mapping[str, Case]) -> None:
    """The last notice, and the sentence of each rank that ended."""
    sentences = dict[str, str]()
    for name, ranks in run_cases(cases).items():
        notices = [line for line in ranks.lines() if "waiting" in line or "so far" in line]
        ends = [line for line in ranks.lines() if line not in notices]
        sentences |= {f"{name}, notice": line for line in notices[-1:]}
        sentences |= {f"{name}, rank {number}": line for number, line in enumerate(ends)}
    hidden = [*HIDDEN, r"\d+ s(?= so far)", r"(?<=ed \().*(?=\);)"]
    check_refusals(table, sentences, hidden)


def test_ranks_that_are_not_there_are_named() -> None:
    """Missing ranks and machines are named while the others wait."""
    unknown = {**make_rank_envs(2)[1], "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid"}
    long = Case(make_rank_envs(4)[:2], prepare_long, (), [KILLED] * 2, kill_after_notice)
    cases = {
        "missing rank": Case(make_rank_envs(3)[:2], start_with_short_timeouts, (), [2, 2]),
        "long to prepare": long,
        "unknown machine": Case([unknown], start_equal_ranks, (), [2]),
        "blocked port": Case(make_rank_envs(2), start_unreachable, (), [2, 2]),
    }
    check_absent("ranks: who is not there", cases)


@pytest.mark.slow
def test_stores_that_are_not_there() -> None:
    """No program listens, or another program that accepts connections and never answers."""
    remote_variables = [{**variables, "LOCAL_RANK": "0"} for variables in make_rank_envs(2)]
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy_port = {"MASTER_PORT": str(other.getsockname()[1])}
        cases = {
            "no rank 0": Case(remote_variables[1:], start_with_short_timeouts, (), [2]),
            "taken port": Case(
                [{**v, **busy_port} for v in remote_variables],
                start_with_short_timeouts,
                (),
                [2, 2],
            ),
        }
        check_absent("ranks: stores that are not there", cases)


# How ranks end


def start_failing_ranks(kind: str, on_other_machine: bool) -> int:
    """Rank 1 fails with `faults[kind]` while the others wait for it in a collective."""
    if on_other_machine:  # as on another machine
        system.read_machine_id = lambda: f"machine of rank {rank()}"

    def work(_: int, team: ParallelGroups) -> None:
        wait_for_all_ranks(team)
        if rank() == 1:
            print_line("fault")
            faults[kind]()
        wait_for_all_ranks(team)

    return start_rank(work=work)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def defect() -> None:
    raise RuntimeError("a defect of ours")


def refuse() -> None:
    raise InputError("This cannot be run.")


def use_up_memory() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def pause() -> None:
    signal.pause()


faults = {f.__name__: f for f in (die, defect, refuse, use_up_memory, pause)}


def refuse_together() -> int:
    def work(_: int, team: ParallelGroups) -> None:
        wait_for_all_ranks(team)
        refuse()

    return start_rank(work=work)


def decode_alone(pipe: str) -> int:
    """Rank 0 works on after the others have ended, and is refused."""

    def work(_: int, team: ParallelGroups) -> None:
        team.close()
        if team.is_main:
            Path(pipe).read_text()  # until something is written
            refuse()

    return start_rank(work=work)


def refuse_slowly(pipe: str) -> int:
    """Rank 0 is refused, and its message is delayed."""

    def print_slowly(text: str) -> None:
        print_line("about to speak")
        Path(pipe).read_text()
        print_error(text)

    def work(*_: object) -> None:
        if rank() == 0:
            refuse()
        signal.pause()

    return start_rank(work=work, print_message=print_slowly)


def run_agent(kind: str) -> int:
    """Parent of two ranks, as torchrun's agent. The ranks work until it is killed."""
    for variables in make_rank_envs(2, TORCHELASTIC_RUN_ID="of a test"):
        if os.fork() == 0:
            os.environ.update(variables)
            os._exit(start_rank(work=work_by_kind[kind]))
    signal.pause()
    return 0


def compute(_: int, team: ParallelGroups) -> None:
    """Rank 0 waits for a rank that is busy."""
    wait_for_all_ranks(team)
    try:
        print_line(f"rank {rank()} works")
        if rank() == 1:
            signal.pause()
        wait_for_all_ranks(team)
    finally:
        print_line(f"rank {rank()} cleaned up")


def hang(_: int, team: ParallelGroups) -> None:
    """Each rank waits for the other in code that does not handle signals."""
    wait_for_all_ranks(team)
    print_line(f"rank {rank()} works")
    collectives.recv(torch.zeros(1), src=1 - rank())


work_by_kind = {"compute": compute, "hang": hang}


def kill_agent(ranks: Ranks) -> None:
    for number in range(2):
        ranks.wait_for_output(0, f"rank {number} works")
    ranks.processes[0].kill()


def wait_for_other_ranks(pipe: Path) -> Callable[[Ranks], None]:
    def act(ranks: Ranks) -> None:
        for process in ranks.processes[1:]:
            process.join(30)
        pipe.write_text("now")

    return act


def delay_refusal(pipe: Path) -> Callable[[Ranks], None]:
    """Delay the message of a refusing rank. Until it is printed the other ranks continue."""

    def act(ranks: Ranks) -> None:
        ranks.wait_for_output(0, "about to speak")
        ranks.processes[1].join(1)
        assert ranks.processes[1].exitcode is None, ranks.format_outputs()
        os.kill(ranks.processes[0].pid, signal.SIGTERM)  # torchrun, had another rank ended
        pipe.write_text("now")

    return act


def signal_all_ranks(number: signal.Signals) -> Callable[[Ranks], None]:
    """Send a signal to all ranks, as torchrun or a terminal does."""

    def act(ranks: Ranks) -> None:
        ranks.wait_for_output(1, "fault")
        for process in ranks.processes:
            os.kill(process.pid, number)

    return act


SENTENCE_CASES: dict[str, tuple[int, Any, Any, list[int]]] = {
    "killed": (3, start_failing_ranks, ("die", False), [1, KILLED, 1]),
    "killed far away": (2, start_failing_ranks, ("die", True), [1, KILLED]),
    "refused": (2, start_failing_ranks, ("refuse", False), [1, 2]),
    "out of memory": (2, start_failing_ranks, ("use_up_memory", False), [1, 1]),
    "refused by all": (4, refuse_together, (), [2] * 4),
}
DEFECT_CASES: dict[str, tuple[int, Any, Any, list[int]]] = {
    "near": (3, start_failing_ranks, ("defect", False), [1, 1, 1]),
    "far": (3, start_failing_ranks, ("defect", True), [1, 1, 1]),
    "refused far away": (2, start_failing_ranks, ("refuse", True), [1, 2]),
}
SIGNALS = {signal.SIGTERM: ("terminated", 143), signal.SIGINT: ("interrupted", 130)}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """Run all cases of the tests below at the same time; they mostly wait."""
    pipes = [tmp_path_factory.mktemp("pipes") / name for name in ("alone", "slow")]
    for pipe in pipes:
        os.mkfifo(pipe)
    decode_case, slow_case = (decode_alone, (str(pipes[0]),)), (refuse_slowly, (str(pipes[1]),))
    cases = {
        name: Case(make_rank_envs(world), *case)
        for name, (world, *case) in {**SENTENCE_CASES, **DEFECT_CASES}.items()
    }
    cases |= {
        number.name: Case(
            make_rank_envs(2), start_failing_ranks, ("pause", False), None, signal_all_ranks(number)
        )
        for number in SIGNALS
    }
    for name, work in (("its torchrun killed", "compute"), ("killed while it hangs", "hang")):
        cases[name] = Case([{}], run_agent, (work,), [KILLED], kill_agent)
    cases["after the others left"] = Case(
        make_rank_envs(3), *decode_case, [2, 0, 0], wait_for_other_ranks(pipes[0])
    )
    cases["slow to speak"] = Case(make_rank_envs(2), *slow_case, [2, 1], delay_refusal(pipes[1]))
    return run_cases(cases)


def test_how_ranks_end(endings: dict[str, Ranks]) -> None:
    """All ranks print one sentence with the reason, on whichever rank it occurred."""
    hanging = endings["killed while it hangs"].lines()
    assert hanging == ["torchrun has ended unexpectedly; the video was not written."]
    excluded = [*DEFECT_CASES, *(number.name for number in SIGNALS), "killed while it hangs"]
    check_sentences(
        "ranks: how they end", {name: endings[name] for name in endings if name not in excluded}
    )
    assert endings["its torchrun killed"].texts[0].count("cleaned up") == 2


def test_sentences_of_a_defect_and_of_other_machines(endings: dict[str, Ranks]) -> None:
    """The failing rank prints a traceback; ranks of other machines print the failure."""
    sentences = {name: sorted(set(endings[name].lines())) for name in DEFECT_CASES}
    defect, refusal = "RuntimeError: a defect of ours", "This cannot be run."
    far = f"Rank 1 on {HOST} ended: "
    assert sentences == {
        "near": [f"rank 1 failed: {defect}"],
        "far": [f"{far}{defect}", f"rank 1 failed: {defect}"],
        "refused far away": [f"{far}{refusal}", refusal],
    }
    for name in ("near", "far"):
        text = endings[name].texts[1]
        assert text.count("RuntimeError: a defect of ours") == 2, "a traceback and the sentence"


def test_signals(endings: dict[str, Ranks]) -> None:
    """A rank in a collective may detect the other's end before it gets its own signal."""
    for number, (word, code) in SIGNALS.items():
        ranks = endings[number.name]
        codes = ranks.wait_for_exit()
        assert code in codes and set(codes) <= {code, 1}, ranks.format_outputs()
        assert ranks.lines() == [f"{word}; the video was not written."], (
            codes,
            ranks.format_outputs(),
        )


def exchange_until_lost() -> int:
    """Exchange until a rank is lost: it has not answered for five seconds."""

    def work(_: int, team: ParallelGroups) -> None:
        print_line(f"rank {rank()} is {os.getpid()}")
        while True:
            wait_for_all_ranks(team)

    return start_rank(lambda _: replace(make_run(), timeout=timedelta(seconds=5)), work)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_rank_is_named_and_ended(lost: int) -> None:
    with Ranks(make_rank_envs(2), exchange_until_lost) as ranks:
        ranks.wait_for_output(lost, f"rank {lost} is ")
        os.kill(ranks.processes[lost].pid, signal.SIGSTOP)
        codes = ranks.wait_for_exit(60)
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == 1, ranks.format_outputs()
    sentence = f"Rank {lost} has not answered for 5 s (--dist_timeout); the video was not written."
    assert ranks.lines() == [sentence] and "Traceback" not in ranks.format_outputs()


if __name__ == "__main__":  # as a rank of torchrun's
    sys.exit(
        exchange_until_lost()
        if sys.argv[1] == "exchange"
        else start_failing_ranks(sys.argv[1], False)
    )
