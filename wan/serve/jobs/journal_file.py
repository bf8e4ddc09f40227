"""The file of the journal: SQLite tables, a connection that writes and one that reads."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from wan.serve.jobs.job import COLUMNS, Row, read_row
from wan.settings.errors import InputError

PATIENCE = 5.0
"""Seconds to wait while another program locks the file."""
_FORMAT = 1  # `user_version` of the file; the version before wrote random numbers there
_JOBS = f"CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, {', '.join(COLUMNS[1:])})"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS deliveries (
    job TEXT, kind TEXT, receiver TEXT, due REAL, failures INTEGER, PRIMARY KEY (job, kind)
);
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (clock_ended, state);
CREATE INDEX IF NOT EXISTS jobs_by_key ON jobs (key) WHERE key IS NOT NULL;
CREATE INDEX IF NOT EXISTS deliveries_by_due ON deliveries (kind, due);
"""
_INSERT = f"INSERT INTO jobs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
_UPSERT = f"{_INSERT} ON CONFLICT (id) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in COLUMNS[1:]
)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REMEDY = "move it away; finished videos are restored from their records"

Statement = tuple[str, tuple[Any, ...]]
"""A statement of SQL and its values."""


class JournalError(Exception):
    """The journal cannot be read or written; the message is a sentence for users.

    Attributes:
        is_lost: The file was removed, replaced or damaged while the service ran.
    """

    def __init__(self, sentence: str, is_lost: bool = False) -> None:
        super().__init__(sentence)
        self.is_lost = is_lost


