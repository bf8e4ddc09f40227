"""The group of ranks, controlled by the front: processes without a model follow the prompt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.jobs import Jobs, wait_until
from wan.serve.jobs.journal import MAX_ATTEMPTS
from wan.serve.queue.service import Limits
from wan.serve.ranks import group, monitor

RANK = '''#!PYTHON
"""In place of Python: torchrun of two ranks, and each of these."""
import os, signal, sys, time
from pathlib import Path

from wan.serve.ranks import __main__ as ranks

def run_both():
    ranks = []
    for number in range(2):
        pid = os.fork()
        if not pid:
            os.setsid()
            os.environ["RANK"] = str(number)
            return
        ranks.append(pid)
    os.wait()
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    sys.exit(1)

def make(job, settings, file):
    what = settings["prompt"]
    if what == "die":
        os._exit(3)
    if what == "lose memory":
        front.send("lost", code="out_of_memory", message="No memory is left.")
        os._exit(4)
    if what == "lose a peer":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(int((folder / "pid1").read_text()), signal.SIGKILL)
        time.sleep(0.3)  # so long a collective waits, and then raises an error
        front.send("lost", code="internal_error", message="Connection closed by peer")
        os._exit(1)
    if what == "be deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    total = settings.get("sample_steps", 2)
    for done in range(total + 1):
        if job in front.cancelled or front.stop_event.is_set():
            return front.send("failed", job=job, code="cancelled", message="It was cancelled.")
        front.send("step", job=job, done=done, total=total, follows=done < total)
        time.sleep(0.05)
    Path(file).write_bytes(b"video")
    front.send("done", job=job, texts=[0, 1], seconds=1.0, loading=0.0)

folder = Path(sys.argv[-1]).parent
with (folder / "starts").open("a") as file:
    file.write(f"{time.monotonic()}\\n")
if (folder / "broken").exists():
    sys.exit(1)
assert sys.argv[1:] == [*ARGV, str(folder / "front.json")], sys.argv
ranks.HEARTBEAT = 0.1
run_both()
rank = int(os.environ["RANK"])
(folder / f"pid{rank}").write_text(str(os.getpid()))
front = ranks.FrontLink(ranks.read_front_file(folder / "front.json"), rank, 0)
front.send("ready")
while True:
    command = front.next_command(10)
    if command and command["do"] == "stop":
        sys.exit(0)
    for job in command["jobs"] if command else ():
        make(**job)
'''
ARGV = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ARGV += ["-m", "wan.serve.ranks"]
POLL_SECONDS = 0.1
Trial = Callable[[Jobs], Awaitable[None]]


@pytest.fixture(autouse=True)
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the Python interpreter of the ranks, and shortens all waits."""
    path = tmp_path / "python"
    path.write_text(RANK.replace("#!PYTHON", f"#!{sys.executable}").replace("ARGV", repr(ARGV)))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    for name, seconds in {
        "_SHORTEST": POLL_SECONDS,
        "_CHECK_SECONDS": POLL_SECONDS,
        "_RECOVERY": 1.0,
    }.items():
        monkeypatch.setattr(group, name, seconds)
    monkeypatch.setattr(monitor, "SILENCE", 0.8)


@asynccontextmanager
async def running_service(folder: Path) -> AsyncIterator[Jobs]:
    """A service with two ranks."""
    jobs = Jobs(folder, Limits(batch_size=1), ranks=2)
    living = asyncio.create_task(jobs.service.serve_forever())
    try:
        yield jobs
    finally:
        await jobs.service.stop()
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    assert not any(map(is_alive, jobs.service.rank_group.pids.values()))


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; a zombie has ended."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def wait_for_end(jobs: Jobs, name: str) -> tuple[str, str | None, int]:
    """Waits until a job has ended; returns its status, error code and attempt."""
    await wait_until(lambda: jobs.get_state(name) in ("completed", "failed"))
    video = await jobs.get_video(name)
    return video["status"], (video["error"] or {"code": None})["code"], video["attempt"]


