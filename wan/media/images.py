"""Converts an image from a file or a Python object to 8-bit sRGB in its upright orientation.

The command line and the Python classes get the same pixels from the same file. This module does not
import torch, and imports Pillow and numpy on use, so that a wrong path is refused quickly.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from wan.settings.errors import InputError, escape_controls
from wan.settings.values import expand_home, format_value
from wan.utils.files import check_input_file
from wan.utils.log import logger

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

T = TypeVar("T")
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "BMP", "TIFF", "GIF")
"""Pillow's names of the allowed formats (AVIF if Pillow was built with it).

JPEG includes MPO, a format of phones with further images after the first one.
"""
_ACCEPTED = "PNG, JPEG, WebP, AVIF, BMP, TIFF or GIF"
_MAX_TEXT_BYTES, _MAX_ALL_TEXT_BYTES = 16 << 20, 256 << 20  # of a PNG's texts and color profile
_SRGB_GAMMA = 1 / 2.2  # of PNG's gAMA
_COLOR_MODES = ("RGB", "RGBA", "L", "LA", "P", "PA")
_MAX_GAMMA_ERROR = 0.05  # relative; 0.45455 and 0.45 are sRGB's
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SUBFILE_TYPE = 258, 262, 254  # TIFF tags


@dataclass(frozen=True)
class ImageSetting:
    """The setting of an image and the path in it, for messages."""

    setting: str
    path: str | None = None

    def input_error(self, why: str, remedy: str) -> InputError:
        return InputError(f"`{self.setting}`", self.path, why, remedy)


def read_image_setting(values: Mapping[str, Any], name: str) -> Image.Image | None:
    """Returns the image that a setting names or, in Python, holds; None without it."""
    return None if values.get(name) is None else convert_to_image(values[name], name)


def read_image(path: Path, setting: str = "image") -> Image.Image:
    """Reads and decodes an image file to RGB, rotated by its EXIF orientation.

    A file with several images (MPO, TIFF) is read up to the first image; animations are refused.
    Transparent parts are composited over white, with a warning. Grey values of more than 8 bits are
    scaled.

    Args:
        path: A regular file in one of `FORMATS`.
        setting: Name of the setting, for messages.

    Raises:
        InputError: The path is no such file, or the file is damaged.
    """
    image_setting = ImageSetting(setting, str(path))
    check_input_file(f"`{setting}`", path, "give an image")
    # Opened as a file object: from a path, Pillow 13 memory-maps a TIFF, and confuses width and
    # height if the orientation rotates it.
    with _catch_decoder_errors(image_setting), path.open("rb") as file:
        image = _open_image(file)
        _check_still_image(image, image_setting)
        return _convert_to_rgb(image, image_setting)


def _open_image(file: BinaryIO) -> Image.Image:
    """Opens an image in one of `FORMATS`."""
    from PIL import Image, PngImagePlugin

    # Programs store the history of an image in it, and profiles may have large tables.
    PngImagePlugin.MAX_TEXT_CHUNK = _MAX_TEXT_BYTES
    PngImagePlugin.MAX_TEXT_MEMORY = _MAX_ALL_TEXT_BYTES
    Image.init()
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def is_still_image(path: Path) -> bool:
    """Returns whether a file is an image in one of `FORMATS`, intact or not, and no animation."""
    if not path.is_file():
        return False
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            with _open_image(file) as image:
                return image.format in ("MPO", "TIFF") or getattr(image, "n_frames", 1) == 1
    except Exception:  # its type depends on the damage
        return False


def convert_to_luma(frames_FHW3: np.ndarray) -> np.ndarray:
    """Converts frames, uint8 [F,H,W,3], to luma, [F,H,W] (Rec. 601); gray stays the same."""
    import numpy as np
    from PIL import Image

    return np.stack([np.asarray(Image.fromarray(frame).convert("L")) for frame in frames_FHW3])


def convert_to_image(value: object, setting: str = "image") -> Image.Image:
    """Converts a Python value to an RGB image, with the rules of `read_image`.

    Args:
        value: A path (`~` is the home folder), a PIL image, or a numpy array or torch tensor
            [H,W,3] or [3,H,W], uint8 or floating in [0, 1]. An animation in a PIL image gives its
            current frame.
        setting: Name of the setting, for messages.

    Raises:
        InputError: The value has another type, or the image is damaged.
    """
    from PIL import Image

    if isinstance(value, str | Path):
        return read_image(expand_home(f"`{setting}`", str(value)), setting)
    source = ImageSetting(setting)
    with _catch_decoder_errors(source):
        if isinstance(value, Image.Image):
            return _convert_to_rgb(value, source)
        return Image.fromarray(_convert_to_uint8_rgb(_convert_to_array(value, source), source))


@contextmanager
def _catch_decoder_errors(image_setting: ImageSetting) -> Iterator[None]:
    """Turns every error of Pillow's decoders into an InputError, and hides Pillow's warnings.

    All of Exception is caught: on damaged files the decoders raise ValueError, SyntaxError,
    NotImplementedError, AttributeError, struct.error, ..., depending on the broken byte.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except InputError:
        raise
    except UnidentifiedImageError as error:
        why = f"cannot be read as an image: it is no intact {_ACCEPTED}"
        raise image_setting.input_error(why, "convert it to one") from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise image_setting.input_error(
            "has too many pixels to be decoded", "scale it down"
        ) from error
    except Exception as error:
        why = f"cannot be read as an image ({_describe_decoder_error(error)})"
        raise image_setting.input_error(why, "give a PNG or JPEG") from error


