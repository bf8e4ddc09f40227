"""Images in: formats, modes, EXIF, transparency, damaged files; file and Python value alike."""

from __future__ import annotations

import io
import os
import random
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, features

from wan.pipeline import images
from wan.settings.errors import InputError

REPO = Path(__file__).parents[2]
SIZE = (24, 16)
RGB = np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8)
SMOOTH = np.stack(np.meshgrid(np.arange(24) * 10, np.arange(16) * 15, indexing="xy"), -1)
SMOOTH = np.concatenate((SMOOTH, np.full((16, 24, 1), 99)), -1).astype(np.uint8)
AVIF = pytest.param(
    "avif", marks=pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
)


def rgb(array: np.ndarray = RGB) -> Image.Image:
    return Image.fromarray(array)


def saved(folder: Path, image: Image.Image, name: str, **options: object) -> Path:
    image.save(folder / name, **options)
    return folder / name


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG; the first one of a file ends at byte 33."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


# What is accepted


@pytest.mark.parametrize("extension", ["png", "jpg", "webp", "bmp", "tiff", "gif", AVIF])
def test_a_file_and_what_python_holds_of_it_give_the_same_pixels(
    extension: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, rgb(SMOOTH), f"x.{extension}")
    expected = np.asarray(Image.open(path).convert("RGB"))
    for image in (
        images.read(path),
        images.from_value(path),
        images.from_value(str(path)),
        images.from_value(Image.open(path)),
        images.from_value(expected),
    ):
        assert np.array_equal(pixels(image), expected)
    assert np.abs(expected.astype(int) - SMOOTH).mean() < 12, "the lossy formats"


