"""The journal on disk: an SQLite file that is checked before each write and restored if lost."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

from wan.serve.rows import COLUMNS, Row
from wan.settings.errors import InputError, is_disk_full
from wan.utils.files import (
    has_process_ended,
    make_marked_kind,
    make_process_name,
    remove_output,
    write_output,
)
from wan.utils.log import logger

BUSY = 1.0
"""Seconds that one attempt to write waits for a lock."""
_START = 60.0  # seconds that the start waits for a lock
_RESERVE_KIND = make_marked_kind("room that the journal keeps free", bytes(4096))
_MIN_FREE_BYTES = 1_000_000  # bytes that must be free for the files of a new job
_RESERVE_BYTES = 8_000_000  # bytes; SQLite needs up to half of it for its logs
_CHECKPOINT = "PRAGMA wal_checkpoint({})"
_TABLE = f"CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, {', '.join(COLUMNS[1:])})"
_INSERT = f"INSERT INTO jobs ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
_UPSERT = f"{_INSERT} ON CONFLICT (id) DO UPDATE SET " + ", ".join(
    f"{name} = excluded.{name}" for name in COLUMNS[1:]
)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_REMEDY = "move it away; finished videos are restored from their records"


class JournalError(Exception):
    """The journal cannot be written; the message is a sentence for users.

    Attributes:
        is_locked: Another program has locked the file.
    """

    def __init__(self, sentence: str, is_locked: bool = False) -> None:
        super().__init__(sentence)
        self.is_locked = is_locked


class JournalFile:
    """The file of the journal.

    All methods block on the disk. `write`, `vacuum` and `close` are called by one thread at a time.

    Every transaction writes a random stamp into the file (`user_version`), which distinguishes the
    last written version from an older copy or another file.
    """

    def __init__(self, path: Path) -> None:
        """Prepares the paths; `open` opens the file. path: in an existing folder."""
        self._path = path.absolute()
        self._logs = [self._path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
        self._reserve = path.with_name("reserve")
        self._reserve_lock = threading.Lock()
        self._folder = _identify_file(self._path.parent)
        self._connection: sqlite3.Connection | None = None
        self._files: list[tuple[int, int] | None] = []  # identities of the file and its logs
        self._content = (-1, -1)  # size and modification time of the file
        self._stamp = 0

    def open(self) -> None:
        """Opens or creates the file.

        Raises:
            InputError: The file is damaged, cannot be written, or stays locked by another program.
        """
        deadline, has_warned = time.monotonic() + _START, False
        while True:
            try:
                self._open()
                return
            except (sqlite3.Error, OSError) as error:
                self._disconnect()
                if not _is_lock_error(error):
                    raise self._make_open_error(error) from error
                if time.monotonic() > deadline:
                    remedy = "end that program"
                    why = "is locked by another program"
                    raise InputError(str(self._path), None, why, remedy) from error
            if not has_warned:
                logger.warning("%s is locked by another program; the start waits.", self._path)
                has_warned = True
            time.sleep(0.2)

    def read_rows(self) -> Iterator[Row]:
        """Yields the rows of all jobs, oldest first.

        Raises:
            InputError: The file is damaged.
        """
        assert self._connection is not None
        try:
            yield from self._connection.execute(
                f"SELECT {', '.join(COLUMNS)} FROM jobs ORDER BY rowid"
            )
        except sqlite3.Error as error:
            raise self._make_open_error(error) from error

    def write(
        self,
        rows: Sequence[tuple[str, Row | None]],
        read_all: Callable[[], Iterable[Row]],
        wait_for_lock: bool = True,
    ) -> None:
        """Checks the file and writes rows to it.

        A file that was removed, replaced or damaged is rewritten with all rows; the file that now
        has its name is renamed first.

        Args:
            rows: Ids and rows of jobs; None removes a row. May be empty.
            read_all: Returns the rows of all jobs, these included, in the order of the file.
            wait_for_lock: Whether to wait up to `BUSY` seconds for a lock of another program.

        Raises:
            JournalError: The rows could not be written.
        """
        try:
            why = self._find_damage()
            if why is None:
                self._set_wait(BUSY if wait_for_lock else 0.0)
                why = self._write_or_find_damage(rows)
            if why is not None:
                self._rewrite_file(read_all(), why)
        except (sqlite3.Error, OSError) as error:
            raise _make_journal_error(error) from error

    def erase_log(self) -> bool:
        """Writes the write-ahead log into the file and truncates it.

        Returns:
            Whether the log is empty; False if another program uses it.
        """
        return self._connection is not None and self._checkpoint("TRUNCATE")

    def vacuum(self) -> bool:
        """Rewrites the file without remains of deleted rows in pages that SQLite has split.

        Returns:
            Whether no remains are left.
        """
        address = f"{self._path.as_uri()}?mode=rw"  # does not create a file
        try:
            if self._connection is None or self._find_damage() is not None:
                return False
            with closing(
                sqlite3.connect(address, timeout=0, isolation_level=None, uri=True)
            ) as connection:
                connection.execute("PRAGMA secure_delete=ON")
                connection.execute("VACUUM")
                is_busy = connection.execute(_CHECKPOINT.format("TRUNCATE")).fetchone()[0]
            self._store_identities()
            return not is_busy
        except (sqlite3.Error, OSError, JournalError) as error:  # in use, or the disk is full
            logger.debug("The journal is rewritten later (%s).", error)
            return False

    def close(self) -> None:
        """Closes the file."""
        self._disconnect()

    def reserve_space(self) -> bool:
        """Returns whether the disk has room for new jobs; writes the reserve file if missing."""
        with self._reserve_lock:
            try:
                if shutil.disk_usage(self._path.parent).free < _MIN_FREE_BYTES:
                    return False
                if self._reserve.exists() or _identify_file(self._path.parent) != self._folder:
                    return True  # `write` reports a moved folder
                with write_output(self._reserve, _RESERVE_KIND) as temporary:
                    temporary.write_bytes(bytes(_RESERVE_BYTES))
            except OSError as error:
                if is_disk_full(error):
                    return False
                logger.debug("The reserve file was not written (%s).", error)
            return True

    def _open(self) -> None:
        """Opens the file once."""
        for temporary in self._path.parent.glob(f".*-{self._path.name}*"):  # of a killed process
            if has_process_ended(temporary.name[1:].partition(f"-{self._path.name}")[0]):
                temporary.unlink()
        is_new = not os.path.lexists(self._path)
        jobs = self._path.with_name("jobs")
        if not is_new and not self._path.is_file():
            raise InputError(str(self._path), None, "is no regular file", "move it away")
        if not is_new and not self._path.stat().st_size and any(jobs.glob("*")):
            raise InputError(str(self._path), None, "is empty", _REMEDY)
        is_new = is_new or not self._path.stat().st_size
        self._connect()
        connection = self._connection
        assert connection is not None
        if not is_new:
            (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if answer != "ok":
                raise sqlite3.DatabaseError(str(answer).replace("\n", " "))
        columns = {row[1] for row in connection.execute("PRAGMA table_info(jobs)")}
        if not is_new and not columns >= {"id", "settings", "state"}:
            raise InputError(str(self._path), None, "holds no table of jobs", _REMEDY)
        connection.execute(_TABLE)
        for name in (column for column in COLUMNS if columns and column not in columns):
            connection.execute(f"ALTER TABLE jobs ADD COLUMN {name}")  # of an earlier version
        self._write_rows([])
        self._checkpoint("PASSIVE")
        self._store_identities()

    def _make_open_error(self, error: Exception) -> InputError:
        """Returns the refusal of a file with which the service cannot start."""
        code = _get_sqlite_code(error)
        if code is not None and code not in _DAMAGED:
            remedy = "make it writable"
            return InputError(str(self._path), None, f"cannot be used ({error})", remedy)
        if isinstance(error, OSError):
            return InputError(str(self._path), None, f"cannot be used ({error.strerror})")
        return InputError(str(self._path), None, f"is damaged ({error})", _REMEDY)

    def _connect(self) -> None:
        """Connects to the file, which SQLite creates if it is missing."""
        self._connection = sqlite3.connect(
            self._path, BUSY, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA secure_delete=ON")

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
        self._connection = None

    def _store_identities(self) -> None:
        """Stores the identities, size and modification time of the files after a write."""
        self._files = [_identify_file(path) for path in (self._path, *self._logs)]
        with suppress(OSError):
            status = self._path.stat()
            self._content = status.st_size, status.st_mtime_ns

    def _find_damage(self) -> str | None:
        """Checks the file; returns its damage as a predicate, None if there is none.

        Raises:
            JournalError: The folder was moved or removed.
        """
        if _identify_file(self._path.parent) != self._folder:
            raise JournalError("The folder of the journal was moved or removed; put it back.")
        files = [_identify_file(path) for path in (self._path, *self._logs)]
        if files[0] is None:
            return "is gone"
        if self._files and files[0] != self._files[0]:
            return "was replaced by another file"
        status = self._path.stat()
        is_same = files == self._files and (status.st_size, status.st_mtime_ns) == self._content
        if self._connection is not None and is_same:
            return None
        self._disconnect()  # writes the log into the file, also a removed log
        if not self._has_stamp():
            return "was changed or damaged by another program"
        self._connect()
        self._test_lock()
        self._store_identities()
        return None

    def _has_stamp(self) -> bool:
        """Returns whether the file is valid and has the stamp of the last write."""
        address = f"{self._path.as_uri()}?mode=ro"
        try:
            with closing(sqlite3.connect(address, BUSY, uri=True)) as connection:
                (stamp,) = connection.execute("PRAGMA user_version").fetchone()
                (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                return bool(stamp == self._stamp and answer == "ok")
        except sqlite3.DatabaseError as error:
            if _get_sqlite_code(error) in (*_DAMAGED, sqlite3.SQLITE_IOERR):  # truncated file
                return False
            raise

    def _write_or_find_damage(self, rows: Sequence[tuple[str, Row | None]]) -> str | None:
        """Writes rows; returns the damage of the file as a predicate, None if there is none."""
        try:
            if rows:
                self._write_rows(rows)
                self._checkpoint("PASSIVE")  # so that a lost log loses nothing
                identity = _identify_file(self._path)
                if self._files and identity != self._files[0]:
                    return "was removed or replaced"
                self._store_identities()
            else:
                self._test_lock()
            return None
        except sqlite3.DatabaseError as error:
            if _get_sqlite_code(error) in _DAMAGED:
                return f"is damaged ({error})"
            self._content = -1, -1  # forces a check before the next write
            raise

    def _test_lock(self) -> None:
        """Acquires and releases the write lock."""
        assert self._connection is not None
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("ROLLBACK")

    def _write_rows(self, rows: Sequence[tuple[str, Row | None]]) -> None:
        """Writes rows in one transaction; on a full disk frees the reserve file and retries."""
        assert self._connection is not None
        try:
            self._write_transaction(self._connection, rows)
        except sqlite3.OperationalError as error:
            if _get_sqlite_code(error) != sqlite3.SQLITE_FULL or not self._reserve.exists():
                raise
            remove_output(self._reserve, _RESERVE_KIND)
            self._write_transaction(self._connection, rows)

    def _write_transaction(
        self, connection: sqlite3.Connection, rows: Iterable[tuple[str, Row | None]]
    ) -> None:
        """Writes rows and a new stamp in one transaction."""
        stamp = random.SystemRandom().randrange(1, 1 << 31)
        connection.execute("BEGIN IMMEDIATE")
        try:
            for name, row in rows:
                if row is None:
                    connection.execute("DELETE FROM jobs WHERE id = ?", [name])
                else:
                    connection.execute(_UPSERT, row)
            connection.execute(f"PRAGMA user_version = {stamp}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._stamp = stamp

    def _checkpoint(self, mode: str) -> bool:
        """Runs an SQLite checkpoint; returns False if another program prevents it."""
        assert self._connection is not None
        self._set_wait(0.0)
        try:
            is_busy = bool(self._connection.execute(_CHECKPOINT.format(mode)).fetchone()[0])
        except sqlite3.OperationalError:
            return False
        self._store_identities()
        return not is_busy

    def _set_wait(self, seconds: float) -> None:
        """Sets how long a statement waits for a lock."""
        assert self._connection is not None
        self._connection.execute(f"PRAGMA busy_timeout={int(1000 * seconds)}")

    def _rewrite_file(self, rows: Iterable[Row], why: str) -> None:
        """Writes all rows to a new file; renames a file that has the journal's name.

        Args:
            rows: The rows of all jobs.
            why: The damage of the old file, as a predicate.
        """
        temporary = self._path.with_name(f".{make_process_name()}-{self._path.name}")
        temporary.unlink(missing_ok=True)
        try:
            with closing(sqlite3.connect(temporary, isolation_level=None)) as new:
                new.execute(_TABLE)
                self._write_transaction(new, ((row[0], row) for row in rows))
            backup = self._move_aside()
            self._disconnect()
            for log in self._logs:  # SQLite would apply an old log to the new file
                log.unlink(missing_ok=True)
            temporary.rename(self._path)
        finally:
            temporary.unlink(missing_ok=True)
        self._connect()
        self._test_lock()
        self._store_identities()
        backup_note = f"; the old file is now {backup}" if backup else ""
        logger.error("%s %s. It was written again from memory%s.", self._path, why, backup_note)

    def _move_aside(self) -> str | None:
        """Renames a file that has the journal's name; returns its new name, None without a file."""
        if not os.path.lexists(self._path):
            return None
        for number in count(1):
            backup = self._path.with_name(f"{self._path.stem}-aside-{number}{self._path.suffix}")
            if not os.path.lexists(backup):
                break
        is_ours = self._files and _identify_file(self._path) == self._files[0]
        for index, log in enumerate(self._logs, 1):  # each log moves with its file
            if os.path.lexists(log) and (is_ours or _identify_file(log) != self._files[index]):
                log.rename(backup.with_name(f"{backup.name}{log.name[len(self._path.name) :]}"))
        self._path.rename(backup)
        return backup.name


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Returns device and inode of a file; None if it does not exist."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _get_sqlite_code(error: BaseException) -> int | None:
    """Returns the primary error code of SQLite; None for other errors.

    Errors of the sqlite3 module without a code, as for invalid rows, count as SQLITE_CORRUPT.
    """
    if not isinstance(error, sqlite3.Error):
        return None
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return int(code) & 0xFF


def _is_lock_error(error: BaseException) -> bool:
    return _get_sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _make_journal_error(error: Exception) -> JournalError:
    """Returns a failed write as a `JournalError` whose message has no paths."""
    if _is_lock_error(error):
        return JournalError("The journal is locked by another program.", is_locked=True)
    if _get_sqlite_code(error) == sqlite3.SQLITE_FULL or is_disk_full(error):
        return JournalError("The disk is full, and the journal cannot be written; delete videos.")
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return JournalError(f"The journal cannot be written ({reason}).")
