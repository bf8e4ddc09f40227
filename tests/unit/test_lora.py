"""LoRA and difference files: every naming family, exact merging, experts, and refusals."""

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
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files import PAIR, A, B, Q, make_pair, merge_file, rename_to_diffusers
from tests.refusals import check_refusals, get_refusal
from wan.checkpoint.layout import Checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora.merge import merge_loras, open_lora_sources
from wan.checkpoint.lora.names import DIFFERENCES, NAMINGS
from wan.checkpoint.lora.resolve import LoraFile, iter_lora_notices, parse_lora_file, resolve_loras
from wan.settings.command import Loras
from wan.settings.errors import FileChangedError, InputError

LAYERS = ("blocks.0.self_attn.q", "blocks.1.self_attn.o", "blocks.0.cross_attn.v", "blocks.1.ffn.0")
LAYERS += ("blocks.0.ffn.2", "text_embedding.0", "time_embedding.2", "time_projection.1")
ROUNDED = {"atol": 1e-9, "rtol": 1.2e-7}  # once, to float32


def flatten(layer: str) -> str:
    return layer.replace(".", "_")


def rename_processor(layer: str) -> str:
    """attn1.processor.to_q_lora, to_out_lora"""
    name = rename_to_diffusers(layer).replace("attn1.", "attn1.processor.")
    return name.replace("to_out.0", "to_out")


A_B = (".lora_A.weight", ".lora_B.weight")
A_B_OF_NAME = (".lora_A.NAME.weight", ".lora_B.NAME.weight")
DOWN_UP = (".lora_down.weight", ".lora_up.weight")
FAMILIES: dict[str, tuple[Callable[[str], str], str, str]] = {
    "official": (str, *A_B),
    "PEFT": (lambda x: f"base_model.model.{x}", *A_B_OF_NAME),
    "diffusers": (lambda x: f"transformer.{rename_to_diffusers(x)}", *A_B),
    "processors": (rename_processor, "_lora.down.weight", "_lora.up.weight"),
    "modules": (rename_to_diffusers, ".lora.down.weight", ".lora.up.weight"),
    "layers": (
        rename_to_diffusers,
        ".lora_linear_layer.down.weight",
        ".lora_linear_layer.up.weight",
    ),
    "parameters": (str, ".lora_A", ".lora_B"),
    "other parameters": (str, ".lora_down", ".lora_up"),
    "kohya": (lambda x: f"lora_unet_{flatten(x)}", *DOWN_UP),
    "kohya of diffusers": (lambda x: f"lora_unet_{flatten(rename_to_diffusers(x))}", *DOWN_UP),
}
"""Program -> its name of a layer, and the ends of down and up; NAME is any adapter's."""
RANKS = ((1, None, torch.float32), (4, 8.0, torch.bfloat16), (64, 8.0, torch.float16))
SUFFIXES = (".safetensors", ".sft", ".pth", ".ckpt", ".pt", ".bin")


