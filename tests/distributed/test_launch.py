"""Real ranks through `wan.distributed.start` with toy work: how they meet, agree and end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as collectives

from tests.conftest import slow
from tests.dist import Ranks, free_port, launcher
from wan import device as devices
from wan import host
from wan.cli.failures import describe, say, terminable
from wan.distributed.mesh import Team
from wan.distributed.start import Once, Patience, Prepared, Statement, run, verdict
from wan.settings.errors import InputError

pytestmark = pytest.mark.dist
PATIENT, IMPATIENT = Patience(), Patience(first=0.5, every=0.5, limit=2)


def rank() -> int:
    return int(os.environ["RANK"])


def told(what: str) -> None:
    os.write(1, f"{what}\n".encode())  # at once, whatever comes next


def prepared(facts: dict[str, int] | None = None) -> Prepared[int]:
    """A run that is its seed."""
    world = int(os.environ["WORLD_SIZE"])
    cpu = devices.resolve("cpu")
    return Prepared(rank(), lambda s: s, cpu, (1, 1, world), timedelta(minutes=1), facts or {})


def start(
    prepare: Callable[[Once], Prepared[int]] = lambda _: prepared(),
    work: Callable[[int, Team], None] = lambda *_: None,
    patience: Patience = PATIENT,
) -> int:
    with terminable():
        return run(prepare, work, describe, say, patience)


class Closed(collectives.PrefixStore):
    """The store of a process that has ended meanwhile."""

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
    assert run(lambda _: prepared(), lambda *_: 0, describe, say, IMPATIENT) == 2
    shown = "".join(capfd.readouterr())
    assert "store has ended; start again" in shown and "Traceback" not in shown


def collect(team: Team) -> None:
    """Wait for all ranks."""
    collectives.all_reduce(torch.zeros(1))


# How they meet and agree


def agree() -> int:
    def work(seed: int, team: Team) -> None:
        told(f"seed {seed}, {team.rank} of {team.group('ulysses').size()}")
        team.close()

    return start(work=work)


def test_ranks_share_the_seed_of_rank_0() -> None:
    with Ranks(launcher(3), agree) as ranks:
        assert ranks.ended() == [0, 0, 0], ranks.said()
    assert ranks.texts == [f"seed 0, {i} of 3\n" for i in range(3)]


def differ(what: str) -> int:
    def prepare(_: Once) -> Prepared[int]:
        if rank() == 1 and what == "refuses":
            raise InputError("There is no such folder.")
        if what == "all refuse":
            raise InputError("--sample_steps is 0.")
        if rank() == 1 and what == "fails":
            raise TypeError("a defect")
        line = {"hash": rank() if what == "line" else 0}
        return prepared({"--frame_num": 5 + (rank() if what == "fact" else 0), "line 2": line})

    return start(prepare)


@pytest.mark.parametrize(
    ("what", "sentence", "code"),
    [
        ("fact", "rank 1 on HOST: --frame_num is 6, but 5 on rank 0; start all ranks alike.", 2),
        slow(
            "line", "rank 1 on HOST: line 2 differs from that of rank 0; start all ranks alike.", 2
        ),
        ("refuses", "rank 1 on HOST: There is no such folder.", 2),
        slow("all refuse", "--sample_steps is 0.", 2),
        ("fails", "rank 1 on HOST: TypeError: a defect.", 1),
    ],
)
def test_one_sentence_where_ranks_differ(what: str, sentence: str, code: int) -> None:
    with Ranks(launcher(3), differ, what) as ranks:
        assert ranks.ended() == [code] * 3, ranks.said()
    assert ranks.lines() == [sentence.replace("HOST", socket.gethostname())]
    assert ("TypeError: a defect" in ranks.texts[1]) == (what == "fails"), "the traceback is shown"


def test_what_one_rank_alone_states_is_compared() -> None:
    less, more = {"--frame_num": 5}, {"--frame_num": 5, "--lora": "a"}
    for facts, how in (((less, more), "a, but not given"), ((more, less), "not given, but a")):
        said = [Statement(rank, "here", facts=own) for rank, own in enumerate(facts)]
        sentence = f"rank 1 on here: --lora is {how} on rank 0; start all ranks alike."
        assert verdict(said) == sentence


def make(outcome: str) -> int:
    def maker() -> None:
        told("made")
        if outcome == "fails":
            raise InputError("The disk is full.")

    def prepare(once: Once) -> Prepared[int]:
        once(maker)
        told("ready")
        return prepared()

    return start(prepare)


def test_what_a_machine_needs_once_is_made_once() -> None:
    with Ranks(launcher(3), make, "works") as ranks:
        assert ranks.ended() == [0, 0, 0], ranks.said()
    assert ranks.texts == ["made\nready\n", "ready\n", "ready\n"]


def test_nobody_waits_for_a_maker_that_failed() -> None:
    with Ranks(launcher(3), make, "fails") as ranks:
        assert ranks.ended() == [2, 2, 2], ranks.said()
    assert ranks.lines() == ["The disk is full."] and "ready" not in ranks.said()


# Ranks and machines that are not there


def impatient() -> int:
    return start(patience=IMPATIENT)


def test_a_missing_rank_is_named() -> None:
    with Ranks(launcher(3)[:2], impatient) as ranks:
        assert ranks.ended() == [2, 2], ranks.said()
    *waiting, end = ranks.lines()
    assert "2 of 3 to start" in waiting[0] and waiting[0].endswith(" s so far.")
    assert end == "Waited 2 s for rank 2 of 3 to start; start all 3 ranks alike."


def prepare_long() -> int:
    def prepare(_: Once) -> Prepared[int]:
        if rank() == 1:
            signal.pause()
        return prepared()

    return start(prepare, patience=IMPATIENT)


def test_a_rank_that_takes_long_to_prepare_is_named() -> None:
    with Ranks(launcher(4)[:2], prepare_long) as ranks:
        ranks.until(0, "Waiting for rank 2, 3 of 4 to start and rank 1 of 4 to prepare the run;")


@pytest.mark.slow
def test_no_rank_0() -> None:
    with Ranks([{**launcher(2)[1], "LOCAL_RANK": "0"}], impatient) as ranks:
        assert ranks.ended() == [2], ranks.said()
    first, last = ranks.lines()
    assert first.endswith("(MASTER_ADDR and MASTER_PORT) does not answer; still waiting.")
    assert "cannot be reached" in last and "machine of rank 0" in last


def test_an_unknown_machine_is_refused_at_once() -> None:
    variables = {**launcher(2)[1], "LOCAL_RANK": "0", "MASTER_ADDR": "nowhere.invalid"}
    with Ranks([variables], agree) as ranks:
        assert ranks.ended() == [2], ranks.said()
    (sentence,) = ranks.lines()
    assert "nowhere.invalid" in sentence and "MASTER_ADDR" in sentence


@pytest.mark.slow
def test_another_program_at_the_port() -> None:
    """It takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        variables = [{**v, "MASTER_PORT": port, "LOCAL_RANK": "0"} for v in launcher(2)]
        with Ranks(variables, impatient) as ranks:
            assert ranks.ended() == [2, 2], ranks.said()
    said = ranks.lines()
    for why in ("cannot be opened", "cannot be reached"):
        (sentence,) = [line for line in said if why in line]
        assert f":{port}" in sentence and "--master_port" in sentence


