"""LoRAs of single videos: computed separately from the weights as if merged, and then gone."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conftest import slow
from tests.lora_files import CONVOLUTION, LINEARS, Q, make_pair, save_lycoris
from tests.pipelines import (
    build_quick_pipeline,
    estimate_run,
    generate_quick_latents,
    plan_stages,
    resolve_plan,
)
from tests.refusals import check_refusals, get_refusal
from tests.unit.test_marks import write_quantised_checkpoint
from wan.app import flag_parser, resolve
from wan.app.run import Run
from wan.checkpoint.layout import Checkpoint, inspect_checkpoint
from wan.checkpoint.load import open_sources
from wan.checkpoint.lora import merge as merge_lora
from wan.checkpoint.lora.folder import (
    VideoLora,
    compute_lora_digest,
    find_lora_files,
    make_video_lora_record,
    resolve_video_loras,
)
from wan.checkpoint.lora.resolve import Lora
from wan.kernels.int8_linear import W8A8Linear
from wan.kernels.weight_only_linear import WeightOnlyLinear
from wan.modules.lora_branch import LoraBranch, add_lora_branches, set_lora_branches
from wan.pipeline.pipeline import Pipeline
from wan.settings.errors import KEYWORD_NAMING, InputError
from wan.settings.layers import Layer
from wan.settings.values import read_video_loras
from wan.utils.torch_private import StorageTracker

TASK = ["--task", "t2v-1.3B"]
ARGUMENTS = ["--sample_steps", "2", "--precision", "fp32", "--sample_guide_scale", "3"]
SINGLE_STEP = ["--sample_steps", "1", "--precision", "fp32", "--sample_guide_scale", "1"]
OTHER_LAYERS = ("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0")
OTHER_LAYERS += ("time_embedding.2", "time_projection.1", "head.head", "blocks.0.cross_attn.k")
OTHER_LAYERS += ("blocks.1.cross_attn.v", "blocks.0.self_attn.k", "blocks.1.self_attn.v")

pytestmark = pytest.mark.filterwarnings("ignore")


def save_pairs(
    path: Path, weights: Mapping[str, Tensor], layers: Any, seed: int = 0, rank: int = 2
) -> Path:
    """Saves a LoRA with differences of the biases."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for layer in layers:
        weight = weights[f"{layer}.weight"]
        down, up = make_pair(weight.shape, rank, int(torch.randint(9**9, (), generator=generator)))
        pair = {"lora_down.weight": down / 20, "lora_up.weight": up}
        pair["diff_b"] = torch.randn(len(weight), generator=generator) / 20
        tensors |= {f"{layer}.{name}": x for name, x in pair.items()}
    save_file(tensors, path)
    return path


def generate(pipeline: Pipeline, run: Run) -> Tensor:
    return pipeline.generate_latents(run.params, run.inputs)


def resolve_with_loras(run: Run, *loras: str, base: Sequence[str] = ARGUMENTS) -> Run:
    """Returns the run with other LoRAs."""
    argv = ["--ckpt_dir", run.settings["ckpt_dir"], "--task", run.params.preset.task, *base]
    argv += ["--size", "64*64", "--frame_num", "5", "--base_seed", "7", "--device", "cpu"]
    argv += ["--lora_folder", str(run.setup.lora_options.lora_folder)]
    argv += [word for lora in loras for word in ("--video_lora", lora)]
    return resolve.resolve_settings(flag_parser.parse_flags(argv))