async def test_ranks_that_have_not_called_yet_are_ended(tmp_path: Path) -> None:
    """Also in a session of their own, as torchrun starts them."""
    ranks = group.RankGroup({}, 1, tmp_path, lambda _: None)
    script = "setsid sleep 1000 > /dev/null & echo $!; wait"
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", script), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    await wait_until(lambda: os.getsid(pid) == pid)
    ranks._send_signal(process, signal.SIGTERM)
    await process.wait()
    try:
        await wait_until(lambda: not is_alive(pid), 2)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def test_a_rank_of_an_earlier_group_is_not_heard(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    ranks = group.RankGroup({}, 1, tmp_path, heard.append)
    server = await asyncio.start_server(ranks._handle_connection, "127.0.0.1", 0)
    links = []
    async with server:
        for number in (1, 2):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            links.append((reader, writer))
            hello = {"is": "hello", "secret": ranks._secret, "rank": 0, "node": 1, "pid": number}
            for message in (hello, {"is": "ready"}):
                writer.write(json.dumps(message).encode() + b"\n")
            await wait_until(lambda number=number: len(heard) == number)
        step = {"is": "step", "job": "a", "done": 1, "total": 2, "follows": True}
        for reader, writer in links:
            writer.write(json.dumps(step).encode() + b"\n")
            writer.write_eof()
            await reader.read()
            writer.close()
    assert [message["is"] for message in heard] == ["ready", "ready", "step"]


async def test_silent_callers_keep_no_rank_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest ones are closed for new ones, and all of them after some time."""
    monkeypatch.setattr(group, "_HELLO_SECONDS", 1.0)
    messages: list[dict[str, Any]] = []
    ranks = group.RankGroup({}, 1, tmp_path, messages.append)
    server = await asyncio.start_server(ranks._handle_connection, "127.0.0.1", 0)
    async with server:
        address = server.sockets[0].getsockname()
        links = [await asyncio.open_connection(*address) for _ in range(40)]
        async with asyncio.timeout(0.9):
            for reader, _ in links[:7]:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
        hello = {"is": "hello", "secret": ranks._secret, "rank": 0, "node": 1, "pid": 1}
        links[-1][1].write(json.dumps(hello).encode() + b'\n{"is": "ready"}\n')
        await wait_until(lambda: messages)
        async with asyncio.timeout(30):
            for reader, _ in links[7:-1]:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
        assert not links[-1][0].at_eof()
        for _, writer in links:
            writer.close()


async def make_and_cancel(jobs: Jobs) -> None:
    """Jobs run one after the other; a job that is deleted while it runs ends soon."""
    first, long, last = [await jobs.create({"num_inference_steps": n}) for n in (2, 1000, 2)]
    assert await wait_for_end(jobs, first) == ("completed", None, 1)
    await wait_until(lambda: jobs.service.find_job(long).done > 2)
    await jobs.delete(long)
    assert await wait_for_end(jobs, last) == ("completed", None, 1)
    await wait_until(lambda: not (jobs.folder / "jobs" / long).exists())
    assert jobs.service.rank_group.restarts == 0


async def lose(jobs: Jobs) -> None:
    """A job is retried once, but not if it ran out of memory."""
    expected = {"die": ("failed", "ranks_lost", MAX_ATTEMPTS), "well": ("completed", None, 1)}
    expected |= {"lose memory": ("failed", "out_of_memory", 1)}
    expected |= {"lose a peer": ("failed", "ranks_lost", MAX_ATTEMPTS)}
    expected |= {"at last": ("completed", None, 1)}
    names = {prompt: await jobs.create({"prompt": prompt}) for prompt in expected}
    outcomes = {prompt: await wait_for_end(jobs, name) for prompt, name in names.items()}
    assert outcomes == expected and jobs.service.rank_group.restarts == 5
    error = (await jobs.request(f"/v1/videos/{names['lose memory']}"))[2]["error"]
    assert "No memory is left. The estimated need is" in error["message"]
    error = (await jobs.request(f"/v1/videos/{names['lose a peer']}"))[2]["error"]
    assert error["message"] == "Rank 1 has ended unexpectedly."


async def fail_to_start(jobs: Jobs) -> None:
    """Starts are retried with growing delays, and a job waits for them."""
    (jobs.folder / "broken").touch()
    name = await jobs.create()
    await wait_until(lambda: jobs.service.rank_group.restarts >= 4)
    status, _, health = await jobs.request("/health")
    assert (status, health["status"], jobs.get_state(name)) == (503, "starting", "queued")
    assert health["reason"] == "The ranks have ended unexpectedly."
    starts = [float(line) for line in (jobs.folder / "starts").read_text().split()]
    gaps = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert 0.4 < gaps[2] < 5  # 0.8 s; a process may start late
    (jobs.folder / "broken").unlink()
    assert await wait_for_end(jobs, name) == ("completed", None, 1)
    assert (await jobs.request("/health"))[2]["reason"] is None


async def hang(jobs: Jobs) -> None:
    """A rank that recovers in time continues; else it is killed. A deleted job does not return."""
    ranks = jobs.service.rank_group
    names = [await jobs.create({"num_inference_steps": n}) for n in (1000, 2)]
    await wait_until(lambda: jobs.service.find_job(names[0]).done > 2)
    pids = {**ranks.pids}
    assert {*pids} == {0, 1}
    os.kill(pids[1], signal.SIGSTOP)
    await wait_until(lambda: not ranks.ready)
    status, _, health = await jobs.request("/health")
    assert (status, health["status"], health["restarts"]) == (503, "stalled", 0)
    assert "Rank 1 has not answered" in health["reason"]
    os.kill(pids[1], signal.SIGCONT)
    await wait_until(lambda: ranks.ready)
    assert jobs.service.find_job(names[0]).attempt == 1 and ranks.trouble is None
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    await wait_until(lambda: not ranks.ready)
    await jobs.delete(names[0])
    assert await wait_for_end(jobs, names[1]) == ("completed", None, 1)
    assert ranks.restarts == 1 and not any(map(is_alive, pids.values()))
    assert not (jobs.folder / "jobs" / names[0]).exists()
    assert (await jobs.request("/health"))[0] == 200


async def meet_strangers(jobs: Jobs) -> None:
    """A connection without the secret is closed, and its messages are ignored."""
    file = jobs.folder / "front.json"
    front_record = json.loads(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    hello = {"is": "hello", "secret": "x", "rank": 0, "node": 0, "pid": 1}
    for line in (json.dumps(hello), "[]", "1", "{}", "[" * 10_000, json.dumps({"secret": None})):
        reader, writer = await asyncio.open_connection("127.0.0.1", front_record["port"])
        writer.write(line.encode() + b'\n{"is": "lost", "code": "x", "message": "x"}\n')
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert await wait_for_end(jobs, await jobs.create()) == ("completed", None, 1)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", front_record["port"]), 1):
        pass


async def test_a_group(tmp_path: Path) -> None:
    """Runs each scenario in its own service, all at the same time."""

    async def run(trial: Trial) -> None:
        async with running_service(tmp_path / trial.__name__) as jobs:
            if trial is not fail_to_start:
                await wait_until(lambda: jobs.service.rank_group.ready)
            await trial(jobs)

    trials: list[Trial] = [make_and_cancel, lose, fail_to_start, hang, meet_strangers]
    ends: list[Any] = await asyncio.gather(*map(run, trials), return_exceptions=True)
    wrong = {
        scenario.__name__: end
        for scenario, end in zip(trials, ends, strict=True)
        if end is not None
    }
    if wrong:
        raise ExceptionGroup(", ".join(wrong), [*wrong.values()])


async def test_a_stop_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that ignore SIGTERM are killed; their job is queued again without an attempt."""
    monkeypatch.setattr(group, "_GRACE", 0.3)
    async with running_service(tmp_path / "jobs") as jobs:
        name = await jobs.create({"prompt": "be deaf"})
        await wait_until(lambda: jobs.get_state(name) == "in_progress")
        pids = [*jobs.service.rank_group.pids.values()]
        began = time.monotonic()
    assert time.monotonic() - began < 5 and len(pids) == 2
    assert not any(map(is_alive, pids))
    video = (await Jobs(jobs.folder).request(f"/v1/videos/{name}"))[2]
    assert (video["status"], video["attempt"]) == ("queued", 0)