def test_neither_torch_nor_numpy_is_needed_for_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, rgb(), "x.png")
    script = (
        "import sys\nfrom wan.pipeline import images\n"
        f"images.from_value({str(path)!r})\nassert not {{'torch', 'numpy'}} & set(sys.modules)\n"
        "import numpy\nimages.from_value(numpy.zeros((2, 2, 3), 'uint8'))\n"
        "try: images.from_value([])\nexcept ValueError: assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPO, timeout=60)


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


@pytest.mark.parametrize("extension", ["png", "jpg", "webp", "tiff", AVIF])
def test_turned_as_exif_says(extension: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    for mode in ("RGB", "L", "CMYK") if extension in ("jpg", "tiff") else ("RGB",):
        stored = rgb(SMOOTH).convert(mode)
        for orientation, turn in TURNS.items():
            exif[0x0112] = orientation
            path = saved(tmp_path, stored, f"x.{extension}", exif=exif)
            expected = turn(np.asarray(stored.convert("RGB"))).astype(int)
            for given in (path, Image.open(io.BytesIO(path.read_bytes()))):
                found = pixels(images.from_value(given))
                assert found.shape == expected.shape
                assert np.abs(found - expected).mean() < 12, (mode, orientation)


def test_of_several_images_the_first_is_taken(tmp_path: Path) -> None:
    """A phone's JPEG with a depth map or a preview behind it; a TIFF with pages."""
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, options in (("x.mpo", {"exif": exif}), ("x.tiff", {})):
        options |= {"save_all": True, "append_images": [Image.new("L", (5, 5))]}
        path = saved(tmp_path, rgb(), name, **options)
        assert Image.open(path).n_frames == 2
    phone = images.read((tmp_path / "x.mpo").rename(tmp_path / "phone.jpg"))
    assert phone.size == (SIZE[1], SIZE[0])
    assert np.array_equal(pixels(images.read(tmp_path / "x.tiff")), RGB)


@pytest.mark.parametrize("extension", ["gif", "webp", "png", AVIF])
def test_animations_are_refused(extension: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{extension}"
    rgb().save(path, save_all=True, append_images=[rgb(SMOOTH)])
    with pytest.raises(InputError, match=r"is animated \(2 frames\); give a still image"):
        images.read(path)


def test_a_very_large_image_is_read_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow warns from half of what it refuses; phones take 108 million pixels."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", RGB.size // 3 - 1)
    path = saved(tmp_path, rgb(), "x.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(pixels(images.read(path)), RGB)


def test_a_raw_file_of_a_camera_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, rgb(), "x.tiff", tiffinfo={254: 1})
    with pytest.raises(InputError, match="begins with a thumbnail"):
        images.read(path)


# More than 8 bits

DEEP = np.linspace(0, 65535, 24 * 16).round().astype(np.uint16).reshape(16, 24)


def grey(image: Image.Image) -> np.ndarray:
    red, green, blue = np.moveaxis(pixels(image), -1, 0)
    assert np.array_equal(red, green) and np.array_equal(red, blue)
    return red


@pytest.mark.parametrize("name", ["x.png", "x.tiff"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_grey_of_16_bits(name: str, orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = saved(tmp_path, Image.fromarray(DEEP), name, exif=exif)
    expected = np.rint(DEEP / 257)
    expected = np.rot90(expected, -1) if orientation == 6 else expected
    for given in (path, Image.open(io.BytesIO(path.read_bytes()))):
        assert np.array_equal(grey(images.from_value(given)), expected)


def grey_tiff(bits: int, photometric: int, data: bytes, size: tuple[int, int]) -> bytes:
    """A TIFF of one strip, uncompressed, little-endian."""
    entries = [(256, size[0]), (257, size[1]), (258, bits), (259, 1), (262, photometric)]
    entries += [(273, 8 + 2 + 9 * 12 + 4), (277, 1), (278, size[1]), (279, len(data))]
    rows = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + rows + struct.pack("<I", 0) + data


@pytest.mark.parametrize(
    ("bits", "photometric", "data", "expected"),
    [
        (12, 1, bytes([0x00, 0x0F, 0xFF, 0x80, 0x00, 0x00]), [0, 255, 128, 0]),
        (16, 1, struct.pack("<4H", 0, 65535, 32768, 257), [0, 255, 128, 1]),
        (16, 0, struct.pack("<4H", 0, 65535, 32768, 257), [255, 0, 127, 254]),
    ],
)
def test_grey_tiff_of_other_depths_and_senses(
    bits: int, photometric: int, data: bytes, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "x.tif").write_bytes(grey_tiff(bits, photometric, data, (4, 1)))
    assert grey(images.read(tmp_path / "x.tif"))[0].tolist() == expected


UNIT = np.linspace(0, 1, 24 * 16, dtype=np.float32).reshape(16, 24)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (UNIT, UNIT * 255),
        (UNIT / 2, UNIT / 2 * 255),
        (UNIT * 255, UNIT * 255),
        ((UNIT * 200).astype(np.int32), (UNIT * 200).astype(np.int32)),
        ((UNIT * 65535).astype(np.int32), (UNIT * 65535).astype(np.int32) / 257),
    ],
)
def test_grey_of_32_bits(values: np.ndarray, expected: np.ndarray, tmp_path: Path) -> None:
    path = saved(tmp_path, Image.fromarray(values), "x.tiff")
    assert np.abs(grey(images.read(path)) - expected).max() <= 0.5 + 1e-4
    assert np.array_equal(grey(images.from_value(Image.fromarray(values))), grey(images.read(path)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5, 1.2, 3.5, 256])
def test_floating_values_in_no_usual_range(bad: float, tmp_path: Path) -> None:
    """1.2 may be a highlight above white or nearly black out of 255: it is not guessed."""
    values = UNIT.copy()
    values[3, 4] = bad
    path = saved(tmp_path, Image.fromarray(values), "x.tiff")
    with pytest.raises(InputError, match=r"has grey values from .* from 0 to 1 or 0 to 255\."):
        images.read(path)


@pytest.mark.parametrize("bad", [-1, 65536])
def test_integers_in_no_usual_range(bad: int) -> None:
    values = np.full((4, 4), 7, dtype=np.int32)
    values[0, 0] = bad
    with pytest.raises(InputError, match=r"image has grey values from .* 0 to 255 or 0 to 65535\."):
        images.from_value(Image.fromarray(values))


# Transparency and colour

ALPHA = np.linspace(0, 255, 24 * 16).round().astype(np.uint8).reshape(16, 24)
RGBA = np.dstack((RGB, ALPHA))
WARNING = "is transparent in places; they become white"


def over_white(array: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    share = alpha[..., None] / 255
    return array * share + 255 * (1 - share)


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "La"])
def test_transparent_parts_become_white(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    image = Image.fromarray(RGBA)
    array = RGB
    if mode in ("LA", "La"):
        image = image.convert("LA")
        array = np.repeat(np.asarray(image)[..., :1], 3, -1)
    found = pixels(images.from_value(image.convert(mode)))
    assert np.abs(found - over_white(array, ALPHA)).max() <= (1 if mode[-1] == "A" else 2)
    assert caplog.messages == [f"The image {WARNING}."]


@pytest.mark.parametrize("name", ["x.png", "x.webp", "x.tiff", "x.gif"])
def test_a_fully_transparent_file_is_white(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it hides is not shown."""
    image = Image.fromarray(np.dstack((RGB, np.zeros_like(ALPHA))))
    path = saved(
        tmp_path, image, name, **({"lossless": True, "exact": True} if "w" in name else {})
    )
    assert (pixels(images.read(path)) == 255).all()
    assert caplog.messages == [f"{path} {WARNING}."]


def test_an_unused_alpha_channel_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    opaque = Image.fromarray(np.dstack((RGB, np.full_like(ALPHA, 255))))
    assert np.array_equal(pixels(images.from_value(opaque)), RGB)
    assert not caplog.messages


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "I;16"])
def test_one_transparent_colour(mode: str, tmp_path: Path) -> None:
    """The tRNS chunk of a PNG."""
    array = np.zeros((4, 4), np.uint16 if mode == "I;16" else np.uint8)
    array[1] = 200
    image = Image.fromarray(array)
    if mode == "I;16":  # Pillow 10 does not write it
        data, path = encoded(image, "PNG"), tmp_path / "x.png"
        path.write_bytes(data[:33] + chunk(b"tRNS", struct.pack(">H", 200)) + data[33:])
    else:
        key = (200,) * 3 if mode == "RGB" else 200
        path = saved(tmp_path, image.convert(mode), "x.png", transparency=key)
    expected = np.zeros((4, 4))
    expected[1] = 255
    assert np.array_equal(grey(images.read(path)), expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBX", "PA"])
def test_colours_of_every_mode(mode: str) -> None:
    """Red, white and black, as far as the mode has them."""
    image = Image.new("RGB", (3, 1))
    image.putdata([(255, 0, 0), (255, 255, 255), (0, 0, 0)])
    if mode == "LAB":
        image = Image.frombytes("LAB", (3, 1), bytes([138, 208, 195, 255, 128, 128, 0, 128, 128]))
        image = Image.merge("LAB", [image.getchannel(0), *map(_signed, image.split()[1:])])
    elif mode == "PA":
        image = image.quantize(3).convert("PA")
    else:
        image = image.convert(mode)
    red, white, black = pixels(images.from_value(image))[0]
    assert (white >= 250).all() and (black <= 5).all()
    if mode not in ("1", "L"):
        assert red[0] >= 245 and (red[1:] <= 25).all()


def _signed(channel: Image.Image) -> Image.Image:
    """Pillow keeps a and b of LAB as signed bytes."""
    return channel.point(lambda value: (value - 128) % 256)


# Arrays and tensors


@pytest.mark.parametrize("channels", ["first", "last"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
def test_arrays_and_tensors(channels: str, dtype: str) -> None:
    array = (RGB if dtype == "uint8" else RGB / 255).astype(dtype)
    array = array if channels == "last" else array.transpose(2, 0, 1)
    for value in (array, torch.tensor(array).requires_grad_(dtype == "float32")):
        assert np.array_equal(pixels(images.from_value(value)), RGB)
    if dtype == "float32":  # numpy has no bfloat16
        rounded = pixels(images.from_value(torch.tensor(array).bfloat16()))
        assert np.abs(rounded - RGB).max() <= 1


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "image is None; give a path, a PIL image, or an array or tensor"),
        ([[1, 2]], r"image is \[\[1, 2\]\]; give a path"),
        (b"x.png", "image is b'x.png'; give a path"),
        (
            np.zeros((4, 4), np.uint8),
            r"image has shape \[4, 4\]; an image is",
        ),
        (np.zeros((4, 4, 4), np.uint8), r"image has shape \[4, 4, 4\]"),
        (torch.zeros(1, 3, 4, 4), r"image has shape \[1, 3, 4, 4\]"),
        (torch.zeros(3), r"image has shape \[3\]"),
        (torch.zeros(0, 4, 3), r"image has shape \[0, 4, 3\]"),
        (np.zeros((4, 4, 3), np.int64), "image has dtype int64; an image is uint8 or floating"),
        (np.zeros((4, 4, 3), bool), "image has dtype bool"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), "image has dtype int32"),
        (
            torch.full((3, 4, 4), 1.5),
            "image has values from 1.5 to 1.5; floating ones",
        ),
        (torch.full((3, 4, 4), -1.0), "image has values from -1 to -1"),
        (torch.full((3, 4, 4), float("nan")), "image has values from nan"),
        (torch.zeros(3, 4, 4, device="meta"), "image cannot be read as an image"),
        (torch.zeros(3, 4, 4).to_sparse(), "image cannot be read as an image"),
        (Image.new("RGB", (0, 5)), r"image has no pixels \(0x5\)"),
        ("", "image=. is not a file"),
        ("~/no such image.png", f"image={Path.home()}/no such image.png does not exist"),
    ],
)
def test_values_that_are_no_image(value: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        images.from_value(value)
    assert len(str(caught.value)) < 200


def test_an_image_whose_file_is_damaged_or_closed(tmp_path: Path) -> None:
    path = saved(tmp_path, rgb(), "x.png")
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match="image cannot be read as an image"):
        images.from_value(Image.open(path))
    closed = Image.open(saved(tmp_path, rgb(), "y.png"))
    closed.close()
    with pytest.raises(InputError, match="image cannot be read as an image"):
        images.from_value(closed)


def test_of_a_damaged_tiff_only_the_sentence_is_seen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """libtiff itself says something else for each kind of compression."""
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        path = saved(tmp_path, rgb(), "x.tiff", compression=compression)
        data = bytearray(path.read_bytes())
        for place in range(20, len(data) // 2, 37):
            data[place] ^= 0xFF
        path.write_bytes(data)
        with pytest.raises(InputError, match="cannot be read as an image"):
            images.read(path)
    os.write(2, b"as before")
    assert capfd.readouterr().err == "as before"


# Paths and files that are no image


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 10 thousand million pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0"))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
CONTENT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty (0 bytes); give an image."),
    "text": (b"no image at all", "cannot be read as an image: it is no sound PNG, JPEG, WebP"),
    "EPS": (EPS, "it is no sound PNG, JPEG, WebP, AVIF, BMP, TIFF or GIF; convert it to one."),
    "PPM": (b"P6 1 1 255\n\0\0\0", "it is no sound PNG"),
    "SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "it is no sound PNG"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "it is no sound PNG"),
    "a PNG of too many pixels": (bomb(), "has too many pixels to be decoded; scale it down."),
}


@pytest.mark.parametrize("kind", CONTENT)
def test_files_that_are_no_image(kind: str, tmp_path: Path) -> None:
    content, sentence = CONTENT[kind]
    path = tmp_path / "x.png"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        images.read(path)
    assert str(caught.value).startswith(f"image={path} ") and sentence in str(caught.value)


PATHS: dict[str, str] = {
    "https://example.com/cat.jpg": "image takes a file, not an address; download it first.",
    "s3://bucket/cat.png": "image takes a file, not an address",
    "data:image/png;base64,AAAA": "image takes a file, not an address",
    "no/cat.png": "image=no/cat.png does not exist; give an image.",
    "~/cat.png": "image=~/cat.png does not exist; give an image.",
    f"{__file__}/cat.png": "cat.png does not exist; give an image.",
    ".": "image=. is not a file; give an image.",
    "/dev/zero": "image=/dev/zero is not a file; give an image.",
    "x" * 5000: "(5000 characters) cannot be used (File name too long); give another one.",
    "a\0b": "cannot be used (embedded null byte); give another one.",
    "\ud800": "cannot be used ('utf-8' codec can't encode",
}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ascii(path)[:30])
def test_paths_that_are_no_file(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        images.read(Path(path))
    assert PATHS[path] in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match="is not a file"):
        images.read(tmp_path / "pipe.png")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = saved(tmp_path, rgb(), "x.png")
    path.chmod(0)
    with pytest.raises(InputError, match=r"cannot be read as an image \(Permission denied\)"):
        images.read(path)


# Damaged files


def samples() -> dict[str, bytes]:
    """Small sound files of every accepted format."""
    from PIL.PngImagePlugin import PngInfo

    exif, text = Image.Exif(), PngInfo()
    exif[0x0112] = 6
    text.add_text("Comment", "words " * 9, zip=True)
    rgba = Image.fromarray(RGBA)
    found = {
        "png": encoded(rgb(), "PNG", exif=exif, pnginfo=text),
        "png palette": encoded(rgba.quantize(16), "PNG"),
        "png 16": encoded(Image.fromarray(DEEP), "PNG"),
        "jpeg": encoded(rgb(), "JPEG", exif=exif),
        "jpeg cmyk": encoded(rgb().convert("CMYK"), "JPEG", progressive=True),
        "mpo": encoded(rgb(), "MPO", save_all=True, append_images=[rgb(SMOOTH)], exif=exif),
        "webp": encoded(rgba, "WEBP", exif=exif),
        "bmp": encoded(rgb().quantize(16), "BMP"),
        "tiff": encoded(rgb(), "TIFF", exif=exif),
        "tiff deflate": encoded(Image.fromarray(UNIT), "TIFF", compression="tiff_adobe_deflate"),
        "tiff fax": encoded(rgb().convert("1"), "TIFF", compression="group4"),
        "gif": encoded(rgba.quantize(16), "GIF"),
    }
    if features.check("avif"):
        found["avif"] = encoded(rgba, "AVIF", exif=exif)
    return found


def mutated(content: bytes, random_: random.Random) -> bytes:
    """Some bytes changed, inserted, removed or set to extreme lengths; sometimes cut short."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 1, 2, 4, 16))):
        end = len(data) if random_.random() < 0.5 else min(len(data), 80)  # headers break more
        at, some = random_.randrange(end), random_.randbytes(random_.choice((1, 2, 4)))
        change: Callable[[], tuple[int, bytes]] = random_.choice(
            (
                lambda some=some: (len(some), some),
                lambda some=some: (0, some),
                lambda some=some: (len(some), b""),
                lambda: (4, random_.choice((b"\0\0\0\0", b"\xff" * 4, b"\x7f\xff\xff\xff"))),
            )
        )
        length, new = change()
        data[at : at + length] = new
    return bytes(data[: random_.randrange(1, len(data))] if random_.random() < 0.1 else data)


def read_mutants(count: int, seed: int, folder: Path) -> int:
    """How many of `count` mutants of each sample are refused; nothing but InputError may happen."""
    path, refused = folder / "mutant", 0
    for name, content in samples().items():
        random_ = random.Random(f"{seed} {name}")
        for index in range(count):
            path.write_bytes(mutated(content, random_))
            try:
                image = images.read(path)
            except InputError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 400
            except Exception as error:
                raise AssertionError(f"mutant {index} of {name}, seed {seed}") from error
            else:
                assert image.mode == "RGB" and all(image.size)
    return refused


@pytest.fixture
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header with a changed size may say 170 million pixels, which take seconds."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)


@pytest.mark.usefixtures("few_pixels")
def test_damaged_files(tmp_path: Path) -> None:
    assert 300 < read_mutants(60, 0, tmp_path) < 780


@pytest.mark.slow
@pytest.mark.usefixtures("few_pixels")
@pytest.mark.parametrize("seed", (1, 2))
def test_many_damaged_files(seed: int, tmp_path: Path) -> None:
    assert read_mutants(1000, seed, tmp_path) > 0
