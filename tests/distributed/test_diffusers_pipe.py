"""diffusers' pipelines, shared by ranks, make what they make alone; our exchanges, our caches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from PIL import Image
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wan
from tests.conftest import slow
from tests.diffusers_runs import TOLERANCE, Video, sharing
from tests.dist import REPO, TORCHRUN, run
from tests.numerics.test_diffusers import diffusers_latents
from wan.cli.flags import FLAGS
from wan.configs import WAN_CONFIGS
from wan.diffusers import apply_cache_on_pipe, deparallelize, parallelize_transformer
from wan.modules.blocks import WanAttentionBlock
from wan.settings.errors import InputError

pytestmark = pytest.mark.dist

Settings = dict[str, Any]
FORMS = {  # task, images, size
    "2.1": ("t2v-1.3B", 0, (112, 80)),
    "2.2": ("t2v-A14B", 0, (112, 80)),
    "5B": ("ti2v-5B", 0, (224, 160)),
    "5B image": ("ti2v-5B", 1, (224, 160)),
    "2.1 image": ("i2v-14B", 1, (112, 80)),
    "2.1 two images": ("flf2v-14B", 2, (112, 80)),
    "2.2 image": ("i2v-A14B", 1, (112, 80)),
}
HEADS = {"t2v-1.3B": 12, "ti2v-5B": 24}
MODES: dict[str, Settings] = {
    "0": {},
    "1": {"comm_type": 1},
    "2": {"comm_type": 2},
    "overlap": {"fa_alltoall_overlap": True},
}
MODE_FLAGS = {name for mode in MODES.values() for name in mode}


def layouts(world: int, heads: int) -> list[Settings]:
    """All cfg x ring x ulysses of so many ranks."""
    return [
        {"cfg_size": cfg, "ring_size": ring, "ulysses_size": ulysses, **kind}
        for cfg in (1, 2)
        for ring in range(1, world + 1)
        for ulysses in range(1, world + 1)
        if cfg * ring * ulysses == world and heads % ulysses == 0
        for kind in ([{}] if ring == 1 else [{}, {"ring_type": "bidirectional"}])
    ]


def make(tiny: Any, form: str, **more: Any) -> Video:
    task, images, size = FORMS[form]
    return Video(tiny(task, "diffusers"), images, **{"size": size, **more})


def shared(video: Video, settings: Sequence[Settings]) -> list[Tensor]:
    """On one rank: with each of the settings in turn."""
    torch.set_num_threads(1)
    pipe, found = video.pipe(), []
    for one in settings:
        with sharing(pipe, **one):
            found.append(video.latents(pipe))
    return found


SOME: dict[str, list[Settings]] = {  # of two ranks
    "2.2": [{**mode, "ulysses_size": 2} for mode in MODES.values()],
    "5B image": [{"cfg_size": 2}, {"ulysses_size": 2}],
}


def check(expected: Tensor, settings: Sequence[Settings], answers: list[list[Tensor]]) -> None:
    """Against the pipeline as it is; modes against mode 0 of the same layout."""
    for found in answers:
        for one, latents in zip(settings, found, strict=True):
            assert (latents - expected).abs().max() <= TOLERANCE, one
            layout = {name: size for name, size in one.items() if name not in MODE_FLAGS}
            if one == layout or layout not in settings:
                continue
            baseline = found[settings.index(layout)]
            # Of one attention 1e-6, which blocks, guidance and three steps make larger.
            limit = 2e-5 if one.get("comm_type") == 2 else 0
            assert (latents - baseline).abs().max() <= limit, one


@pytest.mark.parametrize("form", SOME)
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_share_a_video(tiny: Any, form: str) -> None:
    video = make(tiny, form, steps=2)
    expected = video.latents(video.pipe())
    check(expected, SOME[form], run(2, shared, video, SOME[form]))


def test_a_batch_with_timesteps_of_its_own(tiny: Any) -> None:
    """Both guidance branches in one call of a network, a timestep for each of 105 tokens."""
    assert max(run(2, batched, make(tiny, "2.1"))) <= TOLERANCE


@torch.no_grad()
def batched(video: Video) -> float:
    """On one rank: the largest difference from the network alone."""
    torch.set_num_threads(1)
    network, generator = video.pipe().transformer, torch.Generator().manual_seed(0)
    x, text = (torch.randn(s, generator=generator) for s in ((2, 16, 3, 10, 14), (2, 512, 64)))
    timestep = torch.randint(0, 1000, (2, 105), generator=generator)
    expected = network(x, timestep, text).sample
    found = parallelize_transformer(network, comm_type=2)(x, timestep, text).sample
    deparallelize(network)
    return (found - expected).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("one_thread")
def test_ranks_share_a_video(tiny: Any, form: str, world: int) -> None:
    """Every mode in every layout, with a batch of two once."""
    video = make(tiny, form)
    settings = [
        {**layout, **mode}
        for layout in layouts(world, HEADS.get(FORMS[form][0], 40))
        for mode in MODES.values()
        if not mode or layout["ulysses_size"] > 1
    ]
    expected = video.latents(video.pipe())
    check(expected, settings, run(world, shared, video, settings, timeout=600))
    two = replace(video, count=2)
    expected = two.latents(two.pipe())
    check(expected, settings[:1], run(world, shared, two, settings[:1], timeout=600))


@pytest.mark.parametrize("form", ["2.1", *(slow(form) for form in FORMS if form != "2.1")])
@pytest.mark.usefixtures("one_thread")
def test_our_own_classes_make_the_same(tiny: Any, image_path: Path, form: str) -> None:
    """Same weights, noise and noise levels; four ranks in two layouts, ours alone."""
    task, images, _ = FORMS[form]
    image = Image.open(image_path).convert("RGB")
    given = [image, image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)][:images]
    two = task.endswith("A14B")
    where: dict[str, Any] = {"img": image, "max_area": 96 * 64} if images else {"size": (96, 64)}
    where |= {"last_image": given[1]} if images == 2 else {}
    facade = {"t2v": wan.WanT2V, "ti2v": wan.WanTI2V}.get(task.split("-")[0], wan.WanI2V)
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    ours = facade(WAN_CONFIGS[task], tiny(task)).generate(
        "",
        **where,
        frame_num=9,
        sampling_steps=6,
        shift=5.0,
        guide_scale=(3.0, 4.0) if two else 5.0,
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    call = (tiny(task, "diffusers"), given, "unipc", two, context, negative)
    worlds = [{"ring_size": 2, "comm_type": 1}, {"cfg_size": 2, "comm_type": 2}]
    for settings in worlds:
        for theirs in run(4, official, settings, *call):
            assert (theirs - ours).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("FP8", {}),
        ("RainFusion", {}),
        slow("FP8", {"comm_type": 1, "quant_alltoall": True}),
        slow("RainFusion", {"comm_type": 1}),
        slow("RainFusion", {"ring_size": 2}),
        slow("RainFusion", {"cfg_size": 2}),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_methods_compute_the_same_as_in_our_own_model(
    tiny: Any, method: str, layout: Settings
) -> None:
    """On one process or two ranks, against our own on one; dense attention is far from both."""
    settings, limit = METHODS[method]
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    expected = wan.WanT2V(WAN_CONFIGS["t2v-1.3B"], tiny("t2v-1.3B"), **settings).generate(
        "",
        size=(224, 160),
        frame_num=9,
        sampling_steps=2,
        shift=5.0,
        guide_scale=5.0,
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    call = (tiny("t2v-1.3B", "diffusers"), [], "unipc", False, context, negative, 2)
    dense = diffusers_latents(*call, size=(224, 160))
    assert (dense - expected).square().mean().sqrt() > 5 * limit
    both = {**settings, **layout}
    for latents in run(2, larger, both, *call) if layout else [larger(both, *call)]:
        assert (latents - expected).square().mean().sqrt() <= limit


METHODS: dict[str, tuple[Settings, float]] = {
    # Projections that differ by 1e-5 round to another FP8 value here and there.
    "FP8": ({"fa_quant": "fp8"}, 2e-3),
    "RainFusion": ({"use_rainfusion": True, "sparse_start_step": 0, "sparsity": 0.5}, TOLERANCE),
}


def larger(settings: Settings, *call: Any) -> Tensor:
    """On one rank: as `official`, of 420 tokens, which are several blocks."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            stack.enter_context(sharing(pipe, **settings))

        return diffusers_latents(*call, prepare=prepare, size=(224, 160))


