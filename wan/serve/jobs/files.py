"""The files of the service's jobs: uploads, video, pictures, record, and what an attempt leaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from wan.checkpoint.formats.headers import read_json
from wan.media.video_reader import read_video
from wan.serve.jobs.folders import (
    UPLOAD_KIND,
    UPLOAD_PREFIX,
    list_output_files,
    make_output_stem,
    remove_job_files,
)
from wan.serve.jobs.job import ServiceJob
from wan.serve.requests.fields import FIELD_NAMES, FOLDER, PICTURES, UPLOADS
from wan.settings.errors import InputError
from wan.utils.files import make_marked_kind, write_output
from wan.utils.log import logger

_NAMES = "names"  # suffix of the file with the clients' names of uploaded files


class UploadedFile(bytes):
    """The content of a file in a form.

    Attributes:
        name: The client's name of the file.
    """

    name: str


class JobFiles:
    """The folders of all jobs.

    Attributes:
        jobs: Their parent; each is `jobs/ID`.
    """

    def __init__(self, jobs: Path) -> None:
        """Creates the parent folder."""
        self.jobs = jobs
        jobs.mkdir(parents=True, exist_ok=True)

    def job_folder(self, job: ServiceJob) -> Path:
        """Returns the folder of a job's files."""
        return self.jobs / job.id

    def has_folder(self, job_id: str) -> bool:
        """Returns whether a job has a folder."""
        return (self.jobs / job_id).exists()

    def upload_path(self, job: ServiceJob, upload_name: str) -> Path:
        """Returns the path of an uploaded file of a job."""
        return self.job_folder(job) / f"{UPLOAD_PREFIX}{upload_name}"

    def video_path(self, job: ServiceJob, index: int = 0) -> Path:
        """Returns the path of one of a job's videos."""
        return self.job_folder(job) / f"{make_output_stem(index)}.mp4"

    def list_latents(self, job: ServiceJob, index: int) -> list[tuple[str, Path]]:
        """Returns suffix and path of each file of saved latents of one of a job's videos."""
        video = self.video_path(job, index)
        paths = video.parent.glob(f"{video.stem}.latents.safetensors")
        steps = video.with_suffix(".steps").glob("*.safetensors")
        suffix_start = len(str(video.with_suffix("")))
        return [(str(path)[suffix_start:], path) for path in (*paths, *sorted(steps))]

    def count_videos(self, job: ServiceJob) -> int:
        """Returns the number of a job's videos on the local disk before the first missing one."""
        exists = [self.video_path(job, index).exists() for index in range(job.num_outputs)]
        return [*exists, False].index(False)

    def list_jobs_with_video(self) -> list[str]:
        """Returns the ids of the jobs that have a video on the local disk."""
        return [*{path.parent.name: None for path in self.jobs.glob("*/video*.mp4")}]

    def read_preview(self, job: ServiceJob, index: int | None = None) -> bytes:
        """Reads the newest preview of a job, or of one of its videos.

        Raises:
            OSError: There is none.
        """
        indices = range(job.num_outputs) if index is None else (index,)
        paths = [self.video_path(job, i).with_suffix(".preview.jpg") for i in indices]
        return max(paths, key=_get_modification_time).read_bytes()

    def read_record(self, job: ServiceJob, index: int = 0) -> dict[str, Any]:
        """Reads the record of a finished video; returns {} if it is missing or damaged."""
        try:
            return read_json(self.video_path(job, index).with_suffix(".json"))
        except InputError as error:
            logger.debug("%s has no record (%s)", job.id, error)
            return {}

    def count_bytes(self, job: ServiceJob) -> int:
        """Returns the size of all files of a job."""
        return sum(path.stat().st_size for path in self.job_folder(job).rglob("*"))

    def write_uploads(self, job: ServiceJob, files: Mapping[str, bytes | bytearray]) -> None:
        """Creates the folder of a job and writes its uploaded files."""
        self.job_folder(job).mkdir()
        names = {key: file.name for key, file in files.items() if isinstance(file, UploadedFile)}
        files = {**files, _NAMES: json.dumps(names).encode()} if names else files
        for name, content in files.items():
            with write_output(self.upload_path(job, name), UPLOAD_KIND) as temporary:
                temporary.write_bytes(content)

    def describe_refusal(
        self, error: InputError, job: ServiceJob, folder_files: Mapping[str, str]
    ) -> str:
        """Returns the sentence of a refusal with fields instead of the paths of uploaded files.

        folder_files: Field -> file of the folder of uploaded files.
        """
        names = self._name_uploads(job, folder_files)
        text = str(error)
        if name := names.get(str(error.value)):  # the subject names the same field
            renamed = InputError(name, None, error.why, error.remedy)
            renamed.naming = error.naming
            text = str(renamed)
        for path, name in names.items():
            text = text.replace(path, name)
        return text

    def _name_uploads(self, job: ServiceJob, folder_files: Mapping[str, str]) -> dict[str, str]:
        """Returns the names of the uploaded files and folders of a job by their absolute paths."""
        names: dict[str, str] = {}
        for setting, field in job.names.items():
            path = self.upload_path(job, setting)
            if setting in folder_files:
                path = self.upload_path(job, f"{FOLDER}/{folder_files[setting]}")
            elif path.is_dir():
                files = sorted(path.iterdir())
                numbers = range(1, len(files) + 1) if len(files) > 1 else ("",)
                for file, number in zip(files, numbers, strict=True):
                    names[str(file.absolute())] = f"the uploaded {field} {number}".rstrip()
            names[str(path.absolute())] = f"the uploaded {field}"
        folder_fields = [field for setting, field in job.names.items() if setting in folder_files]
        folder = str(self.upload_path(job, FOLDER).absolute())
        return names | {folder: f"the uploaded {' and '.join(folder_fields)}"}

    def read_upload_name(self, job: ServiceJob, path: Path) -> str:
        """Returns the client's name of an uploaded file; the name of its path if it is unknown."""
        (name,) = self._read_client_names(job, [path])
        return name or f"{job.id}-{path.name}"

    def list_input_names(
        self, job: ServiceJob, folder_files: Mapping[str, str]
    ) -> dict[str, list[str | None]]:
        """Returns the clients' names of a job's uploads by field; None where there is no name.

        folder_files: See `list_inputs`.
        """
        inputs = self.list_inputs(job, folder_files)
        return {field: self._read_client_names(job, paths) for field, paths in inputs.items()}

    def _read_client_names(self, job: ServiceJob, paths: Sequence[Path]) -> list[str | None]:
        try:
            names = read_json(self.upload_path(job, _NAMES))
        except InputError:
            names = {}
        keys = [str(path.relative_to(self.job_folder(job))) for path in paths]
        return [names.get(key.removeprefix(UPLOAD_PREFIX)) or None for key in keys]

    def read_uploads(self, job: ServiceJob) -> dict[str, bytes]:
        """Reads the uploaded files of a job, by name."""
        folder, files = self.job_folder(job), {}
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            if name.startswith(UPLOAD_PREFIX) and path.is_file():
                files[name.removeprefix(UPLOAD_PREFIX)] = path.read_bytes()
        return files

    def list_uploads(self, job: ServiceJob) -> dict[str, str | list[str]]:
        """Returns the paths of a job's uploads by setting: a folder, a file, or several files."""
        paths: dict[str, str | list[str]] = {}
        for name in (*UPLOADS, FOLDER):
            path = self.upload_path(job, name).absolute()
            if path.is_dir() and name != FOLDER:
                paths[name] = [str(file) for file in sorted(path.iterdir())]
            elif path.exists():
                paths[name] = str(path)
        return paths

    def list_inputs(
        self, job: ServiceJob, folder_files: Mapping[str, str]
    ) -> dict[str, list[Path]]:
        """Returns the paths of a job's uploads by field; does not check that they exist.

        folder_files: Field -> file of the folder of uploaded files.
        """
        paths: dict[str, list[Path]] = {}
        for name in job.names:
            if name in folder_files:
                paths[name] = [self.upload_path(job, f"{FOLDER}/{folder_files[name]}")]
            elif name in UPLOADS:
                path = self.upload_path(job, name)
                is_list = name == PICTURES and path.is_dir()
                paths[FIELD_NAMES.get(name, name)] = sorted(path.iterdir()) if is_list else [path]
        return paths

    def remove_all(self, job: ServiceJob) -> None:
        """Removes the files of a job and its folder."""
        remove_job_files(self.job_folder(job))

    def remove_attempt(self, job: ServiceJob, keep_clips: bool = True) -> None:
        """Removes the files of an attempt; uploaded files and complete videos stay.

        Args:
            keep_clips: Whether finished clips stay, with which the next attempt continues.
        """
        complete = {name for index in range(job.outputs_done) for name in list_output_files(index)}

        def keep(name: str) -> bool:
            is_clip = keep_clips and Path(name.partition("/")[0]).suffix == ".clips"
            return name.startswith(UPLOAD_PREFIX) or is_clip or name in complete

        remove_job_files(self.job_folder(job), keep)


