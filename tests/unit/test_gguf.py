"""GGUF: headers, values of every kind, weight-only layers, and runs from such files.

The `gguf` package writes the files and is the reference for headers and values.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests import gguf_files
from tests.conftest import slow
from tests.gguf_files import dequantize, finish_gguf, get_quant_type, make_gguf_folders
from tests.pipelines import build_quick_pipeline, count_owned_bytes, generate_quick_latents
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.formats.gguf import read_gguf_metadata
from wan.checkpoint.formats.headers import read_file_headers
from wan.checkpoint.formats.tensor_info import GGUF
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.names.dit_shapes import convert_dit_tensors
from wan.checkpoint.quant.dequantise import TO_FLOAT, dequantize_gguf
from wan.kernels.compiled_dequantise import CompiledDequantizer
from wan.kernels.weight_only_linear import UpcastMemory, WeightOnlyLinear
from wan.planner.measure import Planner
from wan.testing.random_checkpoint import make_checkpoint


def make_random_rows(kind: str, count: int) -> Tensor:
    """Returns rows of 512 quantized values, of random bytes."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[get_quant_type(kind)]
    size, generator = (count, 512 // block_values * block_bytes), torch.Generator().manual_seed(0)
    return torch.randint(256, size, generator=generator, dtype=torch.uint8)


@np.errstate(invalid="ignore")
def test_values_of_any_bytes() -> None:
    """Random bytes, and thus also subnormal and NaN scales."""
    wrong = []
    for kind in GGUF:
        stored = make_random_rows(kind, 300)
        values, expected = dequantize_gguf(kind, stored), dequantize(stored.numpy(), kind)
        assert expected.isnan().any() or kind == "MXFP4", kind  # its scales are powers of two
        if not torch.equal(*(x.nan_to_num(torch.inf) for x in (values, expected))) or not (
            torch.equal(values.isnan(), expected.isnan())
        ):
            wrong.append(kind)
    assert not wrong


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_axes_that_stable_diffusion_cpp_drops(tmp_path: Path, kind: str) -> None:
    """Its GGUF files have no first axes of length 1, and it quantizes these tensors."""
    shapes = {
        "blocks.0.modulation": (1, 6, 64),
        "head.modulation": (1, 2, 64),
        "img_emb.emb_pos": (1, 5, 64),
        "casual_audio_encoder.encoder.padding_tokens": (1, 1, 1, 64),
        "casual_audio_encoder.weights": (1, 25, 1, 1),
        "blocks.0.norm3.weight": (64,),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    stored = {
        name: x.reshape(x.shape[next((i for i, n in enumerate(x.shape) if n > 1), 0) :])
        for name, x in tensors.items()
    }
    kinds = {name: kind for name in tensors if name != "casual_audio_encoder.weights"}
    path = tmp_path / "x.gguf"
    values = gguf_files.write_gguf(path, stored, {} if kind == "F32" else kinds)
    sources = open_sources(convert_dit_tensors(read_file_headers(path)))
    assert {name: source.shape for name, source in sources.items()} == shapes
    for name, source in sources.items():
        assert torch.equal(source.read(slice(None)), values[name].view(shapes[name]))


NOT_COMPILED = ("IQ4_NL", "IQ4_XS", "MXFP4")


@np.errstate(invalid="ignore", over="ignore")
def test_the_functions_that_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all types, without a compiler: the values of the package, in slices where there are."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("wan.kernels.compiled_dequantise.get_slice_numel", lambda _: 512 * 3)
    dequantizer, wrong = CompiledDequantizer(min_values=0), []
    for kind in GGUF:
        stored, values = make_random_rows(kind, 20), torch.empty(20, 512).bfloat16()
        expected = dequantize(stored.numpy(), kind).bfloat16()
        is_compiled = dequantizer.fill(kind, stored, None, values)
        if is_compiled == (kind in NOT_COMPILED) or (
            is_compiled and not torch.allclose(values, expected, rtol=0, atol=0, equal_nan=True)
        ):
            wrong.append(kind)
    assert not wrong


@np.errstate(invalid="ignore")
@pytest.mark.parametrize(
    "kind", ["Q4_K", *(slow(x) for x in GGUF if x not in ("Q4_K", *NOT_COMPILED))]
)
def test_compiled_values_of_any_bytes(kind: str) -> None:
    """Those of the package, rounded to bfloat16; one function for weights of all sizes."""
    dequantizer = CompiledDequantizer(min_values=0)
    for rows in (300, 7):
        stored = make_random_rows(kind, rows)
        values, expected = torch.empty(rows, 512).bfloat16(), dequantize(stored.numpy(), kind)
        with torch.inference_mode():
            assert dequantizer.fill(kind, stored, None, values)
        torch.testing.assert_close(values, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("missing", ["compiler", "cache", "private cache"])
def test_weights_are_dequantized_without_a_compiler_or_a_cache(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import config

    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "folder" if missing == "cache" else tmp_path
    tmp_path.chmod(0o777 if missing == "private cache" else 0o700)
    compiler = str(tmp_path / "g++") if missing == "compiler" else "g++"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    torch._dynamo.reset()
    stored = make_random_rows("Q8_0", 300)
    stored = stored[(dequantize(stored.numpy(), "Q8_0").abs() < 1e30).all(1)]
    fill = partial(CompiledDequantizer(min_values=0).fill, "Q8_0")
    layer = WeightOnlyLinear(
        *(stored, TO_FLOAT["Q8_0"], None), in_features=512, memory=UpcastMemory(), try_fill=fill
    )
    caplog.set_level(logging.WARNING)
    with config.patch({"cpp.cxx": (compiler,)}), torch.inference_mode():
        for _ in range(2):
            output = layer(torch.eye(512).bfloat16())
            assert torch.equal(output, dequantize(stored.numpy(), "Q8_0").bfloat16().T)
    (notice,) = caplog.messages
    assert notice.startswith("Weights are dequantized without a compiler, which costs speed only: ")
    assert "\n" not in notice and notice.endswith("(--fused_ops none does not try).")


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a.weight": (48, 512), "b.weight": (64, 96), "c": (3,), "d.weight": (8, 4, 1, 2, 2)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def test_headers_with_any_legal_metadata(tmp_path: Path) -> None:
    """Metadata of every type, and arrays of each; several alignments; versions 2 and 3."""
    path, arrays = tmp_path / "x.gguf", ([1, 2, 3], [0.5], [True, False, True], ["a", "", "数"])
    for alignment, version in ((None, 2), (8, 3), (64, 2), (4096, 3)):
        writer = gguf.GGUFWriter(path, "wan")
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        for kind in NUMBERS:
            getattr(writer, f"add_{kind}")(f"x.{kind}", 100)
        writer.add_bool("x.bool", True)
        writer.add_float32("x.float32", 0.5)
        writer.add_float64("x.float64", 0.5)
        writer.add_string("x.text", "Übergröße")
        for index, values in enumerate(arrays):
            writer.add_array(f"x.array.{index}", values)
        for name, tensor in tensors().items():
            writer.add_tensor(name, tensor.numpy())
        finish_gguf(writer)
        content = bytearray(path.read_bytes())
        content[4:8] = version.to_bytes(4, "little")  # their layouts are the same
        path.write_bytes(content)
        headers, expected = read_file_headers(path), gguf.GGUFReader(path).tensors
        assert {name: info.data_offset for name, info in headers.items()} == {
            tensor.name: tensor.data_offset for tensor in expected
        }
        for name, tensor in tensors().items():
            assert torch.equal(open_sources(headers)[name].read(slice(None)), tensor)
        metadata = {"x.bool": True, "x.float64": 0.5, "x.int64": 100, "x.text": "Übergröße"}
        metadata |= {f"x.array.{index}": tuple(values) for index, values in enumerate(arrays)}
        assert read_gguf_metadata(path, list(metadata)) == metadata, (alignment, version)


def test_rows_and_slices_of_tensors(tmp_path: Path) -> None:
    """Rows of a flattened matrix may begin inside a block; F16 and BF16 are not changed.

    Slices of tensors are as queries, keys and values of a CLIP whose projections are one tensor.
    """
    path, kinds = tmp_path / "x.gguf", {"a.weight": "Q4_K", "b.weight": "Q6_K"}
    cases = [(path, gguf_files.write_gguf(path, tensors(), kinds))]
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        values, path = tensors()["a.weight"].to(dtype), tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, "wan")
        writer.add_tensor("x", values.view(torch.uint8).numpy(), raw_dtype=get_quant_type(kind))
        finish_gguf(writer)
        cases.append((path, {"x": values}))
    for path, values_by_name in cases:
        for name, info in read_file_headers(path).items():
            values, source = values_by_name[name], open_sources({name: info})[name]
            end, count = len(values), len(values) // 4
            for rows in (slice(None), slice(1, 2), slice(end // 9, end // 2), slice(end - 1, end)):
                assert torch.equal(source.read(rows), values[rows]), (path.name, name, rows)
            if not count:
                continue
            slices = {
                str(i): replace(info, shape=(count, *info.shape[1:]), first_row=i * count)
                for i in range(4)
            }
            parts = [source.read(slice(None)) for source in open_sources(slices).values()]
            assert torch.equal(torch.cat(parts), values), (path.name, name)


def test_files_that_are_refused(tmp_path: Path) -> None:
    """Unsupported kinds; truncated files; impossible counts, which are refused without reading on.

    The counts are of keys, and of strings in an array; the rest of the file is zeros.
    """
    messages, path = {}, tmp_path / "x.gguf"
    for kind in ("IQ3_S", "TQ1_0"):
        values, size = gguf.GGML_QUANT_SIZES[get_quant_type(kind)]
        writer = gguf.GGUFWriter(path, "wan")
        stored = np.zeros((4, 256 // values * size), np.uint8)
        writer.add_tensor("blocks.0.x", stored, raw_dtype=get_quant_type(kind))
        finish_gguf(writer)
        messages[kind] = get_refusal(read_file_headers, path)
    path.unlink()
    for size in (0, 10):
        (tmp_path / "wan2.2-t2v-Q4_K_M.gguf").write_bytes(b"GGUF" * 3 if size else b"")
        messages[f"{size} bytes"] = get_refusal(inspect_checkpoint, tmp_path)
    for name, content in {
        "big-endian": struct.pack(">IQQ", 3, 0, 0),
        "version 1": struct.pack("<III", 1, 0, 0),
    }.items():
        path.write_bytes(b"GGUF" + content + bytes(8))
        messages[name] = get_refusal(read_file_headers, path)
    counts = 2**64 - 1, 2**31, 70_000
    contents = {f"{keys} keys": struct.pack("<IQQ", 3, 0, keys) for keys in counts}
    contents |= {f"{tensors} tensors": struct.pack("<IQQ", 3, tensors, 0) for tensors in counts}
    contents["no name"] = struct.pack("<IQQQIQIQ", 3, 1, 0, 0, 1, 32, 0, 0)
    contents["strings"] = struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**21)
    key = struct.pack("<IQQQ", 3, 0, 1, 17) + b"general.alignment"
    contents["alignment 24"] = key + struct.pack("<II", 4, 24)
    for name, content in contents.items():
        path.write_bytes(b"GGUF" + content)
        os.truncate(path, 1 << 26)
        started = time.process_time()
        messages[name] = get_refusal(read_file_headers, path)
        assert time.process_time() - started < 0.5, name
    check_refusals("gguf: files", messages)


def test_damaged_headers(tmp_path: Path) -> None:
    """Other damage is in test_damaged_files.py."""
    path, wrong = tmp_path / "x.gguf", {}
    alignment = struct.pack("<IQQQ17sI", 3, 0, 1, 17, b"general.alignment", 4)
    for reason, content in {
        "truncated": struct.pack("<IQQQ", 3, 0, 1, 0),
        "more than 32 MB of header": struct.pack("<IQQQ", 3, 1, 0, 1 << 60) + bytes(1 << 26),
        "version 4": struct.pack("<IQQ", 4, 0, 0),
        "not valid UTF-8": struct.pack("<IQQQ", 3, 1, 0, 1) + b"\xff",
        "metadata of the unknown type 13": struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 13),
        "alignment 4": alignment + struct.pack("<I", 4),
        "alignment 2097152": alignment + struct.pack("<I", 1 << 21),
    }.items():
        path.write_bytes(b"GGUF" + content)
        sentence = get_refusal(read_file_headers, path)
        if reason not in sentence:
            wrong[reason] = sentence
    assert not wrong


def make_header(
    *tensors: tuple[int, tuple[int, ...], int], shape: tuple[int, bytes] | None = None, data: int
) -> bytes:
    """Returns a file whose data are zeros.

    Args:
        tensors: Type, sizes and offset of each tensor; all have the name "x".
        shape: Type of the numbers, and the numbers of the shape before flattening.
        data: Number of bytes after the header, which is aligned to 32.
    """

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), shape is not None)
    if shape is not None:
        number_type, numbers = shape
        size = {5: 4, 6: 4, 8: 9}[number_type]  # int32, float32, strings of one letter
        content += text(b"comfy.gguf.orig_shape.x")
        content += struct.pack("<IIQ", 9, number_type, len(numbers) // size) + numbers
    for tensor_type, sizes, offset in tensors:
        content += text(b"x") + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        content += struct.pack("<IQ", tensor_type, offset)
    return content + bytes(-len(content) % 32 + data)


def test_shapes_and_offsets_that_are_refused(tmp_path: Path) -> None:
    """A shape before flattening has the tensor's number of values; the same file is else intact."""
    path, messages = tmp_path / "x.gguf", {}
    f32, q8_0, eight = 0, 8, (0, (8,), 0)

    def ints(*sizes: int) -> tuple[int, bytes]:
        return 5, struct.pack(f"<{len(sizes)}i", *sizes)

    for shape, expected in ((None, (8,)), (ints(2, 4), (2, 4)), (ints(8), (8,))):
        path.write_bytes(make_header(eight, shape=shape, data=32))
        assert read_file_headers(path)["x"].shape == expected
    contents = {
        "more values": make_header(eight, shape=ints(4, 4), data=64),
        "fewer values": make_header(eight, shape=ints(2, 2), data=32),
        "negative sizes": make_header(eight, shape=ints(-2, -4), data=32),
        "a size of zero": make_header(eight, shape=ints(8, 0), data=32),
        "fractions": make_header(eight, shape=(6, struct.pack("<2f", 2, 4)), data=32),
        "letters": make_header(eight, shape=(8, struct.pack("<Qc", 1, b"8")), data=32),
        "many axes": make_header(eight, shape=ints(*[1] * 70, 8), data=32),
        "nine axes": make_header((f32, (8, *[1] * 8), 0), data=32),
        "rows of half a block": make_header((q8_0, (16, 2), 0), data=34),
        "no values": make_header((f32, (0,), 0), data=32),
        "one byte too few": make_header(eight, data=31),
        "an offset within a line": make_header((f32, (4,), 4), data=32),
        "one name for two": make_header(eight, (f32, (8,), 32), data=64),
    }
    for case, content in contents.items():
        path.write_bytes(content)
        messages[case] = get_refusal(read_file_headers, path)
    check_refusals("gguf: shapes and offsets", messages)


@np.errstate(invalid="ignore")
def test_a_weight_only_layer_equals_the_upcast_layer() -> None:
    generator, wrong = torch.Generator().manual_seed(1), []
    bias, x = torch.randn(8, generator=generator), torch.randn(2, 7, 512, generator=generator)
    for kind in GGUF:
        rows = make_random_rows(kind, 300)
        values = dequantize(rows.numpy(), kind)
        is_finite = (values.abs() < 1e30).all(1)  # and so are its products
        stored, values = rows[is_finite][:8], values[is_finite][:8]
        layer = WeightOnlyLinear(
            stored, TO_FLOAT[kind], nn.Parameter(bias.clone()), in_features=512
        )
        for dtype in (torch.float32, torch.bfloat16):
            output = layer.to(dtype)(x.to(dtype))
            expected = nn.functional.linear(x.to(dtype), values.to(dtype), bias.to(dtype))
            if len(stored) < 8 or not torch.equal(output, expected):
                wrong.append((kind, dtype))
    assert not wrong


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose rows are whole blocks of 256 values."""
    sizes = {"dim": 256, "ffn_dim": 512, "num_heads": 4, "num_layers": 2}
    return make_checkpoint("t2v-1.3B", tmp_path_factory.mktemp("wide") / "t2v-1.3B", sizes=sizes)


@pytest.mark.parametrize(
    ("task", "kind", "precision"),
    [
        ("t2v-A14B", "Q8_0", "bf16"),
        slow("t2v-A14B", "Q6_K", "fp32"),
        *(slow("t2v-1.3B", kind, "bf16") for kind in ("Q3_K", "Q4_K", "Q6_K", "Q5_1", "MXFP4")),
    ],
)
def test_a_run_from_gguf_is_that_of_its_values(
    task: str, kind: str, precision: str, tiny: Any, request: Any, tmp_path: Path, one_thread: None
) -> None:
    """Weights kept, and streamed by block; Q6_K of narrow rows is flattened and upcast."""
    source = tiny(task) if task == "t2v-A14B" else request.getfixturevalue("wide")
    files, plain = make_gguf_folders(source, kind, tmp_path)
    arguments = ["--task", task, "--sample_steps", "2", "--sample_guide_scale", "1"]
    arguments += ["--precision", precision]
    expected = generate_quick_latents(plain, *arguments)
    for weight_mode, offload in (("keep", "true"), ("auto", "block")):
        flags = ["--stored_weights", weight_mode, "--offload_model", offload]
        assert torch.equal(generate_quick_latents(files, *arguments, *flags), expected), weight_mode


@pytest.fixture(scope="module")
def wide_folders(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wide checkpoint with GGUF files, and one with the dequantised values."""
    return make_gguf_folders(wide, "Q4_K", tmp_path_factory.mktemp("gguf"))


def test_a_lora_on_weight_only_layers(
    wide_folders: tuple[Path, Path], tmp_path: Path, one_thread: None
) -> None:
    """Pairs, Kronecker products, differences, and two files, against merging in float64."""
    files, values = wide_folders
    plain = Path(shutil.copytree(values, tmp_path / values.name))
    path = plain / "diffusion_pytorch_model.safetensors"
    state, generator = load_file(path), torch.Generator().manual_seed(2)
    lora_tensors: list[dict[str, Tensor]] = [{}, {}]
    for name, weight in list(state.items()):
        layer, total = name.removesuffix(".weight"), weight.double()
        if weight.dim() != 2 or not name.startswith("blocks."):
            continue
        for number, rank in enumerate((4, 2)):
            if number and layer.endswith(("cross_attn.o", "ffn.0")):
                left = torch.randn(16, 8, generator=generator) / 7
                right = torch.randn(len(weight) // 16, 32, generator=generator) / 7
                lora_tensors[1] |= {f"{layer}.lokr_w1": left, f"{layer}.lokr_w2": right}
                total += 0.25 * torch.kron(left, right).double()
                continue
            up = torch.randn(len(weight), rank, generator=generator) / 20
            down = torch.randn(rank, weight.shape[1], generator=generator) / 20
            lora_tensors[number] |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
            total += (0.5, 0.25)[number] * up.double() @ down.double()
        if layer.endswith("self_attn.k"):
            lora_tensors[0][f"{layer}.diff"] = torch.randn(weight.shape, generator=generator) / 50
            total += 0.5 * lora_tensors[0][f"{layer}.diff"].double()
        state[name] = total.float()
    save_file(state, path)
    loras = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for lora, tensors in zip(loras, lora_tensors, strict=True):
        save_file(tensors, lora)
    arguments = ["--sample_steps", "1", "--sample_guide_scale", "1", "--precision", "fp32"]
    expected = generate_quick_latents(plain, *arguments)
    arguments += ["--lora", f"{loras[0]}=0.5", "--lora", f"{loras[1]}=0.25"]
    for weight_mode, offload in (("keep", "block"), ("upcast", "false")):
        mode_flags = ["--stored_weights", weight_mode, "--offload_model", offload]
        result = generate_quick_latents(files, *arguments, *mode_flags)
        assert (result - expected).abs().max() <= 1e-5 * expected.abs().max(), mode_flags


def test_a_weight_is_dequantized_once_per_step(wide_folders: tuple[Path, Path]) -> None:
    """For both guidance branches, in memory that is reused and then freed.

    The keys and values of the text are computed once in a video.
    """
    files, _ = wide_folders
    upcast, counts = WeightOnlyLinear._upcast, Counter[WeightOnlyLinear]()

    def count_upcast(linear: WeightOnlyLinear, weight_OI: Tensor) -> None:
        counts[linear] += 1
        upcast(linear, weight_OI)

    run, pipeline = build_quick_pipeline(files, "--sample_steps", "3")
    with mock.patch.object(WeightOnlyLinear, "_upcast", count_upcast):
        pipeline.generate_latents(run.params)
    assert sorted(counts.values()) == [1] * 4 + [3] * 16
    assert not next(iter(counts))._memory._buffers


def test_weight_only_layers_take_the_bytes_of_the_file(wide_folders: tuple[Path, Path]) -> None:
    """In memory, and in the copies of streamed blocks."""
    block_bytes = {}
    for weight_mode in ("keep", "upcast"):
        flags = ["--stored_weights", weight_mode, "--precision", "bf16", "--frame_num", "1"]
        flags += ["--sample_guide_scale", "1"]
        run, pipeline = build_quick_pipeline(wide_folders[0], *flags, "--offload_model", "false")
        block_bytes[weight_mode] = count_owned_bytes(pipeline.experts.get("dit").blocks)
        planner = Planner(run.setup, run.params)
        assert (planner.estimate_upcast_seconds() > 0) == (weight_mode == "keep")
    assert block_bytes["keep"] < 0.35 * block_bytes["upcast"]
    flags[1:2] = ["keep"]
    run, pipeline = build_quick_pipeline(wide_folders[0], *flags, "--offload_model", "false")
    planned = Planner(run.setup, run.params).compute_stage_memory()["denoising"]["DiT weights"]
    assert planned == pytest.approx(count_owned_bytes(pipeline.experts.get("dit")), rel=0.03)
    run, _ = build_quick_pipeline(wide_folders[0], *flags, "--offload_model", "block")
    copied = Planner(run.setup, run.params).count_streamed_blocks()
    assert copied == (2, 1, pytest.approx(block_bytes["keep"], rel=0.03))