def official(settings: Settings, *call: Any) -> Tensor:
    """On one rank: a pipeline on the official noise levels."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            stack.enter_context(sharing(pipe, **settings))

        return diffusers_latents(*call, prepare=prepare)


@pytest.mark.parametrize(
    ("form", "settings", "world"),
    [
        ("2.1 image", {"comm_type": 1}, 2),
        slow("2.2", {"comm_type": 2, "ring_size": 2}, 4),
        slow("5B image", {"fa_alltoall_overlap": True}, 4),
        slow("2.2", {"comm_type": 1, "cfg_size": 2}, 4),
        slow("2.1", {"comm_type": 1, "fa_quant": "fp8", "quant_alltoall": True}, 2),
        slow("2.1", {"use_rainfusion": True, "sparse_start_step": 0}, 2),
    ],
)
def test_exchanges_are_those_of_our_own_model(
    tiny: Any, image_path: Path, form: str, settings: Settings, world: int
) -> None:
    """In number, order and size; none in cross-attention, which sees all of image and text."""
    video = make(tiny, form, steps=1, size=(224, 160))
    task = FORMS[form][0]
    answers = run(world, exchanges, video, settings, task, tiny(task), image_path)
    for theirs, ours, crossing, keys in answers:
        assert theirs == ours and all(theirs) and len(theirs) >= 2
        assert not crossing
        assert keys == {769 if form == "2.1 image" else 512}


class Collectives(TorchDispatchMode):
    """Notes every operator of torch.distributed, block by block, and those in cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[list[Any]] = []
        self.crossing: list[Any] = []
        self.keys: set[int] = set()
        self._places = [list[Any]()]  # where to note: outside, in a block, in cross-attention
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        )

    def _enter(self, module: Any, args: Any) -> None:
        if isinstance(module, WanTransformerBlock | WanAttentionBlock):
            self.blocks.append([])
            self._places.append(self.blocks[-1])
        elif isinstance(module, WanAttention) and module.is_cross_attention:
            self.keys.add(args[1].shape[1])
            self._places.append(self.crossing)

    def _leave(self, module: Any, *_: object) -> None:
        crosses = isinstance(module, WanAttention) and module.is_cross_attention
        if crosses or isinstance(module, WanTransformerBlock | WanAttentionBlock):
            self._places.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            shapes = [tuple(x.shape) for x in tree_leaves(args) if isinstance(x, Tensor)]
            self._places[-1].append((func.__name__, shapes))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)


