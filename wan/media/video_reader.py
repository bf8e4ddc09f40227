"""Reads videos with ffmpeg as frames of a constant rate.

A first pass reads the time stamps, from which the number of frames and the rate are computed. A
video of constant rate is read frame by frame. A video of variable rate is resampled to a constant
rate, with an error of at most half a frame.

This module does not import torch, so that bad files are refused before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from wan.media.ffmpeg import (
    build_clock_args,
    build_input_args,
    build_passthrough_args,
    describe_failure,
    has_filters,
    start_ffmpeg,
    stop_ffmpeg,
)
from wan.media.images import is_still_image
from wan.settings.errors import FileChangedError, InputError
from wan.utils.files import check_input_file
from wan.utils.log import logger

if TYPE_CHECKING:
    import numpy as np

HD_LINES = 720  # a video without color tags is BT.709 from this height on, else BT.601
_RATES = (16, 20, 24, 25, 30, 48, 50, 60, 120, 240)
_NTSC = (24, 30, 60)  # may be divided by 1.001
_MAX_LOST = 0.05  # fraction of the stored frames that resampling may drop
_MAX_LAST_SECONDS = 0.1  # upper limit of the last frame's duration with a variable rate
# A line of the filter `showinfo`.
_FRAME_PATTERN = re.compile(
    r"n: *\d+ pts: *(-?\d+)?.* fmt:(\S+) .*?(?:sar:(\d+)/(\d+) .*?)?\bs:(\d+)x(\d+) "
)
_MIN_STRETCH, _MAX_STRETCH = 1.02, 10  # of pixels that are not square; others are shown as stored
_STREAM_NAMES = {
    "Video": "video",
    "Audio": "sound",
    "Subtitle": "subtitles",
    "Data": "data",
    "Attachment": "attachments",
    "Cover": "a cover picture",
}
"""ffmpeg's names of the kinds of streams, and those of sentences."""
_HDR = {"smpte2084": "PQ", "arib-std-b67": "HLG"}  # transfer functions


@dataclass(frozen=True)
class VideoFile:
    """A video as frames of a constant rate.

    Attributes:
        size: (width, height) as shown: after rotation, with square pixels.
        fps: Frames per second.
        times: Time stamp of each stored frame, in seconds.
        indices: The index of the stored frame that is shown, for each frame at `fps`.
        filters: ffmpeg's filters for colors and square pixels, or "".
        is_variable: Whether the stored frames have a variable rate.
    """

    path: Path
    size: tuple[int, int]
    fps: float
    times: Sequence[float]
    indices: Sequence[int]
    filters: str = ""
    is_variable: bool = False

    @property
    def num_frames(self) -> int:
        return len(self.indices)

    def iter_frames(self, step: int = 1) -> Iterator[np.ndarray]:
        """Decodes and yields every `step`th frame, uint8 [H,W,3]."""
        with closing(decode_frames(self.path, self.size, self.filters)) as frames:
            frame, stored_index = None, -1
            for index in self.indices[::step]:
                while stored_index < index:
                    frame, stored_index = next(frames, None), stored_index + 1
                if frame is None:
                    return
                yield frame

    def resample(self, fps: float) -> VideoFile:
        """Resamples the video to another rate by its time stamps."""
        return replace(self, fps=fps, indices=_resample_times(self.times, fps))

    def synchronize(self, other: VideoFile) -> VideoFile:
        """Resamples this video to the rate of `other`, for a mask or pose video that belongs to it.

        With equal numbers of stored frames the time stamps of `other` are used. Otherwise the video
        is resampled by its time stamps if the rate of either video is variable; a small difference
        in length is then removed.
        """
        if len(self.times) == len(other.times):
            return replace(self, fps=other.fps, times=other.times, indices=other.indices)
        if not (self.is_variable or other.is_variable):
            return self
        resampled = self.resample(other.fps)
        missing = other.num_frames - resampled.num_frames
        if abs(missing) > max(1, 2 * _MAX_LAST_SECONDS * other.fps):
            return resampled
        repeated = [resampled.indices[-1]] * max(missing, 0)
        return replace(resampled, indices=[*resampled.indices[: other.num_frames], *repeated])


