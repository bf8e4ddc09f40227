"""parallelize_pipe on one process: compatible changes, refusals, and deparallelize."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import logging
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor

from tests.diffusers_classes import (
    CASES,
    Case,
    make_features,
    make_images,
    make_network,
    make_vae,
)
from tests.diffusers_runs import TOLERANCE, Video, make_video, parallelized_pipe
from tests.dist import REPO, run_on_ranks
from tests.refusals import check_refusals, get_refusal
from wan.diffusers import (
    ANIMATE2_PIPELINES,
    PIPELINES,
    VERSIONS,
    apply_cache_on_pipe,
    deparallelize,
    parallelize_pipe,
    parallelize_transformer,
)
from wan.diffusers.hooks import get_session
from wan.settings.errors import InputError
from wan.settings.step_cache import POLICIES

RELEASE = tuple(map(int, diffusers.__version__.split(".")[:2]))
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def video(tiny: Any) -> Video:
    return Video(tiny("t2v-1.3B", "diffusers"), size=(96, 64), frames=5, steps=2)


@pytest.fixture(scope="module")
def make_pipe(video: Video) -> Callable[[], Any]:
    pipe = video.pipe()
    pipe.register_modules(vae=make_vae())  # whose copies are fast
    return partial(deepcopy, pipe)


@pytest.fixture
def pipe(make_pipe: Callable[[], Any]) -> Any:
    return make_pipe()


@pytest.fixture(scope="module")
def expected(video: Video, make_pipe: Callable[[], Any]) -> Tensor:
    return video.latents(make_pipe())


def reuse_as_second_expert(pipe: Any) -> Any:
    pipe.register_to_config(boundary_ratio=0.9)
    pipe.transformer_2 = pipe.transformer
    return pipe


def offload_groups(pipe: Any) -> None:
    if RELEASE < (0, 41):
        pytest.skip("diffusers' group offloading needs an accelerator")
    pipe.transformer.enable_group_offload(CPU, CPU, "block_level", num_blocks_per_group=1)


def load_lora(pipe: Any) -> None:
    """Load a LoRA of two blocks and of the two modules around the blocks."""
    pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(0)
    network, weights = pipe.transformer, {}
    for name in ("patch_embedding", "blocks.0.attn1.to_q", "blocks.1.attn2.to_out.0", "proj_out"):
        rows, columns, *patch = network.get_submodule(name).weight.shape
        down = torch.randn(4, columns, *patch, generator=generator)
        up = torch.randn(rows, 4, *[1 for _ in patch], generator=generator) / 10
        weights |= {f"transformer.{name}.lora_{x}.weight": w for x, w in (("A", down), ("B", up))}
    pipe.load_lora_weights(weights)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda pipe: None,
    "fused projections": lambda pipe: pipe.transformer.fuse_qkv_projections(),
    "group offloading": offload_groups,
    "LoRA": load_lora,
    "weights in FP8": lambda pipe: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_pipeline_stay_compatible(
    video: Video, make_pipe: Callable[[], Any], expected: Tensor, change: str
) -> None:
    """Changes made before and after parallelize_pipe, also with a cache that skips no block."""
    plain, changed_before, changed_after = (make_pipe() for _ in range(3))
    CHANGES[change](plain), CHANGES[change](changed_before)
    reference = video.latents(plain)
    assert torch.equal(reference, expected) != (change == "LoRA" or change.startswith("weights"))
    parallelize_pipe(changed_before)
    CHANGES[change](apply_cache_on_pipe(parallelize_pipe(changed_after), "steps:0,1", force=True))
    for pipe in (changed_before, changed_after):
        assert (video.latents(pipe) - reference).abs().max() <= TOLERANCE


SCHEDULERS = {
    "LTXEulerAncestralRFScheduler": {},
    "FlowMatchHeunDiscreteScheduler": {},
    "DPMSolverMultistepScheduler": {
        "algorithm_type": "sde-dpmsolver++",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    },
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_samplers_of_diffusers(video: Video, make_pipe: Callable[[], Any], name: str) -> None:
    """Each forward pass of a scheduler is a step; Heun's has two passes a step."""
    plain, parallelized = make_pipe(), make_pipe()
    for pipe in (plain, parallelized):
        pipe.scheduler = getattr(diffusers, name)(**SCHEDULERS[name])
    num_passes = 3 if "Heun" in name else 2
    passes = ",".join(map(str, range(num_passes)))
    apply_cache_on_pipe(parallelize_pipe(parallelized), f"steps:{passes}", force=True)
    torch.manual_seed(0)
    reference = video.latents(plain)
    torch.manual_seed(0)
    latents = video.latents(parallelized)
    assert len(parallelized.scheduler.timesteps) == num_passes
    assert (latents - reference).abs().max() <= TOLERANCE * reference.abs().max()


