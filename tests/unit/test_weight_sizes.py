"""The weights that are summed from headers are those of the networks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.pipelines import estimate_run, resolve_plan
from tests.unit.test_marks import write_quantised_checkpoint
from wan.app.run import Run
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.formats.tensor_source import get_named_tensors
from wan.checkpoint.load import make_dit_dtype_rule
from wan.pipeline import weight_sizes
from wan.pipeline.weight_transforms import install_weight_only_linears
from wan.tasks.base import build_dit

SMALL = ("--size", "64*64", "--device", "cuda")


def plan_run(task: str, folder: Path, *flags: str) -> Run:
    return resolve_plan("--task", task, "--ckpt_dir", folder, *SMALL, *flags)


def count_bytes(modules: Any) -> int:
    return sum(x.nbytes for module in modules for x in get_named_tensors(module).values())


def build_meta_dit(run: Run, convert: bool = False) -> Any:
    """The network of a run with the dtypes of the loader's rule, without values."""
    with torch.device("meta"):
        network = build_dit(run.setup.checkpoint.config)
    get_dtype = make_dit_dtype_rule(torch.bfloat16, convert)
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(get_dtype(name, torch.bfloat16))
    return network


@pytest.mark.parametrize(
    ("task", "convert"),
    [
        *(("t2v-A14B", False), ("i2v-14B", True), ("s2v-14B", False), ("s2v-14B", True)),
        *(("animate-14B", True), ("vace-1.3B", False)),
    ],
)
def test_weights_of_a_dit(task: str, convert: bool, tiny: Any) -> None:
    """The loader's rule of dtypes, and the modules that are streamed together with a block."""
    run = plan_run(task, tiny(task), *(("--convert_model_dtype",) if convert else ()))
    network = build_meta_dit(run, convert)
    layers = range(len(network.blocks))
    adapters: list[list[nn.Module]] = [[*network.adapter_modules(layer)] for layer in layers]
    block, adapter_bytes = count_bytes(network.blocks[:1]), [*map(count_bytes, adapters)]
    assert any(adapter_bytes) == (task in ("s2v-14B", "animate-14B", "vace-1.3B"))
    weights = weight_sizes.sum_dit_weights(run.setup, "cuda", 1)
    assert weights.allocated == count_bytes([network])
    assert weights.all_blocks == len(layers) * block + sum(adapter_bytes)
    assert (weights.plain_block, weights.adapters) == (block, max(adapter_bytes))
    sharded = weight_sizes.sum_dit_weights(run.setup, "cuda", 3)
    local_rows = (parameter.chunk(3)[0] for parameter in network.parameters())
    assert sharded.allocated == sum(rows.nbytes for rows in local_rows)


def test_fp8_weights_with_scales_of_blocks(tiny: Any, tmp_path: Path) -> None:
    """The values and the scales that a network keeps on its device, in float32."""
    folder = write_quantised_checkpoint(tiny("t2v-1.3B"), tmp_path / "x", "row blocks")
    run = plan_run("t2v-1.3B", folder, "--stored_weights", "keep")
    network = build_meta_dit(run)
    install_weight_only_linears(run.setup, "dit", "cuda", network, torch.bfloat16)
    assert weight_sizes.sum_dit_weights(run.setup, "cuda", 1).allocated == count_bytes([network])


def test_loras_of_a_video_that_are_in_memory_at_once(tiny: Any, tmp_path: Path) -> None:
    """Those of one expert; a CPU's memory also has the cache, up to those of the other expert."""
    for name, rank in {"x": 3, "x_high_noise": 5}.items():
        pair = {"down": torch.zeros(rank, 240), "up": torch.zeros(240, rank)}
        tensors = {f"blocks.0.self_attn.q.lora_{n}.weight": x for n, x in pair.items()}
        save_file(tensors, tmp_path / f"{name}.sft")
    flags = ("--precision", "fp32", "--lora_folder", tmp_path)
    flags += ("--video_lora", "x", "--video_lora", "x_high_noise")
    low, high = (2 * 240 * rank * 4 for rank in (3, 3 + 5))
    for device, cache, cached_bytes in (
        ("cpu", 0, 0),
        ("cpu", 1e-6, 1000),
        ("cpu", 1, low),
        ("cuda", 1, 0),
    ):
        more = ("--device", device, "--lora_cache", cache)
        setup = plan_run("t2v-A14B", tiny("t2v-A14B", "diffusers"), *flags, *more).setup
        assert weight_sizes.sum_video_loras(setup, device) == high + cached_bytes