def decode_frames(path: Path, size: tuple[int, int], filters: str = "") -> Generator[np.ndarray]:
    """Decodes and yields all stored frames of a video, uint8 [H,W,3].

    Args:
        size: (width, height) after the filters.
        filters: ffmpeg's filters.
    """
    import numpy as np

    width, height = size
    args = [*build_input_args(path), *(("-vf", filters) if filters else ())]
    args += [*build_passthrough_args(), "-pix_fmt", "rgb24", "-c:v", "rawvideo"]
    process = start_ffmpeg([*args, "-f", "image2pipe", "-"], "quiet", reads=True)
    assert process.stdout is not None
    try:
        while len(frame := process.stdout.read(width * height * 3)) == width * height * 3:
            yield np.frombuffer(frame, np.uint8).reshape(height, width, 3)
    finally:
        stop_ffmpeg(process)


@dataclass(frozen=True)
class _Probe:
    """Properties of a video, parsed from ffmpeg's messages while it decodes all frames.

    Attributes:
        size: (width, height) after rotation.
        pixel_aspect: Width of a pixel over its height.
        stored_height: Height before rotation.
        fps: Average rate of the stream; 0 if unknown.
        times: Time stamp of each frame in seconds; None without a time stamp.
        pixel_format: As in ffmpeg.
        colors: range, space, primaries and trc of the first frame, or "unknown".
        stream_kinds: Kinds of the file's streams, such as "Video"; a cover picture is a "Cover".
        failure: The last message of ffmpeg.
    """

    size: tuple[int, int]
    pixel_aspect: float
    stored_height: int
    fps: float
    times: list[Fraction | None]
    pixel_format: str
    colors: dict[str, str]
    stream_kinds: frozenset[str]
    failure: str


def read_video(path: Path, setting: str, fps: float | None = None) -> VideoFile:
    """Reads the time stamps of a video; its frames are decoded later.

    Args:
        path: Any video that ffmpeg reads.
        setting: Name of the setting, for messages.
        fps: Rate for a video of variable rate; None: a usual rate that drops few frames.

    Raises:
        InputError: The file is no video.
    """
    check_input_file(setting, path, "give a video, such as an mp4")
    try:
        probe = _probe_video(path)
    except OSError as error:
        why = f"cannot be read as a video ({describe_failure(str(error))})"
        raise InputError(setting, path, why, "give an mp4, or another video") from error
    if probe.stream_kinds and "Video" not in probe.stream_kinds:
        kinds = " and ".join(sorted(_STREAM_NAMES[kind] for kind in probe.stream_kinds))
        why = f"has no video stream, only {kinds}"
        raise InputError(setting, path, why, "give a video with pictures, such as an mp4")
    if not probe.times:
        failure = f"cannot be read as a video ({probe.failure})"
        why = "is a still image, not a video" if is_still_image(path) else failure
        raise InputError(setting, path, why, "give an mp4, or another video")
    times = _complete_times(probe)
    rate = _measure_rate(times)
    if not (probe.fps or rate):
        raise InputError(setting, path, "has no frames that can be read", "give an mp4")
    size = _compute_shown_size(probe)
    filters = _choose_color_filters(probe, path)
    if size != probe.size:  # scaled in RGB, as subsampled colors would blur
        stretch = f"format=gbrp,scale=w={size[0]}:h={size[1]}:flags=lanczos"
        filters = ",".join(filter(None, (filters, stretch)))
    if _is_uniform(times):
        is_exact = not rate or abs(probe.fps - rate) <= 0.01 * rate
        constant_fps = probe.fps if is_exact else rate
        late = max(_round_half_up(times[0] * constant_fps), 0)
        if late:
            logger.warning(
                "%s begins %.2f s late: its first frame is shown from the beginning.",
                *(path, times[0]),
            )
        indices = [*[0] * late, *range(len(times))] if late else range(len(times))
        return VideoFile(path, size, constant_fps, times, indices, filters)
    fps = fps or _choose_rate(times)
    logger.warning(
        "%s has no constant frame rate: it is resampled to %.4g frames per second.",
        *(path, fps),
    )
    indices = _resample_times(times, fps)
    return VideoFile(path, size, fps, times, indices, filters, is_variable=True)


