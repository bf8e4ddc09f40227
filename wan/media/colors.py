"""Converts images with a color profile or gamma of their own to sRGB, as models expect."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from wan.settings.errors import escape_controls
from wan.utils.log import logger

if TYPE_CHECKING:
    from PIL import Image

_SRGB_GAMMA = 1 / 2.2  # of PNG's gAMA
_MODES = ("RGB", "RGBA", "L", "LA", "P", "PA")
_MAX_GAMMA_ERROR = 0.05  # relative; 0.45455 and 0.45 are sRGB's


def convert_to_srgb(image: Image.Image, name: str) -> Image.Image:
    """Returns an image in sRGB; logs one line if its colors change, or cannot be converted.

    Phones store Display P3, cameras Adobe RGB, and renderers linear light. A profile of sRGB itself
    changes nothing.

    Args:
        name: For the log.
    """
    profile, gamma = image.info.get("icc_profile"), image.info.get("gamma")
    if profile and image.mode in (*_MODES, "CMYK"):
        return _apply_profile(image, profile, name)
    if profile or "srgb" in image.info or not isinstance(gamma, float):
        return image
    is_srgb = abs(gamma / _SRGB_GAMMA - 1) <= _MAX_GAMMA_ERROR
    if is_srgb or not 0.01 < gamma < 100 or image.mode not in _MODES:
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