def test_each_row_of_the_tables_is_merged() -> None:
    """Prefixes have tests in test_lora_names.py."""
    assert {(row.down, row.up) for row in NAMINGS} == {row[1:] for row in FAMILIES.values()}
    assert {end for end in DIFFERENCES if not any(x.endswith(end) for x in CHANGES)} == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(
    family: str, weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """Each with a rank, an alpha, a dtype and a suffix of the file."""
    spell, *ends = FAMILIES[family]
    down_end, up_end = (end.replace("NAME", "style_0") for end in ends)
    number = [*FAMILIES].index(family)
    rank, alpha, dtype = RANKS[number % len(RANKS)]
    path = tmp_path / f"x{SUFFIXES[number % len(SUFFIXES)]}"
    tensors, expected = {}, {}
    for seed, layer in enumerate(LAYERS):
        weight = weights[f"{layer}.weight"]
        down, up = make_pair(weight.shape, rank, seed, dtype)
        tensors |= {f"{spell(layer)}{down_end}": down, f"{spell(layer)}{up_end}": up}
        if alpha is not None:
            tensors[f"{spell(layer)}.alpha"] = torch.tensor(alpha, dtype=dtype)
        factor = 0.7 * (1 if alpha is None else alpha / rank)
        delta = up.double() @ down.double().flatten(1)
        expected[f"{layer}.weight"] = weight.double() + factor * delta.reshape(weight.shape)
    (save_file if path.suffix in SUFFIXES[:2] else torch.save)(tensors, path)
    actual = merge_file(path, dense, 0.7)
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        torch.testing.assert_close(actual[name].double(), exact, **ROUNDED)


CHANGES = {  # name in a file -> parameter
    "diffusion_model.blocks.0.norm3.diff": "blocks.0.norm3.weight",
    "diffusion_model.blocks.0.norm3.diff_b": "blocks.0.norm3.bias",
    "blocks.1.norm3.weight.diff": "blocks.1.norm3.weight",
    "blocks.1.self_attn.norm_q.diff": "blocks.1.self_attn.norm_q.weight",
    "blocks.1.cross_attn.norm_k.w_norm": "blocks.1.cross_attn.norm_k.weight",
    "diffusion_model.blocks.0.ffn.0.diff_b": "blocks.0.ffn.0.bias",
    "diffusion_model.blocks.1.norm3.b_norm": "blocks.1.norm3.bias",
    "diffusion_model.blocks.1.diff_m": "blocks.1.modulation",
    "diffusion_model.blocks.0.scale_shift_table.diff": "blocks.0.modulation",
    "diffusion_model.head.diff_m": "head.modulation",
    "proj_out.weight.diff": "head.head.weight",
    "lora_unet_head_head_bias.diff": "head.head.bias",
    "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
}


def test_every_kind_of_difference(
    weights: dict[str, Tensor], dense: Checkpoint, tmp_path: Path
) -> None:
    """Norms, biases, the convolution, the head and the modulation, which other loaders ignore.

    `.diff` after the name of a layer or of a parameter, official or of diffusers.
    """
    generator = torch.Generator().manual_seed(0)
    tensors, expected = {}, {}
    for key, name in CHANGES.items():
        tensors[key] = torch.randn(weights[name].shape, generator=generator)
        expected[name] = weights[name].double() + 0.5 * tensors[key].double()
    # The alpha / rank of a pair is a factor of its bias, and not of a difference of the bias.
    for seed, layer in enumerate(("blocks.0.self_attn.k", "blocks.0.ffn.0")):
        weight, bias = (weights[f"{layer}.{name}"].double() for name in ("weight", "bias"))
        down, up = make_pair(weight.shape, 3, seed)
        tensors |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        tensors[f"{layer}.alpha"] = torch.tensor(6.0)
        expected[f"{layer}.weight"] = weight + up.double() @ down.double()
    tensors["blocks.0.self_attn.k.lora_B.bias"] = torch.randn(96, generator=generator)
    bias = weights["blocks.0.self_attn.k.bias"].double()
    expected["blocks.0.self_attn.k.bias"] = bias + tensors["blocks.0.self_attn.k.lora_B.bias"]
    save_file(tensors, tmp_path / "x.safetensors")
    actual = merge_file(tmp_path / "x.safetensors", dense, 0.5)
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        torch.testing.assert_close(actual[name].double(), exact, **ROUNDED)


def test_two_experts_of_one_file_and_of_several(
    pair_of_experts: Checkpoint, tmp_path: Path
) -> None:
    """Prefixes of the low-noise expert, or a file for each; several files add up."""
    plain = {x: open_sources(files.tensors) for x, files in pair_of_experts.experts.items()}
    down, up = make_pair(torch.Size(plain["low_noise"][f"{Q}.weight"].shape), 2)
    both, one = tmp_path / "both_high.safetensors", tmp_path / "one.safetensors"
    for high_prefix, low_prefix in (
        ("transformer.", "transformer_2."),
        ("pipe.dit.", "pipe.dit2."),
        ("base_model.model.transformer.", "base_model.model.transformer_2."),
        ("lora_transformer_", "lora_transformer_2_"),
    ):
        name = Q if high_prefix.endswith(".") else flatten(Q)
        high, low = (
            {f"{prefix}{name}.lora_A.weight": down, f"{prefix}{name}.lora_B.weight": factor * up}
            for prefix, factor in ((high_prefix, 1), (low_prefix, 4))
        )
        save_file(high | {key: x.clone() for key, x in low.items()}, both)  # whatever its name
        save_file(high, one)
        values = {"lora": (str(both),), "lora_high_noise": (f"{one}=-2",)}
        loras = resolve_loras(Loras(**values), pair_of_experts)
        for expert, factor in {"high_noise": -1.0, "low_noise": 4.0}.items():
            weight, changed = (
                sources[f"{Q}.weight"].read(slice(None)).double()
                for sources in (plain[expert], merge_loras(plain[expert], loras[expert]))
            )
            exact = weight + factor * up.double() @ down.double()
            torch.testing.assert_close(changed, exact, **ROUNDED)
    with pytest.raises(InputError, match="both experts' tensors"):
        resolve_loras(Loras(lora_high_noise=(str(both),)), pair_of_experts)


Styles = Callable[..., dict[str, list[str]]]


@pytest.fixture
def styles(pair_of_experts: Checkpoint, tmp_path: Path) -> Styles:
    """styles(*names, **flags) -> the files of each expert and the notices, of equal LoRAs."""
    shape = pair_of_experts.experts["low_noise"].tensors[f"{Q}.weight"].shape
    down, up = make_pair(torch.Size(shape), 2)

    def make(name: str) -> str:
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({f"{Q}.lora_A.weight": down, f"{Q}.lora_B.weight": up}, path)
        return str(path)

    def resolve_files(*names: str, task: str = "t2v", **flags: str) -> dict[str, list[str]]:
        values: dict[str, Any] = {flag: (make(name),) for flag, name in flags.items()}
        loras = resolve_loras(Loras(**values | {"lora": tuple(map(make, names))}), pair_of_experts)
        files = {
            expert: [str(x.path.relative_to(tmp_path).with_suffix("")) for x in adapters]
            for expert, adapters in loras.items()
        }
        lines = iter_lora_notices(loras, task, recipe_has_pair=task == "t2v")
        return files | {"notices": [line for line in lines if "LoRA of" not in line]}

    return resolve_files


def test_each_expert_gets_its_file_of_a_pair(styles: Styles) -> None:
    """`HIGH` names an expert as a separate word; `low_rank` and `HIGHWAY` name none."""
    for names in (("A14B_HIGH_lora_rank_128", "A14B-4steps-lora_LOW"), ("h/x", "l/x")):
        expected = {"high_noise": [names[0]], "low_noise": [names[1]], "notices": []}
        assert styles(*names) == styles(*names[::-1]) == expected
        both = styles(*names, "i2v_low_rank_64", task="i2v")
        assert both["high_noise"] == ["i2v_low_rank_64", names[0]]
        assert both["low_noise"] == ["i2v_low_rank_64", names[1]]


def test_an_unpaired_expert_name_is_reported(styles: Styles) -> None:
    result = styles("style_high")
    assert (result["high_noise"], result["low_noise"]) == (["style_high"], [])
    first, last = result["notices"]
    assert "style_high.safetensors goes into the high_noise expert only" in first
    assert "low_noise expert has no LoRA, but the recipe has a pair" in last
    assert styles("style_high", lora_low_noise="other")["notices"] == []
    (notice,) = styles(lora_high_noise="style_high")["notices"]
    assert notice == last, "a flag decides"


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("t2v", {"t2v": False, "i2v": True, "a_flf2v_b": True}),
        ("i2v", {"i2v": False, "flf2v": False, "t2v": True, "ti2v": True}),
        ("vace", {"t2v": False, "i2v": True}),
    ],
)
def test_a_name_of_another_task_is_reported(
    task: str, names: dict[str, bool], styles: Styles
) -> None:
    for name, is_other in names.items():
        notices = [x for x in styles(name, task=task)["notices"] if "in its name, but" in x]
        assert bool(notices) == is_other, name


