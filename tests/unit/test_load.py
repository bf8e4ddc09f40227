"""Networks and their weight files: compared before any weight is read, filled by one loader."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import gguf_files
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint import load
from wan.checkpoint.formats.headers import compute_fingerprint
from wan.checkpoint.formats.tensor_source import (
    TensorSource,
    TensorSources,
    concat_sources,
    materialize_tensors,
    owns_memory,
)
from wan.checkpoint.load import ModelSpec, open_sources, read_headers
from wan.settings.errors import FileChangedError, InputError
from wan.utils import system

CPU = torch.device("cpu")
SUFFIXES = pytest.mark.parametrize("suffix", [".pth", ".safetensors"])


def linear() -> nn.Linear:
    return nn.Linear(2, 3)


def make_spec(file: Path, make: Callable[[], nn.Module] = linear) -> ModelSpec[Any]:
    return ModelSpec("net", make, read_headers(file, str), file)


def make_checked_spec(file: Path) -> ModelSpec[Any]:
    blueprint = make_spec(file)
    blueprint.check()
    return blueprint


get_change_error = partial(get_refusal, kind=FileChangedError)


def load_network(file: Path, make: Callable[[], nn.Module] = linear, **options: Any) -> Any:
    return make_spec(file, make).load(device=CPU, dtype_of=lambda _, dtype: dtype, **options)


def write_state(state: dict[str, Tensor], file: Path) -> Path:
    (torch.save if file.suffix == ".pth" else save_file)(state, file)
    return file


def ones(**overrides: Tensor | None) -> dict[str, Tensor]:
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3), **overrides}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


def test_names_shapes_and_dtypes_are_strict(tmp_path: Path) -> None:
    table: dict[str, dict[str, Tensor | None]] = {
        "too few": {"bias": None},
        "too many": {"more": torch.ones(1), "zeal": torch.ones(1)},
        "a shape": {"bias": torch.ones(1)},  # would be broadcast
        "a dtype": {"bias": torch.ones(3, dtype=torch.int8)},
    }
    messages = {}
    for suffix in (".pth", ".safetensors"):
        for name, overrides in table.items():
            file = write_state(ones(**overrides), tmp_path / f"weights{suffix}")
            messages[f"{name} in {suffix}"] = get_refusal(make_checked_spec, file)
    check_refusals("weights: strict", messages)


@SUFFIXES
def test_the_network_that_was_checked_is_the_one_that_is_filled(
    suffix: str, tmp_path: Path
) -> None:
    networks: list[nn.Module] = []

    def make() -> nn.Module:
        networks.append(linear())
        assert all(parameter.is_meta for parameter in networks[-1].parameters())
        return networks[-1]

    blueprint = make_spec(write_state(ones(), tmp_path / f"weights{suffix}"), make)
    blueprint.check()
    blueprint.check()
    options: dict[str, Any] = {"device": CPU, "dtype_of": lambda *_: torch.bfloat16}
    first, second = blueprint.load(**options), blueprint.load(**options)
    assert networks == [first, second]  # a second load creates another network
    for network in networks:
        assert not network.training
        for name, parameter in network.named_parameters():
            assert parameter.dtype == torch.bfloat16 and not parameter.requires_grad
            assert torch.equal(parameter, ones()[name].bfloat16())


def align_tensors(file: Path) -> Path:
    """Pad the header until the first tensor begins at a multiple of 64 bytes."""
    if file.suffix == ".safetensors":
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        shift_tensors(file, -start % 64)
    return file


@SUFFIXES
def test_tensors_stored_in_their_dtype_stay_mapped(suffix: str, tmp_path: Path) -> None:
    """Other tensors are copies; in-place changes of a network's tensors change no file."""
    state = ones(bias=torch.ones(3, dtype=torch.bfloat16))
    file = align_tensors(write_state(state, tmp_path / f"weights{suffix}"))
    network = make_spec(file).load(device=CPU, dtype_of=lambda *_: torch.float32)
    assert not owns_memory(network.weight) and owns_memory(network.bias)
    assert file.name in mapping_of(network.weight) and file.name not in mapping_of(network.bias)
    assert materialize_tensors(network) is network and owns_memory(network.weight)
    network.weight.zero_(), network.bias.zero_()
    assert torch.equal(load_network(file).weight, torch.ones(3, 2))


