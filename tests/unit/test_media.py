"""Reading and writing media with ffmpeg: allowed inputs, times, frames, sounds and colours."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from imageio_ffmpeg import get_ffmpeg_exe

from tests.conftest import slow
from tools import contact_sheet, make_character, make_sound
from wan.media import audio, video_reader, video_writer
from wan.media.video_reader import VideoFile
from wan.settings.command import Output
from wan.settings.errors import FileChangedError, InputError
from wan.tasks import animate, speech2video, vace

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 120, 90]])
NAMES = ["concat:v.mp4", "-i.mp4", "%03d.mp4", "a\nb'\"c.mp4", "file:v.mp4"]
MORE_NAMES = ["12:30.mp4", "tcp:127.0.0.1:9", "udp:127.0.0.1:9.mp4", "--x.mp4", "pipe:0"]
MORE_NAMES += ["http:x?y#z.mp4"]
FRAME_SELECTION = "lt(t,0.4)+not(mod(n,3))"  # frames: 30 a second at first, then 10


def ffmpeg(*args: object) -> bytes:
    command = [get_ffmpeg_exe(), "-v", "error", "-y", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def lavfi(source: str) -> list[str]:
    return ["-f", "lavfi", "-i", source]


def write_clock_video(
    path: Path, *, late: float = 0.0, variable: bool = True, size: str = "96x64"
) -> Path:
    """Writes a video of a bar that grows from left to right in 1.2 s, perhaps after a sound."""
    bar = f"color=black:s={size}:r=30:d=1.2,geq=lum='255*lt(X,W*T/1.2)':cb=128:cr=128"
    bar += f",select='{FRAME_SELECTION}'" if variable else ""
    inputs = ["-itsoffset", late, *lavfi(bar), *lavfi("sine=d=1.7")]
    maps = ["-map", "0:v", *(["-map", "1:a"] if late else [])]
    ffmpeg(*inputs, *maps, "-fps_mode", "vfr", "-c:v", "libx264", "-crf", 1, f"file:{path}")
    return path


def seconds_shown(frames: np.ndarray) -> np.ndarray:
    return (frames[:, 32, :, 0] > 127).mean(axis=1) * 1.2


def decode_frames(path: Path) -> np.ndarray:
    """Returns the stored frames of a file, without repeats for timing."""
    raw = ffmpeg("-i", path, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, 64, 96, 3)


def test_a_script_opens_no_other_file(tmp_path: Path) -> None:
    """ffmpeg itself would follow such a list."""
    make_sound.write_wav(tmp_path / "sound.wav", 1.0)
    make_character.write_character_folder(tmp_path / "moves", (32, 32), 5)
    for name, read in (
        ("sound.wav", audio.read_audio),
        ("moves/src_pose.mp4", lambda path: video_reader.read_video(path, "`pose_video`")),
    ):
        script = tmp_path / "list.mp4"
        script.write_text(f"ffconcat version 1.0\nfile {name}\n")
        command = [get_ffmpeg_exe(), "-v", "error", "-i", script, "-f", "null", "-"]
        assert subprocess.run(command).returncode == 0
        read(tmp_path / name)
        with pytest.raises(InputError, match="cannot be read"):
            read(script)


@pytest.mark.parametrize("name", [*NAMES, *map(slow, MORE_NAMES)])
def test_a_name_is_only_a_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special characters in a relative path change nothing in reading, writing or joining."""
    monkeypatch.chdir(tmp_path)
    make_sound.write_wav(tmp_path / "sound.wav", 1.0)
    path = Path(name)
    video_writer.write_video(torch.zeros(3, 5, 64, 96), Output(path, fps=16))
    assert (
        path.is_file()
        and video_reader.read_video(path, "`src_root_path`").num_frames
        == vace.read_vace_files(path, path, ()).num_frames
        == 5
    )
    assert len(contact_sheet.read_frames(path)) == 5
    folder = tmp_path / f"of {name}"
    folder.mkdir()
    path.rename(folder / name)
    video_writer.join_videos(folder, [name, name], path, "a comment")
    assert video_reader.read_video(path, "`src_root_path`").num_frames == 10
    path.rename("10.mp4")
    audio.add_audio(Path("10.mp4"), Path("sound.wav"), path)
    assert len(audio.read_audio(path).samples) == pytest.approx(10_000, abs=1100)