def test_a_pipeline_after_its_cache_and_its_parallelism(
    video: Video, pipe: Any, expected: Tensor, tmp_path: Path
) -> None:
    """It generates the same bits as before, and so do copies of it; it can be saved."""
    processors = pipe.transformer.attn_processors
    apply_cache_on_pipe(pipe, "steps:0", force=True)
    assert not torch.equal(video.latents(pipe), expected)
    apply_cache_on_pipe(pipe, "none")
    pipe.transformer.save_pretrained(tmp_path)
    assert torch.equal(video.latents(deepcopy(pipe)), expected)
    apply_cache_on_pipe(apply_cache_on_pipe(pipe, "steps:0", force=True), "none")
    assert (video.latents(parallelize_pipe(pipe)) - expected).abs().max() <= TOLERANCE
    apply_cache_on_pipe(pipe, "steps:0", force=True)
    assert not torch.equal(video.latents(pipe), expected)
    assert deparallelize(pipe) is pipe
    assert pipe.transformer.attn_processors == processors
    assert torch.equal(video.latents(pipe), expected)
    transformer = parallelize_transformer(pipe.transformer)
    assert (video.latents(pipe) - expected).abs().max() <= TOLERANCE
    deparallelize(transformer)
    assert torch.equal(video.latents(pipe), expected)


def describe_modules(pipe: Any) -> list[Any]:
    """Returns the attributes, the hooks and the attention processor of each module."""
    networks = (pipe.transformer, getattr(pipe, "transformer_2", None))
    modules = [m for network in networks if network is not None for m in network.modules()]
    return [
        (
            sorted(vars(m)),
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            vars(m).get("processor"),
        )
        for m in modules
    ]


@pytest.mark.parametrize("case", ["t2v", "animate", "control, low noise", "modular 2.2"])
def test_nothing_is_left_of_a_removed_cache(case: str, make_pipe: Callable[[], Any]) -> None:
    """Neither of any policy, with or without a video, nor of parallelism or a refused cache."""
    pipe = make_pipe() if case == "t2v" else CASES[case]().pipe
    untouched = describe_modules(pipe)
    for name in (*POLICIES.keys() - {"steps"}, "steps:0"):
        coefficients = {"coefficients": "1,0"} if name == "tea" else {}
        with suppress(InputError):  # easy
            apply_cache_on_pipe(pipe, name, **coefficients)
            assert describe_modules(pipe) != untouched
        apply_cache_on_pipe(pipe, "none")
        assert describe_modules(pipe) == untouched, name
    apply_cache_on_pipe(pipe, "none")
    assert describe_modules(pipe) == untouched
    parallelize_pipe(pipe)
    parallelized = [names for names, *_ in describe_modules(pipe)]
    apply_cache_on_pipe(apply_cache_on_pipe(pipe, "first_block"), "none")
    assert [names for names, *_ in describe_modules(pipe)] == parallelized
    assert describe_modules(deparallelize(pipe)) == untouched
    assert describe_modules(deparallelize(pipe)) == untouched


