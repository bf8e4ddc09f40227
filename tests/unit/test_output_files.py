"""Output files: whole or absent, and only earlier outputs of the same kind are replaced."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import pytest
import torch
from safetensors.torch import save_file

from wan.output_files import (
    LATENTS,
    RECORD,
    SUMMARY,
    VIDEO,
    OutputKind,
    check_folder,
    check_output,
    check_output_folder,
    is_output,
    marked_kind,
    place_new,
    process_name,
    remove_output,
    write_folder,
    write_output,
)
from wan.pipeline.video import save_latents, save_video
from wan.settings.command import Output
from wan.settings.errors import InputError, WriteError

ENDS = pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt, SystemExit])
TEXT = marked_kind("a text of this test", b"# made by this test")
OURS = "# made by this test\n"


@ENDS
def test_a_file_is_whole_or_absent(end: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "new" / "film.mp4"
    with pytest.raises(end), write_output(path, TEXT) as temporary:
        assert temporary.parent == path.parent and temporary.suffix == ".mp4"
        temporary.write_text("half")
        raise end
    assert not list(path.parent.iterdir())
    with write_output(path, TEXT) as temporary:
        temporary.write_text(OURS)
        assert not path.exists()
    assert path.read_text() == OURS and list(path.parent.iterdir()) == [path]


def test_an_existing_file_is_kept_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(OURS)
    with pytest.raises(OSError), write_output(path, TEXT) as temporary:
        temporary.write_text("new")
        raise OSError
    assert path.read_text() == OURS and list(tmp_path.iterdir()) == [path]
    with write_output(path, TEXT) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_names_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is handed one may read "~" or "-" its own way."""
    monkeypatch.chdir(tmp_path)
    with write_output(Path("~", "x"), TEXT) as temporary, write_folder(Path("-y")) as folder:
        assert temporary.is_absolute() and folder.is_absolute()
        temporary.touch()
    assert (tmp_path / "~" / "x").is_file() and (tmp_path / "-y").is_dir()


@ENDS
def test_a_folder_is_whole_or_absent(end: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(end), write_folder(path) as temporary:
        (temporary / "file").write_text("half")
        raise end
    assert not list(tmp_path.iterdir())
    path.mkdir()  # an empty folder is filled
    with write_folder(path) as temporary:
        (temporary / "file").write_text("whole")
    assert (path / "file").read_text() == "whole" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("taken", ["file", "full", "link", "."])
def test_a_folder_that_is_taken(taken: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="; name "), write_folder(Path(taken)):
        pytest.fail("the block must not begin")
    assert sorted(tmp_path.rglob("*")) == before


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


CONFLICTS: dict[str, Callable[[Path], object]] = {
    "a foreign file": lambda path: path.write_text("precious"),
    "a link to a file of ours": lambda path: path.symlink_to(path.with_name("ours")),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a socket": _socket,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("what", CONFLICTS)
def test_what_is_not_ours_is_refused_and_kept(what: str, tmp_path: Path) -> None:
    """Before the work, after it, and when files are removed."""
    tmp_path.joinpath("ours").write_text(OURS)
    path = tmp_path / "x"
    CONFLICTS[what](path)
    before = path.lstat(), path.read_text() if what == "a foreign file" else ""
    with pytest.raises(InputError):
        check_output(path, TEXT, "--out")
    with pytest.raises(WriteError), write_output(path, TEXT) as temporary:
        temporary.write_text(OURS)
    assert not remove_output(path, TEXT)
    after = path.lstat(), path.read_text() if what == "a foreign file" else ""
    assert before[0].st_ino == after[0].st_ino and before[1] == after[1]
    assert tmp_path.joinpath("ours").read_text() == OURS
    assert len(list(tmp_path.iterdir())) == 2


def test_a_device_is_refused() -> None:
    with pytest.raises(InputError):
        check_output(Path("/dev/null"), TEXT, "--out")


def test_a_file_that_appears_during_the_work_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    check_output(path, TEXT, "--out")
    with pytest.raises(WriteError), write_output(path, TEXT) as temporary:
        temporary.write_text(OURS)
        path.write_text("precious")
    assert path.read_text() == "precious" and list(tmp_path.iterdir()) == [path]


def test_a_temporary_name_never_follows_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".{process_name()}-x").symlink_to(victim)
    with write_output(tmp_path / "x", TEXT) as temporary:
        temporary.write_text(OURS)
    assert victim.read_text() == "precious" and (tmp_path / "x").read_text() == OURS


def test_an_empty_file_is_filled(tmp_path: Path) -> None:
    """A program that makes a temporary name often makes the file, too."""
    path = tmp_path / "x"
    path.touch()
    check_output(path, TEXT, "--out")
    with write_output(path, TEXT) as temporary:
        temporary.write_text(OURS)
    assert path.read_text() == OURS


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
    assert place_new(temporary, tmp_path / "x.mp4") == tmp_path / "x-3.mp4"
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"x.mp4": "x.mp4", "x-2.mp4": "x-2.mp4", "x-3.mp4": "new"}


