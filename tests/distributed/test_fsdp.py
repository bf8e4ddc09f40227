"""Networks sharded with FSDP give the same bits; each rank reads and keeps only its shard."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.conftest import slow
from tests.dist import run_on_ranks
from wan.checkpoint.formats.tensor_source import TensorSource, TensorSources
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import UNSHARDED, ModelSpec, make_dit_dtype_rule, read_headers
from wan.distributed.fsdp import FsdpSharding, compute_row_range
from wan.modules import t5
from wan.modules.interfaces import ModelComponents
from wan.modules.model import WanModel
from wan.modules.t5 import TextEncoder, list_umt5_blocks

pytestmark = pytest.mark.dist
WORLDS = pytest.mark.parametrize("world", [2, slow(4)])
LAYOUTS = pytest.mark.parametrize("layout", ["official", slow("diffusers")])
CPU = torch.device("cpu")
# Compute dtype, whether all weights are converted to it, and the dtypes of the parameters.
PRECISIONS = (
    (torch.bfloat16, False, {torch.bfloat16, torch.float32}),
    (torch.float32, False, {torch.float32}),
    (torch.bfloat16, True, {torch.bfloat16}),
)


@cache
def mesh() -> DeviceMesh:
    """Return the mesh of all ranks of the pool; it is made once."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def dit(
    folder: Path,
    compute: torch.dtype,
    convert_all: bool,
    sharded: bool,
    cached: bool = True,
) -> WanModel:
    files = next(iter(inspect_checkpoint(folder).experts.values()))
    shared = ModelComponents(text_kv_cache=sharded and cached)
    make = partial(WanModel, **files.config, components=shared)
    return ModelSpec("DiT", make, files.tensors, folder).load(
        device=CPU,
        dtype_of=make_dit_dtype_rule(compute, convert_all),
        sharding=FsdpSharding(mesh(), lambda network: network.blocks) if sharded else UNSHARDED,
    )


@torch.no_grad()
def velocity(model: WanModel, t: float, context: Tensor) -> Tensor:
    x = torch.randn(model.in_dim, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    return model([x], torch.tensor([t]), [context], 16)[0]


def record_text_kv(model: WanModel) -> list[bool]:
    """Return a list that is filled in each forward: whether a block gets cached text K/V."""
    has_text_kv: list[bool] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: has_text_kv.append(inputs[3] is not None))
    return has_text_kv


def compare_dits(folder: Path) -> None:
    context = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for compute, convert_all, dtypes in PRECISIONS:
        unsharded, sharded = (dit(folder, compute, convert_all, on) for on in (False, True))
        has_text_kv = record_text_kv(sharded)
        expected = [velocity(unsharded, t, context) for t in (900.0, 3.0)]
        for t in (0, 0, 1):  # the first call fills the text cache
            assert torch.equal(velocity(sharded, (900.0, 3.0)[t], context), expected[t])
        layers = sharded.num_layers
        assert has_text_kv == [False] * layers + [True] * 2 * layers
        assert {p.dtype for p in sharded.parameters()} == dtypes
        shares = torch.tensor([sum(p.to_local().numel() for p in sharded.parameters())])
        dist.all_reduce(shares)
        assert shares.item() == sum(p.numel() for p in unsharded.parameters())


@LAYOUTS
@WORLDS
def test_dit_is_bit_equal(tiny, layout: str, world: int) -> None:
    run_on_ranks(world, compare_dits, tiny("t2v-1.3B", layout))


def text_encoder(folder: Path, dtype: torch.dtype, sharded: bool) -> tuple[TextEncoder, nn.Module]:
    """The encoder and its network."""
    checkpoint = inspect_checkpoint(folder)
    network = t5.read_text_encoder_spec(checkpoint.require("text_encoder")).load(
        device=CPU,
        dtype_of=t5.choose_text_encoder_dtypes(dtype),
        sharding=FsdpSharding(mesh(), list_umt5_blocks) if sharded else UNSHARDED,
    )
    tokenizer = t5.load_tokenizer(checkpoint.require("tokenizer"))
    return TextEncoder(network, tokenizer, dtype=dtype, text_len=64), network


