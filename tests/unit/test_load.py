"""Networks and their files: compared before anything is read, filled by one loader."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from wan import host
from wan.checkpoint.files import fingerprint
from wan.checkpoint.load import Blueprint, mapped, stored
from wan.checkpoint.source import Source, Sources, is_own, own
from wan.settings.errors import FileChangedError, InputError

CPU = torch.device("cpu")
SUFFIXES = pytest.mark.parametrize("suffix", [".pth", ".safetensors"])


def linear() -> nn.Linear:
    return nn.Linear(2, 3)


def plan(file: Path, make: Callable[[], nn.Module] = linear) -> Blueprint[Any]:
    return Blueprint("net", make, stored(file, str), file)


def load(file: Path, make: Callable[[], nn.Module] = linear, **how: Any) -> Any:
    return plan(file, make).load(device=CPU, dtype_of=lambda _, dtype: dtype, **how)


def write(state: dict[str, Tensor], file: Path) -> Path:
    (torch.save if file.suffix == ".pth" else save_file)(state, file)
    return file


def ones(**changed: Tensor | None) -> dict[str, Tensor]:
    state = {"weight": torch.ones(3, 2), "bias": torch.ones(3), **changed}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


@SUFFIXES
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bias": None}, "lacks tensor bias; download it again"),
        ({"more": torch.ones(1), "zeal": torch.ones(1)}, "unknown tensor more and 1 more"),
        ({"bias": torch.ones(1)}, r"bias has shape \[1\], .* for \[3\]"),  # would be broadcast
        ({"bias": torch.ones(3, dtype=torch.int8)}, "bias is stored as .*int8|as I8"),
    ],
)
def test_names_shapes_and_dtypes_are_strict(
    changed: dict[str, Tensor | None], sentence: str, suffix: str, tmp_path: Path
) -> None:
    file = write(ones(**changed), tmp_path / f"weights{suffix}")
    with pytest.raises(InputError, match=sentence):
        plan(file).check()


@SUFFIXES
def test_the_network_that_was_checked_is_the_one_that_is_filled(
    suffix: str, tmp_path: Path
) -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(linear())
        assert all(parameter.is_meta for parameter in made[-1].parameters())
        return made[-1]

    blueprint = plan(write(ones(), tmp_path / f"weights{suffix}"), make)
    blueprint.check()
    blueprint.check()
    how: dict[str, Any] = {"device": CPU, "dtype_of": lambda *_: torch.bfloat16}
    first, second = blueprint.load(**how), blueprint.load(**how)
    assert made == [first, second]  # after it was handed out, another one is made
    for network in made:
        assert not network.training
        for name, parameter in network.named_parameters():
            assert parameter.dtype == torch.bfloat16 and not parameter.requires_grad
            assert torch.equal(parameter, ones()[name].bfloat16())


def alignable(file: Path) -> Path:
    """Places the first tensor of a safetensors file at a multiple of 64 bytes."""
    if file.suffix == ".safetensors":
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        shift(file, -start % 64)
    return file


@SUFFIXES
def test_what_is_stored_as_it_is_used_stays_mapped(suffix: str, tmp_path: Path) -> None:
    """The others are copies; a network's own tensors may be changed, which changes no file."""
    state = ones(bias=torch.ones(3, dtype=torch.bfloat16))
    file = alignable(write(state, tmp_path / f"weights{suffix}"))
    network = plan(file).load(device=CPU, dtype_of=lambda *_: torch.float32)
    assert not is_own(network.weight) and is_own(network.bias)
    assert file.name in mapping_of(network.weight) and file.name not in mapping_of(network.bias)
    assert own(network) is network and is_own(network.weight)
    network.weight.zero_(), network.bias.zero_()
    assert torch.equal(load(file).weight, torch.ones(3, 2))


def mapping_of(tensor: Tensor) -> str:
    """The line of /proc/self/maps that a tensor begins in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line
    raise AssertionError("is in no mapping")


def test_nothing_is_allocated_for_what_stays_mapped(tmp_path: Path) -> None:
    file = alignable(write({"weight": torch.ones(8 << 20, 2)}, tmp_path / "x.safetensors"))
    before = anonymous()
    network = load(file, lambda: nn.Linear(2, 8 << 20, bias=False))
    assert network.weight.sum() == 16 << 20
    assert anonymous() - before < 16 << 20, "of 64 MiB"


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@SUFFIXES
@pytest.mark.parametrize("how", ["truncated", "written", "replaced"])
def test_files_that_change_while_they_are_used(how: str, suffix: str, tmp_path: Path) -> None:
    """Reading a mapped page behind a file's end would end the process (SIGBUS)."""
    state = {"weight": torch.ones(3, 4096), "bias": torch.ones(3)}
    file = alignable(write(state, tmp_path / f"weights{suffix}"))
    network, x = load(file, lambda: nn.Linear(4096, 3)), torch.ones(1, 4096)
    assert (network(x) == 4097).all()
    content = file.read_bytes()
    if how == "replaced":
        other = tmp_path / "other"
        other.write_bytes(bytes(len(content)))
        other.replace(file)
        assert (network(x) == 4097).all(), "it has the file that it had"
        return
    if how == "truncated":
        os.truncate(file, 100)
    else:
        os.utime(file, ns=(0, 0))
    with pytest.raises(FileChangedError, match=r"weights.*was changed while"):
        network(x)
    file.write_bytes(content)  # nothing behind the end is touched when the process ends


