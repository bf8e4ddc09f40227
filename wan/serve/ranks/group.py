"""Starts the ranks with torchrun, exchanges messages with them, and restarts them."""

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

from wan.serve.jobs.folders import FRONT_KIND
from wan.serve.ranks.monitor import GroupMonitor
from wan.serve.requests.addresses import open_sockets
from wan.settings.layers import Layer
from wan.utils import env
from wan.utils.files import write_output
from wan.utils.log import logger

_GRACE = 15.0  # seconds in which ranks should end after a stop command or the loss of a rank
_RECOVERY = 15.0  # seconds in which ranks that seem to hang may recover
_HELLO_SECONDS = 10.0  # seconds in which a new connection must send the secret
_MAX_UNKNOWN_CALLERS = 32  # maximum of connections without the secret
_SHORTEST = 1.0  # seconds between two starts of a group
_LONGEST = 60.0  # the same after repeated failed starts
_CHECK_SECONDS = 1.0  # seconds between two checks for hanging ranks
_MAX_LOG_BYTES = 10_000_000  # bytes from which a new ranks' log is started


@dataclass(frozen=True)
class Nodes:
    """The machines of a group.

    Attributes:
        count: Number of machines.
        host, port: Rendezvous address, on the front's machine.
    """

    count: int = 1
    host: str = "127.0.0.1"
    port: int = 0

    def make_torchrun_args(self, ranks: int) -> list[str]:
        """Returns the torchrun arguments for this machine's part of `ranks` ranks."""
        if self.count == 1:
            return ["--standalone", f"--nproc_per_node={ranks}"]
        node_args = [
            f"--nnodes={self.count}",
            "--node_rank=0",
            f"--nproc_per_node={ranks // self.count}",
        ]
        return [*node_args, f"--master_addr={self.host}", f"--master_port={self.port}"]


ONE_NODE = Nodes()