def mapping_of(tensor: Tensor) -> str:
    """The line of /proc/self/maps that a tensor begins in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line
    raise AssertionError("is in no mapping")


@SUFFIXES
def test_files_that_change_while_they_are_used(suffix: str, tmp_path: Path) -> None:
    """Reading a mapped page past the end of a file would kill the process (SIGBUS).

    Also where a part of the network is called alone.
    """
    state = {"0.weight": torch.ones(3, 4096), "0.bias": torch.ones(3)}
    messages, x = {}, torch.ones(1, 4096)
    for method in ("replaced", "truncated", "written"):
        file = align_tensors(write_state(state, tmp_path / f"{method}{suffix}"))
        network = load_network(file, lambda: nn.Sequential(nn.Linear(4096, 3)))
        assert (network(x) == 4097).all()
        content = file.read_bytes()
        if method == "replaced":
            other = tmp_path / "other"
            other.write_bytes(bytes(len(content)))
            other.replace(file)
            assert (network(x) == 4097).all(), "it has the file that it had"
            continue
        if method == "truncated":
            os.truncate(file, 100)
        else:
            os.utime(file, ns=(0, 0))
        part = network if method == "truncated" else network[0]
        messages[method] = get_change_error(part, x)
        file.write_bytes(content)  # so that no page past the end is read when the process ends
    check_refusals(f"weights: changed in use, {suffix}", messages)


def test_a_joined_file_that_changes_before_it_is_read(tmp_path: Path) -> None:
    """Keys and values of Animate's face attention may be in two files."""
    files = [
        write_state({"x": torch.ones(2, 3)}, tmp_path / f"{name}.safetensors") for name in "kv"
    ]
    sources = [open_sources(read_headers(file, str))["x"] for file in files]
    joined = concat_sources(sources, (4, 3))
    assert joined.read(slice(1, 3)).shape == (2, 3)
    os.utime(files[1], ns=(0, 0))
    assert joined.read(slice(0, 2)).shape == (2, 3)
    assert "v.safetensors was changed" in get_change_error(joined.read, slice(1, 3))


def change_file(file: Path, method: str) -> None:
    """Change a weight file as another program would."""
    content, other = file.read_bytes(), file.with_name("other")
    if method in ("truncated", "emptied"):
        os.truncate(file, 100 if method == "truncated" else 0)
    elif method in ("deleted", "a folder"):
        file.unlink()
        if method == "a folder":
            file.mkdir()
    else:
        other.write_bytes(content if method == "replaced" else bytes(len(content)))
        os.utime(other, ns=(0, 0))
        other.replace(file)


CHANGES = ("truncated", "emptied", "deleted", "a folder", "replaced", "of zeros")


def test_files_that_change_between_check_and_load(tmp_path: Path) -> None:
    messages = {}
    for suffix, method in product((".pth", ".safetensors", ".gguf"), CHANGES):
        file = tmp_path / method / f"weights{suffix}"
        file.parent.mkdir(exist_ok=True)
        if suffix == ".gguf":
            gguf_files.write_gguf(file, ones(), {})
        else:
            write_state(ones(), file)
        blueprint = make_checked_spec(file)
        change_file(file, method)
        messages[f"{suffix} {method}"] = get_change_error(
            blueprint.load, device=CPU, dtype_of=lambda _, dtype: dtype
        )
        assert "weights" in messages[f"{suffix} {method}"], (suffix, method)
    last = {case: messages[case] for case in messages if ".gguf" in case}
    check_refusals("weights: changed after the check", last)


