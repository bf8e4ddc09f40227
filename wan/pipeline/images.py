"""Reads an image from a file or a Python object as 8-bit RGB, as it is shown.

The command line and the Python classes get the same pixels from the same file. Torch is not needed,
and Pillow and numpy are imported where they work, so that a wrong path is refused without them.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wan.log import logger
from wan.settings.errors import InputError
from wan.settings.values import shown

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
"""All that Pillow is allowed to open, by its names (AVIF where its build has it).

JPEG includes MPO: the files of phones that hold further images after the first one.
"""
_ACCEPTED = "PNG, JPEG, WebP, AVIF, BMP, TIFF or GIF"
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SUBFILE_TYPE = 258, 262, 254  # TIFF tags


@dataclass(frozen=True)
class ImageSetting:
    """Where an image comes from: a setting, and the path that it names."""

    setting: str
    path: str | None = None

    def refused(self, why: str, remedy: str) -> InputError:
        return InputError(f"`{self.setting}`", self.path, why, remedy)


def read(path: Path, setting: str = "image") -> Image.Image:
    """Reads and completely decodes the image in a file, in RGB, turned as its EXIF data says.

    The first image of a file with several of them (MPO, TIFF) is taken; animations are refused.
    Transparent parts are put over white, with a warning. Grey values of more than 8 bits are
    scaled.

    Args:
        path: A regular file in one of `FORMATS`.
        setting: The flag that names the path, for messages.

    Raises:
        InputError: The path is no such file, or the file is damaged.
    """
    given = ImageSetting(setting, str(path))
    _check_file(path, given)
    from PIL import Image

    Image.init()
    formats = [known for known in FORMATS if known in Image.OPEN]
    # Not opened by its name: Pillow 13 maps a TIFF into memory then, and mistakes its sides where
    # its orientation turns it.
    with _decoding(given), path.open("rb") as file, Image.open(file, formats=formats) as image:
        _check_still(image, given)
        return _as_shown(image, given)


def from_value(value: object, setting: str = "image") -> Image.Image:
    """Converts the image that a Python caller gives to RGB, as `read` does.

    Args:
        value: A path (`~` is the home folder), a PIL image, or a numpy array or torch tensor
            [H,W,3] or [3,H,W], uint8 or floating in [0, 1]. Of an animation that is open as a PIL
            image the current frame is taken.
        setting: The flag that the argument stands for, for messages.

    Raises:
        InputError: The value is something else, or damaged.
    """
    from PIL import Image

    if isinstance(value, str | Path):
        return read(Path(os.path.expanduser(value)), setting)
    given = ImageSetting(setting)
    with _decoding(given):
        if isinstance(value, Image.Image):
            return _as_shown(value, given)
        return Image.fromarray(_levels(_array(value, given), given))


def _check_file(path: Path, given: ImageSetting) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if re.match(r"([a-z][a-z0-9+.-]+:/|data:)", str(path), re.IGNORECASE):
            address = ImageSetting(given.setting)
            raise address.refused("takes a file, not an address", "download it first") from None
        raise given.refused("does not exist", "give an image") from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        short = ImageSetting(given.setting, shown(path, str))  # it may be too long a name
        raise short.refused(f"cannot be used ({_reason(error)})", "give another one") from None
    if not stat.S_ISREG(found.st_mode):
        raise given.refused("is not a file", "give an image")
    if found.st_size == 0:
        raise given.refused("is empty (0 bytes)", "give an image")


@contextmanager
def _decoding(given: ImageSetting) -> Iterator[None]:
    """Makes one sentence of whatever goes wrong in Pillow; its own warnings are not shown.

    All of Exception is caught: on damaged files the decoders raise ValueError, SyntaxError,
    NotImplementedError, AttributeError, struct.error, ..., as the broken byte will have it.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except UnidentifiedImageError as error:
        why = f"cannot be read as an image: it is no sound {_ACCEPTED}"
        raise given.refused(why, "convert it to one") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise given.refused("has too many pixels to be decoded", "scale it down") from error
    except Exception as error:
        why = f"cannot be read as an image ({_reason(error)})"
        raise given.refused(why, "give a PNG or JPEG") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return shown(error, str) or type(error).__name__


def _check_still(image: Image.Image, given: ImageSetting) -> None:
    """Refuses animations, and TIFFs whose first page is not the image itself."""
    if image.format == "TIFF":
        if _tag(image, _SUBFILE_TYPE, 0) & 1:
            why = "begins with a thumbnail, as raw files of cameras do"
            raise given.refused(why, "export it as PNG or JPEG")
    elif image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise given.refused(f"is animated ({frames} frames)", "give a still image")


