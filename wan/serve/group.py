"""The group of ranks: started, listened to, and started again when it has ended."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wan import env
from wan.log import logger
from wan.output_files import write_output
from wan.serve.connections import Connections, open_sockets
from wan.serve.folders import FRONT
from wan.serve.monitor import GroupMonitor

_GRACE = 15.0  # seconds in which ranks that are told to stop, or have lost one of them, should end
_RECOVERY = 15.0  # seconds in which ranks that seem to hang may go on
_HELLO = 10.0  # seconds in which a rank that has connected shows that it knows the secret
_STRANGERS = 32  # connections at most that have not
_SHORTEST = 1.0  # seconds between two starts of a group
_LONGEST = 60.0  # of one that does not come up
_LOOK = 1.0  # seconds between two looks at whether ranks hang
_LOG = 10_000_000  # bytes from which on the ranks' log is begun anew


@dataclass(frozen=True)
class Nodes:
    """The machines of a group.

    Attributes:
        count: How many there are.
        host, port: Of the front's machine, where the others find it.
    """

    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    def torchrun(self, ranks: int) -> list[str]:
        """Returns the arguments that start the ranks of the front's machine."""
        if self.count == 1:
            return ["--standalone", f"--nproc_per_node={ranks}"]
        own = [f"--nnodes={self.count}", "--node_rank=0", f"--nproc_per_node={ranks // self.count}"]
        return [*own, f"--master_addr={self.host}", f"--master_port={self.port}"]


ONE_NODE = Nodes()