UNTOUCHED: dict[str, Callable[[Any], object]] = {
    "no pipeline": lambda pipe: parallelize_pipe(pipe.transformer),
    "a compiled network": lambda pipe: parallelize_transformer(torch.compile(pipe.transformer)),
    "no keyword": lambda pipe: parallelize_pipe(pipe, dit_fsdp=True),
    "cfg_size of a network": lambda pipe: parallelize_transformer(pipe.transformer, cfg_size=2),
    "no policy": lambda pipe: apply_cache_on_pipe(pipe, "fora"),
    "no parameter": lambda pipe: apply_cache_on_pipe(pipe, "mag", comm_type=1),
    "of another policy": lambda pipe: apply_cache_on_pipe(pipe, "mag", order=1, interval=3),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "no network": lambda pipe: (setattr(pipe, "transformer", None), parallelize_pipe(pipe)),
    "compiled in place": lambda pipe: (pipe.transformer.compile(), parallelize_pipe(pipe)),
    "one network twice": lambda pipe: parallelize_pipe(reuse_as_second_expert(pipe)),
    "a cache for a network alone": lambda pipe: (
        parallelize_transformer(pipe.transformer),
        apply_cache_on_pipe(pipe, "first_block"),
    ),
    "twice": lambda pipe: parallelize_pipe(parallelize_pipe(pipe)),
    "float16": lambda pipe: parallelize_pipe(pipe.to(torch.float16)),
    "another cache": lambda pipe: (
        pipe.transformer.enable_cache(FirstBlockCacheConfig()),
        parallelize_pipe(pipe),
    ),
    "another backend": lambda pipe: (
        pipe.transformer.set_attention_backend("native"),
        parallelize_pipe(pipe),
    ),
    "an offload before": lambda pipe: (
        cpu_offload_with_hook(pipe.transformer, "cpu"),
        parallelize_pipe(pipe),
    ),
    "an offload after": lambda pipe: (
        cpu_offload_with_hook(parallelize_pipe(pipe).transformer, "cpu"),
        deparallelize(pipe),
    ),
}


def test_pipelines_and_keywords_that_are_refused(make_pipe: Callable[[], Any]) -> None:
    pipe = make_pipe()
    messages = {case: get_refusal(call, pipe) for case, call in UNTOUCHED.items()}
    messages |= {case: get_refusal(call, make_pipe()) for case, call in REFUSED.items()}
    check_refusals("diffusers: calls", messages, [r"(?<=attention backend )\S+(?=;)"])