class RankGroup:
    """The ranks of the service, restarted whenever they have ended.

    Ranks on other machines are started there, by torchrun in a loop. They read the address of the
    front from front.json in the journal folder, which all machines share.

    Attributes:
        restarts: Number of restarts.
        trouble: Why the last group ended, or why the present one seems to hang; else None.
        down_since: End of the last group, by `time.monotonic`; None while a group runs.
    """

    def __init__(
        self,
        flags: Layer,
        ranks: int,
        folder: Path,
        on_message: Callable[[dict[str, Any]], None],
        nodes: Nodes = ONE_NODE,
        max_cached_prompts: int = 64,
        timeout: float = 1800.0,
    ) -> None:
        """Prepares the group; `run` starts it.

        Args:
            flags: Settings of the ranks' run and of all jobs.
            ranks: Number of ranks on all machines.
            folder: The journal folder, for the ranks' log and front.json.
            on_message: Called with messages about jobs, with {"is": "ready"} when all ranks are
                ready, and with {"is": "ended", "code": ..., "message": ...} after each group.
            max_cached_prompts: Number of prompts whose embeddings the ranks cache.
            timeout: Seconds that the ranks may make no progress, as --dist_timeout.
        """
        self._flags, self._ranks, self._folder = flags, ranks, folder
        self._on_message = on_message
        self._nodes, self._max_cached_prompts = nodes, max_cached_prompts
        self._secret = secrets.token_hex()
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._ready: set[int] = set()
        self._pids: dict[int, int] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._reason: tuple[str, str] | None = None
        self._monitor = GroupMonitor(timeout)
        self._unknown_callers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._was_ready = False
        self._suspected_since: float | None = None  # start of a suspected hang
        self.trouble: str | None = None
        self.restarts = 0
        self.down_since: float | None = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether all ranks are connected and responsive."""
        return len(self._ready) == self._ranks and self._suspected_since is None

    @property
    def is_stalled(self) -> bool:
        """Whether the ranks seem to hang; they are killed soon."""
        return self._suspected_since is not None

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks on this machine, by rank."""
        return dict(self._pids)

    async def run(self) -> None:
        """Runs groups of ranks, one after the other, until `stop` is called."""
        listener, *unused = open_sockets(self._nodes.host, 0)
        for extra_listener in unused:  # of further addresses; ranks use one port
            extra_listener.close()
        port = listener.getsockname()[1]
        server = await asyncio.start_server(self._handle_connection, sock=listener)
        address = self._folder / "front.json"
        with write_output(address, FRONT_KIND) as temporary:
            temporary.chmod(0o600)
            front = {
                "host": self._nodes.host,
                "port": port,
                "secret": self._secret,
                "settings": self._flags.values,
                "texts": self._max_cached_prompts,
            }
            temporary.write_text(json.dumps(front, default=str))
        wait = _SHORTEST
        async with server:
            while not self._stopping:
                started_at = time.monotonic()
                was_ready = await self._run_once(address)
                if self._stopping:
                    break
                wait = _SHORTEST if was_ready else min(wait * 2, _LONGEST)
                await asyncio.sleep(max(wait - (time.monotonic() - started_at), _SHORTEST / 5))
                self.restarts += 1

    async def stop(self) -> None:
        """Ends the ranks: idle ones at once, others before their next denoising step."""
        self._stopping = True
        self._send_command(do="stop")
        process = self._process
        if process is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                await process.wait()
        await self._terminate(process)  # also ranks that torchrun did not end

    def make_videos(self, jobs: Sequence[dict[str, Any]], shapes: Mapping[str, str]) -> None:
        """Sends a batch of jobs to the ranks; the next batch may follow when all have ended.

        Args:
            jobs: For each job its id "job", its "settings", and the output "file".
            shapes: Job id -> shape; steps of equal shapes take the same time.
        """
        self._monitor.begin_jobs(shapes)
        self._send_command(do="make", jobs=jobs)

    def cancel(self, job: str) -> None:
        """Cancels a job before its next denoising step."""
        self._monitor.cancel(job)
        self._send_command(do="cancel", job=job)

    async def _run_once(self, address: Path) -> bool:
        """Starts a group and waits for its end; returns whether all ranks had become ready."""
        self._links, self._ready, self._reason, self._pids = {}, set(), None, {}
        self._was_ready, self._suspected_since = False, None
        self._monitor.begin_group(time.monotonic())
        command = [sys.executable, "-m"]
        if self._ranks > 1:
            command += ["torch.distributed.run", *self._nodes.make_torchrun_args(self._ranks), "-m"]
        command += ["wan.serve.ranks", str(address)]
        with _open_rank_log(self._folder / "ranks.log") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env.make_rank_environ(),
            )
        self.down_since = None
        watch_task = asyncio.create_task(self._watch(self._process))
        try:
            await self._process.wait()
        finally:
            watch_task.cancel()
        self.down_since = time.monotonic()
        was_ready = self.ready or self._was_ready
        await self._terminate(self._process)
        for link in self._links.values():
            link.close()
        self._ready = set()
        code, message = self._reason or ("ranks_lost", "The ranks have ended unexpectedly.")
        self.trouble = message
        if not self._stopping:
            logger.error("The ranks have ended (%s) and are restarted.", message)
        self._on_message({"is": "ended", "code": code, "message": message})
        return was_ready

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kills a group that hangs and does not recover."""
        while not self._stopping:
            await asyncio.sleep(_CHECK_SECONDS)
            now = time.monotonic()
            trouble = self._monitor.find_hang(now)
            if trouble is None:
                if self._suspected_since is not None:
                    logger.warning("The ranks make progress again.")
                    self._suspected_since = self.trouble = None
                    if self.ready:
                        self._on_message({"is": "ready"})
                continue
            self.trouble = trouble
            if self._suspected_since is None:
                logger.error("%s They are killed in %.0f s if this lasts.", trouble, _RECOVERY)
                self._suspected_since = now
            elif now - self._suspected_since > _RECOVERY:
                self._was_ready, self._ready = len(self._ready) == self._ranks, set()
                self._reason = "ranks_lost", trouble
                self._send_signal(process, signal.SIGKILL)  # SIGKILL also ends a suspended process
                return

    def _send_signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """Sends a signal to every process of a group."""
        pids = {*self._pids.values()}
        if process.returncode is None:
            pids |= _list_descendants(process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for pid in pids:  # torchrun starts each rank in a new session
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    async def _terminate(self, process: asyncio.subprocess.Process) -> None:
        """Ends every process of a group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._send_signal(process, number)
            deadline = time.monotonic() + _GRACE
            while (
                any(map(_is_process_alive, [*self._pids.values()])) and time.monotonic() < deadline
            ):
                await asyncio.sleep(0.05)
        await process.wait()

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reads the messages of one rank until its connection closes."""
        rank = None
        try:
            hello = await self._receive_hello(reader, writer)
            if hello is not None:
                rank = int(hello["rank"])
                self._links[rank] = writer
                if hello["node"] == 0:
                    self._pids[rank] = int(hello["pid"])
                self._monitor.receive(rank, hello, time.monotonic())
                # The link of a rank of an earlier group is replaced by that of a later one.
                while (line := await reader.readline()) and self._links.get(rank) is writer:
                    self._handle_message(rank, json.loads(line))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            if rank is not None and self._links.get(rank) is writer and self._reason is None:
                # The error that a collective raises in the other ranks is only its consequence.
                self._reason = "ranks_lost", f"Rank {rank} has ended unexpectedly."
            writer.close()

    async def _receive_hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> dict[str, Any] | None:
        """Receives the first line of a connection; returns None if the secret is wrong."""
        self._unknown_callers[writer] = None
        if len(self._unknown_callers) > _MAX_UNKNOWN_CALLERS:
            oldest = next(iter(self._unknown_callers))
            del self._unknown_callers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                hello = json.loads(await reader.readline())
            secret = str(hello["secret"]).encode()
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
        finally:
            self._unknown_callers.pop(writer, None)
        return hello if secrets.compare_digest(secret, self._secret.encode()) else None

    def _handle_message(self, rank: int, message: dict[str, Any]) -> None:
        """Handles a message of a rank after its first line."""
        self._monitor.receive(rank, message, time.monotonic())
        if message["is"] == "ready":
            self._ready.add(rank)
            if self.ready:
                self.trouble = None
                self._monitor.mark_ready()
                self._on_message(message)
        elif message["is"] == "lost":
            self._reason = self._reason or (message["code"], message["message"])
        elif message["is"] != "alive":
            self._on_message(message)

    def _send_command(self, **command: Any) -> None:
        writer = self._links.get(0)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps(command, ensure_ascii=False).encode() + b"\n")


def _is_process_alive(pid: int) -> bool:
    """Returns whether a process is running; a zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _list_descendants(pid: int) -> set[int]:
    """Returns the process ids of all descendants of a process."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        children = {int(child) for child in text.split()}
        return children.union(*map(_list_descendants, children))
    return set()


def _open_rank_log(path: Path) -> BinaryIO:
    """Opens the ranks' log for appending; renames a long one first."""
    if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
        path.replace(path.with_suffix(".1.log"))
    return path.open("ab")
