"""Images in: formats, modes, EXIF, transparency, damaged files; file and Python value alike."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import warnings
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from tests.refusals import check_refusals, get_refusal
from wan.media import images
from wan.settings.errors import InputError

SIZE = (24, 16)
RGB = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
SMOOTH = np.stack(np.meshgrid(np.arange(24) * 10, np.arange(16) * 15, indexing="xy"), -1)
SMOOTH = np.concatenate((SMOOTH, np.full((16, 24, 1), 99)), -1).astype(np.uint8)
AVIF = ("avif",) if features.check("avif") else ()  # an older Pillow reads none


def rgb(array: np.ndarray = RGB) -> Image.Image:
    return Image.fromarray(array)


def save_image(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


def encode_image(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG; the first chunk of a file ends at byte 33."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


# Accepted images


def test_a_file_and_what_python_holds_of_it_give_the_same_pixels(tmp_path: Path) -> None:
    for extension in ("png", "jpg", "webp", "bmp", "tiff", "gif", *AVIF):
        path = save_image(tmp_path, rgb(SMOOTH), f"x.{extension}")
        expected = np.asarray(Image.open(path).convert("RGB"))
        values = path, str(path), Image.open(path), expected
        for image in (images.read_image(path), *map(images.convert_to_image, values)):
            assert np.array_equal(pixels(image), expected), extension
        assert np.abs(expected.astype(int) - SMOOTH).mean() < 12, "the lossy formats"


TURNS = {  # EXIF orientation -> the stored array as it is shown
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


def test_turned_as_exif_says(tmp_path: Path) -> None:
    exif, wrong = Image.Exif(), []
    modes = dict.fromkeys(("png", "webp", *AVIF), ("RGB",))
    modes |= dict.fromkeys(("jpg", "tiff"), ("RGB", "L", "CMYK"))
    for extension, mode in [(name, mode) for name in modes for mode in modes[name]]:
        stored = rgb(SMOOTH).convert(mode)
        for orientation, turn in TURNS.items():
            exif[0x0112] = orientation
            path = save_image(tmp_path, stored, f"x.{extension}", exif=exif)
            expected = turn(np.asarray(stored.convert("RGB"))).astype(int)
            for source in (path, Image.open(io.BytesIO(path.read_bytes()))):
                actual = pixels(images.convert_to_image(source))
                if actual.shape != expected.shape or np.abs(actual - expected).mean() >= 12:
                    wrong.append((extension, mode, orientation))
    assert not wrong


def test_of_several_images_the_first_is_taken(tmp_path: Path) -> None:
    """A phone's JPEG followed by a depth map or a preview; a TIFF with pages."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, options in (("x.mpo", {"exif": exif}), ("x.tiff", {})):
        options |= {"save_all": True, "append_images": [Image.new("L", (5, 5))]}
        path = save_image(tmp_path, rgb(), name, **options)
        assert Image.open(path).n_frames == 2
    phone = images.read_image((tmp_path / "x.mpo").rename(tmp_path / "phone.jpg"))
    assert phone.size == (SIZE[1], SIZE[0])
    assert np.array_equal(pixels(images.read_image(tmp_path / "x.tiff")), RGB)


