"""Kinds of adapters: merged as PEFT and LyCORIS merge them, and applied to kept weights."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from lycoris.modules.glora import GLoRAModule
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import adapter_kinds
from tests.pipelines import build_quick_pipeline, generate_quick_latents
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_lora import Q
from tests.unit.test_marks import quantise_state
from wan.checkpoint import lora
from wan.checkpoint.layout import inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora_deltas import list_factor_shapes
from wan.checkpoint.merge_lora import merge_loras, open_lora_sources
from wan.kernels.weight_only_linear import WeightOnlyLinear

LINEARS = (Q, "blocks.1.cross_attn.o", "blocks.0.ffn.0", "blocks.1.ffn.2")
CONVOLUTION = "patch_embedding"
TOLERANCE = 1e-6  # of the largest change of the weight


@pytest.fixture(scope="module")
def weights(tiny: Any) -> dict[str, Tensor]:
    """The weights of the tiny dense checkpoint."""
    return load_file(tiny("t2v-1.3B") / "diffusion_pytorch_model.safetensors")


def make_layer(weight: Tensor) -> Any:
    """The layer of a weight in float64: a linear one, or the patch embedding's convolution."""
    rows, columns, *kernel = weight.shape
    layer = (
        nn.Conv3d(columns, rows, tuple(kernel), tuple(kernel))
        if kernel
        else nn.Linear(columns, rows)
    ).double()
    layer.weight.data = weight.double()
    return layer


def randomise(module: nn.Module, seed: int) -> None:
    """Sets the adapter's factors; a DoRA's magnitudes are changed by up to a third."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "base_layer" in name or "original_module" in name:
            continue
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5
        is_magnitude = "dora_scale" in name or "magnitude" in name
        parameter.data = parameter.data * (1 + noise * 2 / 3) if is_magnitude else noise


def merge_with_lycoris(module_class: Any, layer: Any, seed: int, **options: Any) -> Any:
    """LyCORIS' adapter of a layer: its tensors, and its merged weight."""
    module = module_class("x", layer, **options).double()
    randomise(module, seed)
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            eye = torch.eye(layer.in_features, dtype=torch.float64)
            merged = (module(eye) - layer.bias).T
        else:
            change = (
                module.get_weight(module.shape)
                if module_class in (LohaModule, LokrModule)
                else module.make_weight() * (module.scale if module_class is LoConModule else 1)
            )
            merged = layer.weight + change
            if options.get("weight_decompose"):
                merged = module.apply_weight_decompose(merged)
    tensors = {name: x.detach().clone() for name, x in module.custom_state_dict().items()}
    return tensors, merged.detach()


LYCORIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "LoRA": (LoConModule, {}),
    "rsLoRA": (LoConModule, {"rs_lora": True}),
    "LoCon with a core": (LoConModule, {"use_tucker": True}),
    "DoRA of rows": (LoConModule, {"weight_decompose": True}),
    "DoRA of columns": (LoConModule, {"weight_decompose": True, "wd_on_out": False}),
    "LoHa": (LohaModule, {}),
    "LoHa with cores": (LohaModule, {"use_tucker": True}),
    "LoHa, DoRA": (LohaModule, {"weight_decompose": True}),
    "LoKr": (LokrModule, {}),
    "LoKr of 4": (LokrModule, {"factor": 4}),
    "LoKr, whole": (LokrModule, {"factor": 8, "full_matrix": True}),
    "LoKr, factorised": (LokrModule, {"factor": 8, "decompose_both": True}),
    "LoKr with a core": (LokrModule, {"factor": 4, "use_tucker": True}),
    "LoKr, unbalanced": (LokrModule, {"factor": 4, "unbalanced_factorization": True}),
    "GLoRA": (GLoRAModule, {}),
    "LoKr, DoRA of columns": (LokrModule, {"weight_decompose": True, "wd_on_out": False}),
}


