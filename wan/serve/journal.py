"""The journal of the jobs: an SQLite file, which tells after a restart what is still to be made."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wan.checkpoint.files import whole_file
from wan.settings.errors import is_disk_full

ENDS = ("completed", "failed", "deleted")
ATTEMPTS = 2
"""How often a job is begun before it fails because its ranks were lost."""
_JSON = ("settings", "names", "error")
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


_COLUMNS = [one.name for one in fields(QueuedVideo)]


class Journal:
    """Jobs on disk; every change is written before the method returns.

    A file beside it keeps some megabytes free for what becomes of the jobs when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        """Opens the journal, or begins one."""
        self._reserve = path.with_name("reserve")
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.row_factory = sqlite3.Row
        self._file.execute("PRAGMA journal_mode=WAL")
        columns = ", ".join(f"{name} {_kind(name)}" for name in _COLUMNS)
        self._file.execute(f"CREATE TABLE IF NOT EXISTS jobs ({columns})")
        self._file.execute("CREATE INDEX IF NOT EXISTS by_state ON jobs (state, created)")

    def close(self) -> None:
        """Ends all writing."""
        self._file.close()

    def has_room(self) -> bool:
        """Returns whether new jobs can be written; sees to it that they can, if the disk allows."""
        if self._reserve.exists():
            return True
        try:
            with whole_file(self._reserve) as temporary:
                temporary.write_bytes(bytes(_RESERVE))
        except OSError as error:
            if not is_disk_full(error):
                raise
            return False
        return True

    def add(self, job: QueuedVideo) -> None:
        """Writes a new job."""
        marks = ", ".join("?" for _ in _COLUMNS)
        self._write(f"INSERT INTO jobs VALUES ({marks})", [_stored(job, n) for n in _COLUMNS])

    def change(self, job: QueuedVideo, **values: Any) -> None:
        """Sets some of a job's values, here and on disk."""
        for name, value in values.items():
            setattr(job, name, value)
        sets = ", ".join(f"{name} = ?" for name in values)
        stored = [_stored(job, name) for name in values]
        self._write(f"UPDATE jobs SET {sets} WHERE id = ?", [*stored, job.id])

    def get(self, name: str) -> QueuedVideo | None:
        """Returns a job that is not deleted."""
        return self._one("id = ? AND state != 'deleted'", [name])

    def twin(self, digest: str, key: str | None) -> QueuedVideo | None:
        """Returns the last job of the same key, or without one of the same body."""
        found = ("key = ?", [key]) if key else ("digest = ?", [digest])
        return self._one(f"{found[0]} AND state != 'deleted' ORDER BY rowid DESC", found[1])

    def page(self, after: str | None, limit: int, newest_first: bool) -> list[QueuedVideo]:
        """Returns jobs by age, from the one that follows `after`."""
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

    def last(self, shape: str | None, count: int = 5) -> list[QueuedVideo]:
        """Returns the last completed jobs, of one shape or of all."""
        where, given = ("AND shape = ?", [shape]) if shape is not None else ("", [])
        return self._all(f"state = 'completed' {where} ORDER BY ended DESC LIMIT {count}", given)

    def ended_before(self, moment: float) -> list[QueuedVideo]:
        """Returns the jobs that ended earlier and have files."""
        return self._all("state IN ('completed', 'failed') AND ended < ?", [moment])

    def counts(self) -> dict[str, int]:
        """Returns how many jobs are in each state."""
        rows = self._file.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state")
        return dict(rows.fetchall())

    def stored_bytes(self) -> int:
        """Returns the bytes of the files of all jobs."""
        return int(self._file.execute("SELECT COALESCE(SUM(bytes), 0) FROM jobs").fetchone()[0])

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
            self._reserve.unlink()
            self._file.execute(statement, given)

    def _one(self, where: str, given: Sequence[Any]) -> QueuedVideo | None:
        return next(iter(self._all(f"{where} LIMIT 1", given)), None)

    def _all(self, where: str, given: Sequence[Any]) -> list[QueuedVideo]:
        return [_job(row) for row in self._file.execute(f"SELECT * FROM jobs WHERE {where}", given)]


def _kind(name: str) -> str:
    return "TEXT PRIMARY KEY" if name == "id" else ""


def _stored(job: QueuedVideo, name: str) -> Any:
    value = getattr(job, name)
    return json.dumps(value, ensure_ascii=False, default=str) if name in _JSON else value


def _job(row: sqlite3.Row) -> QueuedVideo:
    values = dict(row)
    return QueuedVideo(**values | {name: json.loads(values[name]) for name in _JSON})