def test_an_ambiguous_expert_name_is_reported(styles: Styles) -> None:
    for name, flag in (("style_l", "lora_low_noise"), ("high_quality", "lora_high_noise")):
        result = styles(name)
        assert result["high_noise"] == result["low_noise"] == [name]
        assert "into both experts" in result["notices"][0] and flag in result["notices"][0]
    assert styles("yellow_HIGHWAY")["notices"] == []


def test_flags_against_names(styles: Styles) -> None:
    """Also half of a pair whose other half names no expert."""
    halves = ("style_high", "style"), ("fox", "fox-LOW"), ("a/x", "xLow")
    messages = {" and ".join(names): get_refusal(styles, *names) for names in halves}
    messages["a flag of the other"] = get_refusal(styles, lora_low_noise="style_high")
    check_refusals("LoRA: experts", messages)
    assert styles("style_high", "style_low", "style")["notices"] == [], "the pair is whole"
    for name in ("style_H", "high_quality", "high/style"):
        assert styles(lora_low_noise=name)["low_noise"] == [name]


def test_a_file_that_changes_after_the_check(dense: Checkpoint, tmp_path: Path) -> None:
    """Before and after the file is mapped; for merged LoRAs and for separate ones."""
    path, base = tmp_path / "x.safetensors", open_sources(dense.experts["dit"].tensors)

    def source(use: Any, adapters: Any) -> Any:
        if use is merge_loras:
            return merge_loras(base, adapters)[f"{Q}.weight"]
        deltas = {Q: adapters[0].deltas[f"{Q}.weight"]}
        return open_lora_sources(deltas, torch.float32, base)[f"{Q}.lora_up"]

    for use, mapped_before in product((merge_loras, open_lora_sources), (True, False)):
        path.unlink(missing_ok=True)
        save_file(PAIR, path)
        adapters = resolve_loras(Loras(lora=(str(path),)), dense)["dit"]
        mapped_source = source(use, adapters) if mapped_before else None
        os.truncate(path, 300)
        with pytest.raises(FileChangedError, match=r"x\.safetensors"):
            mapped_source.read(slice(None)) if mapped_before else source(use, adapters)


