"""LoRA and difference files: every naming family, exact merging, and refusals."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pipelines import build_cpu_pipeline
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint import lora
from wan.checkpoint.keymaps import rename_dit_to_diffusers
from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora import LoraFile, parse_lora_file
from wan.checkpoint.lora_names import NAMINGS, is_low_noise
from wan.checkpoint.merge_lora import merge_loras, open_lora_sources
from wan.settings.errors import FileChangedError, InputError

LAYERS = ("blocks.0.self_attn.q", "blocks.1.self_attn.o", "blocks.0.cross_attn.v", "blocks.1.ffn.0")
LAYERS += ("blocks.0.ffn.2", "text_embedding.0", "time_embedding.2", "time_projection.1")

Q = "blocks.0.self_attn.q"
A, B = torch.ones(2, 96), torch.ones(96, 2)
PAIR = {f"{Q}.lora_down.weight": A, f"{Q}.lora_up.weight": B}


def rename_to_diffusers(layer: str) -> str:
    return rename_dit_to_diffusers(f"{layer}.weight").removesuffix(".weight")


def processor(layer: str) -> str:
    """attn1.processor.to_q_lora, to_out_lora"""
    return (
        rename_to_diffusers(layer)
        .replace("attn1.", "attn1.processor.")
        .replace("to_out.0", "to_out")
    )


FAMILIES: dict[str, tuple[Callable[[str], str], str, str]] = {
    "lightx2v": (lambda x: f"diffusion_model.{x}", ".lora_down.weight", ".lora_up.weight"),
    "official": (str, ".lora_A.weight", ".lora_B.weight"),
    "peft": (lambda x: f"base_model.model.{x}", ".lora_A.default.weight", ".lora_B.default.weight"),
    "diffusers": (
        lambda x: f"transformer.{rename_to_diffusers(x)}",
        ".lora_A.weight",
        ".lora_B.weight",
    ),
    "old diffusers": (processor, "_lora.down.weight", "_lora.up.weight"),
    "lora modules": (rename_to_diffusers, ".lora.down.weight", ".lora.up.weight"),
    "musubi": (
        lambda x: f"lora_unet_{x.replace('.', '_')}",
        ".lora_down.weight",
        ".lora_up.weight",
    ),
    "kohya of diffusers": (
        lambda x: f"lora_unet_{rename_to_diffusers(x).replace('.', '_')}",
        ".lora_down.weight",
        ".lora_up.weight",
    ),
    "comfy": (lambda x: f"model.diffusion_model.{x}", ".lora_down.weight", ".lora_up.weight"),
}


@pytest.fixture(scope="module")
def weights(tiny: Any) -> dict[str, Tensor]:
    """The weights of the tiny dense checkpoint."""
    return load_file(tiny("t2v-1.3B") / "diffusion_pytorch_model.safetensors")


def pair(shape: torch.Size, rank: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, *shape[1:], generator=generator)
    up = torch.randn(shape[0], rank, *(1 for _ in shape[2:]), generator=generator) / 30
    return down.to(dtype), up.to(dtype)


def pair_of(checkpoint: Checkpoint, rank: int = 2) -> tuple[Tensor, Tensor]:
    """A pair for Q of the low-noise expert."""
    shape = checkpoint.experts["low_noise"].tensors[f"{Q}.weight"].shape
    return pair(torch.Size(shape), rank, 0, torch.float32)


def read_merged_weights(
    path: Path, folder: Path, strength: float = 1.0, expert: str = "dit"
) -> dict[str, Tensor]:
    """The merged weights of a network that the file changes."""
    checkpoint = inspect_checkpoint(folder)
    values = {"lora": (f"{path}={strength}",)}
    loras = lora.resolve_loras(values, checkpoint)[expert]
    sources = merge_loras(open_sources(checkpoint.experts[expert].tensors), loras)
    return {name: sources[name].read(slice(None)) for adapter in loras for name in adapter.deltas}


def test_families(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    """Each family with ranks, alphas and dtypes."""
    kinds = (1, None, torch.float32), (4, 8.0, torch.bfloat16), (64, 8.0, torch.float16)
    wrong = []
    for family, (rank, alpha, dtype) in product(FAMILIES, kinds):
        spell, down_end, up_end = FAMILIES[family]
        tensors, expected = {}, {}
        for seed, layer in enumerate(LAYERS):
            weight = weights[f"{layer}.weight"]
            down, up = pair(weight.shape, rank, seed, dtype)
            tensors |= {f"{spell(layer)}{down_end}": down, f"{spell(layer)}{up_end}": up}
            if alpha is not None:
                tensors[f"{spell(layer)}.alpha"] = torch.tensor(alpha, dtype=dtype)
            factor = 0.7 * (1 if alpha is None else alpha / rank)
            delta = up.double() @ down.double().flatten(1)
            expected[f"{layer}.weight"] = weight.double() + factor * delta.reshape(weight.shape)
        save_file(tensors, tmp_path / "x.safetensors")
        actual = read_merged_weights(tmp_path / "x.safetensors", tiny("t2v-1.3B"), 0.7)
        near = {"atol": 0, "rtol": 1.2e-7}
        if actual.keys() != expected.keys() or not all(
            torch.allclose(actual[name].double(), exact, **near) for name, exact in expected.items()
        ):
            wrong.append((family, rank))
    assert not wrong


# Those of the low-noise expert need two networks.
PREFIXES = {row.prefix for row in NAMINGS if not is_low_noise(f"{row.prefix}{Q}")}


def test_the_prefixes_of_the_low_noise_expert() -> None:
    rows = {row.program for row in NAMINGS if row.prefix not in PREFIXES}
    assert rows == {row.program for row in NAMINGS if "low-noise" in row.program}


def test_every_naming_of_the_table(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    """Every prefix with the ends of every row."""
    name, path, wrong = LAYERS[0], tmp_path / "x.safetensors", []
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    down, up = pair(weight.shape, 2, 0, torch.float32)
    sums = {f"{name}.weight": (weight.double() + up.double() @ down.double()).float()}
    for prefix, row in product(sorted(PREFIXES), NAMINGS):
        naming = row._replace(
            **{key: end.replace("NAME", "style_0") for key, end in row._asdict().items() if end}
        )
        tensors = {f"{prefix}{name}{naming.down}": down, f"{prefix}{name}{naming.up}": up}
        expected = dict(sums)
        if naming.bias is not None:
            tensors[f"{prefix}{name}{naming.bias}"] = torch.full_like(bias, 0.25)
            expected[f"{name}.bias"] = (bias.double() + 0.25).float()
        save_file(tensors, path)
        actual = read_merged_weights(path, tiny("t2v-1.3B"))
        if actual.keys() != expected.keys() or any(
            not torch.equal(actual[key], exact) for key, exact in expected.items()
        ):
            wrong.append((prefix, naming.up))
    assert not wrong


def test_every_kind_of_difference(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    """Norms, biases, the convolution, the head and the modulation, which other loaders ignore."""
    names = {
        "diffusion_model.blocks.0.norm3.diff": "blocks.0.norm3.weight",
        "diffusion_model.blocks.0.norm3.diff_b": "blocks.0.norm3.bias",
        "blocks.1.self_attn.norm_q.diff": "blocks.1.self_attn.norm_q.weight",
        "blocks.1.cross_attn.norm_k.w_norm": "blocks.1.cross_attn.norm_k.weight",
        "diffusion_model.blocks.0.ffn.0.diff_b": "blocks.0.ffn.0.bias",
        "diffusion_model.blocks.1.diff_m": "blocks.1.modulation",
        "diffusion_model.head.diff_m": "head.modulation",
        "diffusion_model.head.head.diff": "head.head.weight",
        "diffusion_model.head.head.diff_b": "head.head.bias",
        "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
        "proj_out.lora_B.bias": "",  # with its pair, below
    }
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for key, name in names.items():
        if name:
            tensors[key] = torch.randn(weights[name].shape, generator=generator)
            expected[name] = weights[name].double() + 0.5 * tensors[key].double()
    layer = "blocks.0.self_attn.k"
    down, up = pair(weights[f"{layer}.weight"].shape, 3, 1, torch.float32)
    bias = torch.randn(len(up), generator=generator)
    tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    tensors |= {f"{layer}.lora_B.bias": bias, f"{layer}.alpha": torch.tensor(6.0)}
    expected[f"{layer}.weight"] = weights[f"{layer}.weight"].double() + up.double() @ down.double()
    expected[f"{layer}.bias"] = weights[f"{layer}.bias"].double() + bias.double()
    save_file(tensors, tmp_path / "x.safetensors")
    actual = read_merged_weights(tmp_path / "x.safetensors", tiny("t2v-1.3B"), 0.5)
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        torch.testing.assert_close(actual[name].double(), exact, atol=1e-9, rtol=1.2e-7)


def test_a_convolutions_pair(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    weight = weights["patch_embedding.weight"]
    down, up = pair(weight.shape, 2, 0, torch.float32)
    tensors = {"patch_embedding.lora_down.weight": down, "patch_embedding.lora_up.weight": up}
    save_file(tensors, tmp_path / "x.safetensors")
    actual = read_merged_weights(tmp_path / "x.safetensors", tiny("t2v-1.3B"))[
        "patch_embedding.weight"
    ]
    delta = torch.einsum("orabc,rixyz->oixyz", up.double(), down.double())
    torch.testing.assert_close(actual.double(), weight.double() + delta, atol=1e-9, rtol=1.2e-7)


def test_rows_are_the_same_bits_wherever_they_are_cut(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """As ranks and slices split them."""
    layer = "blocks.0.ffn.0"
    down, up = pair(weights[f"{layer}.weight"].shape, 16, 0, torch.float32)
    halves = {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
    save_file(halves, tmp_path / "x.safetensors")
    checkpoint = inspect_checkpoint(tiny("t2v-1.3B"))
    (adapter,) = lora.resolve_loras({"lora": (str(tmp_path / "x.safetensors"),)}, checkpoint)["dit"]
    source = merge_loras(open_sources(checkpoint.experts["dit"].tensors), [adapter])[
        f"{layer}.weight"
    ]
    all_rows = source.read(slice(None))
    for cut in (1, 7, 100, len(all_rows) - 1):
        parts = (source.read(slice(0, cut)), source.read(slice(cut, None)))
        assert torch.equal(torch.cat(parts), all_rows)


def test_two_experts_of_one_file_and_of_several(tiny: Any, tmp_path: Path) -> None:
    """Prefixes transformer. and transformer_2., or a file for each; several files add up."""
    folder = tiny("t2v-A14B")
    checkpoint = inspect_checkpoint(folder)
    down, up = pair_of(checkpoint)
    end = "blocks.0.attn1.to_q.lora_{}.weight"
    high = {f"transformer.{end.format('A')}": down, f"transformer.{end.format('B')}": up}
    low = {
        f"transformer_2.{end.format('A')}": down.clone(),
        f"transformer_2.{end.format('B')}": 4 * up,
    }
    save_file(high | low, tmp_path / "both.safetensors")
    save_file(high, tmp_path / "one.safetensors")
    values = {
        "lora": (str(tmp_path / "both.safetensors"),),
        "lora_high_noise": (f"{tmp_path / 'one.safetensors'}=-2",),
    }
    loras = lora.resolve_loras(values, checkpoint)
    with pytest.raises(InputError, match="both experts' tensors"):
        lora.resolve_loras({"lora_low_noise": (str(tmp_path / "both.safetensors"),)}, checkpoint)
    factors = {"high_noise": -1.0, "low_noise": 4.0}
    for expert, factor in factors.items():
        plain = open_sources(checkpoint.experts[expert].tensors)
        name = f"{Q}.weight"
        exact = plain[name].read(slice(None)).double() + factor * up.double() @ down.double()
        changed = merge_loras(plain, loras[expert])[name].read(slice(None))
        torch.testing.assert_close(changed.double(), exact, atol=1e-9, rtol=1.2e-7)


def test_experts_in_capitals_and_names_that_say_none(tiny: Any, tmp_path: Path) -> None:
    """`HIGH` names an expert as a separate word; `low_rank` and `HIGHWAY` name none."""
    checkpoint = inspect_checkpoint(tiny("i2v-A14B"))
    down, up = pair_of(checkpoint)
    names = {
        "SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16": {"high_noise"},
        "Wan2.2-Lightning_I2V-A14B-4steps-lora_LOW_fp16": {"low_noise"},
        "i2v_low_rank_64": {"high_noise", "low_noise"},
        "HIGHWAY": {"high_noise", "low_noise"},
    }
    for name, experts in names.items():
        file = tmp_path / f"{name}.safetensors"
        save_file({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, file)
        loras = lora.resolve_loras({"lora": (str(file),)}, checkpoint)
        assert {expert for expert, adapters in loras.items() if adapters} == experts


def test_a_published_pair_goes_to_its_experts(tiny: Any, tmp_path: Path) -> None:
    """Both files passed with `lora`: their names determine the expert."""
    checkpoint, stem = (
        inspect_checkpoint(tiny("t2v-A14B")),
        tmp_path / "wan2.2_t2v_A14b_lora_rank64_1022",
    )
    down, up = pair_of(checkpoint)
    ends = {"high_noise": "_high_noise", "low_noise": "-LowNoise"}
    files = {name: f"{stem}{end}.safetensors" for name, end in ends.items()}
    for file in files.values():
        save_file({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, file)
    loras = lora.resolve_loras({"lora": tuple(files.values())}, checkpoint)
    files_by_expert = {
        name: [str(adapter.path) for adapter in adapters] for name, adapters in loras.items()
    }
    assert files_by_expert == {name: [file] for name, file in files.items()}
    with pytest.raises(InputError, match="is named as the high_noise expert"):
        lora.resolve_loras({"lora_low_noise": (files["high_noise"],)}, checkpoint)
    notices = list(lora.iter_lora_notices(loras, "t2v", recipe_has_pair=True))
    assert notices == [f"LoRA of {n}: {files[n]}, strength 1, 1 layers." for n in loras]
    alone = lora.resolve_loras({"lora": (files["high_noise"],)}, checkpoint)
    assert (
        "low_noise expert has no LoRA"
        in list(lora.iter_lora_notices(alone, "i2v", recipe_has_pair=True))[-1]
    )
    assert "has t2v in its name" in list(lora.iter_lora_notices(alone, "i2v", False))[-1]


@pytest.fixture
def styles(tiny: Any, tmp_path: Path) -> Callable[..., dict[str, list[str]]]:
    """styles(*names, **flags) -> the files of each expert and the notices, of equal LoRAs."""
    checkpoint = inspect_checkpoint(tiny("t2v-A14B"))
    down, up = pair_of(checkpoint)
    layer = "blocks.0.self_attn.q.lora_{}.weight"

    def make(name: str) -> str:
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({layer.format("A"): down, layer.format("B"): up}, path)
        return str(path)

    def resolve_files(*names: str, **flags: str) -> dict[str, list[str]]:
        values: dict[str, Any] = {flag: (make(name),) for flag, name in flags.items()}
        loras = lora.resolve_loras(values | {"lora": tuple(map(make, names))}, checkpoint)
        files = {
            n: [str(x.path.relative_to(tmp_path)) for x in adapters]
            for n, adapters in loras.items()
        }
        lines = [
            line for line in lora.iter_lora_notices(loras, "t2v", False) if "LoRA of" not in line
        ]
        return {n: [x.removesuffix(".safetensors") for x in xs] for n, xs in files.items()} | {
            "notices": lines
        }

    return resolve_files


def test_each_expert_gets_its_file_of_a_pair(styles: Any) -> None:
    pairs = ("style_high", "style_low"), ("StyleHigh", "StyleLow"), ("fox_H", "fox_L")
    for names in (*pairs, ("h/x", "l/x")):
        expected = {"high_noise": [names[0]], "low_noise": [names[1]], "notices": []}
        assert styles(*names) == styles(*names[::-1]) == expected
        both = styles(*names, "other")
        assert both["high_noise"] == ["other", names[0]]
        assert both["low_noise"] == ["other", names[1]]


def test_an_unpaired_expert_name_is_reported(styles: Any) -> None:
    result = styles("style_high")
    assert (result["high_noise"], result["low_noise"]) == (["style_high"], [])
    assert "style_high.safetensors goes into the high_noise expert only" in result["notices"][0]
    assert styles("style_high", lora_low_noise="other")["notices"] == []
    assert styles(lora_high_noise="style_high")["notices"] == [], "a flag decides"


def test_an_ambiguous_expert_name_is_reported(styles: Any) -> None:
    for name, flag in (("style_l", "lora_low_noise"), ("high_quality", "lora_high_noise")):
        result = styles(name)
        assert result["high_noise"] == result["low_noise"] == [name]
        assert "into both experts" in result["notices"][0] and flag in result["notices"][0]
    assert styles("yellow_highway")["notices"] == []


def test_flags_against_names(styles: Any) -> None:
    """Also half of a pair whose other half names no expert."""
    halves = ("style_high", "style"), ("fox", "fox-LOW"), ("a/x", "xLow")
    messages = {" and ".join(names): get_refusal(styles, *names) for names in halves}
    messages["a flag of the other"] = get_refusal(styles, lora_low_noise="style_high")
    check_refusals("LoRA: experts", messages)
    assert styles("style_high", "style_low", "style")["notices"] == [], "the pair is whole"
    for name in ("style_H", "high_quality", "high/style"):
        assert styles(lora_low_noise=name)["low_noise"] == [name]


def test_a_file_of_both_experts_whatever_its_name(tiny: Any, tmp_path: Path) -> None:
    checkpoint, path = inspect_checkpoint(tiny("t2v-A14B")), tmp_path / "fly_high.safetensors"
    end, (down, up) = "blocks.0.attn1.to_q.lora_{}.weight", pair_of(checkpoint)
    tensors = {
        f"{prefix}.{end.format(part)}": tensor.clone()
        for prefix in ("transformer", "transformer_2")
        for part, tensor in (("A", down), ("B", up))
    }
    save_file(tensors, path)
    loras = lora.resolve_loras({"lora": (str(path),)}, checkpoint)
    assert [len(adapters) for adapters in loras.values()] == [1, 1]


def test_a_file_that_changes_after_the_check(tiny: Any, tmp_path: Path) -> None:
    """Before and after the file is mapped; for merged LoRAs and for separate ones."""
    path, checkpoint = tmp_path / "x.safetensors", inspect_checkpoint(tiny("t2v-1.3B"))
    base = open_sources(checkpoint.experts["dit"].tensors)

    def source(use: Any, adapters: Any) -> Any:
        if use is merge_loras:
            return merge_loras(base, adapters)[f"{Q}.weight"]
        deltas = {Q: adapters[0].deltas[f"{Q}.weight"]}
        return open_lora_sources(deltas, torch.float32, base)[f"{Q}.lora_up"]

    for use, mapped_before in product((merge_loras, open_lora_sources), (True, False)):
        path.unlink(missing_ok=True)
        save_file(PAIR, path)
        adapters = lora.resolve_loras({"lora": (str(path),)}, checkpoint)["dit"]
        mapped_source = source(use, adapters) if mapped_before else None
        os.truncate(path, 300)
        with pytest.raises(FileChangedError, match=r"x\.safetensors"):
            mapped_source.read(slice(None)) if mapped_before else source(use, adapters)


def test_strength_is_split_off_at_the_last_equals_sign() -> None:
    assert parse_lora_file("a=b.safetensors") == LoraFile(Path("a=b.safetensors"))
    assert parse_lora_file("a=b.safetensors=0.25") == LoraFile(Path("a=b.safetensors"), 0.25)
    assert parse_lora_file("a.safetensors=-1e-1") == LoraFile(Path("a.safetensors"), -0.1)
    with pytest.raises(InputError, match="strength inf"):
        parse_lora_file("a.safetensors=inf")


BAD: dict[str, dict[str, Tensor]] = {
    "empty": {},
    "no weight there": {"head.lora_A.weight": A, "head.lora_B.weight": B},
    "all blocks": {"blocks.diff_m": torch.ones(1, 6, 96)},
    "another model": {"double_blocks.0.img_attn.qkv.lora_A.weight": A},
    "only image keys": {"blocks.0.cross_attn.k_img.lora_down.weight": A},
    "block beyond": {"blocks.9.self_attn.q.lora_A.weight": A},
    "no up": {f"{Q}.lora_down.weight": A},
    "no down": {f"{Q}.lora_B.weight": B},
    "ranks differ": PAIR | {f"{Q}.lora_up.weight": torch.ones(96, 3)},
    "wide": PAIR | {f"{Q}.lora_down.weight": torch.ones(2, 95)},
    "high": PAIR | {f"{Q}.lora_up.weight": torch.ones(97, 2)},
    "rank 0": {f"{Q}.lora_A.weight": A[:0], f"{Q}.lora_B.weight": B[:, :0]},
    "vector": {f"{Q}.lora_A.weight": A[0], f"{Q}.lora_B.weight": B[:, 0]},
    "alpha of two": PAIR | {f"{Q}.alpha": torch.ones(2)},
    "alpha nan": PAIR | {f"{Q}.alpha": torch.tensor(float("nan"))},
    "alpha 1e38": PAIR | {f"{Q}.alpha": torch.tensor(1e38)},
    "lone alpha": {f"{Q}.alpha": torch.tensor(1.0)},
    "lone bias": {f"{Q}.lora_B.bias": torch.ones(96)},
    "int8": PAIR | {f"{Q}.lora_up.weight": B.to(torch.int8)},
    "a DoRA's shape": PAIR | {f"{Q}.dora_scale": torch.ones(95, 1)},
    "a DoRA of a norm": {
        "blocks.0.norm3.lora_down.weight": A[:, :1],
        "blocks.0.norm3.lora_up.weight": B,
        "blocks.0.norm3.dora_scale": torch.ones(1, 1),
    },
    "DoRA alone": {f"{Q}.lora_magnitude_vector.weight": torch.ones(96)},
    "half of LoHa": {f"{Q}.hada_w1_a": B, f"{Q}.hada_w1_b": A},
    "half of LoKr": {f"{Q}.lokr_w1": B},
    "LoKr twice": {f"{Q}.lokr_w1": B, f"{Q}.lokr_w2": B, f"{Q}.lokr_w2_a": B},
    "LoKr's shape": {f"{Q}.lokr_w1": torch.ones(2, 2), f"{Q}.lokr_w2": torch.ones(48, 47)},
    "OFT": {f"{Q}.oft_blocks": B},
    "LoCon": PAIR | {f"{Q}.lora_mid.weight": torch.ones(2, 3)},
    "reshaped": PAIR | {f"{Q}.reshape_weight": torch.ones(2)},
    "text encoder": PAIR | {"lora_te_text_model_q.lora_down.weight": A},
    "difference's shape": {"blocks.0.norm3.diff": torch.ones(95)},
    "no such bias": {"blocks.0.self_attn.norm_q.diff_b": torch.ones(96)},
    "modulation's shape": {"blocks.0.diff_m": torch.ones(6, 96)},
    "twice": PAIR | {f"diffusion_model.{Q}.lora_down.weight": A},
    "whole weights": {f"{Q}.weight": torch.ones(96, 96)},
    "whole weights beside": PAIR | {"head.head.bias": torch.ones(64)},
    "two adapters": {f"{Q}.lora_A.{x}.weight": A for x in ("one", "two")},
    "an unknown prefix": PAIR | {f"foreign.{Q}.lora_A.weight": A},
    "another network's blocks": {f"vace_{x}": tensor for x, tensor in PAIR.items()},
    "unknown end": PAIR | {f"{Q}.lora_C.weight": A},
    "two experts'": {f"transformer_2.{Q}.lora_A.weight": A},
    "scale tensor": PAIR | {"scale": torch.ones(1)},
}


@pytest.mark.parametrize("alpha", [3, 1.5])
def test_alphas_that_are_python_numbers(alpha: float, tiny: Any, tmp_path: Path) -> None:
    """In PyTorch files, against the same alpha as a tensor."""
    merged = []
    for value in (alpha, torch.tensor(float(alpha))):
        torch.save(PAIR | {f"{Q}.alpha": value}, tmp_path / "x.pt")
        merged.append(read_merged_weights(tmp_path / "x.pt", tiny("t2v-1.3B")))
    assert torch.equal(*(weights[f"{Q}.weight"] for weights in merged))


def test_bad_files(tiny: Any, tmp_path: Path) -> None:
    """Also files with an invalid alpha in PEFT's metadata, and shards."""
    path, messages = tmp_path / "x.safetensors", {}
    for case, tensors in BAD.items():
        save_file({name: value.clone() for name, value in tensors.items()}, path)
        messages[case] = get_refusal(read_merged_weights, path, tiny("t2v-1.3B"))
        assert str(path) in messages[case], case
    path = tmp_path / "x.pt"
    for alpha in (True, 10**400, "2", None, math.inf):
        torch.save(PAIR | {f"{Q}.alpha": alpha}, path)
        messages[f"alpha {alpha!s:.3} in a PyTorch file"] = get_refusal(
            read_merged_weights, path, tiny("t2v-1.3B")
        )
    path = tmp_path / "x.safetensors"
    for alpha in (True, 10**400, "2", None):
        metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": alpha})}
        save_file(PAIR, path, metadata=metadata)
        if alpha is None:
            read_merged_weights(path, tiny("t2v-1.3B"))
        else:
            messages[f"alpha {str(alpha)[:9]}"] = get_refusal(
                read_merged_weights, path, tiny("t2v-1.3B")
            )
    for number in (2, 1):
        path = tmp_path / f"style-0000{number}-of-00002.safetensors"
        save_file(PAIR, path)
    messages["a shard"] = get_refusal(read_merged_weights, path, tiny("t2v-1.3B"))
    check_refusals("LoRA: files", messages)