def count_stored_frames(path: Path) -> int:
    """Counts the stored frames of a video file; 0 for any other file."""
    try:
        return len(_probe_video(path).times)
    except OSError:
        return 0


def _probe_video(path: Path) -> _Probe:
    """Decodes a video and parses the messages of the filter `showinfo` for each frame."""
    args = [*build_input_args(path), "-vf", "showinfo=checksum=0", "-an", "-sn", "-dn"]
    args += [*build_passthrough_args(), "-f", "null", "-", *build_clock_args(path, "0:a?")]
    process = start_ffmpeg(args, "info")
    assert process.stderr is not None
    header, failure = list[str](), ""
    times, time_base = list[Fraction | None](), Fraction(1)
    size, pixel_aspect, pixel_format, colors = (0, 0), 1.0, "", dict[str, str]()
    try:
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            _, is_frame, printed = line.partition("] ")
            if not (is_frame and line.startswith("[Parsed_showinfo_0 @ ")):
                failure = line if line.strip() else failure
                if not times:
                    header.append(line)
            elif match := re.match(r"config in time_base: (\d+)/(\d+)", printed):
                time_base = Fraction(int(match[1]), max(int(match[2]), 1))
            elif match := _FRAME_PATTERN.match(printed):
                times.append(None if match[1] is None else int(match[1]) * time_base)
                if len(times) == 1:
                    pixel_format, size = match[2], (int(match[5]), int(match[6]))
                    width, height = (int(side or 0) for side in match.group(3, 4))
                    pixel_aspect = width / height if width and height else 1.0  # 0/1: unknown
            elif not colors and printed.startswith("color_range:"):
                colors = dict(re.findall(r"color_(\w+):(\S+)", printed))
    finally:
        stop_ffmpeg(process)
    stored_height, fps = _parse_header(header)
    return _Probe(
        *(size, pixel_aspect, stored_height or size[1], fps, times, pixel_format, colors),
        _list_stream_kinds(header),
        describe_failure(failure),
    )


def _list_stream_kinds(header: Sequence[str]) -> frozenset[str]:
    """Returns the kinds of the input's streams, which are described before those of the output."""
    inputs = takewhile(lambda line: not line.startswith(("Stream mapping", "Output")), header)
    kinds = "|".join(_STREAM_NAMES)
    matches = (re.match(rf" +Stream #.*?: ({kinds}): (.*)", line) for line in inputs)
    return frozenset(
        "Cover" if "(attached pic)" in match[2] else match[1] for match in matches if match
    )


def _parse_header(header: Sequence[str]) -> tuple[int, float]:
    """Returns height and frames per second of the decoded stream; 0 if unknown."""
    stream = re.search(r"^ +Stream #(\d+:\d+) -> #0:0", "\n".join(header), re.MULTILINE)
    start = rf"\s+Stream #{stream[1]}(?!\d).*?: Video: " if stream else r"\s+Stream .*?: Video: "
    line = next((line for line in header if re.match(start, line)), "")
    height = re.search(r", \d+x(\d+)[ ,]", line + " ")
    rate = re.search(r", ([\d.]+)(k?) fps", line) or re.search(r", ([\d.]+)(k?) tbr", line)
    fps = float(rate[1]) * (1000 if rate[2] else 1) if rate else 0.0
    return int(height[1]) if height else 0, fps


def _complete_times(probe: _Probe) -> list[float]:
    """Returns increasing time stamps, or those of a constant rate if some are missing."""
    stamps = [time for time in probe.times if time is not None]
    if len(stamps) < len(probe.times) or (len(stamps) > 1 and max(stamps) == min(stamps)):
        return [index / (probe.fps or 25) for index in range(len(probe.times))]
    return [float(time) for time in accumulate(stamps, max)]