def exchanges(video: Video, settings: Settings, task: str, folder: Path, image: Path) -> Any:
    """On one rank: those of a step, of diffusers' pipeline and of our own; see the test."""
    torch.set_num_threads(1)
    with sharing(video.pipe(), **settings) as pipe, Collectives() as theirs:
        video.latents(pipe)
    facade = {"t2v": wan.WanT2V, "ti2v": wan.WanTI2V}.get(task.split("-")[0], wan.WanI2V)
    model = facade(WAN_CONFIGS[task], folder, use_sp=True, **settings)
    where: dict[str, Any] = {"size": video.size}
    if video.images:
        shown = Image.open(image).convert("RGB").resize((224, 160))
        where = {"img": shown, "max_area": 224 * 160}
    prompt = torch.zeros(3, 64)
    with Collectives() as ours:
        model.generate(
            "",
            **where,
            frame_num=9,
            sampling_steps=1,
            guide_scale=5.0,
            seed=3,
            prompt_embeds=prompt,
            negative_prompt_embeds=prompt,
            output_type="latent",
        )
    return theirs.blocks, ours.blocks, theirs.crossing, theirs.keys


def test_refused_by_all_ranks_together(tiny: Any) -> None:
    """Guidance that skips the second call, which cfg_size 2 needs; other noise."""
    for unguided, ended, drawn, again in run(2, refused, make(tiny, "2.1"), timeout=60):
        assert "there is only one" in unguided and "ends in the middle" in ended
        assert "generators of the same seed" in drawn
        assert again, "the next video is made"