def test_strength_is_split_off_at_the_last_equals_sign(tmp_path: Path) -> None:
    assert parse_lora_file("a=b.safetensors") == LoraFile(Path("a=b.safetensors"))
    assert parse_lora_file("a=b.safetensors=0.25") == LoraFile(Path("a=b.safetensors"), 0.25)
    assert parse_lora_file("a.safetensors=-1e-1") == LoraFile(Path("a.safetensors"), -0.1)
    with pytest.raises(InputError, match="strength inf"):
        parse_lora_file("a.safetensors=inf")
    existing, strange = tmp_path / "a.safetensors", tmp_path / "a.safetensors=b"
    existing.touch()
    with pytest.raises(InputError, match="strength b"):
        parse_lora_file(str(strange))
    strange.touch()
    assert parse_lora_file(str(strange)) == LoraFile(strange)


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
    "a DoRA of columns": PAIR | {f"{Q}.dora_scale": torch.ones(1, 96)},
    "a DoRA of a norm": {
        "blocks.0.norm3.lora_down.weight": A[:, :1],
        "blocks.0.norm3.lora_up.weight": B,
        "blocks.0.norm3.dora_scale": torch.ones(1, 1),
    },
    "DoRA alone": {f"{Q}.lora_magnitude_vector.weight": torch.ones(96)},
    "half of LoHa": {f"{Q}.hada_w1_a": B, f"{Q}.hada_w1_b": A},
    "half of LoKr": {f"{Q}.lokr_w1": B},
    "LoKr twice": {f"{Q}.lokr_w1": B, f"{Q}.lokr_w2": B, f"{Q}.lokr_w2_a": B},
    "LoKr and a pair": PAIR
    | {f"{Q}.lokr_w1": torch.ones(2, 2), f"{Q}.lokr_w2": torch.ones(48, 48)},
    "LoHa and a pair": PAIR
    | {f"{Q}.hada_w{i}_{x}": B if x == "a" else A for i in "12" for x in "ab"},
    "LoKr's shape": {f"{Q}.lokr_w1": torch.ones(2, 2), f"{Q}.lokr_w2": torch.ones(48, 47)},
    "OFT": {f"{Q}.oft_blocks": B},
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
def test_alphas_that_are_python_numbers(alpha: float, dense: Checkpoint, tmp_path: Path) -> None:
    """In PyTorch files, against the same alpha as a tensor, also within a larger storage."""
    merged = []
    for value in (alpha, torch.tensor(float(alpha)), torch.tensor([9.0, alpha])[1]):
        torch.save(PAIR | {f"{Q}.alpha": value}, tmp_path / "x.pt")
        merged.append(merge_file(tmp_path / "x.pt", dense))
    first, *others = (weights[f"{Q}.weight"] for weights in merged)
    assert all(torch.equal(first, other) for other in others)


