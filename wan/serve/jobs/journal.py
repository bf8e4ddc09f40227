"""The journal of the jobs: one SQLite file, and in memory open jobs and unwritten changes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from wan.serve.jobs.job import COLUMNS, Row, ServiceJob, make_row, make_tombstone, read_row
from wan.serve.jobs.journal_file import PATIENCE, JournalError, JournalFile, Statement
from wan.serve.requests.refusals import RefusedError
from wan.utils.log import logger

MAX_ATTEMPTS = 2
"""Attempts after which a job fails whose ranks were lost."""
CHECK_SECONDS = 2.0
"""Seconds between two checks of the journal file, and between two attempts to write it."""
TRUST_SECONDS = 3600.0
"""Seconds after the start in which a wrong clock of the system can be corrected."""
_DAY = 86400.0
_MAX_WRITTEN = 200  # jobs that are written at once
_JOB = ", ".join(f"jobs.{name}" for name in COLUMNS)
_OLDER = (
    "clock_ended > :first AND clock_ended < :now - :seconds"
    " AND NOT ended BETWEEN :wall - :seconds AND :wall"
)
_ENDED = """
SELECT id FROM jobs INDEXED BY jobs_by_end
WHERE {} AND state IN ('completed', 'failed') ORDER BY clock_ended LIMIT 500
"""
_FORGOTTEN = f"""
SELECT id FROM jobs INDEXED BY jobs_by_end
WHERE {_OLDER} AND state = 'deleted' AND NOT EXISTS (SELECT 1 FROM deliveries WHERE job = id)
ORDER BY random() LIMIT 500
"""
_DUE = f"""
SELECT failures, {_JOB} FROM deliveries JOIN jobs ON jobs.id = job
WHERE kind = ? AND due <= ? AND receiver NOT IN ({{}}) ORDER BY due LIMIT ?
"""


class Journal:
    """The jobs of a service.

    The queued and running jobs are in memory, and so are changes until they are on disk. They are
    written by a separate thread, so that a slow or locked disk never blocks the event loop. A new
    job is queued only once it is on disk.

    Ages are counted by a clock that cannot be set: `clock_ended` is the end of a job in seconds
    since 1970 by the system's clock at the start of the service and `time.monotonic` since then.

    All methods except `get_state` and `vacuum` are called in the thread of the event loop.

    Attributes:
        version: Incremented by every change of a job.
        problem: Why changes cannot be written, as a sentence; None while they can.
        is_lost: Whether the file was removed, replaced or damaged, so that the service must stop.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the journal.

        Raises:
            InputError: The file is damaged, cannot be used, or stays locked by another program.
        """
        self.version = 0
        self.problem: str | None = None
        self.is_lost = False
        self._wall_start, self._monotonic_start = time.time(), time.monotonic()
        self._unwritten: dict[str, ServiceJob] = {}  # in the order of the changes
        self._statements: list[Statement] = []  # to be executed after these changes
        self._in_writing: dict[str, ServiceJob] = {}
        self._change_event, self._write_lock = asyncio.Event(), asyncio.Lock()
        self._file = JournalFile(path, self._wall_start)
        statement = "SELECT total(bytes), total(state = 'deleted') > 0 FROM jobs"
        ((self._bytes, self._has_residue),) = self._query(statement)
        self._open_jobs = {job.id: job for job in self._file.open_jobs}
        for job in self._file.open_jobs:
            job.event_series += 1
            self._mark_unwritten(job)
        self._thread = ThreadPoolExecutor(1, "journal")

    def close(self) -> None:
        """Writes the last changes and closes the file."""
        while not self.is_lost and (self._unwritten or self._statements):
            num_statements = len(self._statements)
            try:
                self._begin_write().result()
            except JournalError as error:
                message = "%s The last changes of %d jobs are lost when the service ends."
                logger.error(message, error, len(self._in_writing | self._unwritten))
                break
            del self._statements[:num_statements]
        self.vacuum()
        self._thread.submit(self._file.close).result()
        self._thread.shutdown()

    async def run_writer(self) -> None:
        """Writes changes, and checks the file regularly, until the task is cancelled.

        Raises:
            JournalError: The file is lost.
        """
        while not self.is_lost:
            self._change_event.clear()
            if not await self.save():
                await asyncio.sleep(0.0 if self.is_lost else CHECK_SECONDS)
                continue
            try:
                async with asyncio.timeout(CHECK_SECONDS):  # `wait_for` may lose a cancellation
                    await self._change_event.wait()
            except TimeoutError:
                try:
                    await asyncio.to_thread(self._file.check)
                except JournalError as error:
                    self._note_problem(error)
        raise JournalError(self.problem or "", is_lost=True)

    async def save(self) -> bool:
        """Waits until all changes so far are on disk; returns whether they are.

        A lock of another program is waited for up to `PATIENCE` seconds, and not at all after an
        attempt that has failed.
        """
        async with self._write_lock:
            while self._unwritten or self._statements:
                num_statements = len(self._statements)
                try:
                    await asyncio.wrap_future(self._begin_write())
                except BaseException as error:
                    self._unwritten = self._in_writing | self._unwritten
                    self._in_writing = {}
                    if not isinstance(error, JournalError):
                        raise
                    self._note_problem(error)
                    return False
                del self._statements[:num_statements]
                jobs, self._in_writing = self._in_writing, {}
                self._open_jobs |= {name: job for name, job in jobs.items() if not job.is_ended}
            if self.problem is not None and not self.is_lost:
                logger.warning("The journal can be written again.")
                self.problem = None
            return not self.is_lost

    async def add(self, job: ServiceJob) -> None:
        """Writes a new job to disk, then adds it to the queue.

        Raises:
            JournalError: The job cannot be written and was not added.
        """
        self._bytes += job.bytes
        self._mark_unwritten(job)
        try:
            if not await self.save():
                raise JournalError(self.problem or "The journal cannot be written.")
        except BaseException:
            self.delete(job)
            raise

    def restore_job(self, job: ServiceJob) -> None:
        """Adds a job of an earlier service that is missing in the journal."""
        self._bytes += job.bytes
        self._set_end(job)
        self._mark_unwritten(job)

    def update_job(self, job: ServiceJob, **values: Any) -> None:
        """Sets fields of a job; of one that is deleted, only those of this object."""
        entry = self.get(job.id)
        if entry is not None:
            self._bytes += values.get("bytes", entry.bytes) - entry.bytes
        for target in (job, job if entry is None else entry):
            for name, value in values.items():
                setattr(target, name, value)
        if entry is not None:
            if "ended" in values:
                self._set_end(entry)
            self._mark_unwritten(entry)

    def update_ended(self, name: str, **values: Any) -> None:
        """Sets fields of an ended job, also of a deleted one; nothing if it is unknown."""
        job = self.find(name)
        if job is None:
            return
        self.update_job(job, **values)
        if job.state == "deleted":
            self._mark_unwritten(make_tombstone(job))

    def delete(self, job: ServiceJob) -> None:
        """Deletes a job; only its id and its times stay, for a day."""
        entry = self.get(job.id)
        if entry is None:
            return
        self._bytes -= entry.bytes
        job.state, job.ended, job.bytes = "deleted", time.time(), 0
        self._set_end(job)
        self._mark_unwritten(make_tombstone(job))

    def vacuum(self) -> None:
        """Rewrites the file if jobs were deleted since the last time.

        SQLite zeroes deleted content, but may leave copies of it in pages that it has split.
        """
        if self._has_residue and not self.is_lost:
            self._has_residue = False
            self._has_residue |= not self._thread.submit(self._file.vacuum).result()

    async def forget_deleted(self, has_files: Callable[[str], bool]) -> None:
        """Removes the rows of some jobs without files that were deleted more than a day ago."""
        for (name,) in await self._query_long(_FORGOTTEN, self._make_age(_DAY)):
            if not has_files(name):
                self._statements.append(("DELETE FROM jobs WHERE id = ?", (name,)))

    def is_older(self, name: str, seconds: float) -> bool:
        """Returns whether a job ended, or was deleted, more than some time ago.

        What happened before the service was started is known by the system's clock only. As that
        may be wrong, nothing of then is older in the first `TRUST_SECONDS`, nor later if the clock
        has been corrected.
        """
        statement = f"SELECT 1 FROM jobs WHERE id = :name AND {_OLDER}"
        return bool(self._query(statement, self._make_age(seconds) | {"name": name}))

    async def list_ended(self, seconds: float | None = None) -> list[str]:
        """Returns the ids of completed and failed jobs: some of those that ended first.

        seconds: Only those that are older, as in `is_older`.
        """
        if seconds is None:
            rows = await self._query_long(_ENDED.format("clock_ended IS NOT NULL"), {})
        else:
            rows = await self._query_long(_ENDED.format(_OLDER), self._make_age(seconds))
        return [name for (name,) in rows]

    def get(self, name: str) -> ServiceJob | None:
        """Returns a job by its id; None if it is deleted or unknown."""
        job = self.find(name)
        return None if job is None or job.state == "deleted" else job

    def find(self, name: str) -> ServiceJob | None:
        """Returns a job in its present state, also a deleted one; None if it is unknown.

        An open or unwritten job is the object itself.
        """
        for jobs in (self._unwritten, self._in_writing, self._open_jobs):
            if name in jobs:
                return jobs[name]
        return next(iter(self._query_jobs("WHERE id = ?", (name,))), None)

    def get_state(self, name: str) -> str | None:
        """Returns the state of a job, also of a deleted one; None if it is unknown."""
        job = self.find(name)
        return None if job is None else job.state

    def find_earlier_job(self, digest: str, key: str | None) -> ServiceJob | None:
        """Returns the job of an earlier request with the same Idempotency-Key, or None.

        Without a key every request is a new one, also a retry: an equal request may come from
        another client, who could then delete the job of the first one.

        Args:
            digest: Digest of the request, from `hash_request`.
            key: The request's Idempotency-Key.

        Raises:
            RefusedError: The key belongs to a different request.
        """
        statement = "SELECT id FROM jobs WHERE key = ? ORDER BY rowid DESC LIMIT 1"
        rows = self._query(statement, (key,)) if key else ()
        job = self.get(rows[0][0]) if rows else None
        if job is not None and job.digest != digest:
            message = "This Idempotency-Key belongs to another request; use a new one."
            raise RefusedError(message, 422, "idempotency_key_reused")
        return job

    def list_page(
        self, after: str | None, limit: int, newest_first: bool, states: Sequence[str]
    ) -> list[str]:
        """Returns up to `limit` ids by age of the jobs that are in some states on disk.

        after: The id after which the page starts, also of a deleted job.
        """
        comparison, order, number = (">", "ASC", 0) if not newest_first else ("<", "DESC", 1 << 62)
        if after is not None:
            numbers = self._query("SELECT rowid FROM jobs WHERE id = ?", (after,))
            if not numbers:
                return []
            ((number,),) = numbers
        select = f"SELECT rowid AS number, id FROM jobs WHERE state = ? AND rowid {comparison} ?"
        statement = f"{' UNION ALL '.join([select] * len(states))} ORDER BY number {order} LIMIT ?"
        values = [value for state in states for value in (state, number)]
        return [name for _, name in self._query(statement, (*values, limit))]

    def list_in_state(self, *states: str) -> list[ServiceJob]:
        """Returns the queued or running jobs in some states, in the order of execution."""
        jobs = [job for job in self._open_jobs.values() if job.state in states]
        return sorted(jobs, key=lambda job: -job.priority)

    def list_completed(self, count: int) -> list[ServiceJob]:
        """Returns up to `count` completed jobs, newest first."""
        condition = "INDEXED BY jobs_by_end WHERE clock_ended IS NOT NULL AND state = 'completed'"
        return self._query_jobs(f"{condition} ORDER BY clock_ended DESC LIMIT ?", (count,))

    def count_states(self) -> Counter[str]:
        """Returns the number of queued and of running jobs."""
        return Counter(job.state for job in self._open_jobs.values())

    def count_bytes(self) -> int:
        """Returns the size of the files of all jobs in bytes."""
        return int(self._bytes)

    def requeue_interrupted(self) -> list[ServiceJob]:
        """Requeues the jobs that ran when the front ended; returns those that fail instead."""
        failed_jobs = []
        for job in self.list_in_state("in_progress"):
            if job.attempt >= MAX_ATTEMPTS:
                error = {"code": "interrupted", "message": "The job was interrupted twice."}
                self.update_job(job, state="failed", error=error, ended=time.time())
                failed_jobs.append(job)
            else:
                self.update_job(job, state="queued", done=job.steps_before, preview_step=0)
        return failed_jobs

    # Deliveries.

    def count_deliveries(self, kind: str) -> int:
        """Returns the number of deliveries left: "webhook" or "store"."""
        unwritten = (self._in_writing | self._unwritten).values()
        ((count,),) = self._query("SELECT count(*) FROM deliveries WHERE kind = ?", (kind,))
        return int(count) + sum(job.receivers[kind] is not None for job in unwritten)

    async def list_due(
        self, kind: str, full_receivers: Sequence[str], limit: int
    ) -> list[tuple[int, ServiceJob]]:
        """Returns failed attempts and jobs of deliveries that are due, the earliest first.

        Args:
            full_receivers: Their deliveries are left out.
        """
        statement = _DUE.format(", ".join("?" * len(full_receivers)))
        values = (kind, time.monotonic(), *full_receivers, limit)
        return [(row[0], read_row(row[1:])) for row in await self._query_long(statement, values)]

    def schedule_delivery(self, kind: str, name: str, seconds: float, failures: int) -> None:
        """Sets after how many seconds a delivery of a job is due, if there is one left."""
        statement = "UPDATE deliveries SET due = ?, failures = ? WHERE job = ? AND kind = ?"
        values = (time.monotonic() + seconds, failures, name, kind)
        self._statements.append((statement, values))
        self._change_event.set()

    # Reading and writing.

    def _set_end(self, job: ServiceJob) -> None:
        """Sets the end of a job by the clock that cannot be set.

        A job whose end lies in the future, by a clock that has been set back since, ended just now.
        """
        if job.ended is not None:
            job.clock_ended = self._compute_now() - max(time.time() - job.ended, 0.0)

    def _compute_now(self) -> float:
        return self._wall_start + time.monotonic() - self._monotonic_start

    def _make_age(self, seconds: float) -> dict[str, float]:
        """Returns the values of the condition `_OLDER`."""
        now, first = self._compute_now(), -1.0
        if now - self._wall_start < TRUST_SECONDS:
            first = self._wall_start
        return {"first": first, "now": now, "wall": time.time(), "seconds": seconds}

    def _mark_unwritten(self, job: ServiceJob) -> None:
        """Marks a job as changed."""
        if job.is_ended:
            self._open_jobs.pop(job.id, None)
        self._has_residue |= job.state == "deleted"
        self._unwritten[job.id] = job
        self.version += 1
        self._change_event.set()

    def _begin_write(self) -> Future[None]:
        """Begins to write the oldest changes of jobs, and the statements.

        These jobs are in `_in_writing` until their present state is on disk.
        """
        self._in_writing = dict(islice(self._unwritten.items(), _MAX_WRITTEN))
        for name in self._in_writing:
            del self._unwritten[name]
        changes = [(make_row(job), job.receivers) for job in self._in_writing.values()]
        patience = PATIENCE if self.problem is None else 0.0
        return self._thread.submit(self._file.write, changes, [*self._statements], patience)

    def _note_problem(self, error: JournalError) -> None:
        """Records why the journal cannot be used at present."""
        consequence = "Changes stay in memory until it can be written."
        if error.is_lost:
            consequence = "The service stops."
        if self.problem != str(error):
            logger.error("%s %s", error, consequence)
        self.problem, self.is_lost = str(error), self.is_lost or error.is_lost
        self._change_event.set()

    def _query(self, statement: str, values: Any = ()) -> list[Row]:
        """Returns the rows of a short query; raises JournalError."""
        try:
            return self._file.query(statement, values)
        except JournalError as error:
            self._note_problem(error)
            raise

    def _query_jobs(self, condition: str, values: Any = ()) -> list[ServiceJob]:
        """Returns the jobs of a short query. condition: What follows `FROM jobs`."""
        return [*map(read_row, self._query(f"SELECT {_JOB} FROM jobs {condition}", values))]

    async def _query_long(self, statement: str, values: Any) -> list[Row]:
        """Returns the rows of a query that may read the whole file; raises JournalError."""
        future = self._thread.submit(self._file.query, statement, values, is_long=True)
        try:
            return await asyncio.wrap_future(future)
        except JournalError as error:
            self._note_problem(error)
            raise