class JournalFile:
    """The journal on disk. Short queries are made in one thread, all else in another one.

    Attributes:
        open_jobs: The jobs that were queued or running when it was opened, oldest first.
    """

    def __init__(self, path: Path, wall: float) -> None:
        """Opens or creates the file.

        Args:
            path: In an existing folder.
            wall: The present time of the system's clock.

        Raises:
            InputError: The file is damaged, cannot be used, or stays locked by another program.
        """
        self._path = path.absolute()
        try:
            self._writer, self._reader = self._connect(), self._connect()
            self._create_tables()
            self._restore_times(wall)
            self._reader.execute("PRAGMA busy_timeout = 0")  # the event loop must not wait
            self._inodes = self._read_inodes()
            select = f"SELECT {', '.join(COLUMNS)} FROM jobs"
            condition = "WHERE state IN ('queued', 'in_progress') ORDER BY rowid"
            self.open_jobs = [*map(read_row, self._writer.execute(f"{select} {condition}"))]
        except (sqlite3.Error, OSError) as error:
            raise InputError(str(self._path), None, *_explain(error)) from error
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            why = f"is damaged: a row is not a job ({error})"
            raise InputError(str(self._path), None, why, _REMEDY) from error

    def close(self) -> None:
        """Closes both connections."""
        self._reader.close()
        self._writer.close()

    def query(self, statement: str, values: Any, is_long: bool = False) -> list[Row]:
        """Returns the rows of a query; raises JournalError.

        is_long: It may read the whole file, and is called in the thread that writes.
        """
        try:
            connection = self._writer if is_long else self._reader
            return connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise _make_error(error) from error

    def write(
        self,
        changes: Iterable[tuple[Row, Mapping[str, str | None]]],
        statements: Iterable[Statement],
        patience: float,
    ) -> None:
        """Writes jobs, and executes statements, in one transaction.

        Args:
            changes: Rows of jobs, and `ServiceJob.receivers`. Their deliveries are due at once.
            patience: Seconds to wait for a lock of another program.

        Raises:
            JournalError: Nothing was written, or the file is lost.
        """
        has_deleted = False
        try:
            self._set_patience(patience)
            with self._writer as writer:
                writer.execute("BEGIN IMMEDIATE")
                for row, receivers in changes:
                    writer.execute(_UPSERT, row)
                    self._write_deliveries(row[0], receivers)
                    has_deleted |= row[COLUMNS.index("state")] == "deleted"
                for statement, values in statements:
                    writer.execute(statement, values)
            if has_deleted:
                self._empty_log()
        except sqlite3.Error as error:
            raise _make_error(error) from error
        self.check()

    def check(self) -> None:
        """Raises JournalError if the file or one of its logs was removed or replaced."""
        with suppress(OSError):
            if self._read_inodes() == self._inodes:
                return
        sentence = "The journal was removed or replaced; finished videos are restored at the start."
        raise JournalError(sentence, is_lost=True)

    def vacuum(self) -> bool:
        """Rewrites the file without remains of deleted rows in pages that SQLite has split.

        Returns:
            Whether no remains are left; False if another program uses the file.
        """
        try:
            self._set_patience(0.0)
            self._writer.execute("VACUUM")
            return self._empty_log()
        except sqlite3.Error:  # in use, or the disk is full
            return False

    def _connect(self) -> sqlite3.Connection:
        """Connects to the file, which SQLite creates if it is missing."""
        connection = sqlite3.connect(
            self._path, PATIENCE, isolation_level=None, check_same_thread=False
        )
        for setting in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {setting}")
        return connection

    def _create_tables(self) -> None:
        """Checks the tables of an earlier start, and adds missing columns and tables."""
        (answer,) = self._writer.execute("PRAGMA quick_check(1)").fetchone()
        if answer != "ok":
            raise sqlite3.DatabaseError(str(answer).replace("\n", " "))
        ((num_tables,),) = self._writer.execute("SELECT count(*) FROM sqlite_master")
        columns = {row[1] for row in self._writer.execute("PRAGMA table_info(jobs)")}
        if num_tables and not columns >= {"id", "settings", "state"}:
            raise InputError(str(self._path), None, "holds no table of jobs", _REMEDY)
        self._writer.execute(_JOBS)
        for name in (column for column in COLUMNS if columns and column not in columns):
            self._writer.execute(f"ALTER TABLE jobs ADD COLUMN {name}")  # of an earlier version
        self._writer.executescript(_SCHEMA)
        if self._writer.execute("PRAGMA user_version").fetchone() != (_FORMAT,):
            self._list_deliveries()

    def _list_deliveries(self) -> None:
        """Fills the table of deliveries after a start of the version before, which had none."""
        with self._writer as writer:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("DELETE FROM deliveries")
            for row in writer.execute(f"SELECT {', '.join(COLUMNS)} FROM jobs"):
                job = read_row(row)
                self._write_deliveries(job.id, job.receivers)
            writer.execute(f"PRAGMA user_version = {_FORMAT}")

    def _restore_times(self, wall: float) -> None:
        """Sets the times that were counted by a clock of an earlier start; see `Journal`."""
        with self._writer as writer:
            writer.execute("BEGIN IMMEDIATE")
            end = "min(ended, ?1)"
            statement = f"UPDATE jobs SET clock_ended = {end} WHERE clock_ended IS NOT {end}"
            writer.execute(statement, (wall,))
            writer.execute("UPDATE deliveries SET due = 0 WHERE due")

    def _write_deliveries(self, job_id: str, receivers: Mapping[str, str | None]) -> None:
        """Adds the deliveries of a job that are missing, and removes those that are done."""
        for kind, receiver in receivers.items():
            if receiver is None:
                statement = "DELETE FROM deliveries WHERE job = ? AND kind = ?"
                self._writer.execute(statement, (job_id, kind))
            else:
                statement = "INSERT OR IGNORE INTO deliveries VALUES (?, ?, ?, 0, 0)"
                self._writer.execute(statement, (job_id, kind, receiver))

    def _empty_log(self) -> bool:
        """Moves the write-ahead log into the file; returns False if another program reads it."""
        self._set_patience(0.0)
        return not self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def _set_patience(self, seconds: float) -> None:
        """Sets how long a statement waits for a lock."""
        self._writer.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")

    def _read_inodes(self) -> list[int]:
        """Returns the inodes of the file and of SQLite's logs, which exist while it is open."""
        return [os.stat(f"{self._path}{end}").st_ino for end in ("", "-wal", "-shm")]


def _explain(error: Exception) -> tuple[str, str]:
    """Returns why the file cannot be used, as a predicate, and a remedy."""
    code = _get_sqlite_code(error)
    if code in _LOCKED:
        return "is locked by another program", "end that program"
    if code == sqlite3.SQLITE_FULL:
        return "cannot be written, as the disk is full", "delete videos"
    if code in _DAMAGED:
        return f"is damaged ({error})", _REMEDY
    return f"cannot be used ({getattr(error, 'strerror', None) or error})", "make it writable"


def _make_error(error: sqlite3.Error) -> JournalError:
    """Returns a failed read or write as a `JournalError`."""
    sentence = "The journal {}; {}.".format(*_explain(error))
    return JournalError(sentence, is_lost=_get_sqlite_code(error) in _DAMAGED)


def _get_sqlite_code(error: Exception) -> int | None:
    """Returns the primary error code of SQLite; None for an OSError.

    Errors of the sqlite3 module without a code count as SQLITE_CORRUPT.
    """
    if isinstance(error, OSError):
        return None
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)) & 0xFF
