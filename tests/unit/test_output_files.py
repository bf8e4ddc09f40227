"""Output files: whole or absent, and only earlier outputs of the same kind are replaced."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imageio_ffmpeg
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.pipelines import resolve_argv
from tests.refusals import check_refusals, get_refusal
from wan.media.video_writer import save_latents, save_preview, write_video
from wan.settings.command import Output
from wan.settings.errors import InputError, WriteError
from wan.utils.files import (
    LATENTS_KIND,
    PREVIEW_KIND,
    RECORD_KIND,
    SUMMARY_KIND,
    VIDEO_KIND,
    OutputKind,
    check_folder,
    check_output,
    check_output_folder,
    has_process_ended,
    is_output,
    make_marked_kind,
    make_process_name,
    move_to_free_name,
    remove_output,
    write_folder,
    write_output,
)

TEXT = make_marked_kind("a text of this test", b"# made by this test")
OURS = "# made by this test\n"


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    """An empty file is filled: programs that make temporary names often create the file as well."""
    path = tmp_path / "new" / "film.mp4"
    for number in (1, 2):  # the second time, the first file is kept until the new one is whole
        files_before = {file.name: file.read_text() for file in path.parent.glob("*")}
        with pytest.raises(KeyboardInterrupt), write_output(path, TEXT) as temporary:
            assert temporary.parent == path.parent and temporary.suffix == ".mp4"
            temporary.write_text("half")
            raise KeyboardInterrupt
        assert {file.name: file.read_text() for file in path.parent.iterdir()} == files_before
        with write_output(path, TEXT) as temporary:
            temporary.write_text(f"{OURS}{number}")
            assert path.exists() == (number == 2)
        assert path.read_text() == f"{OURS}{number}" and list(path.parent.iterdir()) == [path]
    path.write_text("")
    check_output(path, TEXT, "--out")
    with write_output(path, TEXT) as temporary:
        temporary.write_text(OURS)
    assert path.read_text() == OURS


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(KeyboardInterrupt), write_folder(path) as temporary:
        (temporary / "file").write_text("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    path.mkdir()  # an empty folder is filled
    with write_folder(path) as temporary:
        (temporary / "file").write_text("whole")
    assert (path / "file").read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    paths_before = sorted(tmp_path.rglob("*"))

    def write(folder: str) -> None:
        with write_folder(Path(folder)):
            pytest.fail("the block must not begin")

    messages = {name: get_refusal(write, name) for name in ("file", "full", "link", ".")}
    check_refusals("output files: folders", messages)
    assert sorted(tmp_path.rglob("*")) == paths_before


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


CONFLICTS: dict[str, Callable[[Path], object]] = {
    "a foreign file": lambda path: path.write_text("precious"),
    "a link to a file of ours": lambda path: path.symlink_to(path.with_name("ours")),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
}


def test_foreign_files_are_refused_and_kept(tmp_path: Path) -> None:
    """The check applies before the work, after it, and when files are removed."""

    def write(path: Path) -> None:
        with write_output(path, TEXT) as temporary:
            temporary.write_text(OURS)

    messages = {"a device": get_refusal(check_output, Path("/dev/null"), TEXT, "--out")}
    for number, (case, make) in enumerate(CONFLICTS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "ours").write_text(OURS)
        path = folder / "x"
        make(path)
        inode = path.lstat().st_ino
        messages[case] = get_refusal(check_output, path, TEXT, "--out")
        messages[f"{case}, when it is written"] = get_refusal(write, path, kind=WriteError)
        assert not remove_output(path, TEXT), case
        assert path.lstat().st_ino == inode, case
        assert case != "a foreign file" or path.read_text() == "precious"
        assert (folder / "ours").read_text() == OURS and len(list(folder.iterdir())) == 2, case
    check_refusals("output files: not ours", messages)


def test_a_temporary_name_never_follows_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".{make_process_name()}-x").symlink_to(victim)
    with write_output(tmp_path / "x", TEXT) as temporary:
        temporary.write_text(OURS)
    assert victim.read_text() == "precious" and (tmp_path / "x").read_text() == OURS


def test_threads_check_one_folder_at_once(tmp_path: Path) -> None:
    """As the service does for requests that come together; a killed process left its probe."""
    probe = tmp_path / f".{make_process_name()}-probe"
    probe.touch()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: check_folder(tmp_path, "`save_file`", tmp_path), range(200)))
    assert list(tmp_path.iterdir()) == [probe]


def test_only_ends_of_this_machine_are_known() -> None:
    """Files of a running process, or of a machine that shares the folder, are not removed."""
    child = subprocess.Popen(["true"])
    child.wait()
    host = make_process_name().rpartition("-")[0]
    ended = {f"{host}-{child.pid}": True, f"{host}-{os.getpid()}": False, f"{host}-1": False}
    ended |= {f"not_{host}-{child.pid}": False, f"{host}-": False, "film": False}
    assert {name: has_process_ended(name) for name in ended} == ended


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_new_name_never_replaces_a_file(hard_links: bool, tmp_path: Path, monkeypatch) -> None:
    if not hard_links:

        def refused(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refused)
    for name in ("x.mp4", "x-2.mp4"):
        (tmp_path / name).write_text(name)
    temporary = tmp_path / "temporary"
    temporary.write_text("new")
    assert move_to_free_name(temporary, tmp_path / "x.mp4") == tmp_path / "x-3.mp4"
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"x.mp4": "x.mp4", "x-2.mp4": "x-2.mp4", "x-3.mp4": "new"}


def _mp4(path: Path, *more: str) -> None:
    source = ["-f", "lavfi", "-i", "testsrc=s=64x64:r=16", "-frames:v", "3"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, *more, "-f", "mp4"]
    subprocess.run([*command, str(path)], check=True)


def _comment(text: str, *more: str) -> Callable[[Path], None]:
    return lambda path: _mp4(path, "-metadata", f"comment={text}", *more)


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


WAN_OUTPUTS: dict[str, tuple[OutputKind, Callable[[Path], object]]] = {
    "video": (
        VIDEO_KIND,
        lambda path: write_video(torch.zeros(3, 1, 16, 16), Output(save_file=path, fps=16)),
    ),
    "video of 0.4.0": (VIDEO_KIND, _comment('{"task": "t2v-A14B", "seed": 1}')),
    "video, moov first": (VIDEO_KIND, _comment('{"task": "t2v-A14B"}', "-movflags", "+faststart")),
    "record": (RECORD_KIND, _text('{"settings": {}, "versions": {"wan": "0.4.0"}}')),
    "latents": (
        LATENTS_KIND,
        lambda path: save_latents(torch.zeros(1, 1, 1, 1), path, {"prompt": "x"}),
    ),
    "preview": (PREVIEW_KIND, lambda path: save_preview(torch.zeros(3, 16, 16), path)),
    "summary": (SUMMARY_KIND, _text('{"made": {}, "there already": [], "go on with": null}')),
}
FOREIGN_OUTPUTS: dict[str, tuple[OutputKind, Callable[[Path], object]]] = {
    "a video without a comment": (VIDEO_KIND, _mp4),
    "a video of another comment": (VIDEO_KIND, _comment("my holidays, see {task}")),
    "no video": (VIDEO_KIND, _text('{"task": "x"}')),
    "half an atom": (VIDEO_KIND, _bytes(b"\0\0\1\0moov")),
    "an endless atom": (VIDEO_KIND, _bytes(b"\0\0\0\1moov" + b"\xff" * 8)),
    "another program's settings": (RECORD_KIND, _text('{"settings": {}}')),
    "an array": (RECORD_KIND, _text("[]")),
    "a number of many digits": (RECORD_KIND, _text("9" * 5000)),
    "deep brackets": (RECORD_KIND, _text("[" * 100_000)),
    "other weights": (LATENTS_KIND, lambda path: save_file({"x": torch.zeros(1)}, path)),
    "a header of many bytes": (LATENTS_KIND, _bytes(b"\xff" * 20)),
    "another picture": (
        PREVIEW_KIND,
        lambda path: Image.new("RGB", (16, 16)).save(path, "JPEG", comment=b"my holidays"),
    ),
    "another summary": (SUMMARY_KIND, _text('{"made": 3}')),
}


def test_an_output_is_known_by_its_content(tmp_path: Path) -> None:
    path, results = tmp_path / "x", {}
    for case, (kind, write) in {**WAN_OUTPUTS, **FOREIGN_OUTPUTS}.items():
        write(path)
        content = path.read_bytes()
        results[case] = is_output(path, kind), remove_output(path, kind), not path.exists()
        if path.exists():
            assert path.read_bytes() == content, case
            path.unlink()
    assert results == {case: (case in WAN_OUTPUTS,) * 3 for case in results}


FITS: list[tuple[dict[str, str], bool]] = [
    ({}, True),
    ({"1.txt": OURS}, True),
    ({"1.txt": OURS, "notes": "mine"}, True),  # which stay
    ({f".{make_process_name()}-1.txt": "half"}, True),
    ({"notes": "mine"}, False),
    ({"1.txt": "mine"}, False),
    ({"1.txt": OURS, "2.txt": "mine"}, False),
]


def test_a_derived_folder_is_ours_or_refused(tmp_path: Path) -> None:
    messages = {}
    for number, (files, fits) in enumerate(FITS):
        folder = tmp_path / f"{number}.clips"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        refusal = get_refusal(check_output_folder, folder, {"[0-9].txt": TEXT}, "`save_file`")
        assert (refusal == "") == fits, files
        if refusal:
            messages[", ".join(f"{n}: {t.strip()}" for n, t in files.items())] = refusal
        assert {path.name: path.read_text() for path in folder.iterdir()} == files
    (tmp_path / "a file").touch()
    (tmp_path / "a link to a folder").symlink_to(tmp_path)
    (tmp_path / "a link to nowhere").symlink_to(tmp_path / "nowhere")
    for name in ("a file", "a link to a folder", "a link to nowhere"):
        messages[name] = get_refusal(
            check_output_folder, tmp_path / name, {"*": TEXT}, "`save_file`"
        )
    check_refusals("output files: derived folders", messages)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    paths_before, messages = sorted(tmp_path.iterdir()), {}
    for path in ("link/x", "link/new/x", "loop/x", "file/x", f"new/{'n' * 300}/x", "/proc/x/y"):
        messages[path[:20]] = get_refusal(
            check_folder, (tmp_path / path).parent, "--out", Path(path)
        )
    check_refusals("output files: folders that cannot be made", messages)
    assert sorted(tmp_path.iterdir()) == paths_before


def test_a_stream_replaces_no_other_file(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a foreign file nor the source of the video, also if a killed run has left it."""
    monkeypatch.chdir(tmp_path)
    argv = ["--ckpt_dir", str(tiny("t2v-A14B")), "--size", "64*64", "--frame_num", "5"]
    argv += ["--prompt", "x", "--save_file", "v.mp4", "--stream"]
    Path("v.stream.mp4").write_text("precious")
    with pytest.raises(InputError, match=r"v\.stream\.mp4 exists and is not a video of generate"):
        resolve_argv(argv)
    Path("v.stream.mp4").unlink()
    write_video(torch.zeros(3, 5, 64, 64), Output(Path("v.stream.mp4"), fps=16))
    resolve_argv(argv)
    with pytest.raises(InputError, match=r"v\.stream\.mp4 would be replaced by an output"):
        resolve_argv([*argv, "--src_video", "v.stream.mp4", "--strength", "0.5"])