def unreachable() -> int:
    """Rank 0 listens where the other does not find it, as behind a firewall."""
    create, blocked = socket.create_server, socket.socket()
    blocked.bind(("127.0.0.1", 0))  # and does not listen; no other program takes the port
    port = blocked.getsockname()[1]
    socket.create_server = lambda *_, **__: create(("127.0.0.2", port))  # type: ignore[assignment]
    return start()


def test_a_blocked_port_of_rank_0_is_refused_at_once() -> None:
    with Ranks(launcher(2), unreachable) as ranks:
        assert ranks.ended(30) == [2, 2], ranks.said()
    (sentence,) = ranks.lines()
    assert sentence.startswith(f"rank 1 on {socket.gethostname()}: Rank 0 at 127.0.0.1:")
    assert sentence.endswith("(Connection refused); open the ports between the machines.")


def test_ranks_that_torchrun_restarts_do_not_read_of_earlier_ones() -> None:
    """The store of torchrun's agent stays, and what a rank had refused is mended."""
    port, patience = int(free_port()), timedelta(seconds=60)
    store = collectives.TCPStore("127.0.0.1", port, None, True, patience, wait_for_workers=False)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    with Ranks(launcher(2, **variables), differ, "refuses") as ranks:
        assert ranks.ended(30) == [2, 2], ranks.said()
    again = launcher(2, **variables, TORCHELASTIC_RESTART_COUNT="1")
    with Ranks(again, agree) as ranks:
        assert ranks.ended(30) == [0, 0], ranks.said()