def test_bad_files(dense: Checkpoint, tmp_path: Path) -> None:
    """Also files with an invalid alpha in PEFT's metadata, and shards."""
    path, messages = tmp_path / "x.safetensors", {}
    for case, tensors in BAD.items():
        save_file({name: value.clone() for name, value in tensors.items()}, path)
        messages[case] = get_refusal(merge_file, path, dense)
        assert str(path) in messages[case], case
    path = tmp_path / "x.pt"
    for alpha in (True, 10**400, "2", None, math.inf):
        torch.save(PAIR | {f"{Q}.alpha": alpha}, path)
        messages[f"alpha {alpha!s:.3} in a PyTorch file"] = get_refusal(merge_file, path, dense)
    path = tmp_path / "x.safetensors"
    for alpha in (True, 10**400, "2", None):
        metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": alpha})}
        save_file(PAIR, path, metadata=metadata)
        if alpha is None:
            merge_file(path, dense)
        else:
            messages[f"alpha {str(alpha)[:9]}"] = get_refusal(merge_file, path, dense)
    for number in (2, 1):
        path = tmp_path / f"style-0000{number}-of-00002.safetensors"
        save_file(PAIR, path)
    messages["a shard"] = get_refusal(merge_file, path, dense)
    check_refusals("LoRA: files", messages)


def test_bad_paths(dense: Checkpoint, tmp_path: Path) -> None:
    for name in ("TEXT.pt", "TEXT.safetensors"):
        (tmp_path / name).write_text("<html>not found</html>")
    folder, text = tmp_path / "FOLDER", f"{tmp_path}/TEXT.safetensors"
    folder.mkdir()
    table = {
        "no file": Loras(("/nowhere/x.safetensors",)),
        "a folder": Loras((str(folder),)),
        "a pickle": Loras((f"{tmp_path}/TEXT.pt",)),
        "a strength": Loras((f"{text}=1e308",)),
        "a text": Loras((text,)),
        "an expert of one network": Loras(lora_high_noise=(text,)),
        "an empty lora_dir": Loras(lora_dir=folder),
    }
    messages = {name: get_refusal(resolve_loras, loras, dense) for name, loras in table.items()}
    messages["an export"] = get_refusal(resolve_loras, Loras((f"{tmp_path}/X",)), dense, True)
    check_refusals("LoRA: places", messages, [r"(?<=file \().*(?=\); )"])