def compare_text_encoders(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        unsharded, _ = text_encoder(folder, dtype, sharded=False)
        sharded, network = text_encoder(folder, dtype, sharded=True)
        for prompt in ("A cat.", "A cat.", "Two dogs play chess on the moon."):
            actual, expected = sharded(prompt), unsharded(prompt)
            assert actual.dtype == dtype and torch.equal(actual, expected)
        # Stored once, in the dtype of the file, for any compute dtype.
        assert {p.dtype for p in network.parameters()} == {torch.bfloat16}


@WORLDS
@LAYOUTS
def test_text_encoder_is_bit_equal(tiny, world: int, layout: str) -> None:
    run_on_ranks(world, compare_text_encoders, tiny("t2v-1.3B", layout))


def live_bytes() -> int:
    """Bytes of all tensors in this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def record_gathered_parts(network: nn.Module, parts: list[nn.Module]) -> list[tuple[int, set[int]]]:
    """Return a list of (part that runs, parts that are gathered) that is filled in each forward."""
    records: list[tuple[int, set[int]]] = []

    def record_call(running: int) -> None:
        gathered = {i for i, part in enumerate(parts) if not isinstance(first(part), DTensor)}
        inner = {id(p) for part in parts for p in part.parameters()}
        root = [p for p in network.parameters() if id(p) not in inner]
        assert root and not any(isinstance(p, DTensor) for p in root)
        records.append((running, gathered))

    def first(part: nn.Module) -> Tensor:
        return next(part.parameters())

    for index, part in enumerate(parts):
        part.register_forward_pre_hook(lambda *_, index=index: record_call(index))
    return records


def check_resident_share(folder: Path) -> None:
    model = dit(folder, torch.bfloat16, False, sharded=True, cached=False)
    encoder, umt5 = text_encoder(folder, torch.float32, sharded=True)
    umt5_parts = list_umt5_blocks(umt5)
    context = torch.zeros(5, 64)
    calls: list[tuple[Any, list[nn.Module], Callable[[], Any]]] = [
        (model, list(model.blocks), lambda: velocity(model, 5.0, context)),
        (umt5, umt5_parts, lambda: encoder("A cat.")),
    ]
    for network, parts, call in calls:
        records = record_gathered_parts(network, parts)
        bytes_before = live_bytes()
        call()
        call()
        assert live_bytes() - bytes_before < 64 << 10  # the RoPE table of the grid
        assert records == [(i, {i}) for i in range(len(parts))] * 2
        assert all(isinstance(p, DTensor) for p in network.parameters())


def test_one_block_is_whole_at_a_time_and_none_between_calls(tiny) -> None:
    run_on_ranks(2, check_resident_share, tiny("t2v-1.3B"))


def compare_uneven(folder: Path) -> None:
    context = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    unsharded, sharded = (dit(folder, torch.bfloat16, True, on) for on in (False, True))
    assert torch.equal(velocity(sharded, 3.0, context), velocity(unsharded, 3.0, context))
    for parameter in sharded.parameters():
        rows = compute_row_range(parameter)
        assert parameter.to_local().shape[0] == rows.stop - rows.start
    narrow = compute_row_range(sharded.blocks[0].ffn[0].weight)  # 3 rows for 4 ranks
    rank = dist.get_rank()
    assert (narrow.start, narrow.stop) == (rank, min(rank + 1, 3))


def test_rows_that_do_not_divide(tmp_path: Path) -> None:
    """dim 10 over 4 ranks is 3, 3, 3, 1; 3 rows leave the last rank none, 1 row all but one."""
    config = {"model_type": "t2v", "dim": 10, "ffn_dim": 3, "num_heads": 1, "num_layers": 2}
    torch.manual_seed(0)
    model = WanModel(**config, freq_dim=256, text_dim=7)
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_dim": 7}))
    save_file(model.state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    run_on_ranks(4, compare_uneven, tmp_path)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 8192), nn.Linear(8192, 2048))


def mapped_bytes(file: Path) -> int:
    """Bytes of a memory-mapped file that are resident in this process (whole pages)."""
    sections = Path("/proc/self/smaps").read_text().split("VmFlags")
    resident = [s.split("Rss:")[1].split()[0] for s in sections if str(file) in s]
    return sum(int(kilobytes) for kilobytes in resident) * 1024


def read_share(file: Path) -> tuple[int, int]:
    """Return (bytes read, bytes of the file that became resident)."""
    requested_bytes, open_sources = [0], []

    def read_rows(rows: slice, source: TensorSource) -> Tensor:
        values = source.read(rows)
        requested_bytes[0] += values.nbytes
        return values

    def count_reads(_: nn.Module, sources: TensorSources) -> TensorSources:
        open_sources.extend(sources.values())  # so that the file is still mapped afterwards
        return {n: replace(s, read=partial(read_rows, source=s)) for n, s in sources.items()}

    ModelSpec("", layers, read_headers(file, str), file).load(
        device=CPU,
        dtype_of=lambda *_: torch.float32,
        sharding=FsdpSharding(mesh(), lambda network: network),
        transform=count_reads,
    )
    resident_bytes = mapped_bytes(file)
    dist.barrier()
    return requested_bytes[0], resident_bytes


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_rank_reads_only_its_share(tmp_path: Path, suffix: str) -> None:
    """64 MiB over 4 ranks. The system maps pages of up to 2 MiB, so two per tensor may be more."""
    file = tmp_path / f"weights{suffix}"
    with torch.device("meta"):
        parameters = dict(layers().named_parameters())
    state = {name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in parameters.items()}
    (torch.save if suffix == ".pth" else save_file)(state, file)
    total = sum(tensor.nbytes for tensor in state.values())
    reads = run_on_ranks(4, read_share, file)
    assert sum(requested_bytes for requested_bytes, _ in reads) == total
    for requested_bytes, resident_bytes in reads:
        assert requested_bytes == total // 4
        assert requested_bytes <= resident_bytes <= requested_bytes + len(state) * (4 << 20)


def shard_over_two_axes() -> str:
    ranks = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"2 axes.* flatten it") as caught:
        FsdpSharding(ranks, lambda network: network.blocks)
    return str(caught.value)


def test_a_mesh_of_several_axes_is_refused() -> None:
    run_on_ranks(4, shard_over_two_axes)
