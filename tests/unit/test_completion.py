"""`--completion` prints a script with which bash itself completes flags and their values."""

from __future__ import annotations

import subprocess

import pytest

from tests.refusals import get_refusal
from wan.app.completion import make_completion_script
from wan.cli.main import main


def complete(*words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    script = make_completion_script("bash") + (
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _wan_generate; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    process = subprocess.run(
        ["bash", "-c", script, "bash", "wan-generate", *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return process.stdout.splitlines()


def test_flags_values_and_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat one.jpg").touch()
    (tmp_path / "cat.txt").touch()
    monkeypatch.chdir(tmp_path)
    assert complete("--ulysses") == ["--ulysses_size"]
    assert {"--sample_steps", "--sample_solver", "--sample_shift"} <= {*complete("--sample_s")}
    assert complete("--task", "s2v") == ["s2v-14B"]
    assert complete("--comm_type", "1", "--sample_solver", "uni") == ["unipc"]
    assert {*complete("--image", "cat.")} == {"cat.txt"}
    assert {*complete("--image", "cat")} == {"cat.txt", "cat one.jpg"}
    assert complete("--comm_type", "=") == complete("--comm_type", "=", "") == ["0", "1", "2"]


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--completion", "zsh"])
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert "bashcompinit" in first and rest == make_completion_script("bash")
    assert "bash or zsh" in get_refusal(make_completion_script, "fish")
