"""Compiled code is loaded only from where nobody but the user and root can have put it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from wan.settings.errors import InputError
from wan.utils.compiler_cache import prepare_compiler_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def make_folder(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


def get_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make_link(path: Path, target: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


OPEN: dict[str, Callable[[Path], Path]] = {
    "writable for all": lambda tmp: make_folder(tmp / "a", 0o777),
    "sticky": lambda tmp: make_folder(tmp / "a", 0o1777),
    "a parent writable for all": lambda tmp: make_folder(make_folder(tmp / "p", 0o777) / "a"),
    "missing, in a folder writable for all": lambda tmp: make_folder(tmp / "p", 0o777) / "a",
    "a folder in it": lambda tmp: make_folder(tmp / "a" / "fx", 0o777).parent,
    "a link to it": lambda tmp: make_link(tmp / "a", make_folder(tmp / "b", 0o777)),
    "a link in a link": lambda tmp: make_link(
        tmp / "a", make_link(make_folder(tmp / "p", 0o777) / "b", make_folder(tmp / "c"))
    ),
    "a way back": lambda tmp: make_folder(tmp / "p", 0o777) / ".." / "p",
}
UNUSABLE: dict[str, Callable[[Path], Path]] = {
    "a broken link": lambda tmp: make_link(tmp / "a", tmp / "gone"),
    "a loop": lambda tmp: make_link(tmp / "a", tmp / "a"),
    "a file": lambda tmp: Path(__file__),
    "below a file": lambda tmp: Path(__file__) / "a",
    "a long name": lambda tmp: tmp / ("a" * 260),
}


@pytest.mark.parametrize("cases", [OPEN, UNUSABLE], ids=["open", "unusable"])
def test_folders_that_a_variable_may_not_name(
    cases: dict[str, Callable[[Path], Path]], tmp_path: Path
) -> None:
    """Refused each time in one sentence with the variable and the folder."""

    sentences = {}
    for case, make in cases.items():
        folder = make(make_folder(tmp_path / case))
        environ = {VARIABLE: str(folder)}
        for _ in range(2):
            try:
                sentences[case] = f"used {prepare_compiler_cache(environ)}"
            except InputError as error:
                sentences[case] = str(error).replace(str(folder), "FOLDER")
        assert get_mode(Path(environ[VARIABLE])) == 0o700, "torch itself imports code from there"
    start = f"{VARIABLE} FOLDER "
    assert {case: text for case, text in sentences.items() if not text.startswith(start)} == {}
    assert all("\n" not in text and len(text) < 300 for text in sentences.values())


@pytest.mark.parametrize("owned", ["folder", "file", "parent", "link"])
def test_files_of_another_user(owned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stranger makes them in a sticky temporary folder before the user's first run."""
    shared = make_folder(tmp_path / "shared", 0o1777)
    folder = make_folder(shared / "parent" / "cache", 0o700)
    (file := folder / "fx" / "graph.so").parent.mkdir()
    file.touch()
    (link := shared / "link").symlink_to(folder)
    path = {"folder": folder, "file": file, "parent": folder.parent, "link": link}[owned]
    if user := os.geteuid():  # who cannot give files away, becomes another user instead
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(InputError, match="another user"):
        prepare_compiler_cache({VARIABLE: str(link)})
    if owned != "file":
        default_folder = prepare_compiler_cache({"XDG_CACHE_HOME": str(link)})
        assert not default_folder.is_relative_to(link)


def test_folders_that_a_variable_may_name(tmp_path: Path) -> None:
    """They are used as they are; a missing one is made for the user alone."""
    shared = make_folder(tmp_path / "shared", 0o1777)
    readable, target = make_folder(shared / "mine"), make_folder(tmp_path / "target")
    link = make_link(shared / "link", target)
    for folder in (readable, link, tmp_path / "new" / "cache"):
        environ = {VARIABLE: str(folder), "TRITON_CACHE_DIR": str(target)}
        assert prepare_compiler_cache(environ) == folder == Path(environ[VARIABLE])
        assert environ["TRITON_CACHE_DIR"] == str(target)
    assert get_mode(readable) == 0o755 and get_mode(tmp_path / "new" / "cache") == 0o700


def test_a_folder_that_another_rank_removes_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there when its parent is listed, and gone when it is listed itself."""
    scandir, named = os.scandir, tmp_path / "compiled"

    def remove_and_list(folder: Path) -> object:
        if Path(folder).name == "temporary":
            Path(folder).rmdir()
        return scandir(folder)

    (named / "temporary").mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(os, "scandir", remove_and_list)
    assert prepare_compiler_cache({VARIABLE: str(named)}) == named


def test_without_a_variable(tmp_path: Path) -> None:
    """A folder in the user's cache folder; another run finds it again."""
    home, torch_folder = tmp_path / "home", Path(tempfile.gettempdir()) / "torchinductor_user"
    for value in ("", str(torch_folder)):  # the second is what torch sets by itself
        environ = {"XDG_CACHE_HOME": str(home), VARIABLE: value}
        folder = prepare_compiler_cache(environ)
        assert folder.parent == home / "wan" and get_mode(folder) == 0o700
        assert prepare_compiler_cache(environ) == folder == Path(environ[VARIABLE])
        for variable in ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
            assert Path(environ[variable]).parent == folder


def test_a_cache_folder_that_others_can_write(tmp_path: Path) -> None:
    """A temporary folder instead; folders of other compilers move there, too."""
    shared = make_folder(tmp_path / "shared", 0o777)
    for place in (shared, Path("/proc")):
        environ = {"XDG_CACHE_HOME": str(place), "TRITON_CACHE_DIR": str(shared)}
        folder = prepare_compiler_cache(environ)
        assert folder.is_dir() and get_mode(folder) == 0o700
        assert not folder.is_relative_to(shared)
        assert Path(environ["TRITON_CACHE_DIR"]).parent == folder


def test_torch_keeps_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither precompiled headers nor pickles, for which torch has no variable."""
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils

    from wan.utils.torch_private import use_private_compiler_cache

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    use_private_compiler_cache()
    assert cache_dir_utils.cache_dir() == cache_dir_utils.default_cache_dir() == str(tmp_path)
    assert Path(codecache._HEADER_DIR).parent == tmp_path