# How they end


def fail(kind: str, far: bool) -> int:
    """Rank 1 ends in some way while the others wait for it in a collective."""
    if far:  # as on another machine
        host.machine = lambda: f"machine of rank {rank()}"

    def work(_: int, team: Team) -> None:
        collect(team)
        if rank() == 1:
            told("fault")
            faults[kind]()
        collect(team)

    return start(work=work)


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
LOST = "Rank 1 ended unexpectedly (killed, or out of memory); the video was not written."


def test_a_killed_rank_is_named() -> None:
    with Ranks(launcher(3), fail, "die", False) as ranks:
        assert ranks.ended(30) == [1, -signal.SIGKILL, 1], ranks.said()
    assert ranks.lines() == [LOST] and "Traceback" not in ranks.said()


@pytest.mark.slow
def test_a_killed_rank_of_another_machine_is_named() -> None:
    with Ranks(launcher(2), fail, "die", True) as ranks:
        assert ranks.ended(30) == [1, -signal.SIGKILL], ranks.said()
    (sentence,) = ranks.lines()
    assert sentence.startswith(f"Rank 1 on {socket.gethostname()} ended unexpectedly (killed, or")
    assert "Traceback" not in ranks.said()


@pytest.mark.parametrize("far", [False, slow(True)])
def test_a_defect_is_shown_with_its_traceback(far: bool) -> None:
    with Ranks(launcher(3), fail, "defect", far) as ranks:
        assert ranks.ended(30) == [1, 1, 1], ranks.said()
    assert ranks.texts[1].count("RuntimeError: a defect of ours") == 2, ranks.said()
    own, *others = sorted(ranks.lines(), key=lambda line: line.startswith("Rank"))
    assert own == "rank 1 failed: RuntimeError: a defect of ours"
    other = f"Rank 1 on {socket.gethostname()} ended: RuntimeError: a defect of ours"
    assert set(others) == ({other} if far else set())


def test_a_failure_is_named_on_other_machines() -> None:
    with Ranks(launcher(2), fail, "refuse", True) as ranks:
        assert ranks.ended(30) == [1, 2], ranks.said()
    here, there = ranks.lines()
    assert here == f"Rank 1 on {socket.gethostname()} ended: This cannot be run."
    assert there == "This cannot be run."


@pytest.mark.parametrize(
    ("kind", "sentence", "code"),
    [("refuse", "This cannot be run.", 2), slow("use_up_memory", "Out of memory; ", 1)],
)
def test_what_a_user_can_act_upon_is_one_sentence(kind: str, sentence: str, code: int) -> None:
    with Ranks(launcher(2), fail, kind, False) as ranks:
        assert ranks.ended(30) == [1, code], ranks.said()
    (said,) = ranks.lines()
    assert said.startswith(sentence) and "Traceback" not in ranks.said()


def refuse_together() -> int:
    def work(_: int, team: Team) -> None:
        collect(team)
        refuse()

    return start(work=work)


def test_a_refusal_by_all_is_said_once() -> None:
    with Ranks(launcher(4), refuse_together) as ranks:
        assert ranks.ended(30) == [2] * 4, ranks.said()
    assert ranks.lines() == ["This cannot be run."]


@pytest.mark.parametrize(
    ("number", "sentence", "code"),
    [(signal.SIGTERM, "terminated", 143), slow(signal.SIGINT, "interrupted", 130)],
)
def test_signals(number: signal.Signals, sentence: str, code: int) -> None:
    """To all ranks, as from torchrun or a terminal."""
    with Ranks(launcher(2), fail, "pause", False) as ranks:
        ranks.until(1, "fault")
        for process in ranks.processes:
            os.kill(process.pid, number)
        codes = ranks.ended(30)
    # A rank in a collective may learn of the other's end before it sees its own signal.
    assert code in codes and set(codes) <= {code, 1}, ranks.said()
    assert ranks.lines() == [f"{sentence}; the video was not written."], (codes, ranks.said())


def decode_alone(go: str) -> int:
    """Rank 0 works on after the others have left, and fails."""

    def work(_: int, team: Team) -> None:
        team.close()
        if team.is_main:
            Path(go).read_text()  # until something is written
            defect()

    return start(work=work)