def save_lycoris(
    kind: str, weights: dict[str, Tensor], path: Path, layers: tuple[str, ...], prefix: str = ""
) -> dict[str, Tensor]:
    """Saves an adapter of LyCORIS; returns the merged weights."""
    module_class, options = LYCORIS[kind]
    tensors, expected = {}, {}
    for seed, layer in enumerate(layers):
        rank = 3 if kind == "LoKr, factorised" else 2
        base = make_layer(weights[f"{layer}.weight"])
        parts, merged = merge_with_lycoris(
            module_class, base, seed, **{"lora_dim": rank, "alpha": 3, **options}
        )
        name = f"{prefix}{layer.replace('.', '_')}"
        tensors |= {f"{name}.{part}": x.contiguous() for part, x in parts.items()}
        expected[f"{layer}.weight"] = merged.reshape(weights[f"{layer}.weight"].shape)
    save_file(tensors, path)
    return expected


def open_merged(path: Path, folder: Path, strength: float = 1.0) -> Any:
    """The sources of the weights that a file changes."""
    checkpoint = inspect_checkpoint(folder)
    (adapter,) = lora.resolve_loras({"lora": (f"{path}={strength}",)}, checkpoint)["dit"]
    sources = merge_loras(open_sources(checkpoint.experts["dit"].tensors), [adapter])
    return {name: sources[name] for name in adapter.deltas}, adapter


