"""Files written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from wan.checkpoint.files import whole_file, whole_folder
from wan.settings.errors import InputError

ENDS = pytest.mark.parametrize("end", [RuntimeError, KeyboardInterrupt, SystemExit])


@ENDS
def test_a_file_is_whole_or_absent(end: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "new" / "film.mp4"
    with pytest.raises(end), whole_file(path) as temporary:
        assert temporary.parent == path.parent and temporary.suffix == ".mp4"
        temporary.write_text("half")
        raise end
    assert not list(path.parent.iterdir())
    with whole_file(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_an_existing_file_is_kept_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(OSError), whole_file(path) as temporary:
        temporary.write_text("new")
        raise OSError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with whole_file(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_names_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is handed one may read "~" or "-" its own way."""
    monkeypatch.chdir(tmp_path)
    with whole_file(Path("~", "x")) as temporary, whole_folder(Path("-y")) as folder:
        assert temporary.is_absolute() and folder.is_absolute()
        temporary.touch()
    assert (tmp_path / "~" / "x").is_file() and (tmp_path / "-y").is_dir()


@ENDS
def test_a_folder_is_whole_or_absent(end: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with pytest.raises(end), whole_folder(path) as temporary:
        (temporary / "file").write_text("half")
        raise end
    assert not list(tmp_path.iterdir())
    path.mkdir()  # an empty folder is filled
    with whole_folder(path) as temporary:
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
    with pytest.raises(InputError, match="; name "), whole_folder(Path(taken)):
        pytest.fail("the block must not begin")
    assert sorted(tmp_path.rglob("*")) == before