@pytest.mark.slow
def test_ranks_that_have_left_are_not_missed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with Ranks(launcher(3), decode_alone, str(go)) as ranks:
        for process in ranks.processes[1:]:
            process.join(30)
        go.write_text("now")
        assert ranks.ended(30) == [1, 0, 0], ranks.said()
    assert ranks.lines() == ["rank 0 failed: RuntimeError: a defect of ours"]


def speak_slowly(go: str) -> int:
    """Rank 0 fails, and is held up when it says why."""

    def slowly(text: str) -> None:
        told("about to speak")
        Path(go).read_text()
        say(text)

    def work(*_: object) -> None:
        if rank() == 0:
            raise TypeError("a defect")
        signal.pause()

    with terminable():
        return run(lambda _: prepared(), work, describe, slowly)


@pytest.mark.slow
def test_nothing_ends_a_rank_before_it_has_said_why(tmp_path: Path) -> None:
    """On a busy machine a rank is slow to speak. Until it has, the others do not know and go on."""
    go = tmp_path / "go"
    os.mkfifo(go)
    with Ranks(launcher(2), speak_slowly, str(go)) as ranks:
        ranks.until(0, "about to speak")
        ranks.processes[1].join(2)
        assert ranks.processes[1].exitcode is None, ranks.said()
        os.kill(ranks.processes[0].pid, signal.SIGTERM)  # torchrun, had another rank ended
        go.write_text("now")
        assert ranks.ended(30) == [1, 1], ranks.said()
    assert ranks.lines() == ["rank 0 failed: TypeError: a defect"]


def agent(kind: str) -> int:
    """Like torchrun's: the parent of two ranks. They work until it is gone."""
    for variables in launcher(2, TORCHELASTIC_RUN_ID="of a test"):
        if os.fork() == 0:
            os.environ.update(variables)
            os._exit(start(work=go_on[kind]))
    signal.pause()
    return 0


def compute(_: int, team: Team) -> None:
    """Rank 0 waits for a rank that is busy."""
    collect(team)
    try:
        told(f"rank {rank()} works")
        if rank() == 1:
            signal.pause()
        collect(team)
    finally:
        told(f"rank {rank()} cleaned up")


def hang(_: int, team: Team) -> None:
    """Each waits for the other in code that knows no signals."""
    collect(team)
    told(f"rank {rank()} works")
    collectives.recv(torch.zeros(1), src=1 - rank())


go_on = {"compute": compute, "hang": hang}


@pytest.mark.parametrize("kind", ["compute", slow("hang")])
def test_ranks_end_when_torchrun_is_killed(kind: str) -> None:
    with Ranks([{}], agent, kind) as torchrun:
        for number in range(2):
            torchrun.until(0, f"rank {number} works")
        torchrun.processes[0].kill()
        torchrun.ended(30)  # with both ranks
    assert torchrun.lines() == ["torchrun has ended unexpectedly; the video was not written."]
    assert torchrun.texts[0].count("cleaned up") == (2 if kind == "compute" else 0)


def exchange_on(limit: int = 5) -> int:
    """Exchange until somebody is lost; a rank that is silent for `limit` seconds is."""

    def work(_: int, team: Team) -> None:
        told(f"rank {rank()} is {os.getpid()}")
        while True:
            collect(team)

    seconds = timedelta(seconds=limit)
    return start(lambda _: replace(prepared(), timeout=seconds), work)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_rank_is_named_and_ended(lost: int) -> None:
    with Ranks(launcher(2), exchange_on) as ranks:
        ranks.until(lost, f"rank {lost} is ")
        os.kill(ranks.processes[lost].pid, signal.SIGSTOP)
        codes = ranks.ended(60)
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == 1, ranks.said()
    sentence = f"Rank {lost} has not answered for 5 s (--dist_timeout); the video was not written."
    assert ranks.lines() == [sentence] and "Traceback" not in ranks.said()


@pytest.mark.slow
def test_a_pause_of_all_ranks_is_no_silence() -> None:
    """A scheduler may suspend a job; rank 0, which goes on first, has pinged the other before."""
    with Ranks(launcher(2), exchange_on, 20) as ranks:
        for number, process in reversed(list(enumerate(ranks.processes))):
            ranks.until(number, f"rank {number} is ")
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2)
        time.sleep(20)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(2)
        assert not ranks.lines(), ranks.said()
        assert all(process.is_alive() for process in ranks.processes), ranks.said()


if __name__ == "__main__":  # as a rank of torchrun's
    sys.exit(exchange_on() if sys.argv[1] == "exchange" else fail(sys.argv[1], False))
