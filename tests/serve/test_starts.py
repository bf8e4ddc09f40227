"""Refused starts of the service: one sentence, exit code 2, no file written or removed."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.dist import free_port
from tests.pipelines import read_values
from tests.refusals import check_refusals, get_refusal
from wan.serve import __main__ as command
from wan.serve.jobs.folders import lock_journal
from wan.serve.ranks.__main__ import FrontLink, read_front_file
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS

HIDDEN = [r"(?<=known here \().*?(?=\);)", r"(?<=aaa)a{99,}"]  # message of libc, and long names
Capsys = pytest.CaptureFixture[str]

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


def read_tree(folder: Path) -> dict[Path, str]:
    """Returns the paths and texts of a folder without the lock file."""
    return {
        path: path.read_text() if path.is_file() else os.fspath(path)
        for path in folder.rglob("*")
        if path != folder / "videos" / "lock"
    }


def check_refused(folder: Path, capsys: Capsys, *options: str) -> str:
    """Starts the service, which must refuse; returns its sentence."""
    tree_before = read_tree(folder)
    assert command.run_service_cli(options) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence and "\n" not in sentence and "Traceback" not in sentence
    assert len(sentence) < 800 and sentence.endswith((".", "?"))
    assert read_tree(folder) == tree_before
    return sentence


def test_numbers_have_ranges(folder: Path, capsys: Capsys) -> None:
    """The sentence names the option and the allowed range."""
    wrong = []
    for option in NUMBERS:
        for value in (*BAD, *(["0"] if option in ZERO else [])):
            sentence = check_refused(folder, capsys, f"{option}={value}")
            if option not in sentence or "must be" not in sentence:
                wrong.append((option, value, sentence))
    assert not wrong


def test_addresses(folder: Path, capsys: Capsys) -> None:
    (folder / "key").write_text("k" * 16)
    two = ("--nodes", "2", "--ranks", "2", "--node_address")
    sentences: dict[str, str] = {}
    for host in ("nowhere.invalid", "a" * 300, "-", "x\0y", "", "203.0.113.77"):
        service = check_refused(folder, capsys, "--host", host, "--api_key", "key")
        node = check_refused(folder, capsys, *two, f"{host}:29500", "--", "--ulysses_size", "2")
        sentences |= {f"service {host[:20]!r}": service, f"node {host[:20]!r}": node}
    for port in ("0", "-1", "65536", "9" * 5000, "nan", "x", ""):
        sentences[f"port {port[:20]!r}"] = check_refused(folder, capsys, *two, f"127.0.0.1:{port}")
    check_refusals("serve: addresses", sentences, HIDDEN)


def test_a_port_in_use(folder: Path, capsys: Capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for journal in ("videos", "new"):
            assert port in check_refused(folder, capsys, "--port", port, "--journal", journal)


def test_options(folder: Path, capsys: Capsys) -> None:
    """Options that contradict each other, or that are for one video only."""
    (folder / "short").write_text("k" * 15)
    (folder / "base64").write_text("whsec_" + "ä" * 15)
    rows = (
        "--node_address a:1",
        "--nodes 2 --ranks 2",
        "--nodes 2 --ranks 3",
        "--host 0.0.0.0",
        "--ranks 0",
        "--webhook_hosts *",
        "--webhook_hosts a:b --webhook_secret_file short",
        "--webhook_hosts a/b",
        "--webhook_hosts ü",
        "--webhook_hosts hooks.example --webhook_secret_file short",
        "--webhook_hosts hooks.example --webhook_secret_file base64",
        "--webhook_secret_file short",
        "--store nowhere://x",
        "--store short/x",
        "--store videos/jobs",
        "--api_key none",
        "--api_key short",
        "--host 0.0.0.0 --api_key short",
        "--steps 3",
        "--ckpt_dir=none",
        "--stor x",
        "--save_file x",
        "-- --image x.png",
        "-- --prompt_file x",
        "-- --trace x",
        "-- --save_latents x",
        "-- --plan",
        "-- --ckpt_dir none",
        "-- --ulysses_size 2",
        "-- --size 17*33",
        *(f"--name {name}" for name in ("a/b", "a" * 64, "---", "ä", "\ud800")),
    )
    sentences = {
        row.replace("\ud800", "half"): check_refused(folder, capsys, *row.split()) for row in rows
    }
    check_refusals("serve: options", sentences)


def test_a_folder_of_another_service(folder: Path, capsys: Capsys) -> None:
    with lock_journal(folder / "videos"):
        sentence = check_refused(folder, capsys)
    check_refusals("serve: a folder of another service", {"taken": sentence})


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "precious")


DAMAGED_PATHS: dict[str, Callable[[Path], object]] = {
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
}


def test_folders_of_jobs(folder: Path, capsys: Capsys) -> None:
    """Files, links, and folders in which a name of the service is already taken."""
    (folder / "precious").write_text("precious")
    sentences = {}
    for number, (name, spoil) in enumerate(DAMAGED_PATHS.items()):
        journal = folder / f"journal{number}"
        path = journal / name
        if name:
            path.parents[name.count("/")].mkdir()
        spoil(path if name else journal)
        is_inside = name in ("linked", "file/inside", "n" * 300)
        sentences[name[:20] or "a file"] = check_refused(
            folder, capsys, "--journal", str(path if is_inside else journal)
        )
    check_refusals("serve: folders of jobs", sentences, [r"/\S*(?=/journal\d+)", r"nnn+"])


def test_locks_that_are_no_file(folder: Path, capsys: Capsys) -> None:
    lock = folder / "videos" / "lock"
    for spoil in (Path.mkdir, os.mkfifo, _link):
        spoil(lock)
        assert "lock" in check_refused(folder, capsys)
        lock.rmdir() if lock.is_dir() else lock.unlink()
    assert not (folder / "precious").exists()


TEXTS = "1 4 1000 0.5 true auto none a 64*32 1.5,2 1000,500 a,b=0.7 first_block list:0-3"


def test_ranks_without_a_service(folder: Path) -> None:
    """Of a file that is missing or no address, and of an address at which nothing listens."""
    front, port = folder / "front.json", free_port()
    sentences = {"missing": get_refusal(read_front_file, front)}
    front.write_text("[]")
    sentences["no address"] = get_refusal(read_front_file, front)
    sentences["closed"] = get_refusal(FrontLink, {"host": "127.0.0.1", "port": port}, 0, 0)
    check_refusals("serve: ranks", sentences, [rf"(?<=:){port}", r"(?<=\()[^()]+(?=\);)"])


def list_values(name: str) -> list[Any]:
    """Returns values of a setting, from those of its choices and of `TEXTS` that it accepts."""
    values = []
    for text in (*TEXTS.split(), *(FLAGS[name].reader.choices or ())):
        with suppress(InputError):
            values.append(FLAGS[name].reader(name, text))
    return values


def test_the_ranks_read_the_settings_of_the_service() -> None:
    """Each flag that the service accepts has the same value when it is read from front.json."""
    wrong = []
    for name in (name for name in FLAGS if name not in command._PER_VIDEO_FLAGS):
        values = list_values(name)
        copies = [json.loads(json.dumps({name: value}, default=str)) for value in values]
        if not values or [read_values(copy)[name] for copy in copies] != values:
            wrong.append(name)
    assert not wrong
