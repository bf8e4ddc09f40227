"""Writes videos and latents, and reads latents; an output file is complete or absent.

This module does not import torch, so that latents are checked before torch is loaded.

Legend: Z latent channels, f h w latent frames/height/width, F H W those of the video.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.media.ffmpeg import (
    build_concat_args,
    build_output_args,
    run_ffmpeg,
    start_ffmpeg,
    stop_ffmpeg,
)
from wan.media.video_reader import HD_LINES, count_stored_frames
from wan.settings.command import Output
from wan.settings.errors import InputError, WriteError
from wan.settings.values import read_path, real
from wan.utils.files import (
    LATENTS_KIND,
    PREVIEW_KIND,
    PREVIEW_MARKER,
    VIDEO_KIND,
    check_output,
    create_file,
    write_output,
)
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def to_uint8(frames_3FHW: Tensor) -> Tensor:
    """Converts frames in [-1, 1] to [F,H,W,3] uint8, scaled and truncated as officially."""
    return frames_3FHW.float().clamp(-1, 1).add(1).div(2).mul(255).byte().permute(1, 2, 3, 0).cpu()


class Mp4Encoder:
    """Encodes frames to an mp4 like the official code: libx264 at CRF 10, yuv420p.

    Implements `wan.modules.vae.video_vae.Sink`. A thread feeds the encoder from a queue of a few
    frames, so that encoding overlaps with the VAE's decoding.

    Attributes:
        path: The temporary file.
        size: Frames, height and width.
    """

    def __init__(
        self,
        path: Path,
        output: Output,
        comment: str,
        lossless: bool = False,
        is_stream: bool = False,
    ) -> None:
        """Creates an encoder; ffmpeg is started by `begin`.

        Args:
            path: The temporary file.
            output: Frame rate, and the final path `save_file` for messages.
            comment: The mp4's tag "comment", a JSON object that begins like `DEFAULT_COMMENT`.
            lossless: Store the RGB values exactly (libx264rgb).
            is_stream: Encode each frame at once, into a separate fragment; frames are not
                counted in the end.
        """
        self.path, self._output, self._comment = path, output, comment
        self._lossless, self._is_stream = lossless, is_stream
        self.size = (0, 0, 0)
        self._process: Popen[bytes] | None = None
        self._frame_queue: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED_FRAMES)
        self._thread: threading.Thread | None = None

    def begin(self, size: tuple[int, int, int]) -> None:
        """Starts ffmpeg. size: frames, height and width; yuv420p needs even height and width."""
        self.stop()
        self.size = size
        _, height, width = size
        rate = str(Fraction(self._output.fps).limit_denominator())
        raw_args = ["-f", "rawvideo", "-s", f"{width}x{height}", "-pix_fmt", "rgb24", "-r", rate]
        quality_args = _STREAM_ARGS if self._is_stream else ["-crf", "10"]
        codec_args = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", *quality_args]
        codec_args += _build_color_args(height)
        if self._lossless:
            codec_args = ["-an", "-vcodec", "libx264rgb", "-preset", "veryfast", "-qp", "0"]
        codec_args += ["-metadata", f"comment={self._comment[:30_000]}"]  # argument limit: 128 kB
        output_args = build_output_args(self.path, fragmented=self._is_stream)
        args = [*raw_args, "-i", "-", *codec_args, *output_args]
        with wrap_write_errors(self._output.save_file):
            if self._is_stream:  # a new file, so that no reader continues with other frames
                self.path.unlink(missing_ok=True)
                create_file(self.path)
            self._process = start_ffmpeg(args, writes=True)
        self._thread = threading.Thread(target=self._feed, args=(self._process,), daemon=True)
        self._thread.start()

    def write_frames(self, frames_3FHW: Tensor) -> None:
        with wrap_write_errors(self._output.save_file):
            for frame in to_uint8(frames_3FHW):
                self._frame_queue.put(frame.numpy().tobytes())

    def write_rgb_frame(self, frame_HW3: np.ndarray) -> None:
        """Writes a frame of uint8 values."""
        with wrap_write_errors(self._output.save_file):
            self._frame_queue.put(frame_HW3.tobytes())

    def finish(self) -> None:
        """Completes the file; raises OSError with ffmpeg's first error if a frame is missing."""
        if self._process is None or self._thread is None:
            raise OSError("there is no frame")
        self._frame_queue.put(None)
        self._thread.join()
        assert self._process.stderr is not None
        stderr = self._process.stderr.read()
        code = self._process.wait()
        stop_ffmpeg(self._process)
        self._process = None
        if code < 0:
            if -code == signal.SIGXFSZ:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            raise OSError(f"the encoder was killed by {signal.Signals(-code).name}")
        if code > 0:
            first_line = stderr.decode(errors="replace").strip().partition("\n")[0]
            raise OSError(f"the encoder failed: {first_line.rpartition('] ')[2] or f'code {code}'}")
        if self._is_stream:
            return
        num_written, num_expected = count_stored_frames(self.path), self.size[0]
        if num_written != num_expected or not num_expected:
            raise OSError(f"the encoder kept {num_written} of {num_expected} frames")

    def stop(self) -> None:
        """Stops ffmpeg at once, if it runs."""
        if self._process is None or self._thread is None:
            return
        self._process.kill()
        self._frame_queue.put(None)
        self._thread.join()
        stop_ffmpeg(self._process)
        self._process = None

    def _feed(self, process: Popen[bytes]) -> None:
        """Writes queued frames to ffmpeg until None is queued; runs in a thread."""
        assert process.stdin is not None
        while (frame := self._frame_queue.get()) is not None:
            with suppress(OSError):  # it has ended; `finish` reports its error
                process.stdin.write(frame)
        with suppress(OSError):
            process.stdin.close()