def test_each_kind_is_as_if_merged(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """In a float32 network to 1e-6 of the predicted velocity; `--lora` merges in float64."""
    kinds = ("LoRA", "LoHa", "LoKr")
    for kind in kinds:
        save_lycoris(kind, weights, tmp_path / f"{kind}.safetensors", LINEARS)
    flags = ["--lora_folder", str(tmp_path), "--offload_model", "false"]
    run, pipeline = build_quick_pipeline(tiny("t2v-1.3B"), *TASK, *SINGLE_STEP, *flags)
    plain, errors = pipeline.generate_latents(run.params), {}
    for kind in kinds:
        separate = generate(pipeline, resolve_with_loras(run, f"{kind}=0.3", base=SINGLE_STEP))
        lora = f"{tmp_path / kind}.safetensors=0.3"
        merged = generate_quick_latents(tiny("t2v-1.3B"), *TASK, *SINGLE_STEP, "--lora", lora)
        errors[kind] = (separate - merged).abs().max() / merged.abs().max()
        assert (plain - merged).abs().max() > 1e-3, kind
    assert {kind: error for kind, error in errors.items() if not error <= 1e-6} == {}


def test_each_layer_has_its_branch(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """Also layers that are not called as modules, and a bias; against changed weights."""
    for layer in OTHER_LAYERS:
        save_pairs(tmp_path / f"{layer}.safetensors", weights, [layer])
    flags = ["--lora_folder", str(tmp_path), "--offload_model", "false"]
    run, pipeline = build_quick_pipeline(tiny("t2v-1.3B"), *TASK, *SINGLE_STEP, *flags)
    plain, network, wrong = pipeline.generate_latents(run.params), pipeline.experts.get("dit"), {}
    for name in OTHER_LAYERS:
        separate = generate(pipeline, resolve_with_loras(run, name, base=SINGLE_STEP))
        layer, lora = network.get_submodule(name), load_file(tmp_path / f"{name}.safetensors")
        weight, bias = layer.weight.data, layer.bias.data
        up, down = (lora[f"{name}.lora_{part}.weight"].flatten(1) for part in ("up", "down"))
        layer.weight.data = weight + (up.double() @ down.double()).view_as(weight).float()
        layer.bias.data = bias + lora[f"{name}.diff_b"]
        network.clear_caches()
        merged = pipeline.generate_latents(run.params)
        layer.weight.data, layer.bias.data = weight, bias
        network.clear_caches()
        error, change = ((x - merged).abs().max() for x in (separate, plain))
        if not 0 < change >= 10 * error or not error <= 1e-6 * merged.abs().max():
            wrong[name] = error, change
    assert not wrong


def test_kept_weights(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """FP8 weights that stay FP8, against a merge with the same values upcast."""
    folder = write_quantised_checkpoint(tiny("t2v-1.3B"), tmp_path / "fp8")
    loras = tmp_path / "loras"
    loras.mkdir()
    path = save_pairs(loras / "x.safetensors", weights, LINEARS)
    arguments = [*TASK, *SINGLE_STEP, "--offload_model", "block"]
    merged = generate_quick_latents(folder, *arguments, "--lora", str(path))
    flags = ["--lora_folder", str(loras), "--video_lora", "x", "--stored_weights", "keep"]
    run, pipeline = build_quick_pipeline(folder, *arguments, *flags)
    separate, plain = generate(pipeline, run), pipeline.generate_latents(run.params)
    assert isinstance(pipeline.experts.get("dit").get_submodule(LINEARS[0]), WeightOnlyLinear)
    assert (separate - merged).abs().max() <= 1e-6 * merged.abs().max()
    assert (plain - merged).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_layers_of_other_weights(kind: str) -> None:
    """The products of all kinds are added to the output of the layer, which is rounded."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 8), (2, 8), (6, 2), (2, 4), (3, 2), (6,), (2, 3, 8))
    weight, *factors, x = (torch.randn(shape, generator=generator) for shape in shapes)
    layer: Any = nn.Linear(8, 6).bfloat16()
    if kind == "int8":
        values, scale = weight.mul(30).round().clamp(-127, 127).to(torch.int8), torch.ones(6) / 30
        layer = W8A8Linear(values, scale, torch.zeros(6), dtype=torch.bfloat16)
    down, up, left, right, bias = factors = [factor.bfloat16() for factor in factors]
    names, x = ("lora_down", "lora_up", "lora_left_0", "lora_right_0", "bias"), x.bfloat16()
    with torch.no_grad():
        plain = layer(x)
        branch = LoraBranch(0.5, dict(zip(names, factors, strict=True)))
        set_lora_branches(layer, (branch, branch))
        actual = add_lora_branches(layer, x, layer(x))
    change = up.double() @ down.double() + torch.kron(left.double(), right.double())
    exact = plain.double() + 2 * 0.5 * (x.double() @ change.T + bias.double())
    assert actual.dtype == torch.bfloat16 and actual.shape == plain.shape
    assert (actual - exact).abs().max() <= 6 * 2**-8 * exact.abs().max()


@pytest.fixture
def several(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> tuple[Run, Pipeline]:
    """A pipeline whose experts stay loaded, and a run with LoRAs a and b to choose from."""
    for seed, name in enumerate("ab"):
        save_pairs(tmp_path / f"{name}.safetensors", weights, list_linears(weights), seed)
    flags = ["--lora_folder", str(tmp_path), "--offload_model", "false"]
    return build_quick_pipeline(tiny("t2v-1.3B"), *TASK, *ARGUMENTS, *flags)


def list_linears(weights: Mapping[str, Tensor]) -> list[str]:
    """Returns the linear layers of the blocks."""
    names = [name for name, x in weights.items() if x.dim() == 2 and name.startswith("blocks.")]
    return [name.removesuffix(".weight") for name in names]


def test_videos_in_any_order_have_the_bits_of_first_ones(
    several: tuple[Run, Pipeline], one_thread: None
) -> None:
    """None, A, B, A, both, none: also with cached keys and values of the same embeddings."""
    run, pipeline = several
    network = pipeline.experts.get("dit")
    text = torch.randn(4, pipeline.text_size[1], generator=torch.Generator().manual_seed(0))
    actual: dict[str, list[Tensor]] = {}
    for loras in ((), ("a",), ("b",), ("a",), ("a", "b=0.5"), ("a=0",), ()):
        chosen = resolve_with_loras(run, *loras)
        embeds = {"prompt_embeds": text, "negative_prompt_embeds": text[:2]}
        inputs = type(chosen.inputs)(loras=chosen.inputs.loras, **embeds)
        latents = pipeline.generate_latents(chosen.params, inputs)
        actual.setdefault(" ".join(loras), []).append(latents)
        assert pipeline.experts.get("dit") is network
    for first, second in (actual["a"], actual[""], (*actual.pop("a=0"), actual[""][0])):
        assert torch.equal(first, second)
    in_order = [x.name for x in resolve_with_loras(run, "b", "a=0.5").inputs.loras["dit"]]
    assert in_order == ["b", "a"]
    firsts = [latents[0] for latents in actual.values()]
    assert all((x - y).abs().max() > 1e-3 for x, y in combinations(firsts, 2))


def test_a_failed_video_leaves_no_lora(several: tuple[Run, Pipeline], one_thread: None) -> None:
    """Whether it fails in a step, or while its LoRAs are attached."""
    run, pipeline = several
    plain = pipeline.generate_latents(run.params)
    chosen = resolve_with_loras(run, "a")

    def fail(step: int, latents: Tensor) -> None:
        raise RuntimeError("stop")

    inputs = type(run.inputs)(loras=chosen.inputs.loras, callback_on_step_end=fail)
    with pytest.raises(RuntimeError, match="stop"):
        pipeline.generate_latents(chosen.params, inputs)
    other = resolve_with_loras(run, "b")
    (entry,) = other.inputs.loras["dit"]
    entry.lora.deltas["blocks.9.ffn.0.weight"] = entry.lora.deltas.pop("blocks.1.ffn.0.weight")
    with pytest.raises(AttributeError):
        generate(pipeline, other)
    network = pipeline.experts.get("dit")
    assert not any(vars(x).get("lora_branches") or x._forward_hooks for x in network.modules())
    assert torch.equal(pipeline.generate_latents(run.params), plain)


def test_the_cache_keeps_the_last_ones_within_its_bytes(
    several: tuple[Run, Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pipeline = several
    loader, names = pipeline.video_loras, list[str]()

    def read(lora: Lora, *arguments: Any) -> Any:
        names.append(lora.path.stem)
        return merge_lora.read_lora_factors(lora, *arguments)

    monkeypatch.setattr("wan.pipeline.video_loras.read_lora_factors", read)

    def list_files_read(*loras: str) -> list[str]:
        names.clear()
        for lora in loras:
            loader.read_all(resolve_with_loras(run, lora).inputs.loras)
        return [*names]

    assert list_files_read("a", "b") == ["a", "b"]
    both = loader.cached_bytes
    loader.max_bytes = both * 2 // 3
    assert list_files_read("a=0.5") == [] and loader.cached_bytes == both // 2
    assert list_files_read("a", "b") == ["b"] and loader.cached_bytes == both // 2
    loader.max_bytes = 0
    assert list_files_read("b", "b") == ["b"] and loader.cached_bytes == 0


def test_the_experts_of_a_file_are_those_of_its_name(
    pair_of_experts: Checkpoint, tmp_path: Path
) -> None:
    """A request may repeat what the name says, and not contradict it."""
    values = open_sources(pair_of_experts.experts["low_noise"].tensors)
    layer = {f"{Q}.weight": values[f"{Q}.weight"].read(slice(None))}
    for name in ("any", "x_high"):
        save_pairs(tmp_path / f"{name}.safetensors", layer, [Q])

    def list_experts(name: str, expert: str | None) -> list[str]:
        choice = {"name": name, "scale": 1.0, "expert": expert}
        return [*resolve_video_loras([choice], tmp_path, pair_of_experts)]

    both = ["high_noise", "low_noise"]
    assert list_experts("any", None) == list_experts("any", "both") == both
    assert list_experts("any", "low_noise") == ["low_noise"]
    assert list_experts("x_high", None) == list_experts("x_high", "high_noise") == ["high_noise"]
    for expert in ("both", "low_noise"):
        assert "leave expert out" in get_refusal(list_experts, "x_high", expert)


def test_a_digest_is_that_of_the_files_present_content(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for seconds, content in enumerate((b"a", b"bb", b"cc")):
        path.write_bytes(content)
        os.utime(path, (seconds, seconds))
        for _ in range(2):
            assert compute_lora_digest(path) == hashlib.sha256(content).hexdigest()


def test_the_record_has_each_file_and_scale_once() -> None:
    lora: Any = None
    a, half, b = (
        VideoLora(name, scale, name * 2, lora) for name, scale in (("a", 1), ("a", 0.5), ("b", 1))
    )
    assert make_video_lora_record({"high_noise": (a, half), "low_noise": (b, a)}) == [
        {"name": "a", "sha256": "aa", "scale": 1, "experts": ["high_noise", "low_noise"]},
        {"name": "a", "sha256": "aa", "scale": 0.5, "experts": ["high_noise"]},
        {"name": "b", "sha256": "bb", "scale": 1, "experts": ["low_noise"]},
    ]


@pytest.mark.parametrize(
    ("rank", "task", "flags"),
    [
        (
            500,
            "t2v-1.3B",
            ("--size", "192*192", "--frame_num", "1"),
        ),  # the products need more than the layers
        slow(80, "t2v-A14B", ("--offload_model", "true", "--sample_steps", "4")),
        slow(80, "t2v-1.3B", ("--precision", "bf16", "--frame_num", "29")),
        slow(0, "t2v-1.3B", ("--offload_model", "block")),
    ],
)
def test_a_run_takes_no_more_than_planned(
    rank: int, task: str, flags: tuple[str, ...], tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """Live bytes with large LoRAs (0: LoKr), and what the LoRAs add to them."""
    folder, peaks, planned, estimated = tiny(task), list[int](), list[int](), list[int]()
    values = open_sources(next(iter(inspect_checkpoint(folder).experts.values())).tensors)
    network = {name: x.read(slice(None)) for name, x in values.items()}
    if rank:
        save_pairs(tmp_path / "x.safetensors", network, LINEARS, rank=rank)
    else:
        save_lycoris("LoKr", network, tmp_path / "x.safetensors", LINEARS)
    arguments = ["--task", task, *SINGLE_STEP, *flags]
    for loras in ((), ("--lora_folder", str(tmp_path), "--video_lora", "x")):
        live = StorageTracker("cpu")
        with live:
            run, pipeline = build_quick_pipeline(folder, *arguments, *loras)
            generate(pipeline, run)
        peaks.append(live.peak_bytes.total())
        estimated.append(estimate_run(run)["denoising"].total())
        planned.append(plan_stages(run)["denoising"].total())
        del pipeline
    assert peaks[0] <= planned[0] and peaks[1] <= planned[1]
    assert estimated[0] <= planned[0] and estimated[0] < estimated[1] <= planned[1]
    assert 0.9 <= (planned[1] - planned[0]) / (peaks[1] - peaks[0]) <= 1.1


def test_a_plan_without_a_chosen_lora_counts_the_largest(
    weights: dict[str, Tensor], tiny: Any, tmp_path: Path
) -> None:
    for rank in (2, 3):
        save_pairs(tmp_path / f"{rank}.safetensors", weights, [Q], rank=rank)
    shutil.copy(tmp_path / "2.safetensors", tmp_path / "4.sft")
    assert [*find_lora_files(tmp_path)] == ["2", "3", "4"]
    flags = ["--ckpt_dir", tiny("t2v-1.3B"), *TASK, "--lora_folder", tmp_path]
    run = resolve_plan(*flags, "--size", "64*64", "--frame_num", "1")
    stages = plan_stages(run)
    size = (tmp_path / "3.safetensors").stat().st_size
    assert stages["denoising"]["LoRAs"] == size


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["true", "block"])
def test_experts_with_a_lora_of_the_start(
    offload: str, pair_of_experts: Checkpoint, tiny: Any, tmp_path: Path, one_thread: None
) -> None:
    """The sum of both, in each of two experts; a LoRA named for one is for that one."""
    folder, paths = tiny("t2v-A14B"), {}
    values = open_sources(pair_of_experts.experts["high_noise"].tensors)
    tensors = {name: x.read(slice(None)) for name, x in values.items()}
    for seed, name in enumerate(("start", "x_high_noise", "y", "z")):
        path = tmp_path / f"{name}.safetensors"
        paths[name] = str(save_pairs(path, tensors, list_linears(tensors), seed))
    arguments = ["--task", "t2v-A14B", *ARGUMENTS, "--offload_model", offload]
    arguments += ["--lora", paths["start"]]
    flags = ["--lora", paths["x_high_noise"], "--lora", f"{paths['y']}=-0.5"]
    merged = generate_quick_latents(folder, *arguments, *flags, "--lora_low_noise", paths["z"])
    flags = ["--lora_folder", str(tmp_path), "--video_lora", "x_high_noise"]
    flags += ["--video_lora", "y=-0.5", "--video_lora", '{"name": "z", "expert": "low_noise"}']
    run, pipeline = build_quick_pipeline(folder, *arguments, *flags)
    assert [x.name for x in run.inputs.loras["high_noise"]] == ["x_high_noise", "y"]
    assert [x.name for x in run.inputs.loras["low_noise"]] == ["y", "z"]
    assert (generate(pipeline, run) - merged).abs().max() <= 2e-6 * merged.abs().max()


def test_refused(weights: dict[str, Tensor], tiny: Any, tmp_path: Path) -> None:
    folder, outside = tmp_path / "loras", tmp_path / "outside.safetensors"
    folder.mkdir()
    save_pairs(folder / "good.safetensors", weights, [Q])
    save_pairs(folder / "good_low.safetensors", weights, [Q])
    save_pairs(outside, weights, [Q])
    (folder / "linked.safetensors").symlink_to(outside)
    (folder / "inner.safetensors").symlink_to(folder / "good.safetensors")
    kinds = ("DoRA", "LoHa, DoRA", "GLoRA")
    for kind in kinds:
        save_lycoris(kind, weights, folder / f"{kind}.safetensors", (Q, CONVOLUTION))
    weight = weights[f"{Q}.weight"]
    wrong = {f"{Q}.lora_down.weight": torch.ones(2, 5), f"{Q}.lora_up.weight": torch.ones(96, 2)}
    pair = {f"{Q}.lora_down.weight": torch.ones(2, 96), f"{Q}.lora_up.weight": torch.ones(96, 2)}
    norm = {"blocks.0.self_attn.norm_q.diff": torch.ones(96)}
    files = {"difference": {f"{Q}.diff": weight.float()}, "wrong": wrong, "norm": pair | norm}
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    assert {"good", "inner"} <= find_lora_files(folder).keys()
    values = [
        *("nothing", "../outside", "linked", "good/../good", "good.safetensors", ""),
        *kinds,
        *files,
    ]
    checks: dict[str, Any] = {value: [{"name": value}] for value in values}
    checks |= {
        "an absolute path": [str(outside)],
        "a path": [{"path": "x"}],
        "no name": [{"scale": 1}],
        "an unknown key": [{"name": "good", "strength": 1}],
        "two names": [{"name": "good", "adapter": "good"}],
        "a number": 3,
        "a number for a name": [{"name": 3}],
        "nan": [{"name": "good", "scale": float("nan")}],
        "an expert": [{"name": "good", "expert": "dit"}],
        "an expert of one network": [{"name": "good", "expert": "low_noise"}],
        "nine": ["good"] * 9,
        "no JSON": "{x",
        "a name twice": '{"name": "x", "name": "x"}',
    }
    base = {"ckpt_dir": tiny("t2v-1.3B"), "task": "t2v-1.3B", "lora_folder": folder}

    def run(value: Any, **settings: Any) -> None:
        settings = (
            base
            | settings
            | {"save_file": Path("x.mp4"), "video_lora": read_video_loras("`video_lora`", value)}
        )
        resolve.resolve_video(resolve.ResolveContext(), Layer("a test", KEYWORD_NAMING, settings))

    run(["good", {"lora_name": "inner", "lora_scale": "0.5", "int_id": 1, "expert": None}])
    sentences = {case: get_refusal(run, value) for case, value in checks.items()}
    sentences["with compile"] = get_refusal(run, "good", compile=True)
    for case, path in (("no folder", outside), ("an empty folder", tmp_path)):
        (tmp_path / "outside.safetensors").unlink(missing_ok=True)
        sentences[case] = get_refusal(run, "good", lora_folder=path)
    check_refusals("LoRAs of single videos", sentences)
    with pytest.raises(InputError, match="lora_folder"):
        flags = ["--ckpt_dir", str(tiny("t2v-1.3B")), "--video_lora", "good"]
        resolve.resolve_settings(flag_parser.parse_flags(flags))
