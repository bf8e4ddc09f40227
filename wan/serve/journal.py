"""The journal of the jobs: read from memory, and written to disk for restarts."""

from __future__ import annotations

import asyncio
import marshal
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from wan.serve.journal_file import BUSY, JournalError, JournalFile
from wan.serve.retries import TaskIndex
from wan.serve.rows import Row, ServiceJob, make_row, make_tombstone, read_row
from wan.settings.errors import InputError
from wan.utils.log import logger

MAX_ATTEMPTS = 2
"""Attempts after which a job fails whose ranks were lost."""
PATIENCE = 5.0
"""Seconds that another program may lock the journal before new jobs are refused."""
CHECK_SECONDS = 2.0
"""Seconds between two checks of the journal file."""
_TASKS: dict[str, Callable[[ServiceJob], bool]] = {
    "webhook": lambda job: job.has_webhook_event,
    "store": lambda job: job.has_store_task,
}
TRUST_SECONDS = 3600.0
"""Seconds after the start in which a wrong clock of the system can be corrected."""
_DAY = 86400.0
_MAX_FORGOTTEN = 500  # jobs that are forgotten at once
_MAX_WRITTEN = 500  # rows that are written at once
_LAST_WRITE = 5.0  # seconds to write the last changes when the service stops


class Journal:
    """The jobs of a service.

    All jobs are in memory; ended ones as the bytes of their rows. Changes are made in memory first
    and written by a separate thread, so that a slow or locked disk never blocks the event loop. A
    new job is queued only once it is on disk.

    All methods except `reserve_space` and `vacuum` are called in the thread of the event loop.

    Attributes:
        version: Incremented by every change of the queue.
        problem: Why changes cannot be written, as a sentence; None while they can.
        tasks: The ended jobs with a task left: "webhook" or "store".
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the journal.

        Raises:
            InputError: The file is damaged, cannot be written, or stays locked by another program.
        """
        self.version = 0
        self.problem: str | None = None
        self.tasks = {kind: TaskIndex() for kind in _TASKS}
        self._path = path
        self._open_jobs: dict[str, ServiceJob] = {}
        self._ended_rows: dict[str, bytes] = {}
        self._deleted_jobs: dict[str, ServiceJob] = {}
        self._new_jobs: dict[str, ServiceJob] = {}  # new jobs, not yet on disk
        self._numbers: dict[str, int] = {}  # id -> number of its row, also of deleted jobs
        self._order: list[tuple[int, str]] = []  # row number and id of jobs that are not deleted
        self._ends: list[tuple[float, str]] = []  # end and id of ended jobs, sorted
        # End by `time.monotonic` and by the clock, also of deleted jobs.
        self._end_times: dict[str, tuple[float, float]] = {}
        self._opened_at = time.monotonic()
        self._earlier: set[str] = set()  # jobs that had ended before the file was opened
        self._keys: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._bytes = self._last_number = 0
        self._unwritten: dict[str, None] = {}  # ids of changed jobs, in the order of the changes
        self._change_event, self._flush_lock = asyncio.Event(), asyncio.Lock()
        self._failing_since: float | None = None
        self._is_locked = False
        self._has_residue = False
        self._file = JournalFile(path)
        self._file.open()
        self._load_rows(self._file.read_rows())
        self._thread = ThreadPoolExecutor(1, "journal")

    def close(self) -> None:
        """Writes the last changes and closes the file."""
        deadline = time.monotonic() + _LAST_WRITE
        while self._unwritten:
            _, rows = self._take_changes()
            try:
                self._thread.submit(self._file.write, rows, self._iter_rows).result()
            except JournalError as error:
                self._unwritten |= dict.fromkeys(name for name, _ in rows)
                if not error.is_locked or time.monotonic() > deadline:
                    message = "%s The last changes of %d jobs are lost when the service ends."
                    logger.error(message, error, len(rows))
                    break
        self.vacuum()
        self._thread.submit(self._file.close).result()
        self._thread.shutdown()

    def reserve_space(self) -> bool:
        """Returns whether the disk has room for new jobs; reserves space for the journal."""
        return self._file.reserve_space()

    async def run_writer(self) -> None:
        """Writes changes, and checks the file regularly, until the task is cancelled."""
        pause = 0.1
        while True:
            if await self._flush(check_file=True):
                pause = 0.1
                with suppress(TimeoutError):
                    # `wait_for` of Python 3.11 may lose a cancellation.
                    async with asyncio.timeout(CHECK_SECONDS):
                        await self._change_event.wait()
                self._change_event.clear()
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, CHECK_SECONDS)

    async def save(self, seconds: float | None = None, check_file: bool = False) -> bool:
        """Waits until all changes so far are on disk; returns whether they are.

        Args:
            seconds: Time limit for locks of other programs; None: `PATIENCE`.
            check_file: Whether to check the file also if nothing has changed.
        """
        wait = PATIENCE if seconds is None else seconds
        deadline, pause = time.monotonic() + wait, 0.05
        while not await self._flush(check_file):
            is_hopeless = self.problem is not None and not self._is_locked
            if is_hopeless or time.monotonic() + pause > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        return True

    async def add(self, job: ServiceJob) -> None:
        """Writes a new job to disk, then adds it to the queue.

        Raises:
            JournalError: The job cannot be written and was not added.
        """
        self._new_jobs[job.id] = job
        try:
            self._mark_unwritten(job.id)
            if not await self.save(None if self.problem is None else 0.0):
                raise JournalError(self.problem or "The journal cannot be written.")
        except BaseException:
            if job.id in self._open_jobs:
                self.delete(job)
            elif self._new_jobs.pop(job.id, None) is not None:
                self._mark_unwritten(job.id)  # removes its row if it was written after all
            raise

    def restore_job(self, job: ServiceJob) -> None:
        """Adds a job of an earlier service that is missing in the journal."""
        self._earlier.add(job.id)
        self._append_job(job)
        self._mark_unwritten(job.id)

    def update_job(self, job: ServiceJob, **values: Any) -> None:
        """Sets fields of a job."""
        entry = self._find(job.id)
        if entry is not None:
            self._unindex_job(entry)
        for target in (job, *([] if entry is None or entry is job else [entry])):
            for name, value in values.items():
                setattr(target, name, value)
        if entry is not None:
            self._index_job(entry)
            self._mark_unwritten(entry.id)

    def delete(self, job: ServiceJob) -> None:
        """Deletes a job; only its id and its times stay, for a day."""
        entry = self._find(job.id)
        if entry is None:
            return
        self._unindex_job(entry)
        del self._order[bisect_left(self._order, (self._numbers[job.id],))]
        if entry.key is not None and self._keys.get(entry.key) == job.id:
            del self._keys[entry.key]
        job.state, job.ended, job.bytes = "deleted", time.time(), 0
        self._earlier.discard(job.id)
        self._add_tombstone(job)
        self._mark_unwritten(job.id)

    def update_ended(self, name: str, **values: Any) -> None:
        """Sets fields of an ended job, also of a deleted one; nothing if it is unknown."""
        job = self._deleted_jobs.get(name)
        if job is None:
            job = self._find(name)
            if job is not None:
                self.update_job(job, **values)
            return
        for column, value in values.items():
            setattr(job, column, value)
        self._add_tombstone(job)
        self._mark_unwritten(name)

    def vacuum(self) -> None:
        """Rewrites the file if jobs were deleted since the last time.

        SQLite zeroes deleted content, but may leave copies of it in pages that it has split.
        """
        if self._has_residue:
            self._has_residue = False
            self._has_residue |= not self._thread.submit(self._file.vacuum).result()

    def forget_deleted(self, has_files: Callable[[str], bool]) -> None:
        """Removes rows of jobs without files that were deleted more than a day ago: a few of them.

        Those that were deleted first come first.
        """
        for name in [*islice(self._deleted_jobs, _MAX_FORGOTTEN)]:
            if not self.is_older(name, _DAY):
                break
            has_task = any(name in index for index in self.tasks.values())
            if has_task or has_files(name):
                self._deleted_jobs[name] = self._deleted_jobs.pop(name)  # others come first
            else:
                del self._deleted_jobs[name], self._numbers[name], self._end_times[name]
                self._counts["deleted"] -= 1
                self._mark_unwritten(name)

    def is_older(self, name: str, seconds: float) -> bool:
        """Returns whether a job ended, or was deleted, more than some time ago.

        Time is counted by a clock that cannot be set. What happened before the service was started
        is known by the system's clock only. As that may be wrong, nothing of then is older in the
        first `TRUST_SECONDS`, nor later if the clock has been corrected.
        """
        if name not in self._end_times:
            return False
        (ended_at, ended), now = self._end_times[name], time.monotonic()
        if name in self._earlier and now - self._opened_at < TRUST_SECONDS:
            return False
        return now - ended_at > seconds and not 0 <= time.time() - ended < seconds

    def get(self, name: str) -> ServiceJob | None:
        """Returns a job by its id; None if it is deleted or unknown."""
        return self._find(name)

    def get_ended(self, name: str) -> ServiceJob | None:
        """Returns a job that has ended, also a deleted one; None if there is none."""
        job = self._deleted_jobs.get(name) or self._find(name)
        return job if job is not None and job.is_ended else None

    def list_known(self) -> frozenset[str]:
        """Returns the ids of all jobs, also of deleted ones."""
        return frozenset(self._numbers)

    def count_tasks(self, kind: str) -> int:
        """Returns the number of ended jobs with a task left."""
        return len(self.tasks[kind])

    def get_state(self, name: str) -> str | None:
        """Returns the state of a job, also of a deleted one; None if it is unknown."""
        job = self._deleted_jobs.get(name) or self._find(name)
        return None if job is None else job.state

    def find_by_key(self, key: str) -> ServiceJob | None:
        """Returns the last job with an Idempotency-Key."""
        return self._find(self._keys.get(key, ""))

    def list_page(
        self, after: str | None, limit: int, newest_first: bool, is_open: bool = False
    ) -> list[str]:
        """Returns up to `limit` ids by age, starting after the id `after`, also a deleted one.

        is_open: Only queued and running jobs.
        """
        order = self._order
        if is_open:
            order = sorted((self._numbers[name], name) for name in self._open_jobs)
        begin, end = 0, len(order)
        if after is not None:
            number = self._numbers.get(after)
            if number is None:
                return []
            end = bisect_left(order, (number,))
            begin = bisect_left(order, (number + 1,))
        newest, oldest = order[max(end - limit, 0) : end][::-1], order[begin : begin + limit]
        return [name for _, name in (newest if newest_first else oldest)]

    def list_in_state(self, *states: str) -> list[ServiceJob]:
        """Returns the queued or running jobs in some states, in the order of execution."""
        jobs = [job for job in self._open_jobs.values() if job.state in states]
        return sorted(jobs, key=lambda job: (-job.priority, self._numbers[job.id]))

    def list_completed(self, count: int) -> list[ServiceJob]:
        """Returns up to `count` completed jobs, newest first."""
        jobs: list[ServiceJob] = []
        for _, name in reversed(self._ends):
            if len(jobs) == count:
                break
            job = self._find(name)
            if job is not None and job.state == "completed":
                jobs.append(job)
        return jobs

    def list_ended(self, seconds: float = 0.0) -> list[str]:
        """Returns the ids of the jobs that ended some seconds ago or earlier, oldest first."""
        end = bisect_left(self._ends, (time.monotonic() - seconds,))
        return [name for _, name in self._ends[:end]]

    def get_oldest_end(self) -> str | None:
        """Returns the id of the job that ended first; None if none has ended."""
        return self._ends[0][1] if self._ends else None

    def count_states(self) -> dict[str, int]:
        """Returns the number of jobs in each state."""
        return dict(self._counts)

    def count_bytes(self) -> int:
        """Returns the size of the files of all jobs in bytes."""
        return self._bytes

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

    # Jobs in memory.

    def _load_rows(self, rows: Iterable[Row]) -> None:
        """Adds the jobs of all rows of the file."""
        for row in rows:
            try:
                job = read_row(row)
            except (ValueError, RecursionError) as error:
                why = f"is damaged: a row is not a job ({error})"
                remedy = "move it away; finished videos are restored from their records"
                raise InputError(str(self._path), None, why, remedy) from error
            if job.is_ended:
                self._earlier.add(job.id)
            else:
                job.event_series += 1
                self._mark_unwritten(job.id)
            if job.state != "deleted":
                self._append_job(job, row)
                continue
            self._last_number += 1
            self._numbers[job.id] = self._last_number
            self._add_tombstone(job)  # its residue is of an earlier version or a killed process
            if job.settings:
                self._mark_unwritten(job.id)
        for name in sorted(self._deleted_jobs, key=lambda name: self._end_times[name]):
            self._deleted_jobs[name] = self._deleted_jobs.pop(name)

    def _find(self, name: str) -> ServiceJob | None:
        """Returns an open job itself, or a copy of an ended one; None if deleted or unknown."""
        row = self._ended_rows.get(name)
        return self._open_jobs.get(name) if row is None else read_row(marshal.loads(row))

    def _append_job(self, job: ServiceJob, row: Row | None = None) -> None:
        """Adds a job as the newest one. row: its row, if known."""
        self._last_number += 1
        self._numbers[job.id] = self._last_number
        self._order.append((self._last_number, job.id))
        if job.key is not None:
            self._keys[job.key] = job.id
        self._index_job(job, row)

    def _index_job(self, job: ServiceJob, row: Row | None = None) -> None:
        """Adds a job to the index of its state. row: its row, if known."""
        if job.is_ended:
            self._ended_rows[job.id] = marshal.dumps(make_row(job) if row is None else row)
            insort(self._ends, (self._store_end(job), job.id))
        else:
            self._open_jobs[job.id] = job
        self._index_tasks(job)
        self._counts[job.state] += 1
        self._bytes += job.bytes
        self.version += 1

    def _add_tombstone(self, job: ServiceJob) -> None:
        """Adds or replaces the tombstone of a deleted job."""
        if job.id not in self._deleted_jobs:
            self._counts["deleted"] += 1
        self._deleted_jobs[job.id] = make_tombstone(job)
        self._store_end(job)
        self._has_residue = True
        self._index_tasks(self._deleted_jobs[job.id])

    def _store_end(self, job: ServiceJob) -> float:
        """Stores when a job has ended, once; returns this time by `time.monotonic`.

        A job whose end lies in the future, by a clock that has been set back since, ended just now.
        """
        ended = job.ended or 0.0
        times = self._end_times.get(job.id)
        if times is None or times[1] != ended:
            times = time.monotonic() - max(time.time() - ended, 0.0), ended
            self._end_times[job.id] = times
        return times[0]

    def _index_tasks(self, job: ServiceJob) -> None:
        """Adds a job to the indexes of its tasks, and removes it from the others."""
        for kind, has_task in _TASKS.items():
            self.tasks[kind].update(job.id, has_task(job))

    def _unindex_job(self, job: ServiceJob) -> None:
        """Removes a job from the index of its state."""
        if self._ended_rows.pop(job.id, None) is not None:
            end = (self._end_times[job.id][0], job.id)
            del self._ends[bisect_left(self._ends, end)]
        else:
            del self._open_jobs[job.id]
        self._counts[job.state] -= 1
        self._bytes -= job.bytes
        self.version += 1

    # Writing.

    def _mark_unwritten(self, name: str) -> None:
        """Marks a job's row as unwritten."""
        self._unwritten[name] = None
        self._change_event.set()

    def _take_changes(self) -> tuple[dict[str, None], list[tuple[str, Row | None]]]:
        """Returns some unwritten ids and their rows, and removes them from the unwritten ids."""
        names = dict.fromkeys(islice(self._unwritten, _MAX_WRITTEN))
        for name in names:
            del self._unwritten[name]
        return names, [(name, self._get_row(name)) for name in names]

    def _get_row(self, name: str) -> Row | None:
        """Returns the present row of a job; None if the job is removed."""
        row = self._ended_rows.get(name)
        if row is not None:
            return tuple(marshal.loads(row))
        job = self._open_jobs.get(name) or self._deleted_jobs.get(name) or self._new_jobs.get(name)
        return None if job is None else make_row(job)

    def _iter_rows(self) -> Iterator[Row]:
        """Yields the rows of all jobs by age; called in the writing thread."""
        for name in [*self._numbers, *self._new_jobs]:
            row = self._get_row(name)
            if row is not None:
                yield row

    async def _flush(self, check_file: bool = False) -> bool:
        """Tries once to write all changes so far; returns whether it succeeded.

        Args:
            check_file: Whether to check the file also if nothing has changed.
        """
        async with self._flush_lock:
            num_left = len(self._unwritten)
            if not num_left and not check_file:
                return True
            while True:
                if not await self._write_changes():
                    return False
                num_left -= _MAX_WRITTEN
                if num_left <= 0:
                    return True

    async def _write_changes(self) -> bool:
        """Tries once to write the oldest changes; returns whether it succeeded."""
        started_at, loop = time.monotonic(), asyncio.get_running_loop()
        names, rows = self._take_changes()
        has_deleted = any(name in self._deleted_jobs for name in names)
        wait_for_lock = self.problem is None
        try:
            await loop.run_in_executor(
                self._thread, self._file.write, rows, self._iter_rows, wait_for_lock
            )
            if has_deleted:
                await loop.run_in_executor(self._thread, self._file.erase_log)
        except BaseException as error:
            self._unwritten = names | self._unwritten
            if not isinstance(error, Exception):
                raise
            self._record_failure(error, started_at)
            return False
        for name in names:
            job = self._new_jobs.pop(name, None)
            if job is not None:
                self._append_job(job)
        if self.problem is not None:
            logger.warning("The journal can be written again.")
        self.problem = self._failing_since = None
        return True

    def _record_failure(self, error: Exception, started_at: float) -> None:
        """Records a failed attempt to write.

        Args:
            started_at: Start of the attempt, by `time.monotonic`.
        """
        if not isinstance(error, JournalError):
            logger.error("The journal could not be written.", exc_info=error)
            error = JournalError("The journal cannot be written; see the log.")
        if self._failing_since is None:
            self._failing_since = started_at
        self._is_locked = error.is_locked
        is_short = time.monotonic() + BUSY - self._failing_since < PATIENCE  # with one more try
        if error.is_locked and is_short:
            return
        if self.problem != str(error):
            logger.error("%s Changes stay in memory until it can be written.", error)
        self.problem = str(error)
