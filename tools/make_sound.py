"""Writes a wav of tones with pauses, for runs of s2v-14B without a voice at hand.

    python tools/make_sound.py out.wav --seconds 3

The tones glide, swell and stop as syllables do. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import numpy as np

SYLLABLE, PAUSE = 0.22, 0.08  # seconds


def tones(seconds: float, rate: int) -> np.ndarray:
    """Returns float64 [length] in [-1, 1]."""
    t = np.arange(int(seconds * rate)) / rate
    index, within = np.divmod(t, SYLLABLE + PAUSE)
    pitch = 140 + 60 * np.sin(1.7 * index) + 25 * np.sin(2 * np.pi * within / SYLLABLE)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(n * phase) / n for n in (1, 2, 3, 5))
    swell = np.where(within < SYLLABLE, np.sin(np.pi * within / SYLLABLE), 0.0)
    return 0.4 * voice * np.clip(swell, 0, 1)


def write(path: Path, seconds: float = 3.0, rate: int = 16_000, channels: int = 1) -> Path:
    """Writes 16-bit samples, and returns the path."""
    samples = np.round(32767 * np.clip(tones(seconds, rate), -1, 1)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples, channels).tobytes())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=int, default=16_000)
    parser.add_argument("--channels", type=int, default=1)
    given = parser.parse_args()
    print(write(given.out, given.seconds, given.rate, given.channels))


if __name__ == "__main__":
    main()