_MAX_QUEUED_FRAMES = 8
_STREAM_ARGS = ["-preset", "superfast", "-tune", "zerolatency", "-crf", "18", "-g", "12"]
"""x264 without lookahead; a key frame for each 12 frames, as of a block of 3 latent frames."""
DEFAULT_COMMENT = json.dumps({"wan": __version__})
"""Comment of an mp4 without settings; `wan.utils.files.VIDEO_KIND` recognizes an output by it."""


@contextmanager
def open_mp4_encoder(
    output: Output,
    move_into_place: Callable[[Path], object] | None = None,
    comment: str = DEFAULT_COMMENT,
    lossless: bool = False,
) -> Iterator[Mp4Encoder]:
    """Yields an encoder; on exit the file is complete or absent.

    Args:
        output: Its `save_file` ends in .mp4, and `~` is not expanded.
        move_into_place: Moves the temporary file to its final name, as in `write_output`.
        comment, lossless: As in `Mp4Encoder`.

    Raises:
        WriteError: Not every frame could be written; the file is removed.
    """
    caller_error: BaseException | None = None
    try:
        with write_output(output.save_file, VIDEO_KIND, move_into_place) as temporary:
            encoder = Mp4Encoder(temporary, output, comment, lossless)
            try:
                yield encoder
            except BaseException as error:
                caller_error = error
                raise
            finally:
                if caller_error is not None:
                    encoder.stop()
            encoder.finish()
    except OSError as error:
        if error is caller_error:
            raise
        with wrap_write_errors(output.save_file):
            raise


@contextmanager
def open_stream(output: Output, comment: str) -> Iterator[Mp4Encoder | None]:
    """Yields the encoder of the mp4 that can be played while it grows; None without `stream`.

    The frames are encoded once more, without the delay of the video's encoder, so that the video
    has the same bytes with and without a stream. The stream is removed on exit.
    """
    if not output.stream:
        yield None
        return
    path = output.stream_path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    encoder = Mp4Encoder(path, output, comment, is_stream=True)
    logger.info("Stream, which can be played while it grows: %s", output.stream_path)
    try:
        yield encoder
    finally:
        encoder.stop()
        path.unlink(missing_ok=True)


@contextmanager
def wrap_write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a WriteError with a remedy."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        is_disk_full = error.errno in (None, errno.ENOSPC, errno.EDQUOT)  # None: the encoder failed
        remedy = "free space there, or give" if is_disk_full else "give"
        if error.errno == errno.EFBIG:
            remedy = "raise the shell's limit on the size of files (ulimit -f), or give"
        raise WriteError(
            f"{path} could not be written ({error.strerror or error}); {remedy} another "
            "--save_file."
        ) from error


def write_video(
    video_3FHW: Tensor, output: Output, comment: str = DEFAULT_COMMENT, lossless: bool = False
) -> None:
    """Writes a video in [-1, 1] with even height and width; raises like `open_mp4_encoder`."""
    with open_mp4_encoder(output, comment=comment, lossless=lossless) as encoder:
        _, frames, height, width = video_3FHW.shape
        encoder.begin((frames, height, width))
        for frame_3HW in video_3FHW.unbind(1):
            encoder.write_frames(frame_3HW[:, None])


def join_videos(folder: Path, names: Sequence[str], path: Path, comment: str) -> None:
    """Joins mp4 files of one size and rate without encoding their frames again.

    Args:
        folder: The folder of the clips.
        names: File names of the clips.
        path: The joined video.
        comment: As in `Mp4Encoder`.

    Raises:
        OSError: ffmpeg failed, or a frame is missing.
    """
    args = [*build_concat_args(), "-c", "copy", "-metadata", f"comment={comment[:30_000]}"]
    with TemporaryDirectory() as temporary:
        link_folder = Path(temporary)  # the names need no quoting in ffmpeg's list
        for index, name in enumerate(names):
            (link_folder / f"{index}.mp4").symlink_to((folder / name).absolute())
        concat_list = "".join(f"file file:{index}.mp4\n" for index in range(len(names)))
        result = run_ffmpeg([*args, *build_output_args(path)], link_folder, concat_list.encode())
    if result.returncode:
        first_line = result.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise OSError(f"the clips could not be joined: {first_line}")
    num_joined = count_stored_frames(path)
    num_expected = sum(count_stored_frames(folder / name) for name in names)
    if num_joined != num_expected:
        raise OSError(f"the joined video has {num_joined} of {num_expected} frames")