def test_rows_of_whole_groups_stay_as_they_are_stored(tiny: Any) -> None:
    """Linear layers of blocks; a row of a GGUF type has whole groups of values."""
    names = {
        "blocks.0.ffn.0.weight": ("Q4_0", (8, 64), True),
        "blocks.0.ffn.2.weight": ("Q4_0", (8, 48), False),
        "blocks.1.ffn.0.weight": ("Q4_K", (8, 512), True),
        "blocks.1.ffn.2.weight": ("Q4_K", (8, 288), False),
        "blocks.1.self_attn.q.weight": ("F8_E4M3", (8, 33), True),
        "blocks.1.self_attn.k.weight": ("BF16", (8, 32), False),
        "blocks.1.norm3.bias": ("Q4_0", (32,), False),
        "blocks.1.conv.weight": ("Q4_0", (8, 32, 1), False),
        "head.head.weight": ("Q4_0", (8, 32), False),
    }
    tensors = {
        name: TensorInfo(Path("x.gguf"), name, dtype, shape, 0)
        for name, (dtype, shape, _) in names.items()
    }
    setup = plan_run("t2v-1.3B", tiny("t2v-1.3B")).setup
    (expert, files), *_ = setup.checkpoint.experts.items()
    experts = {expert: replace(files, tensors=tensors)}
    setup = replace(setup, checkpoint=replace(setup.checkpoint, experts=experts))
    kept = weight_sizes.find_unconverted_layers(setup, expert, "cuda")
    assert {f"{layer}.weight" for layer in kept} == {name for name, row in names.items() if row[2]}


def test_slices_of_a_tensor_are_mapped_where_they_are_aligned() -> None:
    """Rows of 32 bytes; float32 needs 64, and bfloat16 its own size."""
    for dtype, columns, first_row, offset, is_mapped in (
        ("F32", 8, 0, 64, True),
        ("F32", 8, 1, 64, False),
        ("F32", 8, 2, 64, True),
        ("F32", 8, 1, 96, True),
        ("BF16", 16, 1, 34, True),
        ("BF16", 16, 1, 35, False),
    ):
        place = {"first_row": first_row, "data_offset": offset}
        info = TensorInfo(Path("x.gguf"), "x", dtype, (3, columns), 96, **place)
        for can_map in (True, False):
            weights = weight_sizes.sum_weights({"x": info}, lambda info: info.dtype, can_map)
            mapped = 96 * (is_mapped and can_map)
            assert (weights.mapped, weights.allocated) == (mapped, 96 - mapped), (dtype, place)


def test_a_network_without_files_has_the_same_tensors(tiny: Any) -> None:
    run = plan_run("s2v-14B", tiny("s2v-14B"))
    expert, files = next(iter(run.setup.checkpoint.experts.items()))
    without_tensors = {expert: replace(files, tensors={})}
    checkpoint = replace(run.setup.checkpoint, experts=without_tensors)
    setup = replace(run.setup, checkpoint=checkpoint)
    expected = weight_sizes.sum_dit_weights(run.setup, "cuda", 1)
    assert weight_sizes.sum_dit_weights(setup, "cuda", 1) == expected


def test_a_stored_dtype_changes_no_estimate(tiny: Any, tmp_path: Path) -> None:
    """A text encoder in float32 becomes bfloat16, and a VAE in bfloat16 becomes float32."""
    estimates = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        folder = tmp_path / name
        shutil.copytree(tiny("t2v-1.3B", "diffusers"), folder)
        for file in (*folder.glob("text_encoder/*.safetensors"), *folder.glob("vae/*.safetensors")):
            save_file({key: x.to(dtype) for key, x in load_file(file).items()}, file)
        estimates.append(estimate_run(plan_run("t2v-1.3B", folder)))
    assert estimates[0] == estimates[1]


def test_weights_of_a_text_encoder(tiny: Any) -> None:
    """A published file may name the embedding twice: it is one parameter, and no block's."""
    setup = plan_run("t2v-1.3B", tiny("t2v-1.3B")).setup
    shapes = {"shared.weight": (1000, 64), "encoder.embed_tokens.weight": (1000, 64)}
    shapes |= {f"encoder.block.{n}.layer.0.SelfAttention.q.weight": (64, 64) for n in range(3)}
    tensors = {
        name: TensorInfo(Path("x.pth"), name, "BF16", shape, 0) for name, shape in shapes.items()
    }
    weights = weight_sizes.sum_text_encoder_weights(setup, "cuda", tensors, 1)
    blocks = 3 * 64 * 64 * 2
    assert (weights.allocated, weights.mapped) == (1000 * 64 * 2 + blocks, 0)
    assert (weights.all_blocks, weights.block) == (blocks, blocks // 3)
