"""Writes a wav of tones with pauses, for runs of s2v-14B without a recorded voice.

    python tools/make_sound.py out.wav --seconds 3

The tones glide, swell and stop like syllables. Equal arguments give equal bytes.
"""

from __future__ import annotations

import sys
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.settings.values import integer, real
from wan.utils.files import OutputKind, check_output, write_output

SYLLABLE, PAUSE = 0.22, 0.08  # seconds
_COMPARED = 16_000  # samples that identify a wav of this program


def make_tones(count: int, rate: int) -> np.ndarray:
    """Returns `count` samples, float64 in [-1, 1]."""
    t = np.arange(count) / rate
    index, within = np.divmod(t, SYLLABLE + PAUSE)
    pitch = 140 + 60 * np.sin(1.7 * index) + 25 * np.sin(2 * np.pi * within / SYLLABLE)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(n * phase) / n for n in (1, 2, 3, 5))
    swell = np.where(within < SYLLABLE, np.sin(np.pi * within / SYLLABLE), 0.0)
    return 0.4 * voice * np.clip(swell, 0, 1)


def write_wav(path: Path, seconds: float = 3.0, rate: int = 16_000, channels: int = 1) -> Path:
    """Writes 16-bit samples, and returns the path."""
    check_output(path, SOUND, "OUT")
    content = _make_samples(int(seconds * rate), rate, channels)
    with write_output(path, SOUND) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(content)
    return path


def _make_samples(count: int, rate: int, channels: int) -> bytes:
    samples = np.round(32767 * np.clip(make_tones(count, rate), -1, 1)).astype("<i2")
    return np.repeat(samples, channels).tobytes()


def _is_tones(path: Path) -> bool:
    """Whether a wav begins with the samples that `write_wav` writes."""
    try:
        with wave.open(str(path), "rb") as file:
            form = file.getparams()
            count = min(form.nframes, _COMPARED)
            content = file.readframes(count)
    except (wave.Error, EOFError):
        return False
    return count > 0 and content == _make_samples(count, form.framerate, form.nchannels)


SOUND = OutputKind("tones of make_sound.py", _is_tones)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=make_argument_type(real(0.01, 600)), default=3.0)
    parser.add_argument("--rate", type=make_argument_type(integer(1000, 192_000)), default=16_000)
    parser.add_argument("--channels", type=make_argument_type(integer(1, 16)), default=1)
    options = parser.parse_args(argv)
    print(write_wav(options.out, options.seconds, options.rate, options.channels))


if __name__ == "__main__":
    sys.exit(run_program(main))
