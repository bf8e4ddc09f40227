"""Color profiles and gammas of images, and the large metadata of PNGs."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin

from wan.media.images import convert_to_image, read_image

# Columns: red, green and blue in XYZ (D50). Published by ICC and in Apple's profile.
SRGB = [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]
DISPLAY_P3 = [
    [0.51512, 0.29198, 0.15710],
    [0.24120, 0.69225, 0.06657],
    [-0.00105, 0.04189, 0.78407],
]
GAMMA = 563 / 256  # of the profile, about 2.2
COLORS = np.array([[200, 60, 40], [30, 180, 90], [20, 40, 230], [128, 128, 128]], np.uint8)


def make_profile() -> bytes:
    """An ICC profile of version 2 with the primaries of Display P3."""

    def fixed(values: list[float]) -> bytes:
        return struct.pack(">3i", *(round(value * 65536) for value in values))

    text = b"Display P3\0"
    description = b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78)
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(GAMMA * 256)) + bytes(2)
    tags = {b"desc": description, b"cprt": b"text" + bytes(4) + b"none\0\0\0\0"}
    tags[b"wtpt"] = b"XYZ " + bytes(4) + fixed([0.9642, 1.0, 0.8249])
    for name, column in zip((b"r", b"g", b"b"), zip(*DISPLAY_P3, strict=True), strict=True):
        tags[name + b"XYZ"] = b"XYZ " + bytes(4) + fixed([*column])
        tags[name + b"TRC"] = curve
    table, data = struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        offset = 128 + 4 + 12 * len(tags) + len(data)
        table, data = table + name + struct.pack(">II", offset, len(content)), data + content
    size = struct.pack(">I", 128 + len(table) + len(data))
    head = size + bytes(4) + struct.pack(">I", 0x02100000) + b"mntrRGB XYZ " + bytes(12) + b"acsp"
    return (head + bytes(28) + fixed([0.9642, 1.0, 0.8249])).ljust(128, b"\0") + table + data


def encode_srgb(linear: np.ndarray) -> np.ndarray:
    linear = linear.clip(0, 1)
    values = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return values * 255


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "tiff"])
def test_display_p3(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The conversion in closed form; one line says so."""
    path, profile = tmp_path / f"a.{kind}", make_profile()
    block = Image.fromarray(np.repeat(np.repeat(COLORS[:, None], 16, 0), 16, 1))
    lossless = {"quality": 100, "subsampling": 0} if kind == "jpg" else {"lossless": True}
    block.save(path, icc_profile=profile, **(lossless if kind in ("jpg", "webp") else {}))
    linear = (COLORS / 255.0) ** GAMMA
    expected = encode_srgb(linear @ np.array(DISPLAY_P3).T @ np.linalg.inv(np.array(SRGB)).T)
    caplog.set_level("INFO")
    for image in (read_image(path), convert_to_image(Image.open(path))):
        actual = np.asarray(image)[8::16, 8].astype(float)
        assert np.abs(actual - expected).max() <= (4 if kind == "jpg" else 2)
    assert np.abs(expected - COLORS).max() > 15
    assert len(caplog.messages) == 2 and all("Display P3" in text for text in caplog.messages)


def test_other_modes_with_a_profile(tmp_path: Path) -> None:
    """Transparent parts stay transparent, and a palette is converted like its colors."""
    color, profile = tuple(map(int, COLORS[0])), make_profile()
    Image.new("RGB", (8, 8), color).save(tmp_path / "a.png", icc_profile=profile)
    expected = read_image(tmp_path / "a.png").getpixel((0, 0))
    Image.new("RGBA", (8, 8), (*color, 255)).save(tmp_path / "b.png", icc_profile=profile)
    Image.new("RGB", (8, 8), color).quantize(4).save(tmp_path / "c.png", icc_profile=profile)
    for name in "bc":
        assert read_image(tmp_path / f"{name}.png").getpixel((0, 0)) == expected, name
    Image.new("RGBA", (8, 8), (*color, 0)).save(tmp_path / "d.png", icc_profile=profile)
    assert read_image(tmp_path / "d.png").getpixel((0, 0)) == (255, 255, 255)


def test_profiles_that_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sRGB, silently; damaged ones, and those of another kind of colors, with a line."""
    picture = Image.fromarray(COLORS[None])
    caplog.set_level("INFO")
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile, num_lines in ((srgb, 0), (b"damaged", 1), (make_profile()[:300], 1)):
        caplog.clear()
        picture.save(tmp_path / "a.png", icc_profile=profile)
        assert np.array_equal(np.asarray(read_image(tmp_path / "a.png")), COLORS[None])
        assert len(caplog.messages) == num_lines


@pytest.mark.parametrize(
    ("gamma", "is_srgb"),
    [(1.0, False), (0.6, False), (0.45, True), (0.45455, True), (1.0, True)],
)
def test_gamma_of_a_png(gamma: float, is_srgb: bool, tmp_path: Path) -> None:
    """gAMA of linear light is applied, that of sRGB and beside an sRGB chunk is not."""
    chunks = PngImagePlugin.PngInfo()
    if is_srgb and gamma == 1.0:
        chunks.add(b"sRGB", b"\0")
    chunks.add(b"gAMA", struct.pack(">I", round(gamma * 100_000)))
    for values in (COLORS[None], COLORS):  # of colors, and grey
        Image.fromarray(values).save(tmp_path / "a.png", pnginfo=chunks)
        expected = values if is_srgb else encode_srgb((values / 255.0) ** (1 / gamma)).round()
        expected = expected if values.ndim == 3 else np.stack([expected] * 3, -1)
        assert np.array_equal(np.asarray(read_image(tmp_path / "a.png")), expected)


def test_large_metadata_of_a_png(tmp_path: Path) -> None:
    """Texts and profiles may be larger than Pillow's own limits allow.

    This holds for a new process, too, which has loaded none of Pillow's formats.
    """
    text = "node " * 400_000
    cases = {name: PngImagePlugin.PngInfo() for name in ("zTXt", "iTXt", "tEXt", "many", "both")}
    cases["zTXt"].add_text("workflow", text, zip=True)
    cases["iTXt"].add_itxt("workflow", text, zip=True)
    cases["tEXt"].add_text("workflow", text)
    for index in range(70):
        cases["many"].add_text(f"part {index}", text[:1_000_000], zip=True)
    cases["both"].add_text("workflow", text, zip=True)
    exif = Image.Exif()
    exif[274] = 6  # a quarter turn
    for name, chunks in cases.items():
        profile = make_profile() + bytes(2_000_000) if name == "both" else None
        Image.fromarray(COLORS[None]).save(
            tmp_path / "a.png", pnginfo=chunks, exif=exif, icc_profile=profile
        )
        image = read_image(tmp_path / "a.png")
        assert image.size == (1, 4), name
        if name == "zTXt":
            command = "import sys; from pathlib import Path; from wan.media import images; "
            command += "assert images.is_still_image(Path(sys.argv[1]))"
            subprocess.run([sys.executable, "-c", command, tmp_path / "a.png"], check=True)
        if profile is None:
            assert np.array_equal(np.asarray(image)[:, 0], COLORS), name