def _mp4(path: Path, *more: str) -> None:
    source = ["-f", "lavfi", "-i", "testsrc=s=64x64:r=16", "-frames:v", "3"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, *more, "-f", "mp4"]
    subprocess.run([*command, str(path)], check=True)


def _comment(text: str, *more: str) -> Callable[[Path], None]:
    return lambda path: _mp4(path, "-metadata", f"comment={text}", *more)


FOUND: dict[str, tuple[OutputKind, bool, Callable[[Path], object]]] = {
    "our video": (
        VIDEO,
        True,
        lambda path: save_video(torch.zeros(3, 1, 16, 16), Output(save_file=path, fps=16)),
    ),
    "a video of 0.4.0": (VIDEO, True, _comment('{"task": "t2v-A14B", "seed": 1}')),
    "a video of 0.4.0, moov first": (
        VIDEO,
        True,
        _comment('{"task": "t2v-A14B"}', "-movflags", "+faststart"),
    ),
    "a video without a comment": (VIDEO, False, _mp4),
    "a video of another comment": (VIDEO, False, _comment("my holidays, see {task}")),
    "no video": (VIDEO, False, lambda path: path.write_text('{"task": "x"}')),
    "half an atom": (VIDEO, False, lambda path: path.write_bytes(b"\0\0\1\0moov")),
    "an endless atom": (VIDEO, False, lambda path: path.write_bytes(b"\0\0\0\1moov" + b"\xff" * 8)),
    "our record": (
        RECORD,
        True,
        lambda path: path.write_text('{"settings": {}, "versions": {"wan": "0.4.0"}}'),
    ),
    "another program's settings": (RECORD, False, lambda path: path.write_text('{"settings": {}}')),
    "an array": (RECORD, False, lambda path: path.write_text("[]")),
    "a number of many digits": (RECORD, False, lambda path: path.write_text("9" * 5000)),
    "deep brackets": (RECORD, False, lambda path: path.write_text("[" * 100_000)),
    "our latents": (
        LATENTS,
        True,
        lambda path: save_latents(torch.zeros(1, 1, 1, 1), path, {"prompt": "x"}),
    ),
    "other weights": (LATENTS, False, lambda path: save_file({"x": torch.zeros(1)}, path)),
    "a header of many bytes": (LATENTS, False, lambda path: path.write_bytes(b"\xff" * 20)),
    "our summary": (
        SUMMARY,
        True,
        lambda path: path.write_text(
            json.dumps({"made": {}, "there already": [], "go on with": None})
        ),
    ),
    "another summary": (SUMMARY, False, lambda path: path.write_text('{"made": 3}')),
}


@pytest.mark.parametrize("what", FOUND)
def test_an_output_is_known_by_its_content(what: str, tmp_path: Path) -> None:
    kind, is_ours, write = FOUND[what]
    path = tmp_path / "x"
    write(path)
    content = path.read_bytes()
    assert is_output(path, kind) is is_ours
    assert remove_output(path, kind) is is_ours
    assert path.exists() is not is_ours
    if not is_ours:
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("files", "fits"),
    [
        ({}, True),
        ({"1.txt": OURS}, True),
        ({"1.txt": OURS, "notes": "mine"}, True),  # which stay
        ({f".{process_name()}-1.txt": "half"}, True),
        ({"notes": "mine"}, False),
        ({"1.txt": "mine"}, False),
        ({"1.txt": OURS, "2.txt": "mine"}, False),
    ],
)
def test_a_derived_folder_is_ours_or_refused(
    files: dict[str, str], fits: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "x.clips"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    try:
        check_output_folder(folder, {"[0-9].txt": TEXT}, "`save_file`")
    except InputError:
        assert not fits
    else:
        assert fits
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


@pytest.mark.parametrize("what", ["a file", "a link to a folder", "a link to nowhere"])
def test_a_derived_folder_is_a_folder(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "x.clips"
    if what == "a file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path if what == "a link to a folder" else tmp_path / "nowhere")
    with pytest.raises(InputError):
        check_output_folder(folder, {"*": TEXT}, "`save_file`")


@pytest.mark.parametrize(
    "path", ["link/x", "link/new/x", "loop/x", "file/x", f"new/{'n' * 300}/x", "/proc/x/y"]
)
def test_a_folder_that_cannot_be_made(path: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError):
        check_folder((tmp_path / path).parent, "--out", Path(path))
    assert sorted(tmp_path.iterdir()) == before