def _describe_decoder_error(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return format_value(error, str) or type(error).__name__


def _check_still_image(image: Image.Image, image_setting: ImageSetting) -> None:
    """Refuses animations, and TIFFs whose first page is a thumbnail."""
    if image.format == "TIFF":
        if _get_tiff_tag(image, _SUBFILE_TYPE, 0) & 1:
            why = "begins with a thumbnail, as raw files of cameras do"
            raise image_setting.input_error(why, "export it as PNG or JPEG")
    elif image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        raise image_setting.input_error(f"is animated ({frames} frames)", "give a still image")


def _convert_to_rgb(image: Image.Image, image_setting: ImageSetting) -> Image.Image:
    """Converts an image of any mode to 8-bit RGB: upright by its EXIF data, over white."""
    from PIL import ImageOps

    width, height = image.size
    if not width or not height:
        raise image_setting.input_error(f"has no pixels ({width}x{height})", "give another image")
    _decode_pixels(image)
    upright = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        upright = _scale_to_eight_bits(upright, image, image_setting)
    name = image_setting.path or "The image"
    return _composite_over_white(_convert_to_srgb(upright, name), image_setting).convert("RGB")


def _decode_pixels(image: Image.Image) -> None:
    """Decodes an image, and discards the messages of libtiff on standard error."""
    if image.format != "TIFF" or sys.stderr is None:
        image.load()
        return
    saved_stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        image.load()
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)
        os.close(devnull)


def _composite_over_white(image: Image.Image, image_setting: ImageSetting) -> Image.Image:
    """Composites an image with transparent parts over white, with a warning."""
    from PIL import Image

    if not image.has_transparency_data:
        return image
    straight = {"La": "LA", "RGBa": "RGBA"}.get(image.mode, image.mode)
    rgba = image.convert(straight).convert("RGBA")
    if rgba.getchannel("A").getextrema() == (255, 255):
        return image
    name = image_setting.path or "The image"
    logger.warning("%s is transparent in places; they become white.", name)
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), rgba)


def _convert_to_srgb(image: Image.Image, name: str) -> Image.Image:
    """Returns an image in sRGB; logs one line if its colors change, or cannot be converted.

    Phones store Display P3, cameras Adobe RGB, and renderers linear light. A profile of sRGB itself
    changes nothing.

    Args:
        name: For the log.
    """
    profile, gamma = image.info.get("icc_profile"), image.info.get("gamma")
    if profile and image.mode in (*_COLOR_MODES, "CMYK"):
        return _apply_profile(image, profile, name)
    if profile or "srgb" in image.info or not isinstance(gamma, float):
        return image
    is_srgb = abs(gamma / _SRGB_GAMMA - 1) <= _MAX_GAMMA_ERROR
    if is_srgb or not 0.01 < gamma < 100 or image.mode not in _COLOR_MODES:
        return image
    logger.info("%s has a gamma of %.3g and is converted to sRGB.", name, gamma)
    colors, alpha = _split_alpha(image)
    table = [round(255 * _encode_srgb((value / 255) ** (1 / gamma))) for value in range(256)]
    return _join_alpha(colors.point(table * len(colors.getbands())), alpha)