def test_bad_paths(tiny: Any, tmp_path: Path) -> None:
    for name in ("TEXT.pt", "TEXT.safetensors"):
        (tmp_path / name).write_text("<html>not found</html>")
    folder, text = tmp_path / "FOLDER", f"{tmp_path}/TEXT.safetensors"
    folder.mkdir()
    quantised = {"lora": (f"{tmp_path}/X",), "quant_dit_path": tmp_path / "Y"}
    table: dict[str, dict[str, Any]] = {
        "no file": {"lora": ("/nowhere/x.safetensors",)},
        "a folder": {"lora": (str(folder),)},
        "a pickle": {"lora": (f"{tmp_path}/TEXT.pt",)},
        "a strength": {"lora": (f"{text}=1e308",)},
        "a text": {"lora": (text,)},
        "an expert of one network": {"lora_high_noise": (text,)},
        "an empty lora_dir": {"lora_dir": folder},
        "an export": quantised,
    }
    checkpoint = inspect_checkpoint(tiny("t2v-1.3B"))
    messages = {
        name: get_refusal(lora.resolve_loras, values, checkpoint) for name, values in table.items()
    }
    check_refusals("LoRA: places", messages, [r"(?<=file \().*(?=\); )"])


def test_a_pipeline_runs_with_merged_weights(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """The LoRA is merged: the network holds the sums."""
    down, up = pair(weights[f"{Q}.weight"].shape, 2, 0, torch.float32)
    path = tmp_path / "x.safetensors"
    save_file({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, path)
    network = build_cpu_pipeline("t2v-1.3B", tiny("t2v-1.3B"), lora=(str(path),)).experts.get("dit")
    merged_weight = network.blocks[0].self_attn.q.weight
    exact = weights[f"{Q}.weight"].double() + up.double() @ down.double()
    torch.testing.assert_close(merged_weight.double(), exact, atol=1e-9, rtol=1.2e-7)
