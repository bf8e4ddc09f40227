"""What ffmpeg may open for us."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from imageio_ffmpeg import get_ffmpeg_exe

from tools import make_character, make_sound
from wan.pipeline import media
from wan.settings.errors import InputError


def test_a_script_opens_no_other_file(tmp_path: Path) -> None:
    """ffmpeg itself follows such lists."""
    make_sound.write(tmp_path / "sound.wav", 1.0)
    make_character.write(tmp_path / "moves", (32, 32), 5)
    for name, read in (
        ("sound.wav", media.read_sound),
        ("moves/src_pose.mp4", lambda path: media.read_video(path, "`pose_video`")),
    ):
        script = tmp_path / "list.mp4"
        script.write_text(f"ffconcat version 1.0\nfile {name}\n")
        command = [get_ffmpeg_exe(), "-v", "error", "-i", script, "-f", "null", "-"]
        assert subprocess.run(command).returncode == 0
        read(tmp_path / name)
        with pytest.raises(InputError, match="cannot be read"):
            read(script)
