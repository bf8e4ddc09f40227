"""The page of a prompt file's videos."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.refusals import check_refusals
from tools import gallery
from wan.app.programs import run_program


def write_video(folder: Path, name: str, prompt: object, **more: object) -> None:
    (folder / f"{name}.mp4").write_bytes(b"video")
    video = {"frames": 5, "width": 64, "height": 32, "fps": 8}
    record = {"settings": {"prompt": prompt}, "seed": 7, "video": video, "seconds": {"text": 1.25}}
    (folder / f"{name}.json").write_text(json.dumps(record | more))


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    write_video(folder, "001_a #1", "a <b>red</b> star")
    write_video(folder, "002", "another", power={"joules": 1234.4})
    (folder / "003.mp4").write_bytes(b"without a record")
    summary = {"refused": {"4": "size 1*1 is <small>"}, "failed": {}}
    (folder / "lines.summary.json").write_text(json.dumps(summary))
    gallery.main([str(folder)])
    page = (folder / "index.html").read_text()
    assert capsys.readouterr().out.strip() == str(folder / "index.html")
    assert 'src="001_a%20%231.mp4"' in page and "003" not in page and str(tmp_path) not in page
    assert "a &lt;b&gt;red&lt;/b&gt; star" in page and "<b>" not in page
    assert "64x32 · 5 frames · seed 7 · 1.2 s · 1234 J" in page
    assert "Line 4: size 1*1 is &lt;small&gt;" in page and "--accent" in page
    gallery.main([str(folder), "--out", str(tmp_path / "all.html")])
    assert 'src="made/002.mp4"' in (tmp_path / "all.html").read_text()


def test_records_of_others(tmp_path: Path) -> None:
    """Half a surrogate pair, or a number of thousands of digits, at any place."""
    half, number = json.loads('"\\ud83d"'), 10**4000
    for index, value in enumerate((half, number, {half: half}, [number], None)):
        fields = dict.fromkeys(("width", "height", "frames"), value)
        more = {"seed": value, "video": fields, "power": {"joules": value}}
        name = os.fsdecode(b"a\xff%d" % index)
        write_video(tmp_path, name, value, **more, seconds={"text": value, half: value})
    (tmp_path / "a.summary.json").write_text(json.dumps({"refused": {half: half}}))
    page = gallery.write_gallery(tmp_path).read_text("utf-8")
    assert page.count("<li>") == 5 and "seed \\ud83d" in page and 'src="a%FF0.mp4"' in page


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = {}
    for case, folder in {"no folder": tmp_path / "none", "no videos": tmp_path}.items():
        assert run_program(partial(gallery.main, [str(folder)]), "gallery.py") == 2
        messages[case] = capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    check_refusals("gallery", messages)
