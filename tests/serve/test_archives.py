"""All files of a job in one zip."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from io import BytesIO
from pathlib import Path

from tests.serve.bodies import FORM, make_form, make_picture
from tests.serve.jobs import Jobs
from wan.serve.http.downloads import ArchiveFile, read_parts, stream_archive


def read_zip(content: bytes) -> dict[str, bytes]:
    """Returns the files of a zip, by name; their checksums are compared."""
    with zipfile.ZipFile(BytesIO(content)) as archive:
        names = archive.namelist()
        assert len({*names}) == len(names)
        return {name: archive.read(name) for name in names}


async def test_videos_and_uploaded_files(tmp_path: Path) -> None:
    """Of two videos the complete one is sent at once; names of uploads name no other folder."""
    jobs = Jobs(tmp_path / "jobs", flags=("--task", "i2v-A14B"))
    form = make_form({"prompt": "a star", "seed": "7,3", "input_reference": make_picture()})
    form = form.replace(b'filename="input_reference"', b'filename="a/../b: \xc3\xa4 1?.png"')
    video = (await jobs.request("/v1/videos", form, Content_Type=FORM))[2]
    name, path = video["id"], f"/v1/videos/{video['id']}/archive"
    assert video["input_names"] == {"input_reference": ["b: ä 1?.png"]}
    status, _, answer = await jobs.request(path)
    assert (status, answer["error"]["code"]) == (404, "not_ready")
    jobs.start_idle_ranks()
    jobs.complete(name, video=b"one" * 999)
    latents = {".latents.safetensors": b"l", ".steps/step_01.safetensors": b"s"}
    for suffix, saved in latents.items():
        path_of_latents = jobs.folder / "jobs" / name / f"video{suffix}"
        path_of_latents.parent.mkdir(exist_ok=True)
        path_of_latents.write_bytes(saved)
    upload = "inputs/input_reference_b_ ä 1_.png"
    for others in ({}, {f"{name}-1.mp4": b"two"}):
        if others:
            jobs.complete(f"{name}.1", video=b"two")
        status, headers, content = await jobs.request(path)
        assert (status, headers["content-type"]) == (200, "application/zip")
        assert headers["content-disposition"] == f'attachment; filename="{name}.zip"'
        files = read_zip(content)
        described = json.loads(files.pop(f"{name}.json"))
        described["seconds_left"] = (current := await jobs.get_video(name)).get("seconds_left")
        assert described | {"seconds_left": None} == current | {"seconds_left": None}
        sent = {f"{name}.mp4": b"one" * 999, upload: make_picture()}
        assert files == sent | {f"{name}{s}": saved for s, saved in latents.items()} | others
    status, headers, content = await jobs.request(path, method="HEAD")
    assert (status, headers["content-type"], content) == (200, "application/zip", b"")
    (jobs.folder / "jobs" / name / "video.mp4").unlink()
    assert (await jobs.request(path))[0] == 410
    await jobs.delete(name)
    assert (await jobs.request(path))[0] == 404


async def test_a_list_of_files(tmp_path: Path) -> None:
    """Two of one name are both sent, in their order, under the names that clients gave."""
    jobs = Jobs(tmp_path / "jobs", flags=("--task", "vace-1.3B"))
    pictures = [make_picture(1), make_picture(2)]
    form = make_form({"prompt": "a star", "src_ref_images": pictures})
    name = (await jobs.request("/v1/videos", form, Content_Type=FORM))[2]["id"]
    jobs.complete(name)
    files = read_zip((await jobs.request(f"/v1/videos/{name}/archive"))[2])
    sent = [files[f"inputs/src_ref_images_{number}_src_ref_images"] for number in (1, 2)]
    assert sent == pictures and len(files) == 4


async def test_a_large_archive(tmp_path: Path) -> None:
    """It is sent with little memory."""
    large, size = tmp_path / "large", 50_000_000
    with large.open("wb") as file:
        file.truncate(size)
    archive, peak = tmp_path / "a.zip", 0
    with archive.open("wb") as out:
        tracemalloc.start()
        async for part in stream_archive([ArchiveFile("large.mp4", size, read_parts(large))]):
            out.write(part)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8_000_000
    with zipfile.ZipFile(archive) as file:
        assert file.testzip() is None and file.getinfo("large.mp4").file_size == size