def _measure_rate(times: Sequence[float]) -> float:
    """Returns the average number of frames per second; 0 for a single frame."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def _is_uniform(times: Sequence[float]) -> bool:
    """Returns whether each time stamp is within half a frame of a constant rate."""
    if len(times) < 2:
        return True
    gap = 1 / _measure_rate(times)
    return all(
        abs(time - times[0] - index * gap) <= gap / 2 + 1e-9 for index, time in enumerate(times)
    )


def _choose_rate(times: Sequence[float]) -> float:
    """Returns the lowest usual rate at which nearly all stored frames are shown."""
    for fps in _RATES:
        if len({_round_half_up(time * fps) for time in times}) >= (1 - _MAX_LOST) * len(times):
            return min(fps, fps / 1.001, key=partial(_sum_offsets, times)) if fps in _NTSC else fps
    return 60


def _sum_offsets(times: Sequence[float], fps: float) -> float:
    """Sums the distances of time stamps from the frames of a rate, in frames."""
    return sum(abs(time * fps - _round_half_up(time * fps)) for time in times)


def _resample_times(times: Sequence[float], fps: float) -> list[int]:
    """Returns the index of the shown time stamp for each frame at a constant rate."""
    last = min(times[-1] - times[-2], _MAX_LAST_SECONDS) if len(times) > 1 else 0.0
    ticks = [max(_round_half_up(time * fps), 0) for time in times]
    end = ticks[-1] + max(_round_half_up(last * fps), 1)
    indices = [0] * ticks[0]
    for index, (tick, next_tick) in enumerate(pairwise([*ticks, end])):
        indices += [index] * (next_tick - tick)
    return indices


def _round_half_up(value: float) -> int:
    return int(value + 0.5) if value >= 0 else -int(0.5 - value)


def _compute_shown_size(probe: _Probe) -> tuple[int, int]:
    """Returns (width, height) with square pixels; the side that is too short is stretched."""
    (width, height), aspect = probe.size, probe.pixel_aspect
    if not _MIN_STRETCH <= max(aspect, 1 / aspect) <= _MAX_STRETCH:
        return probe.size
    return round(width * max(aspect, 1)), round(height * max(1 / aspect, 1))


def _choose_color_filters(probe: _Probe, path: Path) -> str:
    """Chooses the filters of the color conversion by the tags, or by the height without tags."""
    colors = {"range": "unknown", "space": "unknown", "primaries": "unknown", **probe.colors}
    transfer = _HDR.get(colors.get("trc", ""))
    if transfer:
        if has_filters("zscale", "tonemap"):
            return _build_tone_map_filters(colors)
        logger.warning(
            "%s is an HDR video (%s), and this ffmpeg cannot convert its colors: they look pale.",
            *(path, transfer),
        )
    is_yuv = probe.pixel_format.startswith(("yuv", "nv", "p0"))
    if is_yuv and colors["space"] == "unknown" and probe.stored_height >= HD_LINES:
        return "scale=in_color_matrix=bt709"
    return ""


def _build_tone_map_filters(colors: dict[str, str]) -> str:
    """Builds filters that map HDR's reference white (203 cd/m2) nearly to SDR's white."""
    values = {"min": ("space", "2020_ncl"), "pin": ("primaries", "2020"), "rin": ("range", "tv")}
    missing = [
        f":{key}={value}" for key, (tag, value) in values.items() if colors[tag] == "unknown"
    ]
    return (
        f"zscale=t=linear:npl=203{''.join(missing)},format=gbrpf32le,zscale=p=bt709,"
        "tonemap=mobius:param=0.8:desat=0,zscale=t=bt709:m=gbr:r=pc,format=gbrp"
    )


FrameReader = Callable[[Sequence[int]], "np.ndarray"]
"""Reads the frames of a video at the given indices, uint8 [F,H,W,3]."""


def read_frames_at(video: VideoFile, indices: Sequence[int]) -> np.ndarray:
    """Reads frames by index, uint8 [F,H,W,3]; decodes from the start of the video.

    Raises:
        FileChangedError: The video has fewer frames than when its metadata was read.
    """
    import numpy as np

    unique, frames_by_index = {*indices}, dict[int, np.ndarray]()
    frames = video.iter_frames()
    for index, frame in zip(range(max(unique) + 1), frames, strict=False):
        if index in unique:
            frames_by_index[index] = frame
    frames.close()  # type: ignore[attr-defined]
    if len(frames_by_index) < len(unique):
        raise FileChangedError(f"{video.path} ends before its frame {max(unique)}; make it again.")
    return np.stack([frames_by_index[i] for i in indices])