def check_merged(sources: Any, expected: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    assert sources.keys() == expected.keys()
    for name, exact in expected.items():
        base = weights[name].double()
        error = (sources[name].read(slice(None)).double() - exact).abs().max()
        assert error <= TOLERANCE * (exact - base).abs().max(), name


@pytest.mark.filterwarnings("ignore")
def test_files_add_up_in_any_order(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    """A DoRA's change is that of the checkpoint's weight, whatever other files add to it."""
    name, files = f"{Q}.weight", list[str]()
    base = weights[name].double()
    total = base.clone()
    for kind in ("LoRA", "DoRA of rows", "DoRA of columns"):
        files.append(str(tmp_path / f"{kind}.safetensors"))
        total += save_lycoris(kind, weights, Path(files[-1]), (Q,), "lycoris_")[name] - base
    checkpoint = inspect_checkpoint(tiny("t2v-1.3B"))
    tensors = checkpoint.experts["dit"].tensors
    for order in (files, files[::-1]):
        adapters = lora.resolve_loras({"lora": tuple(order)}, checkpoint)["dit"]
        merged = merge_loras(open_sources(tensors), adapters)[name]
        check_merged({name: merged}, {name: total}, weights)


@pytest.mark.parametrize("kind", LYCORIS)
@pytest.mark.filterwarnings("ignore")
def test_lycoris(kind: str, weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    """Also at strength -2, which is -2 times the change; and bit-equal rows of any range."""
    path = tmp_path / "x.safetensors"
    layers = (*LINEARS, CONVOLUTION)
    expected = save_lycoris(kind, weights, path, layers, "lycoris_")
    if "core" in kind:
        assert any("_t2" in x or "mid" in x for x in load_file(path))
    if kind == "LoKr, factorised":
        assert any("w1_a" in x for x in load_file(path))
    if "columns" in kind:
        assert load_file(path)["lycoris_patch_embedding.dora_scale"].shape[:2] == (1, 16)
    sources, _ = open_merged(path, tiny("t2v-1.3B"))
    check_merged(sources, expected, weights)
    for name, source in sources.items():
        rows = len(weights[name])
        cuts = [0, 1, rows // 3, rows - 1, rows]
        parts = [source.read(slice(*cut)) for cut in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), source.read(slice(None))), name
    sources, _ = open_merged(path, tiny("t2v-1.3B"), -2)
    scaled = {n: torch.lerp(weights[n].double(), x, -2) for n, x in expected.items()}
    check_merged(sources, scaled, weights)


@pytest.mark.parametrize("kind", [k for k in LYCORIS if "DoRA" not in k])
@pytest.mark.filterwarnings("ignore")
def test_beside_a_kept_weight(
    kind: str, weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """Two files for a layer; a layer that adds their outputs equals one with the merged weight."""
    paths, adapters, changes = [tmp_path / x for x in ("one", "two")], [], {}
    for number, path in enumerate(path.with_suffix(".safetensors") for path in paths):
        layers = LINEARS if number else LINEARS[::-1]
        expected = save_lycoris(kind if number else "LoHa", weights, path, layers)
        adapters.append(open_merged(path, tiny("t2v-1.3B"), -0.5)[1])
        for name, merged in expected.items():
            delta = -0.5 * (merged - weights[name].double())
            changes[name] = changes.get(name, 0) + delta
    deltas = lora.collect_deltas(adapters)
    base_sources = open_sources(inspect_checkpoint(tiny("t2v-1.3B")).experts["dit"].tensors)
    generator = torch.Generator().manual_seed(0)
    for layer in LINEARS:
        weight = weights[f"{layer}.weight"]
        shapes = list_factor_shapes(deltas[f"{layer}.weight"])
        layer_deltas = {layer: deltas[f"{layer}.weight"]}
        sources = open_lora_sources(layer_deltas, torch.float32, base_sources)
        factors = {n: sources[f"{layer}.{n}"].read(slice(None)) for n in shapes}
        assert {name: tuple(x.shape) for name, x in factors.items()} == shapes
        linear = WeightOnlyLinear(
            weight.float(), Tensor.clone, None, in_features=weight.shape[1], lora=factors
        )
        x = torch.randn(2, 5, weight.shape[1], generator=generator)
        exact = x.double() @ (weight.double() + changes[f"{layer}.weight"]).T
        assert (linear(x) - exact).abs().max() <= 2e-6 * exact.abs().max(), layer


def make_network(weights: dict[str, Tensor]) -> nn.Module:
    """Some layers of the network, for PEFT."""
    network = nn.Module()
    for layer in (*LINEARS, CONVOLUTION, "head.head"):
        parent = network
        *parents, last = layer.split(".")
        for name in parents:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        module = make_layer(weights[f"{layer}.weight"])
        module.bias.data = weights[f"{layer}.bias"].double()
        parent.add_module(last, module)
    return network


PEFT: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True, "alpha_pattern": {"q": 2}},
    "patterns": {
        "alpha_pattern": {".n.0": 9, "ffn.0": 5, "^blocks.1.*o": 2},
        "rank_pattern": {"q": 1},
    },
    "DoRA": {"use_dora": True},
    "DoRA of patterns": {"use_dora": True, "alpha_pattern": {"q": 9}},
    "biases": {"bias": "all"},
    "biases of layers": {"bias": "lora_only"},
    "a bias of the LoRA": {"lora_bias": True},
    "saved modules": {"modules_to_save": ["head.head"]},
    "LoHa": {"alpha_pattern": {"q": 2}},
    "LoKr": {"alpha_pattern": {"q": 2}, "rank_pattern": {"ffn.2": 50}},
    "LoKr of both": {"decompose_both": True, "decompose_factor": 8},
    "LoKr, whole": {"r": 60, "alpha": 15},
}


@pytest.mark.parametrize("kind", PEFT)
@pytest.mark.filterwarnings("ignore")
def test_peft(kind: str, weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftModel, get_peft_model

    config_class: Any = {"LoHa": LoHaConfig, "LoKr": LoKrConfig}.get(kind[:4], LoraConfig)
    targets = ["q", "o", "ffn.0", "ffn.2"] + (
        [] if config_class is not LoraConfig else ["patch_embedding"]
    )
    alpha = "lora_alpha" if config_class is LoraConfig else "alpha"
    config = config_class(**{"r": 3, alpha: 6, "target_modules": targets} | PEFT[kind])
    model: Any = get_peft_model(make_network(weights), config).double()
    model.requires_grad_(True)
    names = [n for n, _ in model.named_parameters() if "modules_to_save" in n or ".bias" in n]
    randomise(model, 3)
    if kind.startswith("biases"):
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data += 0.25
    model.save_pretrained(tmp_path)
    merged: Any = PeftModel.from_pretrained(make_network(weights), tmp_path).double()
    expected = merged.merge_and_unload().state_dict()
    assert kind != "saved modules" or not torch.equal(
        expected["head.head.weight"].float(), weights["head.head.weight"].float()
    )
    sources, _ = open_merged(tmp_path / "adapter_model.safetensors", tiny("t2v-1.3B"))
    changed = {
        name: x for name, x in expected.items() if not torch.equal(x, weights[name].double())
    }
    assert changed.keys() <= sources.keys()
    check_merged(sources, {name: expected[name] for name in sources}, weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_kinds_of_both_libraries() -> None:
    """Equal to the library's weights, or refused; as in the documents' table."""
    recorded = json.loads(adapter_kinds.RECORD.read_text())["results"]
    rows = adapter_kinds.list_rows()
    assert [row.kind for row in rows] == [row["kind"] for row in recorded]
    for row, expected in zip(rows, recorded, strict=True):
        assert (row.error is None) == (expected["error"] is None), row
        assert row.error is None or row.error <= TOLERANCE, row
        assert row.text == expected["text"] or "scikit-learn" in row.text, row


@pytest.fixture(scope="module")
def fp8(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny checkpoint with scaled FP8 weights."""
    folder = Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path_factory.mktemp("fp8") / "t2v-1.3B"))
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(quantise_state(load_file(file), "float8")[0], file)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_runs_with_kept_weights(
    fp8: Path, weights: dict[str, Tensor], tmp_path: Path, one_thread: None
) -> None:
    """The latents of merged weights; DoRA is refused before anything is loaded."""
    path, arguments = tmp_path / "x.safetensors", ["--sample_steps", "1", "--precision", "fp32"]
    plain = generate_quick_latents(fp8, *arguments)
    for kind, offload in (*product(("LoKr", "LoHa"), ("false", "block")), ("GLoRA", "block")):
        save_lycoris(kind, weights, path, LINEARS)
        flags = [*arguments, "--lora", f"{path}=0.2", "--offload_model", offload]
        merged = generate_quick_latents(fp8, *flags, "--fp8_weights", "upcast")
        kept = generate_quick_latents(fp8, *flags, "--fp8_weights", "keep")
        assert (kept - merged).abs().max() <= 1e-5 * merged.abs().max(), kind
        assert (plain - merged).abs().max() > 1e-3
    save_lycoris("DoRA of rows", weights, path, LINEARS)
    flags = [*arguments, "--lora", str(path)]
    generate_quick_latents(fp8, *flags, "--fp8_weights", "upcast")
    messages = {
        setting: get_refusal(build_quick_pipeline, fp8, *flags, "--fp8_weights", setting)
        for setting in ("keep", "auto", "multiply")
    }
    check_refusals("LoRA: DoRA of kept weights", messages)


def test_alphas_of_whole_matrices_count_for_nothing(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    """ai-toolkit's LoKr of full rank has an alpha of 1e10, which LyCORIS does not use."""
    path, rows = tmp_path / "x.safetensors", len(weights[f"{Q}.weight"])
    left, right = torch.eye(4), torch.randn(rows // 4, rows // 4)
    tensors = {f"{Q}.lokr_w1": left, f"{Q}.lokr_w2": right, f"{Q}.alpha": torch.tensor(1e10)}
    save_file(tensors, path)
    sources, _ = open_merged(path, tiny("t2v-1.3B"))
    exact = weights[f"{Q}.weight"].double() + torch.kron(left, right).double()
    check_merged(sources, {f"{Q}.weight": exact}, weights)
    config = {"peft_type": "LOKR", "alpha": 8.0, "r": 10**400, "use_rslora": True}
    path.with_name("adapter_config.json").write_text(json.dumps(config))
    del tensors[f"{Q}.alpha"]
    save_file(tensors, path)
    check_merged(open_merged(path, tiny("t2v-1.3B"))[0], {f"{Q}.weight": exact}, weights)
