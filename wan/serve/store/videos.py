"""A store for finished videos: a folder, a bucket or another file system that fsspec supports."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from wan.serve.jobs.files import make_picture
from wan.serve.jobs.folders import list_output_files, make_output_stem, remove_job_files
from wan.serve.jobs.job import ServiceJob
from wan.serve.queue.deliveries import DeliveryKind
from wan.serve.queue.service import Service
from wan.settings.errors import InputError
from wan.settings.values import format_value
from wan.utils.files import check_folder, make_process_name
from wan.utils.log import RareMessages, logger
from wan.utils.threads import DaemonThreads

_CHUNK = 4_000_000  # bytes that are read from the store at once
_READ_SECONDS = 60.0  # seconds for one read
_WRITE_SECONDS = 3600.0  # seconds for all files of a job
_START_SECONDS = 60.0  # seconds in which the store must answer when the service starts
_MAX_READERS = 16  # threads that read; those of a store that hangs stay
_MAX_WRITERS = 4  # threads that upload and remove
_READER_SECONDS = 5.0  # seconds that a request waits for a thread
_WRITER_SECONDS = 60.0  # the same of an upload
_LOCAL_SECONDS = 10.0  # seconds after an upload in which requests may still open the local file
_MAX_UPLOADS = 2  # jobs whose files are uploaded or removed at the same time
_LONGEST_PAUSE = 300.0  # seconds between two attempts
_RENAMES = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "arrow_hdfs")
"""Protocols whose files appear before they are whole, and can be renamed."""

_log = logger.getChild("store")
_log.addFilter(RareMessages())


class StoreError(Exception):
    """The store does not answer, or refuses; the message is for the log."""


class Store:
    """The files of completed jobs in a store, in `ROOT/ID`.

    A file of a job appears only when it is whole: it is written under a temporary name and renamed,
    or put as one object. The record is the last one, so that a folder with a record is complete.

    All methods but the constructor run the calls of the file system in threads, of which there are
    only a few: those of a store that hangs never end.

    Attributes:
        writers: The threads of uploads.
    """

    def __init__(self, url: str) -> None:
        """Finds the file system of a URL; `check` connects to it.

        Raises:
            InputError: The URL is of no known kind, or a package is missing.
        """
        self.name = re.sub(r"//[^/@]*@", "//", url)  # without a password
        if not url:
            raise InputError("--store is empty", remedy="give a folder or an address")
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise self._make_error(
                "needs fsspec", "pip install -r requirements-store.txt"
            ) from error
        try:
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files, self._root = url_to_fs(url, **options)
        except ImportError as error:
            text = format_value(str(error), str)
            raise self._make_error("needs a package", f"install it ({text})") from error
        except Exception as error:
            remedy = "give a folder, or an address such as s3://BUCKET/FOLDER"
            why = f"cannot be used ({_describe_store_error(error)})"
            raise self._make_error(why, remedy) from error
        protocol = self._files.protocol
        self._protocols = (protocol,) if isinstance(protocol, str) else tuple(protocol)
        self._root = str(self._root).rstrip("/")
        self._renames = not {*self._protocols}.isdisjoint(_RENAMES)
        self._readers = DaemonThreads(_MAX_READERS, _READER_SECONDS)
        self.writers = DaemonThreads(_MAX_WRITERS, _WRITER_SECONDS)

    async def check(self, jobs: Path) -> None:
        """Writes, reads and removes a small file.

        Args:
            jobs: The local parent folder of the jobs, in which no store may be.

        Raises:
            InputError: The store does not answer in a minute, or cannot be written.
        """
        if "file" in self._protocols:
            folder = Path(self._root)
            if folder.resolve().is_relative_to(jobs.resolve()):
                raise self._make_error("is in the folder of --journal", "give another folder")
            check_folder(folder.absolute(), "--store", folder, "give another one")
            return
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self.writers.call(self._write_probe)
        except TimeoutError:
            why = f"has not answered in {_START_SECONDS:.0f} s"
            raise self._make_error(why, "check its address") from None
        except Exception as error:
            remedy = "check its address, its rights and its keys"
            why = f"cannot be written ({_describe_store_error(error)})"
            raise self._make_error(why, remedy) from error

    async def upload(self, job_id: str, files: dict[str, Path]) -> None:
        """Puts the files of a job, the record last; replaces those of an earlier attempt.

        Args:
            files: Name in the store -> local file.

        Raises:
            StoreError: A file was not stored.
        """
        await self._call(self.writers, _WRITE_SECONDS, self._put_files, job_id, files)

    async def remove(self, job_id: str) -> None:
        """Removes the files of a job, if there are any; may raise StoreError."""
        await self._call(self.writers, _WRITE_SECONDS, self._remove_folder, job_id)

    async def get_size(self, job_id: str, name: str) -> int | None:
        """Returns the size of a file of a job; None if it is missing; may raise StoreError."""
        threads = self._readers
        size: int | None = await self._call(threads, _READ_SECONDS, self._get_size, job_id, name)
        return size

    async def read(self, job_id: str, name: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yields the bytes of a file from `start` to `end`; may raise StoreError."""
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            path = self._make_path(job_id, name)
            content: bytes = await self._call(
                self._readers, _READ_SECONDS, self._files.cat_file, path, start=first, end=last
            )
            if len(content) != last - first:
                raise StoreError("a file is shorter than it was")
            yield content

    def _make_error(self, why: str, remedy: str) -> InputError:
        return InputError(f"--store {format_value(self.name)}", None, why, remedy)

    def _make_path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    async def _call(
        self,
        threads: DaemonThreads,
        seconds: float,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function of the file system, whose errors are of many kinds."""
        try:
            async with asyncio.timeout(seconds):
                return await threads.call(function, *args, **kwargs)
        except Exception as error:
            raise StoreError(_describe_store_error(error)) from error

    def _write_probe(self) -> None:
        path, content = self._make_path(f".probe-{secrets.token_hex(8)}"), b"probe"
        if self._renames:  # elsewhere this could create a bucket
            self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(path, content)
        try:
            if self._files.cat_file(path) != content:
                raise OSError("it returns other bytes than were written")
        finally:
            self._files.rm_file(path)

    def _put_files(self, job_id: str, files: dict[str, Path]) -> None:
        self._remove_folder(job_id)
        if self._renames:
            self._files.makedirs(self._make_path(job_id), exist_ok=True)
        for name, path in files.items():
            final = self._make_path(job_id, name)
            temporary = self._make_path(job_id, f".{make_process_name()}-{name}")
            self._files.put_file(str(path), temporary if self._renames else final)
            if self._renames:
                self._files.mv(temporary, final)
            if self._files.size(final) != path.stat().st_size:
                raise OSError(f"{name} has another size than it had here")

    def _remove_folder(self, job_id: str) -> None:
        folder = self._make_path(job_id)
        for path in self._list_files(folder):
            self._files.rm_file(path)
        try:
            self._files.rmdir(folder)
        except Exception:  # absent, or an object store, which has no folders
            logger.debug("%s was not removed", folder, exc_info=True)

    def _list_files(self, folder: str) -> list[str]:
        try:
            return [str(path) for path in self._files.ls(folder, detail=False) if path != folder]
        except FileNotFoundError:
            return []

    def _get_size(self, job_id: str, name: str) -> int | None:
        try:
            return int(self._files.size(self._make_path(job_id, name)))
        except FileNotFoundError:
            return None


def _describe_store_error(error: Exception) -> str:
    """Returns an error of a file system in a few words of one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return format_value(str(text), str)


class StoreUploads:
    """Uploads the videos of completed jobs, and removes those of deleted jobs from the store.

    Open deliveries are in the journal. An uploaded video is removed from the local disk; uploads
    of the request and the record stay there.
    """

    def __init__(
        self, service: Service, store: Store, on_attempt: Callable[[str], None] = lambda _: None
    ) -> None:
        """Adds the uploads to the service's deliveries; removes videos that were stored before.

        on_attempt: Called with "uploaded", "removed" or "repeated", for metrics.
        """
        self._service, self._store, self._on_attempt = service, store, on_attempt
        kind = DeliveryKind(self._update_store, _MAX_UPLOADS, _MAX_UPLOADS, _LONGEST_PAUSE)
        service.deliveries.kinds["store"] = kind
        for job_id in service.files.list_jobs_with_video():
            job = service.journal.get(job_id)
            if job is not None and job.store_state == "stored":
                self._remove_local(job)

    async def restore_jobs(self) -> None:
        """Adds the stored videos whose jobs are missing in the journal, by their local records."""
        num_restored, journal = 0, self._service.journal
        for job in await self._store.writers.call(self._service.list_stored_jobs):
            try:
                names = [make_output_stem(index) for index in range(job.num_outputs)]
                sizes = [await self._store.get_size(job.id, f"{name}.mp4") for name in names]
            except StoreError as error:
                logger.error("Stored videos are not listed before the next start: %s", error)
                return
            if None not in sizes and journal.get_state(job.id) is None:
                job.store_state = "stored"
                journal.restore_job(job)
                num_restored += 1
        if num_restored:
            logger.warning("%d stored videos were restored from their records.", num_restored)

    async def _update_store(self, job: ServiceJob) -> bool:
        """Uploads or removes the files of a job once; returns whether that is done."""
        try:
            if job.state == "deleted":
                await self._store.remove(job.id)
                self._service.journal.update_ended(job.id, store_state="")
                self._on_attempt("removed")
            else:
                await self._upload(job)
            return True
        except StoreError as error:
            _log.warning("The store was not updated for %s and is tried again: %s", job.id, error)
            self._on_attempt("repeated")
            return False

    async def _upload(self, job: ServiceJob) -> None:
        """Uploads the files of a completed job, and later removes its local video."""
        journal, folder = self._service.journal, self._service.files.job_folder(job)
        journal.update_ended(job.id, store_state="uploading")
        if not await journal.save():  # a deleted job whose upload is not recorded would stay
            raise StoreError("the journal cannot be written")
        videos = [self._service.files.video_path(job, i) for i in range(job.num_outputs)]
        files = await self._store.writers.call(_list_files_to_store, videos, job.frames)
        if not any(video.exists() for video in videos):
            if journal.get(job.id) is not None:
                logger.error("The video of %s is gone and was not uploaded.", job.id)
                journal.update_ended(job.id, store_state="stored")
            return
        await self._store.upload(job.id, {name: folder / name for name in files})
        current = journal.get(job.id)
        if current is None:  # deleted meanwhile; it is removed from the store next
            return
        journal.update_ended(job.id, store_state="stored")
        self._on_attempt("uploaded")
        if await journal.save():
            asyncio.get_running_loop().call_later(_LOCAL_SECONDS, self._remove_local, current)

    def _remove_local(self, job: ServiceJob) -> None:
        """Removes the local files that are in the store, but for the record, which is small."""
        names = {n for i in range(job.num_outputs) for n in list_output_files(i)[:-1]}
        remove_job_files(self._service.files.job_folder(job), lambda name: name not in names)


def _list_files_to_store(videos: Sequence[Path], num_frames: int) -> list[str]:
    """Makes the pictures of the videos of a job; returns the names of all files.

    The record of the first video is the last one.
    """
    names: list[str] = []
    for index, video in reversed([*enumerate(videos)]):
        for variant in ("thumbnail", "spritesheet"):
            try:
                make_picture(video, variant, num_frames)
            except (OSError, ValueError, RuntimeError) as error:
                logger.debug("%s has no %s (%s)", video, variant, error)
        names += [name for name in list_output_files(index) if (video.parent / name).is_file()]
    return names