def test_a_variable_rate_is_read_by_its_times(tmp_path: Path, caplog) -> None:
    """The video, its mask and the poses each have 20 unevenly spaced frames in 1.2 s."""
    path = write_clock_video(tmp_path / "clock.mp4")
    assert len(decode_frames(path)) == 20
    source = vace.read_vace_files(path, write_clock_video(tmp_path / "mask.mp4"), ())
    assert "clock.mp4" in caplog.text
    pose = speech2video.read_pose_video(path)
    poses = np.stack(list(pose.iter_poses()))
    video_frames = source.video_reader(range(source.num_frames))
    assert (source.mask_reader(range(source.num_frames)) == video_frames).all()
    for frames, rate in ((video_frames, source.fps), (poses, 16)):
        times = np.arange(len(frames)) / rate
        assert np.abs(seconds_shown(frames) - times).max() < 0.1
        assert len(frames) / rate == pytest.approx(1.2, abs=0.11)
    assert len({frame.tobytes() for frame in video_frames}) == 20, "each stored frame is shown"
    assert (
        video_reader.read_video(path, "`src_root_path`").num_frames
        == source.num_frames
        == len(list(video_reader.read_video(path, "x").iter_frames()))
    )


def test_a_mask_of_a_constant_rate_fits_a_variable_video(tmp_path: Path) -> None:
    path, mask = (
        write_clock_video(tmp_path / "clock.mp4"),
        write_clock_video(tmp_path / "mask.mp4", variable=False),
    )
    source = vace.read_vace_files(path, mask, ())
    mask_seconds = seconds_shown(source.mask_reader(range(source.num_frames)))
    assert np.abs(mask_seconds - np.arange(source.num_frames) / source.fps).max() < 0.1


def test_a_short_video_beside_another_ends_with_its_last_frame() -> None:
    """At 10 frames a second one missing frame is made up, and three are not."""
    times = [0.0, 0.1, 0.25, 0.3, 0.4]
    video = VideoFile(Path("v"), (8, 8), 10.0, times, range(5), is_variable=True)
    for count, indices in ((5, [0, 1, 2, 3, 4]), (4, [0, 1, 2, 3, 3]), (2, [0, 1])):
        mask = VideoFile(Path("m"), (8, 8), 10.0, [0.1 * n for n in range(count)], range(count))
        assert [*mask.synchronize(video).indices] == indices, count


