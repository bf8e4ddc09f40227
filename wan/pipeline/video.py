"""Videos and latents out, latents in again; files are complete or absent.

Legend: Z latent channels, f h w latent frames/height/width, F H W the video's.
Torch is not imported with this file, since latents are checked before it is.
"""

from __future__ import annotations

import json
import signal
from fractions import Fraction
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TYPE_CHECKING, Any

from wan.checkpoint.files import safetensors_header, whole_file
from wan.log import logger
from wan.settings.errors import InputError, WriteError

if TYPE_CHECKING:
    from torch import Tensor


def to_uint8(frames_3FHW: Tensor) -> Tensor:
    """[F,H,W,3] uint8 from [-1, 1], scaled and truncated as the official code does."""
    return frames_3FHW.float().clamp(-1, 1).add(1).div(2).mul(255).byte().permute(1, 2, 3, 0).cpu()


def save_video(video_3FHW: Tensor, path: Path, fps: float) -> None:
    """Write an mp4 as officially: libx264 at quality 8 (CRF 10), yuv420p.

    Args:
        video_3FHW: at least one frame in [-1, 1]; H and W even, as yuv420p needs.
        path: a name ending in .mp4; `~` is a name like any other here.
        fps: frames per second.

    Raises:
        WriteError: when not every frame could be written; no file is left then.
    """
    try:
        with whole_file(path) as temporary:
            _encode(video_3FHW, temporary, fps)
            found, wanted = _frames_in(temporary), video_3FHW.shape[1]
            if found != wanted or not wanted:
                raise OSError(f"the encoder kept {found} of {wanted} frames")
    except OSError as error:
        raise WriteError(
            f"{path} could not be written ({error.strerror or error}); "
            "free space there, or give another --save_file."
        ) from error


def _encode(video_3FHW: Tensor, path: Path, fps: float) -> None:
    """Send the frames to ffmpeg; OSError with its first complaint where it fails."""
    import imageio_ffmpeg

    _, _, height, width = video_3FHW.shape
    rate = str(Fraction(fps).limit_denominator())
    raw = ["-f", "rawvideo", "-s", f"{width}x{height}", "-pix_fmt", "rgb24", "-r", rate, "-i", "-"]
    coded = ["-an", "-vcodec", "libx264", "-pix_fmt", "yuv420p", "-crf", "10", "-f", "mp4"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *raw, *coded, str(path)]
    with Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=PIPE) as encoder:
        assert encoder.stdin is not None
        try:
            for frame_3HW in video_3FHW.unbind(1):
                encoder.stdin.write(to_uint8(frame_3HW[:, None]).numpy().tobytes())
        except BrokenPipeError:
            pass  # it has ended, and says why below
        except BaseException:
            encoder.kill()
            raise
        _, said = encoder.communicate()
    if encoder.returncode < 0:
        raise OSError(f"the encoder was ended by {signal.Signals(-encoder.returncode).name}")
    if encoder.returncode > 0:
        first = said.decode(errors="replace").strip().partition("\n")[0]
        complaint = first.rpartition("] ")[2] or f"code {encoder.returncode}"
        raise OSError(f"the encoder failed: {complaint}")


def _frames_in(path: Path) -> int:
    """Frames of a video file; 0 for a file that is none."""
    import imageio_ffmpeg

    try:
        return int(imageio_ffmpeg.count_frames_and_secs(path)[0])
    except (OSError, RuntimeError):
        return 0


def save_latents(latents_Zfhw: Tensor, path: Path, settings: dict[str, Any]) -> None:
    """Latents with the settings of their run, from which `--decode_latents` continues."""
    from safetensors.torch import save

    with whole_file(path) as temporary:
        tensors = {"latents": latents_Zfhw.float().cpu().contiguous()}
        temporary.write_bytes(save(tensors, metadata={"settings": json.dumps(settings)}))


def latents_shape(path: Path) -> tuple[int, ...]:
    """(Z, f, h, w) of the latents that `save_latents` wrote, by the file's header alone.

    Raises:
        InputError: for any other file.
    """
    found = safetensors_header(path).get("latents")
    if found is None:
        raise InputError(f"{path} holds no latents of generate.py; give a .latents.safetensors.")
    if found.dtype != "F32" or len(found.shape) != 4 or not all(found.shape):
        raise InputError(
            f"{path} holds latents of dtype {found.dtype} and shape {list(found.shape)}; "
            "generate.py's are F32 [channels, frames, height, width], each at least 1."
        )
    return found.shape


def load_latents(path: Path) -> Tensor:
    """Latents [Z,f,h,w] float32 of a file that `latents_shape` accepts."""
    from safetensors.torch import load_file

    latents_Zfhw = load_file(path)["latents"]
    if not bool(latents_Zfhw.isfinite().all()):
        logger.warning("%s holds NaN or infinity, so the video will be broken.", path)
    return latents_Zfhw