def test_a_file_that_is_gone_has_no_fingerprint(tmp_path: Path) -> None:
    file = write_state(ones(), tmp_path / "weights.safetensors")
    original = compute_fingerprint([file])
    change_file(file, "truncated")
    assert compute_fingerprint([file]) != original
    file.unlink()
    with pytest.raises(FileChangedError, match="weights"):
        compute_fingerprint([file])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_same_bits_wherever_weights_begin(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Unaligned weights are copied, as MKL's SSE code (`MKL_ENABLE_INSTRUCTIONS`) differs."""
    torch.manual_seed(0)
    weight = torch.randn(96, 80).to(dtype)
    inputs = [torch.randn(rows, 80).to(dtype) for rows in (1, 7, 64)]
    for offset in (0, 1, 2, 4, 32, 63):
        file = align_tensors(write_state({"weight": weight}, tmp_path / "x.safetensors"))
        shift_tensors(file, offset)
        network = load_network(file, lambda: nn.Linear(80, 96, bias=False))
        is_mapped = offset == 0 if dtype == torch.float32 else offset % 2 == 0
        assert owns_memory(network.weight) != is_mapped, offset
        for x in inputs:
            assert torch.equal(network(x), nn.functional.linear(x, weight)), offset


def test_a_parameter_of_two_names(tmp_path: Path) -> None:
    """Like the text encoder's embedding: its first name is required, the second is optional."""

    def make() -> nn.Module:
        layer = nn.Linear(2, 3, bias=False)
        return nn.ModuleDict({"a": layer, "b": layer})

    for names in ("a", "ab"):
        state = {f"{name}.weight": torch.full((3, 2), 7.0) for name in names}
        network = load_network(write_state(state, tmp_path / f"{names}.safetensors"), make)
        assert network["a"].weight is network["b"].weight
        assert torch.equal(network["b"].weight, torch.full((3, 2), 7.0)), names
    file = write_state({"b.weight": torch.ones(3, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"lacks tensor a\.weight"):
        load_network(file, make)


def test_a_source_merges_rows_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W + B A, as a LoRA is merged: the source computes it, for a few rows at a time."""
    rows, columns = 3, 7 << 6
    monkeypatch.setattr(load, "_COPY_ELEMENTS", 2 * columns + 1)
    weight, reads = torch.randn(rows, columns).bfloat16(), list[tuple[int, int]]()
    file = write_state({"weight": weight}, tmp_path / "x.safetensors")
    b, a = torch.arange(6.0).view(rows, 2), torch.ones(2, columns)  # whose products are exact

    def adapt(_: nn.Module, sources: TensorSources) -> TensorSources:
        (stored,) = sources.values()
        assert stored.shape == (rows, columns) and stored.dtype == torch.bfloat16

        def read_merged(rows: slice) -> Tensor:
            reads.append((rows.start, rows.stop))
            return stored.read(rows).float() + b[rows] @ a

        return {"weight": replace(stored, read=read_merged)}

    network = load_network(file, lambda: nn.Linear(columns, rows, bias=False), transform=adapt)
    assert torch.equal(network.weight, (weight.float() + b @ a).bfloat16())
    assert reads == [(0, 2), (2, 3)]


def test_parameters_with_memory_stay(tmp_path: Path) -> None:
    """As layers that a vendor's library inserts into a network on the meta device."""

    def adapt(network: nn.Module, sources: TensorSources) -> TensorSources:
        network[1] = nn.Linear(3, 3, device="cpu")
        network[1].register_buffer("scale", torch.full((3,), 5.0))
        network.kept = network[1].weight
        return sources

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))

    state = {f"{i}.{name}": t for i in "01" for name, t in ones().items()}
    state["1.weight"] = torch.ones(3, 3)
    network = load_network(write_state(state, tmp_path / "x.safetensors"), make, transform=adapt)
    assert torch.equal(network[0].weight, torch.ones(3, 2))
    assert network[1].weight is network.kept and (network[1].scale == 5).all()


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


def test_pickles_with_other_contents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also damaged pickles; their code is not run. Also two tensors with one name."""
    table: dict[str, Any] = {
        "code": Payload(),
        "code as a weight": {"weight": Payload()},
        "a list": [torch.ones(2)],
        "a number": {"weight": 5},
        "a name that is none": {5: torch.ones(2)},
        "a sparse tensor": {"weight": torch.ones(2, 2).to_sparse()},
        "one value for many": {"weight": torch.ones(1).expand(1 << 40)},
        "nothing": {},
    }
    buffer, messages, file = io.BytesIO(), {}, tmp_path / "x.pth"
    for name, content in table.items():
        torch.save(content, file)
        messages[name] = get_refusal(read_headers, file, str)
    torch.save(ones(), buffer)
    damaged = {"plain pickle": pickle.dumps(Payload()), "noise": bytes(range(256)) * 8}
    for name, content in (damaged | {"truncated": buffer.getvalue()[:-200]}).items():
        file.write_bytes(content)
        messages[name] = get_refusal(read_headers, file, str)
    file = write_state(
        {"x.weight": torch.ones(1), "weight": torch.ones(1)}, tmp_path / "x.safetensors"
    )
    messages["twice"] = get_refusal(read_headers, file, lambda name: name.removeprefix("x."))
    check_refusals("weights: other contents", messages, [r"(?<=read \().*(?=\); )"])
    assert not capsys.readouterr().out


def test_dtypes_that_are_not_supported(tmp_path: Path) -> None:
    """Also those that the library does not know: the file is whole."""
    file, sizes = tmp_path / "x.safetensors", {"C64": 16, "F4": 1}
    for dtype in ("I4", "F8_E3M4", "MXFP4", "C64", "F8_E8M0", "F4"):
        size = sizes.get(dtype, 2)
        write_header({"a.weight": {"dtype": dtype, "shape": [2], "data_offsets": [0, size]}}, file)
        os.truncate(file, file.stat().st_size + size)
        sentence = get_refusal(read_headers, file, str)
        assert f"a.weight is stored as {dtype}, which is not supported" in sentence
        assert "download" not in sentence


def write_header(header: dict[str, Any], file: Path) -> None:
    """Write a safetensors file without its data."""
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """A sparse file of zeros, of which only the requested rows are read."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows, file = 2 * memory // 4096, tmp_path / "x.safetensors"
    entry = {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}
    write_header({"x": entry}, file)
    os.truncate(file, file.stat().st_size + rows * 4096)
    source = open_sources(read_headers(file, str))["x"]
    assert source.shape == (rows, 1024) and not source.read(slice(rows - 2, rows)).any()


def shift_tensors(file: Path, count: int) -> None:
    """Pad the header, so that all tensors begin `count` bytes later."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    padded = content[8 : 8 + size] + b" " * count
    file.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + size :])


def test_slices_of_scaled_values_have_the_scales_of_their_rows(tmp_path: Path) -> None:
    """As queries, keys and values of a CLIP whose projections are one tensor."""
    values, scales = torch.ones(6, 2).to(torch.float8_e4m3fn), torch.arange(1.0, 7.0)
    file = write_state({"x": values, "scales": scales}, tmp_path / "x.safetensors")
    tensors = read_headers(file, str)
    info = replace(tensors["x"], scale=tensors["scales"], shape=(2, 2))
    slices = {str(row): replace(info, first_row=row) for row in (0, 2, 4)}
    for row, source in open_sources(slices).items():
        expected = scales[int(row) : int(row) + 2, None].expand(2, 2)
        assert torch.equal(source.read(slice(None)), expected)
        assert torch.equal(source.read(slice(1, 2)), expected[1:])


class RecordCopies(TorchDispatchMode):
    """Records the (device, dtype) of source and result of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[list[tuple[str, torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.copies.append([(x.device.type, x.dtype) for x in (args[-1], out)])
        return out


def test_a_device_converts_the_dtypes_of_its_tensors(tmp_path: Path) -> None:
    """Converting on the CPU would take longer than the transfer. Here, the device is meta."""
    plain = make_spec(write_state(ones(), tmp_path / "weights.safetensors"))
    with RecordCopies() as recorded:
        plain.load(device=torch.device("meta"), dtype_of=lambda *_: torch.bfloat16)
    stored, moved, loaded = (
        *(("cpu", torch.float32), ("meta", torch.float32)),
        ("meta", torch.bfloat16),
    )
    assert recorded.copies[-4:] == [[stored, moved], [moved, loaded]] * 2


def test_loading_uses_this_ranks_share_of_the_cores(tmp_path: Path, monkeypatch) -> None:
    file, thread_counts = write_state(ones(), tmp_path / "weights.safetensors"), []

    def adapt(_: nn.Module, sources: TensorSources) -> TensorSources:
        def read(stored: TensorSource, rows: slice) -> Tensor:
            thread_counts.append(torch.get_num_threads())
            return stored.read(rows)

        return {name: replace(s, read=partial(read, s)) for name, s in sources.items()}

    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        monkeypatch.setattr(system, "count_cores", lambda: 3)
        load_network(file, transform=adapt)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun, which allows one thread
        load_network(file, transform=adapt)
        assert thread_counts == [1, 1, 3, 3] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads_before)
