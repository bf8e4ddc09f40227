"""Starts of the service that are refused: one sentence, exit code 2, nothing made or removed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvicorn

from wan.serve import __main__ as command

BAD = ("-1", "nan", "inf", "-inf", "1e308", "1e400", str(10**30), "9" * 5000, "many", "", "\ud800")
NUMBERS = (
    *("--port", "--ranks", "--nodes", "--queue", "--together", "--kept_texts", "--max_body"),
    *("--max_frames", "--max_megapixels", "--keep_days", "--quota_gb"),
)
ZERO = ("--ranks", "--nodes", "--queue", "--max_body", "--keep_days", "--quota_gb")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a folder of jobs in which a video is finished."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("the service was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn.Server, "run", start)
    video = tmp_path / "videos" / "jobs" / "video_0" / "video.mp4"
    video.parent.mkdir(parents=True)
    video.write_text("video")
    return tmp_path


def tree(folder: Path) -> dict[Path, str]:
    """Returns what is in a folder; the lock is no news."""
    return {
        path: path.read_text() if path.is_file() else os.fspath(path)
        for path in folder.rglob("*")
        if path != folder / "videos" / "lock"
    }


def refuse(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Starts the service, which must refuse; returns the sentence."""
    before = tree(folder)
    assert command.run(options) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence and "\n" not in sentence and "Traceback" not in sentence
    assert len(sentence) < 800 and sentence.endswith((".", "?"))
    assert tree(folder) == before
    return sentence


@pytest.mark.parametrize("option", NUMBERS)
def test_numbers_have_ranges(option: str, folder: Path, capsys) -> None:
    """The sentence says what was given and what is allowed."""
    for value in (*BAD, *(["0"] if option in ZERO else [])):
        sentence = refuse(folder, capsys, f"{option}={value}")
        assert option in sentence and "must be" in sentence, sentence


@pytest.mark.parametrize("port", ["0", "-1", "65536", "9" * 5000, "nan", "x", ""])
def test_port_of_a_node(port: str, folder: Path, capsys) -> None:
    options = ("--nodes", "2", "--ranks", "2", "--node_address", f"127.0.0.1:{port}")
    assert "HOST:PORT" in refuse(folder, capsys, *options)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 300, "-", "x\0y", "", "203.0.113.77"])
@pytest.mark.parametrize("kind", ["service", "node"])
def test_hosts(kind: str, host: str, folder: Path, capsys) -> None:
    (folder / "key").write_text("k" * 16)
    options = ["--host", host, "--api_key", "key"]
    if kind == "node":
        options = ["--nodes", "2", "--ranks", "2", "--node_address", f"{host}:29500"]
        options += ["--", "--ulysses_size", "2"]
    refuse(folder, capsys, *options)


def test_a_port_in_use(folder: Path, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for journal in ("videos", "new"):
            assert port in refuse(folder, capsys, "--port", port, "--journal", journal)


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


PLACES: dict[str, Callable[[Path], object]] = {
    "": lambda path: path.write_text("file"),
    "linked": lambda path: path.symlink_to("nowhere"),
    "file/inside": lambda path: path.parent.write_text("file"),
    "n" * 300: lambda path: None,
    "jobs": lambda path: path.write_text("file"),
    "lock": _link,
    "front.json": lambda path: path.write_text("{}"),
    "journal.sqlite": _link,
    "journal.sqlite-wal": Path.mkdir,
    "ranks.log": os.mkfifo,
    "reserve": _link,
}


@pytest.mark.parametrize("name", PLACES)
def test_folders_of_jobs(name: str, folder: Path, capsys) -> None:
    """A file, links, and folders that have something else under a name of the service."""
    (folder / "precious").write_text("precious")
    journal = folder / "journal"
    path = journal / name if name else journal
    if name in ("linked", "file/inside", "n" * 300):
        journal = path
    if path.parent != folder and name != "file/inside":
        path.parent.mkdir(exist_ok=True)
    if name == "file/inside":
        path.parent.parent.mkdir()
    PLACES[name](path)
    refuse(folder, capsys, "--journal", str(journal))


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link"])
def test_locks_that_are_no_file(kind: str, folder: Path, capsys) -> None:
    lock = folder / "videos" / "lock"
    if kind == "link":
        _link(lock)
    else:
        lock.mkdir() if kind == "folder" else os.mkfifo(lock)
    assert "lock" in refuse(folder, capsys)
    assert not (folder / "precious").exists()


def test_names_of_replicas(folder: Path, capsys) -> None:
    for name in ("a/b", "a" * 64, "---", "ä", "\ud800"):
        assert "--name" in refuse(folder, capsys, "--name", name)