def _get_modification_time(path: Path) -> float:
    """Returns when a file was written; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


_COLUMNS, _ROWS, _WIDTH = 4, 2, 320
_JPEG = make_marked_kind("a JPEG", b"\xff\xd8\xff")
_WRITE_LOCK = threading.Lock()


def make_picture(video: Path, variant: str, num_frames: int) -> Path:
    """Returns the path of a JPEG of a video; creates the file on the first call.

    Args:
        video: An mp4 file.
        variant: "thumbnail" for the first frame, "spritesheet" for several frames.
        num_frames: Frames of the video.

    Raises:
        OSError, ValueError: The video was deleted or cannot be read.
    """
    path = make_picture_path(video, variant)
    with _WRITE_LOCK:  # concurrent requests create it once
        if not path.exists():
            _write_picture(video, path, variant, num_frames)
        if not video.exists():  # deleted meanwhile; the folder may exist again
            remove_job_files(video.parent, lambda name: name != path.name)
            with suppress(OSError):
                video.parent.rmdir()
            raise FileNotFoundError(video)
    return path


def make_picture_path(video: Path, variant: str) -> Path:
    """Returns the path of a JPEG of a video, such as `thumbnail-1.jpg` of `video-1.mp4`."""
    return video.with_name(video.name.replace("video", variant)).with_suffix(".jpg")


def _write_picture(video: Path, path: Path, variant: str, num_frames: int) -> None:
    count = 1 if variant == "thumbnail" else _COLUMNS * _ROWS
    sampled_frames = read_video(video, "save_file").iter_frames(max(num_frames // count, 1))
    thumbnails = [_shrink_frame(Image.fromarray(frame)) for frame in islice(sampled_frames, count)]
    if not thumbnails:
        raise ValueError(f"{video} has no frame")
    width, height = thumbnails[0].size
    columns = min(count, _COLUMNS)
    sheet = Image.new("RGB", (width * columns, height * -(-count // columns)))
    for index in range(count):
        frame = thumbnails[min(index, len(thumbnails) - 1)]
        sheet.paste(frame, (index % columns * width, index // columns * height))
    with write_output(path, _JPEG) as temporary:
        sheet.save(temporary, "JPEG", quality=88)


def _shrink_frame(frame: Image.Image) -> Image.Image:
    height = max(round(frame.height * _WIDTH / frame.width), 1)
    return frame.resize((_WIDTH, height)) if frame.width > _WIDTH else frame