def test_a_very_large_image_is_read_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow warns from half of its pixel limit on; phones take 108 million pixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 3 - 1)
    path = save_image(tmp_path, rgb(), "x.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(pixels(images.read_image(path)), RGB)


# More than 8 bits

DEEP = np.linspace(0, 65535, 24 * 16).round().astype(np.uint16).reshape(16, 24)


def grey(image: Image.Image) -> np.ndarray:
    red, green, blue = np.moveaxis(pixels(image), -1, 0)
    assert np.array_equal(red, green) and np.array_equal(red, blue)
    return red


def test_grey_of_16_bits(tmp_path: Path) -> None:
    exif = Image.Exif()
    for name, orientation in product(("x.png", "x.tiff"), (1, 6)):
        exif[0x0112] = orientation
        path = save_image(tmp_path, Image.fromarray(DEEP), name, exif=exif)
        expected = np.rint(DEEP / 257)
        expected = np.rot90(expected, -1) if orientation == 6 else expected
        for source in (path, Image.open(io.BytesIO(path.read_bytes()))):
            actual = grey(images.convert_to_image(source))
            assert np.array_equal(actual, expected), (name, orientation)


def grey_tiff(bits: int, photometric: int, data: bytes, size: tuple[int, int]) -> bytes:
    """A TIFF of one strip, uncompressed, little-endian."""
    entries = [(256, size[0]), (257, size[1]), (258, bits), (259, 1), (262, photometric)]
    entries += [(273, 8 + 2 + 9 * 12 + 4), (277, 1), (278, size[1]), (279, len(data))]
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + struct.pack("<I", 0) + data


def test_grey_tiff_of_other_depths_and_senses(tmp_path: Path) -> None:
    twelve, path = bytes([0x00, 0x0F, 0xFF, 0x80, 0x00, 0x00]), tmp_path / "x.tif"
    sixteen = struct.pack("<4H", 0, 65535, 32768, 257)
    for bits, photometric, data, expected in (
        (12, 1, twelve, [0, 255, 128, 0]),
        (16, 1, sixteen, [0, 255, 128, 1]),
        (16, 0, sixteen, [255, 0, 127, 254]),
    ):
        path.write_bytes(grey_tiff(bits, photometric, data, (4, 1)))
        assert grey(images.read_image(path))[0].tolist() == expected, (bits, photometric)


UNIT = np.linspace(0, 1, 24 * 16, dtype=np.float32).reshape(16, 24)


def test_grey_of_32_bits(tmp_path: Path) -> None:
    small, large = ((UNIT * top).astype(np.int32) for top in (200, 65535))
    table = {
        "shares": (UNIT, UNIT * 255),
        "dark shares": (UNIT / 2, UNIT / 2 * 255),
        "levels": (UNIT * 255, UNIT * 255),
        "whole levels": (small, small),
        "16 bits": (large, large / 257),
    }
    for name, (values, expected) in table.items():
        path = save_image(tmp_path, Image.fromarray(values), "x.tiff")
        actual = grey(images.read_image(path))
        assert np.abs(actual - expected).max() <= 0.5 + 1e-4, name
        assert np.array_equal(grey(images.convert_to_image(Image.fromarray(values))), actual), name


# Transparency and colour

ALPHA = np.linspace(0, 255, 24 * 16).round().astype(np.uint8).reshape(16, 24)
RGBA = np.dstack((RGB, ALPHA))
WARNING = "is transparent in places; they become white"


def test_transparent_parts_become_white(caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("RGBA", "RGBa", "LA", "La"):
        image, array = Image.fromarray(RGBA), RGB
        if mode in ("LA", "La"):
            image = image.convert("LA")
            array = np.repeat(np.asarray(image)[..., :1], 3, -1)
        actual = pixels(images.convert_to_image(image.convert(mode)))
        share = ALPHA[..., None] / 255
        error = np.abs(actual - (array * share + 255 * (1 - share))).max()
        assert error <= (1 if mode[-1] == "A" else 2), mode  # "a" is rounded twice
        assert caplog.messages == [f"The image {WARNING}."], mode
        caplog.clear()
    opaque = Image.fromarray(np.dstack((RGB, np.full_like(ALPHA, 255))))
    assert np.array_equal(pixels(images.convert_to_image(opaque)), RGB)
    assert not caplog.messages


def test_a_fully_transparent_file_is_white(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hidden colours are not shown."""
    image = Image.fromarray(np.dstack((RGB, np.zeros_like(ALPHA))))
    for name in ("x.png", "x.tiff", "x.gif"):
        path = save_image(tmp_path, image, name)
        assert (pixels(images.read_image(path)) == 255).all(), name
        assert caplog.messages == [f"{path} {WARNING}."]
        caplog.clear()


def test_one_transparent_colour(tmp_path: Path) -> None:
    """The tRNS chunk of a PNG."""
    expected, path = np.repeat([[0], [255], [0], [0]], 4, axis=1), tmp_path / "x.png"
    for mode in ("L", "RGB", "P", "I;16"):
        array = np.zeros((4, 4), np.uint16 if mode == "I;16" else np.uint8)
        array[1] = 200
        image = Image.fromarray(array)
        if mode == "I;16":  # Pillow 10 does not write it
            data = encode_image(image, "PNG")
            path.write_bytes(data[:33] + chunk(b"tRNS", struct.pack(">H", 200)) + data[33:])
        else:
            key = (200,) * 3 if mode == "RGB" else 200
            save_image(tmp_path, image.convert(mode), "x.png", transparency=key)
        assert np.array_equal(grey(images.read_image(path)), expected), mode


def test_colours_of_every_mode() -> None:
    """Red, white and black, as far as the mode can hold them."""
    three, wrong = Image.new("RGB", (3, 1)), {}
    three.putdata([(255, 0, 0), (255, 255, 255), (0, 0, 0)])
    lab = Image.frombytes("LAB", (3, 1), bytes([138, 208, 195, 255, 128, 128, 0, 128, 128]))
    lab = Image.merge("LAB", [lab.getchannel(0), *map(_convert_to_signed, lab.split()[1:])])
    image_by_mode = {"LAB": lab, "PA": three.quantize(3).convert("PA")}
    image_by_mode |= {x: three.convert(x) for x in ("1", "L", "P", "CMYK", "YCbCr", "HSV", "RGBX")}
    for mode, image in image_by_mode.items():
        red, white, black = pixels(images.convert_to_image(image))[0]
        coloured = mode in ("1", "L") or (red[0] >= 245 and (red[1:] <= 25).all())
        if not ((white >= 250).all() and (black <= 5).all() and coloured):
            wrong[mode] = red, white, black
    assert not wrong


def _convert_to_signed(channel: Image.Image) -> Image.Image:
    """Pillow keeps a and b of LAB as signed bytes."""
    return channel.point(lambda value: (value - 128) % 256)


# Arrays and tensors


def test_arrays_and_tensors() -> None:
    for channels, dtype in product(("first", "last"), ("uint8", "float16", "float32", "float64")):
        array = (RGB if dtype == "uint8" else RGB / 255).astype(dtype)
        array = array if channels == "last" else array.transpose(2, 0, 1)
        for value in (array, torch.tensor(array).requires_grad_(dtype == "float32")):
            assert np.array_equal(pixels(images.convert_to_image(value)), RGB), (channels, dtype)
        if dtype == "float32":  # numpy has no bfloat16
            rounded = pixels(images.convert_to_image(torch.tensor(array).bfloat16()))
            assert np.abs(rounded - RGB).max() <= 1


def test_values_that_are_no_image(tmp_path: Path) -> None:
    """Also opened images whose files are damaged or closed."""
    damaged = save_image(tmp_path, rgb(), "x.png")
    damaged.write_bytes(damaged.read_bytes()[:300])
    closed = Image.open(save_image(tmp_path, rgb(), "y.png"))
    closed.close()
    low, high = (np.full((4, 4), 7, dtype=np.int32) for _ in range(2))
    low[0, 0], high[0, 0] = -1, 65536
    table: dict[str, Any] = {
        "None": None,
        "lists": [[1, 2]],
        "four channels": np.zeros((4, 4, 4), np.uint8),
        "four axes": torch.zeros(1, 3, 4, 4),
        "no rows": torch.zeros(0, 4, 3),
        "int64": np.zeros((4, 4, 3), np.int64),
        "above 1": torch.full((3, 4, 4), 1.5),
        "below 0": torch.full((3, 4, 4), -1.0),
        "NaN": torch.full((3, 4, 4), float("nan")),
        "meta": torch.zeros(3, 4, 4, device="meta"),
        "no pixels": Image.new("RGB", (0, 5)),
        "integers below 0": Image.fromarray(low),
        "integers above 65535": Image.fromarray(high),
        "a damaged file": Image.open(damaged),
        "a closed file": closed,
        "no name": "",
        "no file at home": "~/no such image.png",
    }
    messages = {name: get_refusal(images.convert_to_image, value) for name, value in table.items()}
    assert max(map(len, messages.values())) < 200
    libraries = r"(?<=read as an image \().*(?=\))"
    check_refusals("images: values", messages, [re.escape(str(Path.home())), libraries])


def test_of_a_damaged_tiff_only_the_sentence_is_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """libtiff itself prints another message for each kind of compression."""
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        path = save_image(tmp_path, rgb(), "x.tiff", compression=compression)
        data = bytearray(path.read_bytes())
        for offset in range(20, len(data) // 2, 37):
            data[offset] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(InputError, match="cannot be read as an image"):
            images.read_image(path)
    os.write(2, b"as before")
    assert capfd.readouterr().err == "as before"


# Paths and files that are no image


def bomb() -> bytes:
    """A PNG of a few bytes whose header claims 10 thousand million pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0"))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
CONTENT = {
    "empty": b"",
    "text": b"no image at all",
    "EPS": EPS,
    "PPM": b"P6 1 1 255\n\0\0\0",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
    "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "a PNG of too many pixels": bomb(),
}


def test_files_that_are_no_image(tmp_path: Path) -> None:
    """Unsupported formats, animations, raw camera files, and grey values in no usual range.

    1.2 may be a highlight above white, or nearly black on a scale of 255: it is refused.
    """
    messages, path = {}, tmp_path / "x.png"
    for kind, content in CONTENT.items():
        path.write_bytes(content)
        messages[kind] = get_refusal(images.read_image, path)
    animated = set()
    for kind in ("gif", "webp", "png", *AVIF):
        path = tmp_path / f"x.{kind}"
        rgb().save(path, save_all=True, append_images=[rgb(SMOOTH)])
        animated.add(get_refusal(images.read_image, path).replace(path.name, "x"))
    (messages["animated"],) = animated
    messages["raw"] = get_refusal(
        images.read_image, save_image(tmp_path, rgb(), "x.tiff", tiffinfo={254: 1})
    )
    for bad in (np.nan, np.inf, -0.5, 1.2, 3.5, 256):
        values = UNIT.copy()
        values[3, 4] = bad
        path = save_image(tmp_path, Image.fromarray(values), "x.tiff")
        messages[f"grey of {bad}"] = get_refusal(images.read_image, path)
    check_refusals("images: files", messages)


def test_paths_that_are_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a pipe does not block."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.png")
    Path("file").touch()
    paths = [*("https://example.com/cat.jpg", "s3://bucket/cat.png", "data:image/png;base64,AAAA")]
    paths += ["no/cat.png", "~/cat.png", "file/cat.png", ".", "/dev/zero", "pipe.png"]
    paths += ["x" * 5000, "a\0b", "\ud800"]
    sentences = {ascii(path)[:30]: get_refusal(images.read_image, Path(path)) for path in paths}
    escaped = {name: x.encode("unicode_escape").decode() for name, x in sentences.items()}
    check_refusals("images: paths", escaped)


# Damaged files


def samples() -> dict[str, bytes]:
    """Small undamaged files of every accepted format."""
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = Image.fromarray(RGBA)
    contents = {
        "png": encode_image(rgb(), "PNG", exif=exif),
        "png palette": encode_image(rgba.quantize(16), "PNG"),
        "png 16": encode_image(Image.fromarray(DEEP), "PNG"),
        "jpeg": encode_image(rgb().convert("CMYK"), "JPEG", progressive=True, exif=exif),
        "mpo": encode_image(rgb(), "MPO", save_all=True, append_images=[rgb(SMOOTH)], exif=exif),
        "webp": encode_image(rgba, "WEBP", exif=exif),
        "bmp": encode_image(rgb().quantize(16), "BMP"),
        "tiff": encode_image(Image.fromarray(UNIT), "TIFF", compression="tiff_adobe_deflate"),
        "tiff fax": encode_image(rgb().convert("1"), "TIFF", compression="group4"),
        "gif": encode_image(rgba.quantize(16), "GIF"),
    }
    return contents | {name: encode_image(rgba, "AVIF", exif=exif) for name in AVIF}


def damage_content(content: bytes, random_: random.Random) -> bytes:
    """Some bytes changed, inserted or removed, or set to an extreme length."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        at = random_.randrange(random_.choice((len(data), 80)))  # headers break more
        new = random_.choice((random_.randbytes(2), b"", b"\0" * 4, b"\xff" * 4))
        data[at : at + random_.choice((0, 2, 4))] = new
    return bytes(data)


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only InputError may be raised."""
    # A damaged header may claim 170 million pixels, which would take seconds to decode.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    path, refused = tmp_path / "damaged", 0
    for name, content in samples().items():
        random_ = random.Random(name)
        for index in range(20):
            path.write_bytes(damage_content(content, random_))
            try:
                image = images.read_image(path)
            except InputError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 400
            except Exception as error:
                raise AssertionError(f"case {index} of {name}") from error
            else:
                assert image.mode == "RGB" and all(image.size)
    assert 70 < refused < 220