def _as_shown(image: Image.Image, given: ImageSetting) -> Image.Image:
    """Converts an image of any mode to 8-bit RGB, turned as its EXIF data says, over white."""
    from PIL import ImageOps

    width, height = image.size
    if not width or not height:
        raise given.refused(f"has no pixels ({width}x{height})", "give another image")
    _decode(image)
    turned = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        turned = _eight_bits(turned, image, given)
    return _over_white(turned, given).convert("RGB")


def _decode(image: Image.Image) -> None:
    """Decodes an image, and drops what libtiff itself writes to standard error meanwhile."""
    if image.format != "TIFF" or sys.stderr is None:
        image.load()
        return
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        image.load()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _over_white(image: Image.Image, given: ImageSetting) -> Image.Image:
    """Puts an image with transparent parts over white."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
    rgba = image.convert(straight).convert("RGBA")
    if rgba.getchannel("A").getextrema() == (255, 255):
        return image
    name = given.path or "The image"
    logger.warning("%s is transparent in places; they become white.", name)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), rgba)


def _eight_bits(turned: Image.Image, source: Image.Image, given: ImageSetting) -> Image.Image:
    """Scales grey of 16 or 32 bits, or floating, to 8 bits; `source` is the image as opened."""
    import numpy as np
    from PIL import Image

    values = np.asarray(turned, dtype=np.float32)
    low, high = float(values.min()), float(values.max())
    white = _white(source, high)
    if white is None or low < 0 or high > white:
        allowed = "0 to 1 or 0 to 255" if source.mode == "F" else "0 to 255 or 0 to 65535"
        why = f"has grey values from {low:g} to {high:g}"
        raise given.refused(why, f"they must be from {allowed}")
    grey = np.rint(values * np.float32(255) / np.float32(white)).astype(np.uint8)
    if _tag(source, _PHOTOMETRIC, 1) == 0:  # TIFF's "white is zero", which Pillow overlooks here
        grey = 255 - grey
    eight = Image.fromarray(grey)
    if "transparency" in source.info:  # one grey value of the file is transparent
        opaque = values != source.info["transparency"]
        eight.putalpha(Image.fromarray(opaque.astype(np.uint8) * np.uint8(255)))
    return eight


def _white(image: Image.Image, high: float) -> float | None:
    """Returns the white of grey with more than 8 bits; None where `high` does not tell (NaN).

    Floating values to 1 are read as 0 to 1. Values to 255 are read as 0 to 255, but only if some
    are above 16: a highlight of 1.2 in an image from 0 to 1 would make all of it black.
    """
    if image.mode == "F":
        if high <= 1:
            return 1
        return 255 if 16 < high <= 255 else None
    if image.mode == "I" and image.format != "PNG":  # Pillow 10 opens 16-bit PNG as "I"
        return 255 if high <= 255 else 65535
    return 2 ** _tag(image, _BITS_PER_SAMPLE, (16,))[0] - 1  # 12-bit TIFF comes as "I;16", too


def _tag(image: Image.Image, number: int, default: T) -> T:
    """Returns a tag of an image that was opened from a TIFF file."""
    return getattr(image, "tag_v2", {}).get(number, default)


def _array(value: object, given: ImageSetting) -> np.ndarray:
    """Returns a numpy array or torch tensor as an array; torch is looked up, not imported."""
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, np.ndarray):
        return value
    remedy = "give a path, a PIL image, or an array or tensor [H,W,3]"
    raise given.refused(f"is {shown(value)}", remedy)


def _levels(array: np.ndarray, given: ImageSetting) -> np.ndarray:
    """Converts [H,W,3] or [3,H,W], uint8 or floating in [0, 1], to [H,W,3] uint8."""
    import numpy as np

    shape, last = list(array.shape), array.ndim - 1
    channels = next((axis for axis in (last, 0) if array.ndim == 3 and shape[axis] == 3), None)
    if channels is None or not array.size:
        raise given.refused(f"has shape {shape}", "an image is [H,W,3] or [3,H,W]")
    array = np.moveaxis(array, channels, -1)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind != "f":
        raise given.refused(f"has dtype {array.dtype}", "an image is uint8 or floating")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # NaN, too
        why = f"has values from {low:g} to {high:g}"
        raise given.refused(why, "floating ones must be from 0 to 1")
    return np.rint(array * 255).astype(np.uint8)