def test_a_script_for_ranks_runs_on_one_process(
    video: Video, make_pipe: Callable[[], Any], expected: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    for settings in ({"comm_type": 1}, {"cfg_size": 2, "ulysses_size": 4}):
        caplog.clear()
        pipe = parallelize_pipe(make_pipe(), **settings)
        assert caplog.messages[0].startswith("This is one process, so ")
        torch.testing.assert_close(video.latents(pipe), expected, atol=2e-5, rtol=0)


def test_refused_when_called(video: Video, make_pipe: Callable[[], Any]) -> None:
    """Refusals that depend on the call; afterwards, the pipeline still generates videos.

    Also diffusers' own cache together with ours, and calls of the network without the pipeline.
    """
    pipe, messages, sparse = make_pipe(), {}, {"use_rainfusion": True}
    parallelize_pipe(pipe, **sparse, sparse_start_step=2)
    messages["too few steps for sparsity"] = get_refusal(video.latents, pipe)
    apply_cache_on_pipe(deparallelize(pipe), "first_block")
    messages["too few steps for a cache"] = get_refusal(video.latents, pipe)
    video.latents(apply_cache_on_pipe(pipe, "none"))
    deparallelize(pipe)
    parallelize_pipe(pipe, **sparse, sparse_start_step=0)
    network_inputs = torch.zeros(1, 16, 3, 8, 12), torch.tensor([5]), torch.zeros(1, 4, 64)
    messages["the network alone"] = get_refusal(pipe.transformer, *network_inputs)
    shares = make_pipe()
    shares.transformer = pipe.transformer
    messages["another pipeline"] = get_refusal(video.latents, shares)
    deparallelize(pipe), parallelize_pipe(pipe)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    messages["diffusers' cache"] = get_refusal(video.latents, pipe)
    check_refusals("diffusers: videos", messages)
    pipe.transformer.disable_cache()
    video.latents(pipe)


def test_all_wan_pipelines_are_known() -> None:
    """Each class of the installed diffusers is supported, or refused by its name."""
    names = [name for name in dir(diffusers) if re.fullmatch("Wan.*Pipeline", name)]
    assert len(names) >= 9
    for name in names:
        assert issubclass(getattr(diffusers, name), PIPELINES + ANIMATE2_PIPELINES), name


@pytest.mark.skipif(RELEASE < (0, 42), reason="diffusers has it since 0.42")
def test_animate2_is_refused() -> None:
    pipe = diffusers.WanAnimate2Blocks().init_pipeline()
    check_refusals("diffusers: Animate 2", {"pipeline": get_refusal(parallelize_pipe, pipe)})


def test_refusals_of_single_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a refusal, the pipeline still generates videos; the end of a modular one is found."""
    messages = {}
    video_case, curve = CASES["video"](), tmp_path / "curve.json"
    ratios = dict.fromkeys(("cond", "uncond"), [1.0] * 3)
    sizes = {"steps": 3, "sample_shift": 3.0, "high_noise_steps": 0}
    curve.write_text(json.dumps({"task": "t2v-1.3B", **sizes, "ratios": ratios}))
    apply_cache_on_pipe(video_case.pipe, "mag", curve=curve, force=True)
    messages["easy"] = get_refusal(apply_cache_on_pipe, video_case.pipe, "easy")
    messages["mag from the middle"] = get_refusal(video_case.make_latents)
    apply_cache_on_pipe(video_case.pipe, "steps:0,3", force=True)
    messages["a step after the last from the middle"] = get_refusal(video_case.make_latents)
    case = CASES["modular"]()
    guider, zero_guider = case.pipe.guider, diffusers.ClassifierFreeZeroStarGuidance(4.0)
    expected = [case.make_latents()]
    case.pipe.update_components(guider=zero_guider)
    expected.append(case.make_latents())
    apply_cache_on_pipe(case.pipe, "steps:0,1,2", force=True)
    case.pipe.update_components(
        guider=diffusers.SkipLayerGuidance(skip_layer_guidance_layers=[1], skip_layer_config=None)
    )
    messages["a guider that skips layers"] = get_refusal(case.make_latents)
    caplog.clear()
    caplog.set_level(logging.INFO, "wan")
    for other, latents in zip((guider, zero_guider), expected, strict=True):
        case.pipe.update_components(guider=other)
        assert (case.make_latents() - latents).abs().max() <= TOLERANCE
    case.pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=1.0))
    case.make_latents()
    assert caplog.messages == ["Step cache steps: steps skipped: none."] * 3
    check_refusals("diffusers: classes", messages)


def test_an_aborted_video_leaves_nothing(video: Video, pipe: Any) -> None:
    """Neither in the next video nor, after deparallelize, in memory: its cond call waits."""
    steps = replace(video, steps=12)
    network, outputs = apply_cache_on_pipe(pipe, "cfg").transformer, list[weakref.ref[Tensor]]()
    session = get_session({"dit": network})
    network.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output[0])))

    def stop_at_uncond(*_: Any) -> None:
        if len(outputs) % 2:
            raise RuntimeError("stopped")

    for after in (steps.latents, deparallelize):
        outputs.clear()
        handle = network.register_forward_pre_hook(stop_at_uncond)
        assert get_refusal(steps.latents, pipe, kind=RuntimeError) == "stopped"
        handle.remove()
        gc.collect()
        assert outputs[0]() is not None
        after(pipe)
        gc.collect()
        assert outputs[0]() is None, after
    assert session is not None


def test_notices_about_long_videos(
    video: Video, pipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Animate's latents have one more frame, of the picture of the character."""

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped")

    long_video = replace(video, size=(16, 16), frames=85)
    parallelize_pipe(pipe).transformer.register_forward_hook(stop)
    assert get_refusal(long_video.latents, pipe, kind=RuntimeError) == "stopped"
    assert sum(text.startswith("85 frames are more than the 81") for text in caplog.messages) == 1
    case = CASES["animate"]()
    call = case.make_call() | {"width": 16, "height": 16}
    parallelize_pipe(case.pipe)
    case.pipe.transformer.register_forward_hook(stop)
    for frames, is_longer in ((77, False), (81, True)):
        case.make_call = partial(dict, call, segment_frame_length=frames)
        caplog.clear()
        assert get_refusal(case.make_latents, 1, kind=RuntimeError) == "stopped"
        notices = [text for text in caplog.messages if "frames a clip are" in text]
        assert [text.split()[0] for text in notices] == [str(frames)] * is_longer


def test_the_published_curve_is_that_of_the_inputs(tiny: Any) -> None:
    """ti2v-5B has a curve for videos that begin with an image, which its pipeline keeps."""
    for form, name in (("5B", "text"), ("5B image", "image")):
        video = make_video(tiny, form, size=(64, 64), frames=5)
        pipe = apply_cache_on_pipe(video.pipe(), "mag", force=True)
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=3.5)
        assert f"curve of ti2v-5B ({name}) holds" in get_refusal(video.latents, pipe)