def test_a_file_that_was_truncated_before_it_is_copied(tmp_path: Path) -> None:
    file = write(ones(weight=torch.ones(3, 4096)), tmp_path / "weights.safetensors")

    def adapt(_: nn.Module, sources: Sources) -> Sources:
        os.truncate(file, 100)
        return sources

    with pytest.raises(FileChangedError, match="was changed"):
        plan(file, lambda: nn.Linear(4096, 3)).load(
            device=CPU, dtype_of=lambda *_: torch.bfloat16, adapt=adapt
        )


def change(file: Path, how: str) -> None:
    """Changes a weight file in one of the ways that others do."""
    content, other = file.read_bytes(), file.with_name("other")
    if how == "truncated":
        os.truncate(file, 100)
    elif how == "emptied":
        os.truncate(file, 0)
    elif how == "deleted":
        file.unlink()
    elif how == "a folder":
        file.unlink()
        file.mkdir()
    else:
        other.write_bytes(content if how == "replaced" else bytes(len(content)))
        os.utime(other, ns=(0, 0))
        other.replace(file)


CHANGES = ("truncated", "emptied", "deleted", "a folder", "replaced", "of zeros")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".gguf"])
@pytest.mark.parametrize("how", CHANGES)
def test_files_that_change_between_check_and_load(how: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    if suffix == ".gguf":
        writer = gguf.GGUFWriter(file, "wan")
        for name, tensor in ones().items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        write(ones(), file)
    checked = plan(file)
    checked.check()
    change(file, how)
    with pytest.raises(FileChangedError, match="weights"):
        checked.load(device=CPU, dtype_of=lambda _, dtype: dtype)


@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_a_file_that_is_gone_has_no_fingerprint(how: str, tmp_path: Path) -> None:
    file = write(ones(), tmp_path / "weights.safetensors")
    before = fingerprint([file])
    change(file, how)
    if how == "truncated":
        assert fingerprint([file]) != before
        return
    with pytest.raises(FileChangedError, match="weights"):
        fingerprint([file])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_have_the_same_bits_wherever_weights_begin(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Mapped where that is so, else copied: MKL's SSE code (`MKL_ENABLE_INSTRUCTIONS`) differs."""
    torch.manual_seed(0)
    weight, mapped_at = torch.randn(96, 80).to(dtype), []
    inputs = [torch.randn(rows, 80).to(dtype) for rows in (1, 7, 64)]
    for _ in range(64):
        file = write({"weight": weight}, tmp_path / "x.safetensors")
        shift(file, len(mapped_at))
        network = load(file, lambda: nn.Linear(80, 96, bias=False))
        place = network.weight.data_ptr() % 64
        mapped_at.append(None if is_own(network.weight) else place)
        for x in inputs:
            assert torch.equal(network(x), nn.functional.linear(x, weight)), place
    found = sorted(place for place in mapped_at if place is not None)
    assert found == ([0] if dtype == torch.float32 else list(range(0, 64, 2)))


@pytest.mark.parametrize("names", ["a", "ab", "b"])
def test_a_parameter_of_two_names(tmp_path: Path, names: str) -> None:
    """Like the text encoder's table: its first name is needed, the other one may be there too."""

    def make() -> nn.Module:
        layer = nn.Linear(2, 3, bias=False)
        return nn.ModuleDict({"a": layer, "b": layer})

    state = {f"{name}.weight": torch.full((3, 2), 7.0) for name in names}
    file = write(state, tmp_path / "x.safetensors")
    if names == "b":
        with pytest.raises(InputError, match=r"lacks tensor a\.weight"):
            load(file, make)
        return
    network = load(file, make)
    assert network["a"].weight is network["b"].weight
    assert torch.equal(network["b"].weight, torch.full((3, 2), 7.0))


def test_a_source_computes_on_the_way(tmp_path: Path) -> None:
    """W + B A, as a LoRA is merged: nothing but the source knows, and it is asked for few rows."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = 3, 7 << 20
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    file = write({"weight": weight}, tmp_path / "x.safetensors")
    b, a = torch.randn(rows, 2, generator=generator), torch.ones(2, columns)
    reads: list[slice] = []

    def merged(of: slice, stored: Source) -> Tensor:
        reads.append(of)
        return stored.read(of).float() + b[of] @ a

    def adapt(_: nn.Module, sources: Sources) -> Sources:
        (stored,) = sources.values()
        assert stored.shape == (rows, columns) and stored.dtype == torch.bfloat16
        return {"weight": replace(stored, read=partial(merged, stored=stored))}

    network = load(file, lambda: nn.Linear(columns, rows, bias=False), adapt=adapt)
    assert torch.equal(network.weight, (weight.float() + b @ a).bfloat16())
    assert [(part.start, part.stop) for part in reads] == [(0, 2), (2, 3)]


def test_what_has_memory_already_stays(tmp_path: Path) -> None:
    """As layers that a vendor's library put into a network on the meta device."""

    def adapt(network: nn.Module, sources: Sources) -> Sources:
        network[1] = nn.Linear(3, 3, device="cpu")
        network[1].register_buffer("scale", torch.full((3,), 5.0))
        network.kept = network[1].weight
        return sources

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))

    state = {f"{i}.{name}": t for i in "01" for name, t in ones().items()}
    state["1.weight"] = torch.ones(3, 3)
    network = load(write(state, tmp_path / "x.safetensors"), make, adapt=adapt)
    assert torch.equal(network[0].weight, torch.ones(3, 2))
    assert network[1].weight is network.kept and (network[1].scale == 5).all()


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code was run",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (Payload(), "holds something other than weights and was not opened, because it could run"),
        ({"weight": Payload()}, "because it could run code; download it again."),
        ([torch.ones(2)], "holds something other than weights (list); download it again."),
        ({"weight": 5}, "holds something other than weights (weight)"),
        ({5: torch.ones(2)}, "holds something other than weights (5)"),
        ({"weight": torch.ones(2, 2).to_sparse()}, "something other than weights (weight)"),
        ({"weight": torch.ones(1).expand(1 << 40)}, "something other than weights (weight)"),
        ({}, "holds no weights"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_pickles_with_other_contents(
    content: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.pth"
    torch.save(content, file)
    with pytest.raises(InputError) as caught:
        stored(file, str)
    said = str(caught.value)
    assert said.startswith(str(file)) and sentence in said and said.endswith(".")
    assert "\n" not in said and "torch" not in said.lower().replace(str(file).lower(), "")
    assert not capsys.readouterr().out


@pytest.mark.parametrize("damage", ["plain pickle", "truncated", "noise"])
def test_damaged_pickles(damage: str, tmp_path: Path) -> None:
    whole = io.BytesIO()
    torch.save(ones(), whole)
    content = {
        "plain pickle": pickle.dumps(Payload()),
        "truncated": whole.getvalue()[:-200],
        "noise": bytes(range(256)) * 8,
    }[damage]
    file = tmp_path / "x.pth"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"download it again\.$") as caught:
        stored(file, str)
    assert "\n" not in str(caught.value)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    file = write({"x.weight": torch.ones(1), "weight": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"has weight again, which is x\.weight there|x.weight"):
        stored(file, lambda name: name.removeprefix("x."))


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """Of holes: nothing is written, and only what is asked for is read."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = 2 * memory // 4096
    entry = {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}
    header = json.dumps({"x": entry}).encode()
    file = tmp_path / "x.safetensors"
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + rows * 4096)
    source = mapped(stored(file, str))["x"]
    assert source.shape == (rows, 1024) and not source.read(slice(rows - 2, rows)).any()


def shift(file: Path, count: int) -> None:
    """Makes the header longer, so that all tensors begin `count` bytes later."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    padded = content[8 : 8 + size] + b" " * count
    file.write_bytes(len(padded).to_bytes(8, "little") + padded + content[8 + size :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_that_are_not_aligned(dtype: torch.dtype, tmp_path: Path) -> None:
    """As behind a header of odd length; views of bytes could not begin there."""
    values = torch.arange(12.0).reshape(4, 3).to(dtype)
    file = write({"x": values}, tmp_path / "x.safetensors")
    shift(file, 1)
    found = mapped(stored(file, str))["x"].read(slice(1, 3))
    assert torch.equal(found.float(), values[1:3].float())


class Copies(TorchDispatchMode):
    """Notes the devices and dtypes of each copy: (from, to)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[str, torch.dtype], tuple[str, torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[-1]
            self.seen.append(((source.device.type, source.dtype), (out.device.type, out.dtype)))
        return out


def test_a_device_converts_what_it_gets(tmp_path: Path) -> None:
    """A CPU's conversion would take longer than the link to the device. meta stands for one."""
    plain = plan(write(ones(), tmp_path / "weights.safetensors"))
    with Copies() as copies:
        plain.load(device=torch.device("meta"), dtype_of=lambda *_: torch.bfloat16)
    stored, held = torch.float32, torch.bfloat16
    each = [(("cpu", stored), ("meta", stored)), (("meta", stored), ("meta", held))]
    assert copies.seen[-4:] == each * 2


def test_loading_uses_this_ranks_share_of_the_cores(tmp_path: Path, monkeypatch) -> None:
    file, seen = write(ones(), tmp_path / "weights.safetensors"), []

    def adapt(_: nn.Module, sources: Sources) -> Sources:
        def read(stored: Source, rows: slice) -> Tensor:
            seen.append(torch.get_num_threads())
            return stored.read(rows)

        return {name: replace(s, read=partial(read, s)) for name, s in sources.items()}

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        monkeypatch.setattr(host, "cores", lambda: 3)
        load(file, adapt=adapt)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # as torchrun says, which allows one thread
        load(file, adapt=adapt)
        assert seen == [1, 1, 3, 3] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