def _build_color_args(height: int) -> list[str]:
    """Builds the color conversion and tags of an mp4: BT.709 from 720 lines on, else BT.601."""
    name = "bt709" if height >= HD_LINES else "smpte170m"
    tags = {"colorspace": name, "color_primaries": name, "color_trc": name}
    filters = f"scale=out_color_matrix={name}:out_range=tv,format=yuv420p,setparams=range=tv"
    filters += "".join(f":{tag}={value}" for tag, value in tags.items())
    options = [word for tag, value in tags.items() for word in (f"-{tag}", value)]
    return ["-vf", filters, *options, "-color_range", "tv"]


def save_latents(latents_Zfhw: Tensor, path: Path, settings: dict[str, Any]) -> None:
    """Writes latents and the settings of their run for `--decode_latents`."""
    from safetensors.torch import save

    with write_output(path, LATENTS_KIND) as temporary:
        tensors = {"latents": latents_Zfhw.float().cpu().contiguous()}
        temporary.write_bytes(save(tensors, metadata={"settings": json.dumps(settings)}))


def save_preview(frame_3HW: Tensor, path: Path) -> None:
    """Writes a frame in [-1, 1] as a JPEG."""
    from PIL import Image

    with write_output(path, PREVIEW_KIND) as temporary:
        image = Image.fromarray(to_uint8(frame_3HW[:, None])[0].numpy())
        image.save(temporary, "JPEG", quality=90, comment=PREVIEW_MARKER)


def read_latents_shape(path: Path) -> tuple[int, ...]:
    """Reads the shape (Z, f, h, w) of a file of `save_latents` from its header.

    Raises:
        InputError: The file holds no such latents.
    """
    info = read_safetensors_header(path).get("latents")
    if info is None:
        why = "holds no latents of generate.py"
        raise InputError(str(path), None, why, "give a .latents.safetensors")
    if info.dtype != "F32" or len(info.shape) != 4 or not all(info.shape):
        why = f"holds latents of dtype {info.dtype} and shape {list(info.shape)}"
        remedy = "generate.py's are F32 [channels, frames, height, width], each at least 1"
        raise InputError(str(path), None, why, remedy)
    return info.shape


def check_latents_shape(path: Path | None, shape: tuple[int, ...]) -> None:
    """Refuses `fixed_latents` whose shape differs from the video's latents."""
    if path is not None and read_latents_shape(path) != shape:
        why = f"holds latents of shape {list(read_latents_shape(path))}"
        remedy = f"this video's are {list(shape)}; change `size` or `frame_num`"
        raise InputError("`fixed_latents`", None, why, remedy)


def load_latents(path: Path) -> Tensor:
    """Reads latents [Z,f,h,w] float32 from a file that `read_latents_shape` accepts.

    Raises:
        InputError: The latents are not finite.
    """
    from safetensors.torch import load_file

    latents_Zfhw = load_file(path)["latents"]
    if not bool(latents_Zfhw.isfinite().all()):
        raise InputError(str(path), None, "holds NaN or infinity", "make the latents again")
    return latents_Zfhw


def save_video(video: Tensor, path: str | Path, fps: float = 16.0) -> None:
    """Writes a video that `generate` has returned to an mp4 file.

    Args:
        video: Float [3,F,H,W] in [-1, 1], with even H and W.
        path: Ends in .mp4. Only a video of this package is replaced.
        fps: Frames per second, 1 to 240: 16 for the A14B networks, 24 for ti2v-5B.

    Raises:
        InputError: A ValueError: an argument is invalid.
        WriteError: An OSError: the file could not be written; no part of it is left.
    """
    from torch import Tensor

    if not isinstance(video, Tensor) or video.dim() != 4 or len(video) != 3 or not video.numel():
        shape = list(video.shape) if isinstance(video, Tensor) else type(video).__name__
        remedy = "give what `generate` returned on rank 0"
        raise InputError("The video", shape, "is no tensor of shape [3, F, H, W]", remedy)
    if video.shape[2] % 2 or video.shape[3] % 2:
        size = f"{video.shape[3]}*{video.shape[2]}"
        raise InputError("The video", size, "has an odd side", "crop it to even ones")
    file = read_path("path", str(path))
    if file.suffix.lower() != ".mp4":
        raise InputError("path", file, "must end in .mp4, the only format written")
    check_output(file, VIDEO_KIND, "path")
    write_video(video.detach().float().cpu(), Output(file, fps=real(1, 240)("fps", fps)))