def refused(video: Video) -> tuple[str, str, str, bool]:
    """On one rank."""
    torch.set_num_threads(1)

    def end(pipe: Any, step: int, *_: object) -> dict[str, Any]:
        pipe._guidance_scale = 1.0  # as SDCFGCutoffCallback of diffusers
        return {}

    other = torch.Generator().manual_seed(torch.distributed.get_rank())
    each: list[Settings] = [{"callback_on_step_end": end}, {"generator": other}]
    with sharing(video.pipe(), cfg_size=2) as pipe:
        with pytest.raises(InputError) as unguided:
            replace(video, guidance=1.0).latents(pipe)
        said = [str(unguided.value)]
        for more in each:
            with pytest.raises(InputError) as error:
                video.latents(pipe, **more)
            said.append(str(error.value))
        return *said, bool(video.latents(pipe).isfinite().all())


def computing(pipe: Any, noted: list[tuple[int, int]]) -> list[Any]:
    """Notes (network, step) whenever a network computes all of its blocks; returns the hooks."""
    return [
        network.blocks[-1].ffn.register_forward_hook(
            lambda *_, index=index: noted.append((index, pipe.scheduler.step_index or 0))
        )
        for index, network in enumerate((pipe.transformer, pipe.transformer_2))
    ]


@pytest.mark.parametrize("threshold", [0.5, slow(0.8)])
@pytest.mark.usefixtures("one_thread")
def test_first_block_cache_computes_the_steps_of_diffusers_own(tiny: Any, threshold: float) -> None:
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    call = (tiny("t2v-A14B", "diffusers"), [], "unipc", True, context, negative, 20)
    steps: list[list[tuple[int, int]]] = [[], []]

    def theirs(pipe: Any) -> None:
        computing(pipe, steps[0])
        for network in (pipe.transformer, pipe.transformer_2):
            network.enable_cache(FirstBlockCacheConfig(threshold=threshold))

    def ours(pipe: Any) -> None:
        computing(pipe, steps[1])
        apply_cache_on_pipe(pipe, "first_block", threshold=threshold, warmup=0)

    expected, found = (diffusers_latents(*call, prepare=cache) for cache in (theirs, ours))
    assert steps[0] == steps[1] and 4 < len(steps[0]) < 40
    assert (found - expected).abs().max() <= TOLERANCE


POLICIES: dict[str, Settings] = {
    "first_block": {"threshold": 0.7, "order": 1},
    "tea": {"coefficients": (1.0, 0.0), "threshold": 2.0},
    "steps:0,1,2,5,6,7,10": {},
    "attention": {"start_step": 1, "attentioncache_interval": 2, "end_step": 9},
    "cfg": {},
}


@pytest.mark.parametrize("policy", ["first_block", *(slow(p) for p in POLICIES if p[0] != "f")])
@pytest.mark.usefixtures("one_thread")
def test_caches_of_ranks(tiny: Any, policy: str) -> None:
    """They skip as one process does, and as our own pipeline."""
    generator = torch.Generator().manual_seed(5)
    context, negative = (torch.randn(n, 64, generator=generator) for n in (9, 20))
    given = {n if n in FLAGS else f"step_cache_{n}": v for n, v in POLICIES[policy].items()}
    own = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), step_cache=policy, **given)
    expected = own.generate(
        "",
        size=(96, 64),
        frame_num=9,
        sampling_steps=12,
        shift=5.0,
        guide_scale=(3.0, 4.0),
        seed=3,
        prompt_embeds=context,
        negative_prompt_embeds=negative,
        output_type="latent",
    )
    assert own.step_cache is not None
    call = (tiny("t2v-A14B", "diffusers"), [], "unipc", True, context, negative, 12)
    layouts = [{"comm_type": 1}] if policy == "cfg" else [{"comm_type": 1}, {"cfg_size": 2}]
    for settings in layouts:
        for latents, computed in run(2, cached, settings, policy, POLICIES[policy], call):
            if policy != "first_block" or "cfg_size" not in settings:  # whose branches agree
                assert (latents - expected).abs().max() <= TOLERANCE
            uncond = own.step_cache["computed"]["uncond"]
            assert 0 < len(uncond) < 12
            if policy in ("tea", "first_block") and "cfg_size" not in settings:
                assert len(computed) == len(uncond) + len(own.step_cache["computed"]["cond"])


