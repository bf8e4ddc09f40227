"""The journal of the jobs: an SQLite file, which tells after a restart what is still to be made."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from wan.log import logger
from wan.output_files import marked_kind, remove_output, write_output
from wan.settings.errors import is_disk_full

ENDS = ("completed", "failed", "deleted")
ATTEMPTS = 2
"""How often a job is begun before it fails because its ranks were lost."""
_JSON = ("settings", "names", "error", "guidance")
_ROOM = marked_kind("room that the journal keeps free", bytes(4096))
_RESERVE = 8_000_000  # bytes; SQLite writes up to half of it beside its file


@dataclass
class QueuedVideo:
    """A job as the journal has it; times are seconds since 1970.

    Attributes:
        id: Its name in the interface.
        settings: Raw values under flags' names, with the seed.
        state: queued, in_progress, completed, failed or deleted.
        priority: Higher ones come first.
        created, started, ended: Times; None before.
        attempt: How often it was begun.
        done, total: Denoising steps.
        error: {"code": ..., "message": ...} of a failed job.
        shape: Equal for jobs that take the same time.
        work: Tokens of the network times steps times branches.
        seconds: What it took from its start to its end.
        frames, fps, width, height: Of the video.
        model: What made it.
        guidance: Expert -> guidance scale.
        remixed_from: The job whose settings it has.
        digest: Of the request's body.
        key: The request's Idempotency-Key.
        passed: How many later jobs have come before it.
        bytes: Of its files.
    """

    id: str
    settings: dict[str, Any]
    state: str = "queued"
    priority: int = 0
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    attempt: int = 0
    done: int = 0
    total: int = 0
    error: dict[str, str] | None = None
    shape: str = ""
    work: float = 0.0
    seconds: float | None = None
    frames: int = 0
    fps: float = 0.0
    width: int = 0
    height: int = 0
    model: str = ""
    remixed_from: str | None = None
    digest: str = ""
    key: str | None = None
    passed: int = 0
    bytes: int = 0
    names: dict[str, str] = field(default_factory=dict)
    guidance: dict[str, float] = field(default_factory=dict)


_COLUMNS = [one.name for one in fields(QueuedVideo)]
_OF_DELETED = ("id", "state", "created", "started", "ended")
"""What the journal keeps of a deleted job, for a day: the cursor of a list may be its id."""
_DAY = 86400.0
_INDEXES = {
    "by_state": "state, created",
    "by_end": "state, ended",
    "by_key": "key",
    "by_digest": "digest",
}


class Journal:
    """Jobs on disk; every change is written before the method returns.

    A file beside it keeps some megabytes free for what becomes of the jobs when the disk is full.

    Attributes:
        version: Counts the changes of the queue.
    """

    def __init__(self, path: Path) -> None:
        """Opens the journal, or begins one."""
        self._path, self._reserve = path, path.with_name("reserve")
        self._reserving = threading.Lock()
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.row_factory = sqlite3.Row
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA secure_delete=ON")
        columns = ", ".join(f"{name} {_kind(name)}" for name in _COLUMNS)
        self._file.execute(f"CREATE TABLE IF NOT EXISTS jobs ({columns})")
        known = {row["name"] for row in self._file.execute("PRAGMA table_info(jobs)")}
        for name in (one for one in _COLUMNS if one not in known):  # of an earlier version
            self._file.execute(f"ALTER TABLE jobs ADD COLUMN {name}")
        for name, indexed in _INDEXES.items():
            self._file.execute(f"CREATE INDEX IF NOT EXISTS {name} ON jobs ({indexed})")
        self.version = 0
        self._counts = Counter(dict(self._file.execute(_COUNTS).fetchall()))
        self._bytes = int(self._file.execute(_BYTES).fetchone()[0])
        self._has_residue = self._counts["deleted"] > 0  # an earlier version, or a kill, left it
        if self._has_residue:
            self._erase("state = 'deleted' AND settings != '{}'", [])

    def close(self) -> None:
        """Ends all writing."""
        self.wipe()
        self._file.close()

    def has_room(self) -> bool:
        """Returns whether new jobs can be written; sees to it that they can, if the disk allows."""
        with self._reserving:
            if self._reserve.exists():
                return True
            try:
                with write_output(self._reserve, _ROOM) as temporary:
                    temporary.write_bytes(bytes(_RESERVE))
            except OSError as error:
                if not is_disk_full(error):
                    raise
                return False
            return True

    def add(self, job: QueuedVideo) -> None:
        """Writes a new job."""
        names, marks = ", ".join(_COLUMNS), ", ".join("?" for _ in _COLUMNS)
        stored = [_stored(job, name) for name in _COLUMNS]
        self._write(f"INSERT INTO jobs ({names}) VALUES ({marks})", stored)
        self._count(job, 1)

    def change(self, job: QueuedVideo, **values: Any) -> None:
        """Sets some of a job's values, here and on disk."""
        before = replace(job)
        for name, value in values.items():
            setattr(job, name, value)
        sets = ", ".join(f"{name} = ?" for name in values)
        stored = [_stored(job, name) for name in values]
        self._write(f"UPDATE jobs SET {sets} WHERE id = ?", [*stored, job.id])
        self._count(before, -1)
        self._count(job, 1)

    def delete(self, job: QueuedVideo) -> None:
        """Erases a job: its words, its key and its digest; `_OF_DELETED` stays for a day."""
        self.change(job, state="deleted", ended=time.time(), bytes=0)
        self._erase("id = ?", [job.id])
        self._has_residue = True
        self._empty_log()

    def wipe(self) -> None:
        """Rewrites the file, where jobs were deleted since the last time.

        SQLite zeroes what is deleted, but may leave copies of it in pages that it has split.
        """
        if not self._has_residue:
            return
        self._has_residue = False
        try:
            address = f"{self._path.absolute().as_uri()}?mode=rw"  # makes no new file
            with closing(
                sqlite3.connect(address, timeout=0, isolation_level=None, uri=True)
            ) as other:
                other.execute("PRAGMA secure_delete=ON")
                other.execute("VACUUM")
                busy = other.execute(_CHECKPOINT).fetchone()[0]
                self._has_residue |= bool(busy)
        except sqlite3.Error as error:  # another program uses it, or the disk is full
            self._has_residue = True
            logger.debug("The journal is rewritten later (%s).", error)

    def forget_deleted(self, has_files: Callable[[str], bool]) -> None:
        """Removes the rows of jobs that were deleted more than a day ago and have no files."""
        where = "state = 'deleted' AND ended < ?"
        for row in self._file.execute(
            f"SELECT id FROM jobs WHERE {where}", [time.time() - _DAY]
        ).fetchall():
            if not has_files(row["id"]):
                self._write("DELETE FROM jobs WHERE id = ?", [row["id"]])
                self._counts["deleted"] -= 1

    def get(self, name: str) -> QueuedVideo | None:
        """Returns a job that is not deleted."""
        return self._one("id = ? AND state != 'deleted'", [name])

    def state(self, name: str) -> str | None:
        """Returns the state of a job, also of a deleted one; None if there never was one."""
        row = self._file.execute("SELECT state FROM jobs WHERE id = ?", [name]).fetchone()
        return None if row is None else str(row["state"])

    def find_key(self, key: str) -> QueuedVideo | None:
        """Returns the last job of an Idempotency-Key."""
        return self._one("key = ? AND state != 'deleted' ORDER BY rowid DESC", [key])

    def find_digest(self, digest: str, since: float) -> QueuedVideo | None:
        """Returns the last job of the same body and without a key, if it was created since then."""
        where = "digest = ? AND key IS NULL AND created > ? AND state != 'deleted'"
        return self._one(f"{where} ORDER BY rowid DESC", [digest, since])

    def page(self, after: str | None, limit: int, newest_first: bool) -> list[QueuedVideo]:
        """Returns jobs by age, from the one that follows `after`, which may be deleted."""
        order, sign = ("DESC", "<") if newest_first else ("ASC", ">")
        since, given = "", []
        if after is not None:
            since, given = f"AND rowid {sign} (SELECT rowid FROM jobs WHERE id = ?)", [after]
        where = f"state != 'deleted' {since} ORDER BY rowid {order} LIMIT ?"
        return self._all(where, [*given, limit])

    def in_state(self, *states: str) -> list[QueuedVideo]:
        """Returns the jobs of some states in the order in which they are made."""
        marks = ", ".join("?" for _ in states)
        return self._all(f"state IN ({marks}) ORDER BY priority DESC, rowid", [*states])

    def last(self, count: int) -> list[QueuedVideo]:
        """Returns the last completed jobs, the newest first."""
        return self._all(f"state = 'completed' ORDER BY ended DESC LIMIT {count}", [])

    def ended_before(self, moment: float, count: int = -1) -> list[QueuedVideo]:
        """Returns jobs that ended earlier, the oldest end first. count: How many; -1: all."""
        where = "state IN ('completed', 'failed') AND ended < ? ORDER BY ended LIMIT ?"
        return self._all(where, [moment, count])

    def counts(self) -> dict[str, int]:
        """Returns how many jobs are in each state."""
        return dict(self._counts)

    def stored_bytes(self) -> int:
        """Returns the bytes of the files of all jobs."""
        return self._bytes

    def recover(self) -> list[QueuedVideo]:
        """Queues again what ran when the front ended; returns what has failed now."""
        failed = []
        for job in self.in_state("in_progress"):
            if job.attempt >= ATTEMPTS:
                error = {"code": "interrupted", "message": "The service ended twice meanwhile."}
                self.change(job, state="failed", error=error, ended=time.time())
                failed.append(job)
            else:
                self.change(job, state="queued", done=0)
        return failed

    def _write(self, statement: str, given: Sequence[Any]) -> None:
        try:
            self._file.execute(statement, given)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not self._reserve.exists():
                raise
            remove_output(self._reserve, _ROOM)
            self._file.execute(statement, given)

    def _count(self, job: QueuedVideo, sign: int) -> None:
        """Adds a job to the counts, or takes it from them."""
        self._counts[job.state] += sign
        self._bytes += sign * job.bytes
        self.version += 1

    def _erase(self, where: str, given: Sequence[Any]) -> None:
        """Sets all columns but `_OF_DELETED` to what a job has that says nothing."""
        blank = QueuedVideo("", {})
        names = [name for name in _COLUMNS if name not in _OF_DELETED]
        sets = ", ".join(f"{name} = ?" for name in names)
        stored = [_stored(blank, name) for name in names]
        self._write(f"UPDATE jobs SET {sets} WHERE {where}", [*stored, *given])

    def _empty_log(self) -> None:
        """Writes the write-ahead log into the file and empties it, unless others use it."""
        wait = self._file.execute("PRAGMA busy_timeout").fetchone()[0]
        self._file.execute("PRAGMA busy_timeout=0")
        with suppress(sqlite3.OperationalError):
            self._file.execute(_CHECKPOINT).fetchone()
        self._file.execute(f"PRAGMA busy_timeout={wait}")

    def _one(self, where: str, given: Sequence[Any]) -> QueuedVideo | None:
        return next(iter(self._all(f"{where} LIMIT 1", given)), None)

    def _all(self, where: str, given: Sequence[Any]) -> list[QueuedVideo]:
        return [_job(row) for row in self._file.execute(f"SELECT * FROM jobs WHERE {where}", given)]


_COUNTS = "SELECT state, COUNT(*) FROM jobs GROUP BY state"
_CHECKPOINT = "PRAGMA wal_checkpoint(TRUNCATE)"
_BYTES = "SELECT COALESCE(SUM(bytes), 0) FROM jobs"


def _kind(name: str) -> str:
    return "TEXT PRIMARY KEY" if name == "id" else ""


def _stored(job: QueuedVideo, name: str) -> Any:
    value = getattr(job, name)
    return json.dumps(value, ensure_ascii=False, default=str) if name in _JSON else value


def _job(row: sqlite3.Row) -> QueuedVideo:
    values = {name: row[name] for name in _COLUMNS}
    given = {name: json.loads(values[name] or "{}") for name in _JSON}
    return QueuedVideo(**values | given)