def test_a_video_between_two_images() -> None:
    """Its first frame is not kept, unlike that of ti2v-5B."""
    first, last = make_images(2)
    call = {"image": first, "last_image": last, "num_frames": 5}
    sizes = {"in_channels": 36, "image_dim": 4, "added_kv_proj_dim": 24, "pos_embed_seq_len": 514}
    network = make_network(**sizes)
    case = Case("WanImageToVideoPipeline", lambda: call, transformer=network)
    case.pipe.encode_image = lambda *_: make_features().expand(2, -1, -1)
    expected = case.make_latents(1)
    parallelize_pipe(case.pipe)
    assert (case.make_latents(1) - expected).abs().max() <= TOLERANCE


def test_a_step_at_the_boundary_is_of_the_high_noise_network(tiny: Any) -> None:
    """As in the pipeline; each network computes its first step, here the first and the third."""
    video = make_video(tiny, "2.2", frames=5, steps=3)
    pipe = apply_cache_on_pipe(video.pipe(), "steps:0", force=True)
    pipe.scheduler.set_timesteps(3)
    pipe.register_to_config(boundary_ratio=pipe.scheduler.timesteps[1].item() / 1000)
    computed: list[int] = []
    for index, network in enumerate((pipe.transformer, pipe.transformer_2)):
        ffn = network.blocks[-1].ffn
        ffn.register_forward_hook(lambda *_, index=index: computed.append(index))
    video.latents(pipe)
    assert computed == [0, 0, 1, 1]  # both branches


@pytest.mark.dist
@pytest.mark.xdist_group("pairs")
def test_a_cache_measures_no_padding(tiny: Any) -> None:
    """Three tokens on two ranks: steps are computed as on one process, by several thresholds."""
    video = make_video(tiny, "2.1", size=(16, 16), steps=10)
    expected = list_computed_steps(video)
    assert len({*map(len, expected)}) == len(expected)
    assert run_on_ranks(2, list_computed_steps, video) == [expected, expected]


def list_computed_steps(video: Video) -> list[list[int]]:
    """On one rank: lists the steps in which all blocks compute, for each threshold."""
    torch.set_num_threads(1)
    pipe, results = video.pipe(), list[list[int]]()
    pipe.transformer.blocks[-1].ffn.register_forward_hook(
        lambda *_: results[-1].append(pipe.scheduler.step_index or 0)
    )
    for threshold in (0.5, 0.6, 0.7):
        results.append([])
        with parallelized_pipe(pipe):
            apply_cache_on_pipe(pipe, "first_block", threshold=threshold, warmup=0)
            video.latents(pipe)
    return results


@pytest.mark.dist
@pytest.mark.xdist_group("pairs")
def test_ranks_with_another_number_of_inputs(tiny: Any) -> None:
    video = make_video(tiny, "2.1", size=(16, 16))
    for message in run_on_ranks(2, add_input_on_one_rank, video):
        assert message.startswith("The ranks have other texts, images or videos")


