"""Reading and writing media with ffmpeg: allowed inputs, times, frames, sounds and colours."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image

from tools import contact_sheet, make_sound
from wan.media import audio, video_reader, video_writer
from wan.media.video_reader import VideoFile
from wan.settings.command import Output
from wan.settings.errors import FileChangedError, InputError, WriteError
from wan.tasks import animate, speech2video, vace
from wan.utils.files import VIDEO_KIND, is_output

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [200, 120, 90]])
FRAME_SELECTION = "lt(t,0.4)+not(mod(n,3))"  # frames: 30 a second at first, then 10


def ffmpeg(*args: object) -> bytes:
    command = [get_ffmpeg_exe(), "-v", "error", "-y", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True).stdout


def lavfi(source: str) -> list[str]:
    return ["-f", "lavfi", "-i", source]


def write_clock_video(path: Path, *, late: float = 0.0, variable: bool = True) -> Path:
    """Writes a video of a bar that grows from left to right in 1.2 s, perhaps after a sound."""
    bar = "color=black:s=96x64:r=30:d=1.2,geq=lum='255*lt(X,W*T/1.2)':cb=128:cr=128"
    bar += f",select='{FRAME_SELECTION}'" if variable else ""
    inputs = ["-itsoffset", late, *lavfi(bar), *(lavfi("sine=d=1.7") if late else [])]
    coded = ["-fps_mode", "vfr", "-c:v", "libx264", "-preset", "ultrafast", "-crf", 1]
    ffmpeg(*inputs, *coded, path)
    return path


def test_files_without_a_video(tmp_path: Path) -> None:
    """The refusal says what the file holds instead, whatever its name."""
    picture, sound, cover = (tmp_path / name for name in ("a.png", "a.mp3", "cover.mp3"))
    Image.new("RGB", (64, 48)).save(picture)
    ffmpeg(*lavfi("sine=d=0.2"), sound)
    streams = ["-map", 0, "-map", 1, "-c", "copy", "-disposition:v", "attached_pic"]
    ffmpeg("-i", sound, "-i", picture, *streams, cover)
    shutil.copy(picture, tmp_path / "picture.mp4")
    ffmpeg(*lavfi("sine=d=0.2"), tmp_path / "sound.mp4")
    for name, content in {
        **dict.fromkeys(("a.png", "picture.mp4"), "a still image"),
        **dict.fromkeys(("a.mp3", "sound.mp4"), "only sound;"),
        "cover.mp3": "only a cover picture and sound;",
    }.items():
        with pytest.raises(InputError, match=content):
            video_reader.read_video(tmp_path / name, "`src_video`")


def seconds_shown(frames: np.ndarray) -> np.ndarray:
    return (frames[:, 32, :, 0] > 127).mean(axis=1) * 1.2


def decode_frames(path: Path) -> np.ndarray:
    """Returns the stored frames of a file, without repeats for timing."""
    raw = ffmpeg("-i", path, "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    return np.frombuffer(raw, np.uint8).reshape(-1, 64, 96, 3)


def test_a_script_opens_no_other_file(tmp_path: Path) -> None:
    """ffmpeg itself would follow such a list."""
    film, script = tmp_path / "film.mp4", tmp_path / "list.mp4"
    ffmpeg(*lavfi("color=red:s=64x64:r=16:d=1"), *lavfi("sine=d=1"), film)
    script.write_text("ffconcat version 1.0\nfile film.mp4\n")
    ffmpeg("-i", script, "-f", "null", "-")
    for read in (audio.read_audio, partial(video_reader.read_video, setting="`pose_video`")):
        read(film)
        with pytest.raises(InputError, match="cannot be read"):
            read(script)


def test_a_name_is_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special characters in a relative path change nothing in writing, reading or joining."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_sound.write_wav(tmp_path / "sound.wav", 1.0)
    name = "file:-i%03d\nb'\"c.MP4"
    folder, path = Path("~"), Path("~", name)
    video_writer.write_video(torch.zeros(3, 5, 64, 96), Output(path, fps=16))
    assert [file.name for file in (tmp_path / "~").iterdir()] == [name]
    assert len(contact_sheet.read_frames(path)) == 5
    video_writer.join_videos(folder, [name, name], Path(f"joined {name}"), "a comment")
    audio.add_audio(Path(f"joined {name}"), Path("sound.wav"), path)
    assert video_reader.count_stored_frames(path) == 10
    assert len(audio.read_audio(path).samples) == pytest.approx(10_000, abs=1100)
    assert {file.name for file in tmp_path.iterdir()} == {"sound.wav", "~", f"joined {name}"}


def test_a_variable_rate_is_read_by_its_times(tmp_path: Path, caplog) -> None:
    """The video, its mask and the poses each have 20 unevenly spaced frames in 1.2 s."""
    path, mask = write_clock_video(tmp_path / "clock.mp4"), tmp_path / "mask.mp4"
    assert len(decode_frames(path)) == 20
    source = vace.read_vace_files(path, Path(shutil.copy(path, mask)), ())
    assert "clock.mp4" in caplog.text and source.files == (path, mask)
    poses = np.stack(list(speech2video.read_pose_video(path).iter_poses()))
    video_frames = source.video_reader(range(source.num_frames))
    assert (source.mask_reader(range(source.num_frames)) == video_frames).all()
    for frames, rate in ((video_frames, source.fps), (poses, 16)):
        times = np.arange(len(frames)) / rate
        assert np.abs(seconds_shown(frames) - times).max() < 0.1
        assert len(frames) / rate == pytest.approx(1.2, abs=0.11)
    assert len({frame.tobytes() for frame in video_frames}) == 20, "each stored frame is shown"


def make_video_file(times: Sequence[float], variable: bool = False) -> VideoFile:
    """Returns a video of 10 frames a second whose stored frames have these times."""
    return VideoFile(Path("v"), (8, 8), 10.0, times, range(len(times)), is_variable=variable)


def test_a_mask_takes_the_times_of_its_video() -> None:
    """At 10 frames a second one missing or further frame is mended, and more are not."""
    video = make_video_file([0.0, 0.1, 0.25, 0.3, 0.4], variable=True)
    table = {5: [0, 1, 2, 3, 4], 4: [0, 1, 2, 3, 3], 2: [0, 1]}
    table |= {6: [0, 1, 2, 3, 4], 7: [0, 1, 2, 3, 4], 8: [*range(8)]}
    for count, indices in table.items():
        mask = make_video_file([0.1 * n for n in range(count)])
        assert [*mask.synchronize(video).indices] == indices, count
        variable_mask = make_video_file([0.1 * n for n in range(count)], variable=True)
        assert [*variable_mask.synchronize(make_video_file(video.times)).indices] == indices
    other = replace(make_video_file([0.0, 0.4, 0.5, 0.6, 0.7]), fps=5.0, indices=[0, 0, 1, 4])
    assert make_video_file([0.1 * n for n in range(5)]).synchronize(other) == other
    assert make_video_file([0.0, 0.1]).synchronize(make_video_file(video.times)).num_frames == 2


def test_times_are_resampled() -> None:
    """Each frame is shown from its time on, the first one from the beginning, the last 0.1 s."""
    late = make_video_file([0.3, 0.4, 0.6], variable=True)
    table = {10.0: [0, 0, 0, 0, 1, 1, 2], 5.0: [0, 0, 1, 2], 2.5: [0, 1, 2]}
    table[30.0] = [0] * 12 + [1] * 6 + [2] * 3
    for fps, indices in table.items():
        assert [*late.resample(fps).indices] == indices and late.resample(fps).fps == fps


def test_a_video_that_begins_late(tmp_path: Path, caplog) -> None:
    """The first frame is repeated until the video begins."""
    path = write_clock_video(tmp_path / "late.mp4", late=0.5, variable=False)
    video = video_reader.read_video(path, "x")
    assert "late.mp4" in caplog.text
    frames = np.stack(list(video.iter_frames()))
    assert len(frames) == video.num_frames == 15 + 36
    expected = np.maximum(np.arange(len(frames)) / video.fps - 0.5, 0)
    assert np.abs(seconds_shown(frames) - expected).max() < 0.1
    assert np.array_equal(np.stack(list(video.iter_frames(4))), frames[::4])


@pytest.mark.parametrize(("rate", "suffix"), [("16", "mp4"), ("30000/1001", "mkv")])
def test_a_constant_rate_has_its_frames(rate: str, suffix: str, tmp_path: Path, caplog) -> None:
    """Time stamps that are rounded to milliseconds change nothing."""
    path = tmp_path / f"v.{suffix}"
    ffmpeg(*lavfi(f"testsrc2=s=96x64:r={rate}:d=1.3"), "-pix_fmt", "yuv420p", path)
    clip, frames = video_reader.read_video(path, "x"), decode_frames(path)
    assert (np.stack(list(clip.iter_frames())) == frames).all()
    assert f"{clip.fps:.2f}" == f"{eval(rate):.2f}" and not caplog.messages
    assert (np.stack(list(clip.iter_frames(3))) == frames[::3]).all()
    count = len(frames)  # it lost frames since it was checked
    with pytest.raises(FileChangedError, match=rf"{path.name} ends before its frame {count + 1}"):
        video_reader.read_frames_at(replace(clip, indices=range(count + 2)), range(count + 2))


def test_a_character_of_a_variable_rate(tmp_path: Path) -> None:
    """Each face belongs to its pose, also where the file of faces has a constant rate."""
    Image.new("RGB", (96, 64)).save(tmp_path / "src_ref.png")
    for name in ("pose", "bg", "mask"):
        write_clock_video(tmp_path / f"src_{name}.mp4")
    faces = "testsrc=s=512x512:r=30,trim=end_frame=20"
    ffmpeg(*lavfi(faces), "-preset", "ultrafast", "-pix_fmt", "yuv420p", tmp_path / "src_face.mp4")
    character = animate.read_animate_folder(tmp_path, replace_character=True)
    assert {file.name for file in character.files} == {*animate.ANIMATE_FILES}
    assert character.num_frames > 20
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


@pytest.mark.parametrize(
    ("size", "pixel_aspect", "shown"),
    [
        ("96x64", "8/9", (96, 72)),
        ("96x64", "255/256", (96, 64)),  # from rounded sides
        ("64x720", "2", (128, 720)),  # in the colors of HD
    ],
)
def test_pixels_that_are_not_square(
    size: str, pixel_aspect: str, shown: tuple[int, int], tmp_path: Path
) -> None:
    """The frames are those of the same video with square pixels, scaled by Pillow."""
    plain, wide, turned = (tmp_path / f"{name}.mp4" for name in ("plain", "wide", "turned"))
    ffmpeg(*lavfi(f"testsrc2=s={size}:r=16:d=0.2"), "-pix_fmt", "yuv420p", plain)
    ffmpeg("-i", plain, "-vf", f"setsar={pixel_aspect}", "-qp", 1, "-pix_fmt", "yuv420p", wide)
    clip = video_reader.read_video(wide, "x")
    squares = video_reader.read_video(plain, "x").iter_frames()
    assert clip.size == shown
    for frame, square in zip(clip.iter_frames(), squares, strict=True):
        expected = np.asarray(Image.fromarray(square).resize(shown, Image.Resampling.LANCZOS))
        assert np.abs(frame.astype(int) - expected).mean() < 4
    ffmpeg("-display_rotation", 90, "-i", wide, "-c", "copy", turned)
    assert video_reader.read_video(turned, "x").size == shown[::-1]


def first_loud(samples: np.ndarray) -> float:
    return float(np.argmax(np.abs(samples) > 0.02) / 16000)


def decode_sound_by_time(path: Path) -> np.ndarray:
    """Returns the sound of a file at its time stamps, as a player outputs it."""
    by_time = ["-af", "aresample=16000:async=1:first_pts=0", "-ac", 1, "-f", "f32le", "-"]
    return np.frombuffer(ffmpeg("-i", path, *by_time), np.float32)


@pytest.mark.parametrize(
    ("suffix", "codec", "cut"),
    [("mp4", "aac", 0.1875), ("mkv", "libopus", 0.0), ("ts", "mp2", 0.1875)],
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


def test_a_sound_shorter_than_the_video(tmp_path: Path) -> None:
    """It cuts the video, or silence follows it."""
    silent, sound, out = (tmp_path / name for name in ("silent.mp4", "sound.wav", "out.mp4"))
    ffmpeg(*lavfi("color=red:s=64x64:r=16:d=1"), "-pix_fmt", "yuv420p", silent)
    make_sound.write_wav(sound, 0.5)
    audio.add_audio(silent, sound, out)
    assert video_reader.count_stored_frames(out) <= 9
    audio.add_audio(silent, sound, out, min_seconds=1.0)
    assert video_reader.count_stored_frames(out) == 16


def test_channels_are_averaged(tmp_path: Path) -> None:
    """A voice may be on the left, on the right, or in the middle; a constant level is silent."""
    left, right = lavfi("sine=f=300:d=1.3:r=16000"), lavfi("sine=f=700:d=1.3:r=16000,volume=3")
    stereo = ["-filter_complex", "amerge,aformat=channel_layouts=stereo"]
    for name, count, source in (
        ("a.wav", 1, [*right, "-c:a", "pcm_s16le"]),
        ("a.mp3", 1, [*right, "-c:a", "libmp3lame"]),
        ("b.wav", 2, [*left, *right, *stereo]),
    ):
        ffmpeg(*source, tmp_path / name)
        decoded = ffmpeg("-i", tmp_path / name, "-f", "f32le", "-")
        channels = np.frombuffer(decoded, np.float32).reshape(-1, count)
        samples = audio.read_audio(tmp_path / name).samples
        np.testing.assert_allclose(samples, channels.mean(axis=1), atol=1e-6 * (count > 1), rtol=0)
    assert np.abs(channels[:, 0] - channels[:, 1]).max() > 0.1
    ffmpeg(*lavfi("aevalsrc=0.1:d=1.3:s=16000"), tmp_path / "a.wav")
    with pytest.raises(InputError, match="is silent"):
        audio.read_audio(tmp_path / "a.wav")


def test_pixels_are_truncated_as_officially() -> None:
    """0.9 of a level above each level is still this level; values beyond white are white."""
    levels = torch.arange(255)
    frame = torch.cat([(levels + 0.9) / 127.5 - 1, torch.tensor([-2.0, 2.0])])
    expected = torch.cat([levels, torch.tensor([0, 255])])
    pixels = video_writer.to_uint8(frame.expand(3, 1, 1, -1))
    assert torch.equal(pixels, expected.byte()[None, None, :, None].expand(1, 1, -1, 3))


def test_a_stream_can_be_read_while_it_grows(tmp_path: Path) -> None:
    """A copy of the file shows the frames so far; the newest one is stored with the next."""
    width, shift = 96, torch.linspace(-1, 1, 33).view(33, 1, 1)
    ramp = torch.linspace(-0.5, 0.5, width).expand(33, 64, width) + 0.5 * shift
    video = torch.stack([ramp, -ramp, ramp.flip(2)])
    expected = video_writer.to_uint8(video).numpy().astype(int)
    output, copy = Output(tmp_path / "v.mp4", fps=16, stream=True), tmp_path / "copy.mp4"

    def read_copy() -> np.ndarray:
        shutil.copy(output.stream_path, copy)
        return decode_frames(copy) if copy.stat().st_size > 2000 else np.empty(0)

    with video_writer.open_stream(output, video_writer.DEFAULT_COMMENT) as stream:
        assert stream is not None
        stream.begin((33, 64, width))
        num_written = 0
        for block in video.split([9, 12, 12], dim=1):
            stream.write_frames(block)
            num_written += block.shape[1]
            deadline = time.monotonic() + 60
            while len(frames := read_copy()) < num_written - 1:
                assert time.monotonic() < deadline, f"{len(frames)} of {num_written} frames"
            assert np.abs(frames - expected[: len(frames)]).mean() < 2
        assert is_output(output.stream_path, VIDEO_KIND)
        stream.finish()
        assert len(read_copy()) == 33
        with output.stream_path.open("rb") as reader:  # does not see the frames of another attempt
            stream.begin((33, 64, width))
            assert not os.path.samestat(os.fstat(reader.fileno()), output.stream_path.stat())
    assert [path.name for path in tmp_path.iterdir()] == ["copy.mp4"]


def test_a_video_of_another_number_of_frames_is_an_error(tmp_path: Path, monkeypatch) -> None:
    """Three were announced; two joined videos have six."""
    for num_frames in (0, 2, 4):
        with (
            pytest.raises(WriteError, match=f"kept {num_frames} of 3 frames"),
            video_writer.open_mp4_encoder(Output(tmp_path / "v.mp4", fps=16)) as encoder,
        ):
            encoder.begin((3, 16, 16))
            encoder.write_frames(torch.zeros(3, num_frames, 16, 16))
        assert not list(tmp_path.iterdir())
    write_stripes(tmp_path / "a.mp4", 64, 64)
    counts = {"a.mp4": 3, "joined.mp4": 5}
    monkeypatch.setattr(video_writer, "count_stored_frames", lambda path: counts[path.name])
    with pytest.raises(OSError, match="has 5 of 6 frames"):
        video_writer.join_videos(tmp_path, ["a.mp4", "a.mp4"], tmp_path / "joined.mp4", "")


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


@pytest.mark.parametrize(("size", "name"), [((64, 704), "smpte170m"), ((64, 720), "bt709")])
def test_colours_tags_and_index_of_an_mp4(size: tuple[int, int], name: str, tmp_path: Path) -> None:
    """Players depend on these tags; videos with an added sound and joined videos have them."""
    path, last = write_stripes(tmp_path / "a.mp4", *size), tmp_path / "spoken.mp4"
    if name == "bt709":
        video_writer.join_videos(tmp_path, ["a.mp4", "a.mp4"], tmp_path / "joined.mp4", "")
        make_sound.write_wav(tmp_path / "sound.wav", 1.0)
        audio.add_audio(tmp_path / "joined.mp4", tmp_path / "sound.wav", last)
        path = last
    description = describe_pixels(path)
    assert description.startswith(f"yuv420p(tv, {name}")
    assert "/" not in description, "range, matrix, primaries and transfer"
    assert list_boxes(path).index(b"moov") < list_boxes(path).index(b"mdat")
    matrix = "bt709" if name == "bt709" else "bt601"
    graph = f"scale=in_color_matrix={matrix}:in_range=tv,format=rgb24"
    raw = ffmpeg("-i", path, "-frames:v", 1, "-vf", graph, "-f", "rawvideo", "-")
    (width, height), step = size, size[0] // 8
    frame = np.frombuffer(raw, np.uint8).reshape(height, width, 3)
    first_frame = next(video_reader.read_video(path, "x").iter_frames())
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
        ffmpeg(*raw, "-vf", graph, "-c:v", "libx264", "-preset", "ultrafast", "-crf", 1, path)
        assert (tag or "yuv420p(progressive") in describe_pixels(path)
        frame = next(video_reader.read_video(path, "x").iter_frames())
        errors[height, tag] = np.abs(frame[height // 2, 8::16].astype(int) - COLOURS).max()
    assert not {case: error for case, error in errors.items() if error > 4}


@pytest.mark.parametrize(
    ("transfer", "signal"), [("arib-std-b67", 0.75), ("smpte2084", 0.5807)]
)  # of reference white, in ITU-R BT.2408
def test_hdr_is_tone_mapped_or_named(
    transfer: str, signal: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    path = tmp_path / "hdr.mp4"
    grey = f"nullsrc=s=64x64:r=16:d=0.1,format=yuv420p10le,geq=lum=64+{signal}*876:cb=512:cr=512"
    tags = f"colorprim=bt2020:transfer={transfer}:colormatrix=bt2020nc:log-level=error"
    coded = ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", tags]
    coded += ["-color_primaries", "bt2020", "-color_trc", transfer, "-colorspace", "bt2020nc"]
    ffmpeg(*lavfi(grey), *coded, path)
    frame = next(video_reader.read_video(path, "x").iter_frames())
    assert frame.min() >= 235 and np.ptp(frame) <= 2 and not caplog.messages
    monkeypatch.setattr("wan.media.video_reader.has_filters", lambda *names: False)
    assert next(video_reader.read_video(path, "x").iter_frames()).max() < 235
    assert len(caplog.messages) == 1 and "hdr.mp4" in caplog.text