def cached(settings: Settings, policy: str, parameters: Settings, call: Any) -> Any:
    """On one rank: the latents, and the steps in which a network computed all blocks."""
    torch.set_num_threads(1)
    noted: list[tuple[int, int]] = []

    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            computing(pipe, noted)
            stack.enter_context(sharing(pipe, **settings))
            apply_cache_on_pipe(pipe, policy, **parameters)

        return diffusers_latents(*call, prepare=prepare), noted


def disagreeing(video: Video) -> tuple[Any, Any, Tensor]:
    """On one rank, whose first blocks are its own: steps computed alone, and shared; latents."""
    torch.set_num_threads(1)
    pipe, alone, together = video.pipe(), list[Any](), list[Any]()
    for network in (pipe.transformer, pipe.transformer_2):
        network.blocks[0].scale_shift_table.data *= 1 + 4 * torch.distributed.get_rank()
    counting = computing(pipe, alone)
    video.latents(apply_cache_on_pipe(pipe, "first_block", threshold=0.5))
    for hook in counting:
        hook.remove()
    computing(pipe, together)
    with sharing(deparallelize(pipe)):
        apply_cache_on_pipe(pipe, "first_block", threshold=0.5)
        return alone, together, video.latents(pipe)


def test_ranks_that_disagree_skip_together(tiny: Any) -> None:
    """Where diffusers' own cache hangs: see benchmarks/diffusers_parallel.py."""
    first, second = run(2, disagreeing, make(tiny, "2.2", steps=10), timeout=60)
    assert first[0] != second[0], "alone they skip other steps"
    assert first[1] == second[1] and 4 < len(first[1]) < 20
    assert torch.equal(first[2], second[2]) and first[2].isfinite().all()


@pytest.mark.slow
def test_mag_takes_the_steps_of_our_own(tiny: Any) -> None:
    """The published curve, on diffusers' own noise levels of its shift."""
    noted: list[tuple[int, int]] = []
    video = make(tiny, "2.2", steps=40)
    pipe = apply_cache_on_pipe(video.pipe(), "mag", threshold=0.04)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=12.0)
    computing(pipe, noted)
    video.latents(pipe)
    own = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), step_cache="mag")
    own.generate("", size=(96, 64), frame_num=9, sampling_steps=40, shift=12.0, guide_scale=5.0)
    assert own.step_cache is not None
    steps = own.step_cache["computed"]
    assert sorted(step for _, step in noted) == sorted(steps["cond"] + steps["uncond"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["0", "1", "2"])
@pytest.mark.usefixtures("one_thread")
def test_compiled_blocks_have_one_graph(tiny: Any, mode: str) -> None:
    """For all blocks and steps, and no break."""
    video = make(tiny, "2.1")
    expected = video.latents(video.pipe())
    for latents, graphs in run(2, compiled, video, MODES[mode]):
        assert (latents - expected).abs().max() <= TOLERANCE
        assert graphs == 1


def compiled(video: Video, settings: Settings) -> tuple[Tensor, int]:
    """On one rank."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    with sharing(video.pipe(), **settings) as pipe:
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        return video.latents(pipe), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "made"),
    [("t2v", 1, "fox"), ("t2v", 2, "fox"), ("t2v", 3, "fox"), ("i2v", 2, "life")],
)
def test_examples(tmp_path: Path, name: str, ranks: int, made: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(REPO / "examples" / f"diffusers_{name}.py")]
    there = {**os.environ, **TORCHRUN}
    done = subprocess.run(
        command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{made}.mp4").stat().st_size > 1000