def add_input_on_one_rank(video: Video) -> str:
    pipe, image = video.pipe(), {"encoder_hidden_states_image": torch.ones(1, 257, 4)}
    if torch.distributed.get_rank() == 1:
        pipe.transformer.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | image), with_kwargs=True
        )
    with parallelized_pipe(pipe):
        return get_refusal(video.latents, pipe)


def reuse_attention(pipe: Any, computed: Sequence[bool]) -> None:
    """Makes diffusers' self-attention, of two branches, return that of the last computed step."""
    network = pipe.transformer
    for block in (*network.blocks, *getattr(network, "vace_blocks", ())):
        numbers, outputs = itertools.count(), dict[int, Tensor]()

        def forward(
            *args: Any, plain: Any = block.attn1.forward, numbers=numbers, outputs=outputs
        ) -> Tensor:
            step, branch = divmod(next(numbers), 2)
            if computed[step]:
                outputs[branch] = plain(*args)
            return outputs[branch]

        block.attn1.forward = forward


@pytest.mark.parametrize("name", ["video", "control, high noise"])
def test_the_attention_of_each_block_is_reused(name: str) -> None:
    """Of control blocks, too, and by the steps of a video that begins with another one."""
    computed = (True, False, False, True)
    expected_case, case = CASES[name](), CASES[name]()
    plain = expected_case.make_latents(4)
    reuse_attention(expected_case.pipe, computed)
    expected = expected_case.make_latents(4)
    settings = {"start_step": 0, "end_step": 2, "attentioncache_interval": 3}
    apply_cache_on_pipe(case.pipe, "attention", **settings, force=True)
    assert (expected - plain).abs().max() > 10 * TOLERANCE
    assert (case.make_latents(4) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["animate", "control, low noise"])
def test_a_cache_that_skips_nothing_applies_the_adapters_once(name: str) -> None:
    case = CASES[name]()
    expected = case.make_latents(2)
    apply_cache_on_pipe(parallelize_pipe(case.pipe), "steps:0,1", force=True)
    assert (case.make_latents(2) - expected).abs().max() <= TOLERANCE


def test_a_pipeline_in_bfloat16_may_cache_guidance(video: Video, pipe: Any) -> None:
    steps = replace(video, steps=12)
    latents = steps.latents(apply_cache_on_pipe(pipe.to(torch.bfloat16), "cfg"))
    assert latents.isfinite().all()


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"\ndiffusers{VERSIONS} " in (REPO / "requirements.txt").read_text()
    messages = {}
    for version in ("0.39.1", "0.43.0"):
        info = tmp_path / version / f"diffusers-{version}.dist-info"
        info.mkdir(parents=True)
        info.joinpath("METADATA").write_text(f"Name: diffusers\nVersion: {version}\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(info.parent)
            patch.delitem(sys.modules, "wan.diffusers")
            messages[version] = get_refusal(importlib.import_module, "wan.diffusers")
    check_refusals("diffusers: versions", messages)


def test_a_network_of_another_program(pipe: Any) -> None:
    """With module offload; block-sparse attention takes the step from the cache context."""
    network = pipe.transformer
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(s, generator=generator) for s in ((1, 16, 3, 8, 12), (1, 512, 64)))
    t = torch.tensor([500])
    with torch.no_grad():
        expected = network(x, t, text).sample
        cpu_offload(parallelize_transformer(network), CPU)
        assert (network(x, t, text).sample - expected).abs().max() <= TOLERANCE
        remove_hook_from_module(network, recurse=True)
        deparallelize(network)
        parallelize_transformer(network, use_rainfusion=True, sparse_start_step=0, sparsity=0.0)
        with pytest.raises(ValueError, match="step"):
            network(x, t, text)
        if RELEASE < (0, 41):
            return  # a context is a name there
        with network.cache_context("cond", step_index=0, num_inference_steps=4):
            assert (network(x, t, text).sample - expected).abs().max() <= TOLERANCE