def test_a_video_that_lost_frames_since_it_was_checked(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    video_writer.write_video(torch.zeros(3, 5, 64, 96), Output(path, fps=16))
    checked = video_reader.read_video(path, "x")
    path.unlink()
    video_writer.write_video(torch.zeros(3, 3, 64, 96), Output(path, fps=16))
    with pytest.raises(FileChangedError, match=r"v\.mp4 ends before its frame 4"):
        video_reader.read_frames_at(checked, range(5))


@pytest.mark.parametrize("variable", [False, True])
def test_a_video_that_begins_late(variable: bool, tmp_path: Path, caplog) -> None:
    """The first frame is repeated until the video begins."""
    path = write_clock_video(tmp_path / "late.mp4", late=0.5, variable=variable)
    source = vace.read_vace_files(path, path, ())
    assert "late.mp4" in caplog.text
    frames = np.stack(list(video_reader.read_video(path, "x").iter_frames()))
    assert (
        len(frames)
        == source.num_frames
        == video_reader.read_video(path, "`src_root_path`").num_frames
    )
    expected = np.maximum(np.arange(len(frames)) / source.fps - 0.5, 0)
    assert np.abs(seconds_shown(frames) - expected).max() < 0.1
    assert len({frame.tobytes() for frame in frames}) == len(decode_frames(path))


@pytest.mark.parametrize(
    ("rate", "suffix"),
    [
        ("16", "mp4"),
        ("30000/1001", "mkv"),
        *(slow("25", "mp4"), slow("30000/1001", "mp4"), slow("16", "mkv"), slow("25", "mkv")),
    ],
)
def test_a_constant_rate_has_its_frames(rate: str, suffix: str, tmp_path: Path, caplog) -> None:
    """Time stamps that are rounded to milliseconds change nothing."""
    path = tmp_path / f"v.{suffix}"
    ffmpeg(*lavfi(f"testsrc2=s=96x64:r={rate}:d=1.3"), "-pix_fmt", "yuv420p", path)
    clip = video_reader.read_video(path, "x")
    assert (np.stack(list(clip.iter_frames())) == decode_frames(path)).all()
    assert f"{clip.fps:.2f}" == f"{eval(rate):.2f}" and not caplog.messages
    assert (np.stack(list(clip.iter_frames(3))) == decode_frames(path)[::3]).all()


def test_a_character_of_a_variable_rate(tmp_path: Path) -> None:
    """Each face belongs to its pose, also where the file of faces has a constant rate."""
    make_character.write_character_folder(tmp_path, (96, 64), 20)
    poses = write_clock_video(tmp_path / "src_pose.mp4")
    character = animate.read_animate_folder(tmp_path, replace_character=False)
    assert character.num_frames == video_reader.read_video(poses, "`src_root_path`").num_frames > 20
    pose_frames, face_frames = (
        character.readers[part](range(character.num_frames)) for part in ("pose", "face")
    )
    changes = [
        (frames[1:] != frames[:-1]).any(axis=(1, 2, 3)) for frames in (pose_frames, face_frames)
    ]
    assert (changes[0] == changes[1]).all() and changes[0].sum() == 19


def test_a_rotated_video_is_read_as_it_is_shown(tmp_path: Path) -> None:
    ffmpeg(*lavfi("testsrc2=s=96x64:r=16:d=0.3"), "-pix_fmt", "yuv420p", tmp_path / "v.mp4")
    ffmpeg("-display_rotation", 90, "-i", tmp_path / "v.mp4", "-c", "copy", tmp_path / "r.mp4")
    clip = video_reader.read_video(tmp_path / "r.mp4", "x")
    assert clip.size == (64, 96)
    upright = np.stack(list(video_reader.read_video(tmp_path / "v.mp4", "x").iter_frames()))
    turned = np.rot90(upright, axes=(1, 2)).astype(int)
    assert np.abs(np.stack(list(clip.iter_frames())) - turned).mean() < 3  # chroma is turned before


def first_loud(samples: np.ndarray) -> float:
    return float(np.argmax(np.abs(samples) > 0.02) / 16000)


def decode_sound_by_time(path: Path) -> np.ndarray:
    """Returns the sound of a file at its time stamps, as a player outputs it."""
    by_time = ["-af", "aresample=16000:async=1:first_pts=0", "-ac", 1, "-f", "f32le", "-"]
    return np.frombuffer(ffmpeg("-i", path, *by_time), np.float32)


@pytest.mark.parametrize(
    ("suffix", "codec", "cut"),
    [
        *(("mp4", "aac", 0.1875), ("mkv", "libopus", 0.0), ("ts", "mp2", 0.1875)),
        *(slow("mp4", "aac", 0.0), slow("mkv", "libopus", 0.1875), slow("ts", "mp2", 0.0)),
    ],
)
def test_a_sound_that_begins_late(suffix: str, codec: str, cut: float, tmp_path: Path) -> None:
    talk, silent, out = (tmp_path / name for name in (f"talk.{suffix}", "silent.mp4", "out.mp4"))
    late = ["-itsoffset", 0.5, *lavfi("sine=f=440:d=1.2:r=48000")]
    picture = lavfi("color=blue:s=64x64:r=16:d=1.7")
    ffmpeg(*late, *picture, "-map", "1", "-map", "0", "-pix_fmt", "yuv420p", "-c:a", codec, talk)
    ffmpeg(*lavfi("color=red:s=64x64:r=16:d=1.5"), "-pix_fmt", "yuv420p", silent)
    samples = audio.read_audio(talk).samples
    assert first_loud(samples) == pytest.approx(0.5, abs=0.03)
    assert len(samples) / 16000 == pytest.approx(1.7, abs=0.06)
    audio.add_audio(silent, talk, out, cut)
    sound = decode_sound_by_time(out)
    assert first_loud(sound) == pytest.approx(0.5 - cut, abs=0.03)
    assert len(sound) / 16000 == pytest.approx(1.5, abs=0.06)


def test_a_plain_sound_keeps_its_samples(tmp_path: Path) -> None:
    for codec, suffix in (("pcm_s16le", "wav"), ("libmp3lame", "mp3"), ("flac", "flac")):
        path = tmp_path / f"a.{suffix}"
        ffmpeg(*lavfi("sine=d=1.3:r=16000,volume=3"), "-c:a", codec, path)
        decoded = np.frombuffer(ffmpeg("-i", path, "-f", "f32le", "-"), np.float32)
        assert (audio.read_audio(path).samples == decoded).all(), suffix


def test_channels_are_averaged(tmp_path: Path) -> None:
    """A voice may be on the left, on the right, or in the middle."""
    path, graph = tmp_path / "a.wav", "amerge,aformat=channel_layouts=stereo"
    tones = [*lavfi("sine=f=300:d=1.3:r=16000"), *lavfi("sine=f=700:d=1.3:r=16000,volume=3")]
    ffmpeg(*tones, "-filter_complex", graph, path)
    left_channel, right_channel = (
        np.frombuffer(ffmpeg("-i", path, "-f", "f32le", "-"), np.float32).reshape(-1, 2).T
    )
    assert np.abs(left_channel - right_channel).max() > 0.1
    np.testing.assert_allclose(
        audio.read_audio(path).samples, (left_channel + right_channel) / 2, atol=1e-6
    )


def write_stripes(path: Path, width: int, height: int) -> Path:
    pixels = torch.from_numpy(COLOURS / 127.5 - 1).float().T.repeat_interleave(width // 4, 1)
    video_writer.write_video(
        pixels[:, None, None].expand(3, 3, height, width), Output(path, fps=16)
    )
    return path


def describe_pixels(path: Path) -> str:
    """Returns ffmpeg's description of a video's pixel format and colours."""
    output = subprocess.run([get_ffmpeg_exe(), "-i", path], capture_output=True, text=True).stderr
    return re.search(r"Video: .*?(yuv\w+\([^)]*\))", output)[1]


def list_boxes(path: Path) -> list[bytes]:
    content, start, order = path.read_bytes(), 0, []
    while start < len(content):
        size, kind = struct.unpack_from(">I4s", content, start)
        order.append(kind)
        start += size
    return order


@pytest.mark.parametrize(
    ("size", "name"), [slow((96, 64), "smpte170m"), ((64, 704), "smpte170m"), ((64, 720), "bt709")]
)
def test_colours_tags_and_index_of_an_mp4(size: tuple[int, int], name: str, tmp_path: Path) -> None:
    """Players depend on these tags; videos with an added sound and joined videos have them."""
    path = write_stripes(tmp_path / "a.mp4", *size)
    make_sound.write_wav(tmp_path / "sound.wav", 1.0)
    audio.add_audio(path, tmp_path / "sound.wav", tmp_path / "spoken.mp4")
    video_writer.join_videos(tmp_path, ["a.mp4", "a.mp4"], tmp_path / "joined.mp4", "")
    for file in (path, tmp_path / "spoken.mp4", tmp_path / "joined.mp4"):
        assert describe_pixels(file).startswith(f"yuv420p(tv, {name}")
        assert "/" not in describe_pixels(file), "range, matrix, primaries and transfer"
        assert list_boxes(file).index(b"moov") < list_boxes(file).index(b"mdat")
        matrix = "bt709" if name == "bt709" else "bt601"
        graph = f"scale=in_color_matrix={matrix}:in_range=tv,format=rgb24"
        raw = ffmpeg("-i", file, "-frames:v", 1, "-vf", graph, "-f", "rawvideo", "-")
        (width, height), step = size, size[0] // 8
        frame = np.frombuffer(raw, np.uint8).reshape(height, width, 3)
        first_frame = next(video_reader.read_video(file, "x").iter_frames())
        for picture in (frame, first_frame):
            assert np.abs(picture[height // 2, step :: 2 * step].astype(int) - COLOURS).max() <= 4


def test_a_source_is_read_by_its_tags_or_height(tmp_path: Path) -> None:
    path, errors = tmp_path / "v.mp4", {}
    for height, matrix, tag in (
        (64, "bt601", None),
        (720, "bt709", None),
        (64, "bt709", "bt709"),
        (720, "bt601", "smpte170m"),
    ):
        pixels = np.broadcast_to(COLOURS.repeat(16, 0).astype(np.uint8), (2, height, 64, 3))
        (tmp_path / "raw").write_bytes(pixels.tobytes())
        raw = ["-f", "rawvideo", "-s", f"64x{height}", "-pix_fmt", "rgb24", "-i", tmp_path / "raw"]
        graph = f"scale=out_color_matrix={matrix}:out_range=tv,format=yuv420p"
        graph += ",setparams=colorspace=" + (tag or "unknown")
        ffmpeg(*raw, "-vf", graph, "-c:v", "libx264", "-crf", 1, path)
        assert (tag or "yuv420p(progressive") in describe_pixels(path)
        frame = next(video_reader.read_video(path, "x").iter_frames())
        errors[height, tag] = np.abs(frame[height // 2, 8::16].astype(int) - COLOURS).max()
    assert not {case: error for case, error in errors.items() if error > 4}


def white_video_writer(transfer: str, signal: float) -> Callable[[Path], None]:
    grey = f"nullsrc=s=64x64:r=16:d=0.2,format=yuv420p10le,geq=lum=64+{signal}*876:cb=512:cr=512"
    tags = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc:log-level=error"
    coded = ["-c:v", "libx265", "-x265-params", tags, "-pix_fmt", "yuv420p10le"]
    coded += ["-color_primaries", "bt2020", "-color_trc", transfer, "-colorspace", "bt2020nc"]
    return lambda path: ffmpeg(*lavfi(grey), *coded, path)


@pytest.mark.parametrize(
    ("transfer", "signal"), [("arib-std-b67", 0.75), ("smpte2084", 0.5807)]
)  # of reference white, in ITU-R BT.2408
def test_hdr_is_tone_mapped_or_named(
    transfer: str, signal: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    path = tmp_path / "hdr.mp4"
    white_video_writer(transfer, signal)(path)
    frame = next(video_reader.read_video(path, "x").iter_frames())
    assert frame.min() >= 235 and np.ptp(frame) <= 2 and not caplog.messages
    monkeypatch.setattr("wan.media.video_reader.has_filters", lambda *names: False)
    assert next(video_reader.read_video(path, "x").iter_frames()).max() < 235
    assert len(caplog.messages) == 1 and "hdr.mp4" in caplog.text