class RankGroup:
    """The ranks of the service.

    Those of other machines are started there, by torchrun in a loop; they find the front by the
    file front.json in its folder, which all machines have to share.

    Attributes:
        ready: All ranks of the present group wait for videos or make one.
        restarts: How often a group was started after the first.
        trouble: Why the last group has ended; None while a group is ready.
        down_since: When the last group ended, by `time.monotonic`; None while one runs.
    """

    def __init__(
        self,
        argv: Sequence[str],
        ranks: int,
        folder: Path,
        told: Callable[[dict[str, Any]], None],
        nodes: Nodes = ONE_NODE,
        texts: int = 64,
        timeout: float = 1800.0,
    ) -> None:
        """Starts nothing yet.

        Args:
            argv: Flags of generate.py for the ranks.
            ranks: How many there are.
            folder: For the ranks' log and the address of the front.
            told: Gets what ranks say, and {"is": "ended", "reason": ...} when a group has ended.
            nodes: The machines that they are on.
            texts: How many prompts' embeddings they keep.
            timeout: Seconds of --dist_timeout: how long they may make no progress.
        """
        self._argv, self._ranks, self._folder, self._told = list(argv), ranks, folder, told
        self._nodes, self._texts = nodes, texts
        self._secret = secrets.token_hex()
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._ready: set[int] = set()
        self._pids: dict[int, int] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._reason: tuple[str, str] | None = None
        self._monitor = GroupMonitor(timeout)
        self._callers = Connections(ranks + _STRANGERS, _HELLO)
        self._came_up = False
        self._suspected: float | None = None  # since when the group seems to hang
        self.trouble: str | None = None
        self.restarts = 0
        self.down_since: float | None = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether videos can be made."""
        return len(self._ready) == self._ranks and self._suspected is None

    @property
    def is_stalled(self) -> bool:
        """Whether the ranks seem to hang; they are killed soon."""
        return self._suspected is not None

    @property
    def pids(self) -> dict[int, int]:
        """Rank of this machine -> its process."""
        return dict(self._pids)

    async def run(self) -> None:
        """Keeps a group running until `stop` is called."""
        listening, *others = open_sockets(self._nodes.host, 0, self._callers)
        for one in others:  # they have other ports, and ranks are told one
            one.close()
        port = listening.getsockname()[1]
        server = await asyncio.start_server(self._listen, sock=listening)
        address = self._folder / "front.json"
        with write_output(address, FRONT) as temporary:
            temporary.chmod(0o600)
            told = {"host": self._nodes.host, "port": port, "secret": self._secret}
            temporary.write_text(json.dumps(told | {"flags": self._argv, "texts": self._texts}))
        wait = _SHORTEST
        async with server:
            while not self._stopping:
                began = time.monotonic()
                came_up = await self._one(address)
                if self._stopping:
                    break
                wait = _SHORTEST if came_up else min(wait * 2, _LONGEST)
                await asyncio.sleep(max(wait - (time.monotonic() - began), _SHORTEST / 5))
                self.restarts += 1

    async def stop(self) -> None:
        """Ends the ranks: those that wait at once, others before their next step."""
        self._stopping = True
        self._say(do="stop")
        process = self._process
        if process is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                await process.wait()
        await self._end(process)  # also ranks that torchrun has left behind

    def make(self, jobs: Sequence[dict[str, Any]], shapes: Mapping[str, str]) -> None:
        """Has videos made, which all have to end before others are given.

        Args:
            jobs: For each its id "job", "settings", and the "file" that it is written to.
            shapes: Of each job, equal where the steps take the same time.
        """
        self._monitor.begin_jobs(shapes)
        self._say(do="make", jobs=jobs)

    def cancel(self, job: str) -> None:
        """Has a video ended before its next step."""
        self._monitor.cancel(job)
        self._say(do="cancel", job=job)

    async def _one(self, address: Path) -> bool:
        """Starts a group, waits for its end, and returns whether it had come up."""
        self._links, self._ready, self._reason, self._pids = {}, set(), None, {}
        self._came_up, self._suspected = False, None
        self._monitor.begin_group(time.monotonic())
        command = [sys.executable, "-m"]
        if self._ranks > 1:
            command += ["torch.distributed.run", *self._nodes.torchrun(self._ranks), "-m"]
        command += ["wan.serve.ranks", str(address)]
        with _log(self._folder / "ranks.log") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env.for_ranks(),
            )
        self.down_since = None
        watching = asyncio.create_task(self._watch(self._process))
        try:
            await self._process.wait()
        finally:
            watching.cancel()
        self.down_since = time.monotonic()
        came_up = self.ready or self._came_up
        await self._end(self._process)
        for link in self._links.values():
            link.close()
        self._ready = set()
        code, message = self._reason or ("ranks_lost", "The ranks have ended unexpectedly.")
        self.trouble = message
        if not self._stopping:
            logger.error("The ranks have ended (%s); they are started again.", message)
        self._told({"is": "ended", "code": code, "message": message})
        return came_up

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a group that hangs and does not recover; `_one` sees its end."""
        while not self._stopping:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            trouble = self._monitor.check(now)
            if trouble is None:
                if self._suspected is not None:
                    logger.warning("The ranks go on.")
                    self._suspected = self.trouble = None
                    if self.ready:
                        self._told({"is": "ready"})
                continue
            self.trouble = trouble
            if self._suspected is None:
                logger.error("%s They are killed in %.0f s unless they go on.", trouble, _RECOVERY)
                self._suspected = now
            elif now - self._suspected > _RECOVERY:
                self._came_up, self._ready = len(self._ready) == self._ranks, set()
                self._reason = "ranks_lost", trouble
                self._kill(process, signal.SIGKILL)  # which also ends a stopped process
                return

    def _kill(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """Sends a signal to every process of a group."""
        ranks = {*self._pids.values()}
        if process.returncode is None:
            ranks |= _descendants(process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for pid in ranks:  # torchrun gives ranks sessions of their own
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Ends every process of a group, which is a session of its own."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._kill(process, number)
            deadline = time.monotonic() + _GRACE
            while any(map(_runs, [*self._pids.values()])) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        await process.wait()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hears one rank until its connection ends."""
        connection = self._callers.add(writer.transport)
        rank = None
        try:
            while line := await reader.readline():
                if rank is None:
                    told = self._read_hello(line)
                    if told is None:
                        break
                    connection.trust()
                    rank = int(told["rank"])
                    self._links[rank] = writer
                    if told["node"] == 0:
                        self._pids[rank] = int(told["pid"])
                    self._monitor.receive(rank, told, time.monotonic())
                    continue
                if self._links.get(rank) is not writer:  # of a group that was ended
                    break
                self._hear(rank, json.loads(line))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self._callers.remove(connection)
            writer.close()

    def _read_hello(self, line: bytes) -> dict[str, Any] | None:
        """Returns the first line of a rank; None of a caller that does not know the secret."""
        try:
            told = json.loads(line)
            secret = str(told["secret"]).encode()
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        return told if secrets.compare_digest(secret, self._secret.encode()) else None

    def _hear(self, rank: int, said: dict[str, Any]) -> None:
        """Takes what a rank says after its first line."""
        self._monitor.receive(rank, said, time.monotonic())
        if said["is"] == "ready":
            self._ready.add(rank)
            if self.ready:
                self.trouble = None
                self._monitor.end_start()
                self._told(said)
        elif said["is"] == "lost":
            self._reason = self._reason or (said["code"], said["message"])
        elif said["is"] != "alive":
            self._told(said)

    def _say(self, **command: Any) -> None:
        writer = self._links.get(0)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(command, ensure_ascii=False).encode() + b"\n")


def _runs(pid: int) -> bool:
    """Returns whether a process has not ended; a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _descendants(pid: int) -> set[int]:
    """Returns the processes that a process and its children have started."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        children = {int(child) for child in text.split()}
        return children.union(*map(_descendants, children))
    return set()


def _log(path: Path) -> BinaryIO:
    """Opens the ranks' log to write on; a long one is put aside."""
    if path.exists() and path.stat().st_size > _LOG:
        path.replace(path.with_suffix(".1.log"))
    return path.open("ab")