def _apply_profile(image: Image.Image, profile: bytes, name: str) -> Image.Image:
    try:
        from PIL import ImageCms
    except ImportError:
        logger.info("%s has a color profile, which this Pillow cannot apply.", name)
        return image
    colors, alpha = _split_alpha(image)
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        description = " ".join(ImageCms.getProfileDescription(source).split())
        if "sRGB" in description:
            return image
        target = ImageCms.createProfile("sRGB")
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        converted = ImageCms.profileToProfile(colors, source, target, intent, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        reason = escape_controls(str(error))
        logger.info("%s has a color profile that cannot be applied (%s).", name, reason)
        return image
    logger.info("%s is converted from its color profile (%s) to sRGB.", name, description)
    return image if converted is None else _join_alpha(converted, alpha)


def _split_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Returns the colors, without a palette, and the alpha channel."""
    if not image.has_transparency_data:
        return image.convert("RGB") if image.mode in ("P", "PA") else image, None
    rgba = image.convert("RGBA")
    return rgba.convert("RGB" if image.mode in ("P", "PA", "RGB", "RGBA") else "L"), (
        rgba.getchannel("A")
    )


def _join_alpha(colors: Image.Image, alpha: Image.Image | None) -> Image.Image:
    if alpha is not None:
        colors.putalpha(alpha)
    return colors


def _encode_srgb(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055


def _scale_to_eight_bits(
    upright: Image.Image, source: Image.Image, image_setting: ImageSetting
) -> Image.Image:
    """Scales grey values of 16 or 32 bits, or floating ones, to 8 bits.

    Args:
        upright: The rotated image.
        source: The image as opened, with the TIFF tags.
    """
    import numpy as np
    from PIL import Image

    values = np.asarray(upright, dtype=np.float32)
    low, high = float(values.min()), float(values.max())
    white = _find_white_level(source, high)
    if white is None or low < 0 or high > white:
        allowed = "0 to 1 or 0 to 255" if source.mode == "F" else "0 to 255 or 0 to 65535"
        why = f"has grey values from {low:g} to {high:g}"
        raise image_setting.input_error(why, f"they must be from {allowed}")
    grey = np.rint(values * np.float32(255) / np.float32(white)).astype(np.uint8)
    # TIFF's "white is zero", which Pillow ignores here
    if _get_tiff_tag(source, _PHOTOMETRIC, 1) == 0:
        grey = 255 - grey
    eight = Image.fromarray(grey)
    if "transparency" in source.info:  # one grey value of the file is transparent
        opaque = values != source.info["transparency"]
        eight.putalpha(Image.fromarray(opaque.astype(np.uint8) * np.uint8(255)))
    return eight


def _find_white_level(image: Image.Image, high: float) -> float | None:
    """Returns the grey value that is white; None if it is unclear (NaN).

    Floating values up to 1 are read as 0 to 1. Values up to 255 are read as 0 to 255, but only if
    some are above 16: a highlight of 1.2 in an image from 0 to 1 would make all of it black.
    """
    if image.mode == "F":
        if high <= 1:
            return 1
        return 255 if 16 < high <= 255 else None
    if image.mode == "I" and image.format != "PNG":  # Pillow 10 opens 16-bit PNG as "I"
        return 255 if high <= 255 else 65535
    return 2 ** _get_tiff_tag(image, _BITS_PER_SAMPLE, (16,))[0] - 1  # "I;16" is also 12-bit TIFF


def _get_tiff_tag(image: Image.Image, number: int, default: T) -> T:
    """Returns a tag of a TIFF image, or the default for other formats."""
    return getattr(image, "tag_v2", {}).get(number, default)


def _convert_to_array(value: object, image_setting: ImageSetting) -> np.ndarray:
    """Converts a numpy array or torch tensor to an array, without importing torch."""
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        return (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if isinstance(value, np.ndarray):
        return value
    remedy = "give a path, a PIL image, or an array or tensor [H,W,3]"
    raise image_setting.input_error(f"is {format_value(value)}", remedy)


def _convert_to_uint8_rgb(array: np.ndarray, image_setting: ImageSetting) -> np.ndarray:
    """Converts [H,W,3] or [3,H,W], uint8 or floating in [0, 1], to [H,W,3] uint8."""
    import numpy as np

    shape, last = list(array.shape), array.ndim - 1
    channels = next((axis for axis in (last, 0) if array.ndim == 3 and shape[axis] == 3), None)
    if channels is None or not array.size:
        raise image_setting.input_error(f"has shape {shape}", "an image is [H,W,3] or [3,H,W]")
    array = np.moveaxis(array, channels, -1)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise image_setting.input_error(f"has dtype {array.dtype}", "an image is uint8 or floating")
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # NaN, too
        why = f"has values from {low:g} to {high:g}"
        raise image_setting.input_error(why, "floating ones must be from 0 to 1")
    return np.rint(array * 255).astype(np.uint8)


def convert_image_to_tensor(image: Image.Image) -> Tensor:
    """Converts an image to [3,H,W] float32 in [-1, 1]."""
    import numpy as np
    import torch

    array = torch.from_numpy(np.array(image.convert("RGB")))
    return array.permute(2, 0, 1).float().div_(255).sub_(0.5).div_(0.5)


def check_nonzero_size(image: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of a video; refuses an image so narrow that a side would vanish."""
    if not all(size):
        raise InputError(
            f"The image is {image[0]}x{image[1]}, and at the chosen `size` one side of the video "
            "would vanish",
            remedy="crop the image, or choose a larger `size`",
        )
    return size


def scale_and_crop_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Scales an image to cover (width, height), and crops it to its center."""
    from PIL import Image

    width, height = size
    scale = max(width / image.width, height / image.height)
    resized = image.convert("RGB").resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
    )
    x_offset, y_offset = (resized.width - width) // 2, (resized.height - height) // 2
    return resized.crop((x_offset, y_offset, x_offset + width, y_offset + height))
