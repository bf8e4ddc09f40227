"""diffusers' pipelines on several ranks give the results of one process, with `wan`'s exchanges."""

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
from diffusers import DPMSolverMultistepScheduler
from diffusers.models.transformers.transformer_wan import WanAttention, WanTransformerBlock
from PIL import Image
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wan
from tests.conftest import slow
from tests.diffusers_runs import FORMS, TOLERANCE, Settings, Video, make_video, parallelized_pipe
from tests.dist import REPO, TORCHRUN, run_on_ranks
from tests.numerics.test_diffusers import diffusers_latents
from tests.refusals import check_refusals
from wan.configs import WAN_CONFIGS
from wan.diffusers import deparallelize, parallelize_transformer
from wan.modules.blocks import WanAttentionBlock
from wan.settings.errors import InputError
from wan.settings.parallel import EXCHANGES

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]

HEADS = {"t2v-1.3B": 12, "ti2v-5B": 24}
MODES: dict[str, Settings] = {
    "0": {},
    "1": {"comm_type": 1},
    "2": {"comm_type": 2},
    "overlap": {"fa_alltoall_overlap": True},
}
MODE_FLAGS = {name for mode in MODES.values() for name in mode}


def layouts(world: int, heads: int) -> list[Settings]:
    """List all cfg x ring x ulysses layouts of `world` ranks."""
    return [
        {"cfg_size": cfg, "ring_size": ring, "ulysses_size": ulysses, **kind}
        for cfg in (1, 2)
        for ring in range(1, world + 1)
        for ulysses in range(1, world + 1)
        if cfg * ring * ulysses == world and heads % ulysses == 0
        for kind in ([{}] if ring == 1 else [{}, {"ring_type": "bidirectional"}])
    ]


def shared(video: Video, settings: Sequence[Settings]) -> list[Tensor]:
    """On one rank: make the latents with each of the settings in turn."""
    torch.set_num_threads(1)
    pipe, found = video.pipe(), []
    for one in settings:
        with parallelized_pipe(pipe, **one):
            found.append(video.latents(pipe))
    return found


SOME: dict[str, list[Settings]] = {  # of two ranks
    "2.2": [{**mode, "ulysses_size": 2} for mode in MODES.values()],
    "2.1 image": [{"comm_type": 1}],
    "5B image": [{"cfg_size": 2}, {"ulysses_size": 2}],
    "2.2 control": [{"ulysses_size": 2, "comm_type": 1}, {"cfg_size": 2}],
}


def check(expected: Tensor, settings: Sequence[Settings], answers: list[list[Tensor]]) -> None:
    """Compare with the unmodified pipeline, and each mode with mode 0 of the same layout."""
    for found in answers:
        for one, latents in zip(settings, found, strict=True):
            assert (latents - expected).abs().max() <= TOLERANCE, one
            layout = {name: size for name, size in one.items() if name not in MODE_FLAGS}
            if one == layout or layout not in settings:
                continue
            baseline = found[settings.index(layout)]
            # One attention differs by 1e-6; blocks, guidance and three steps make this larger.
            limit = 2e-5 if one.get("comm_type") == 2 else 0
            assert (latents - baseline).abs().max() <= limit, one


@pytest.mark.parametrize("form", SOME)
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_share_a_video(tiny: Any, form: str) -> None:
    video = make_video(tiny, form, steps=2, frames=5 if "control" in form else 9)
    expected = video.latents(video.pipe())
    check(expected, SOME[form], run_on_ranks(2, shared, video, SOME[form]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES.values())
@pytest.mark.usefixtures("one_thread")
def test_no_exchange_changes_a_bit(tiny: Any, mode: Settings) -> None:
    settings = [{**mode, "ulysses_size": 2, "exchange": how} for how in EXCHANGES]
    for split, fused in run_on_ranks(2, shared, make_video(tiny, "2.2", steps=2), settings):
        assert split.equal(fused)


def test_a_batch_with_timesteps_of_its_own(tiny: Any) -> None:
    """Both guidance branches in one call of a network, with a timestep for each of 105 tokens."""
    assert max(run_on_ranks(2, batched, make_video(tiny, "2.1"))) <= TOLERANCE


@torch.no_grad()
def batched(video: Video) -> float:
    """On one rank: return the largest difference from the unmodified network."""
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
    video = make_video(tiny, form)
    settings = [
        {**layout, **mode}
        for layout in layouts(world, HEADS.get(FORMS[form][0], 40))
        for mode in MODES.values()
        if not mode or layout["ulysses_size"] > 1
    ]
    expected = video.latents(video.pipe())
    check(expected, settings, run_on_ranks(world, shared, video, settings, timeout=600))
    if video.has_control:  # diffusers makes one video at a time here
        return
    two = replace(video, count=2)
    expected = two.latents(two.pipe())
    check(expected, settings[:1], run_on_ranks(world, shared, two, settings[:1], timeout=600))


@pytest.mark.parametrize("form", [slow(form) for form in FORMS])
@pytest.mark.usefixtures("one_thread")
def test_our_own_classes_make_the_same(tiny: Any, image_path: Path, form: str) -> None:
    """Same weights, noise and noise levels: diffusers on four ranks, `wan` in one process."""
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
        for theirs in run_on_ranks(4, official, settings, *call):
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
    """diffusers on one or two ranks against `wan` in one process; dense attention differs more."""
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
    for latents in run_on_ranks(2, larger, both, *call) if layout else [larger(both, *call)]:
        assert (latents - expected).square().mean().sqrt() <= limit


METHODS: dict[str, tuple[Settings, float]] = {
    # Projections that differ by 1e-5 round to another FP8 value here and there.
    "FP8": ({"fa_quant": "fp8"}, 2e-3),
    "RainFusion": ({"use_rainfusion": True, "sparse_start_step": 0, "sparsity": 0.5}, TOLERANCE),
}


def larger(settings: Settings, *call: Any) -> Tensor:
    """On one rank: as `run_official_noise_levels`, with 420 tokens, which are several blocks."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            stack.enter_context(parallelized_pipe(pipe, **settings))

        return diffusers_latents(*call, prepare=prepare, size=(224, 160))


def official(settings: Settings, *call: Any) -> Tensor:
    """On one rank: run a pipeline on the official noise levels."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            stack.enter_context(parallelized_pipe(pipe, **settings))

        return diffusers_latents(*call, prepare=prepare)


@pytest.mark.parametrize(
    ("form", "settings", "world"),
    [
        ("2.1", {"comm_type": 1}, 2),
        slow("2.1 image", {"comm_type": 1}, 2),
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
    """Exchanges agree in number, order and size; cross-attention has all keys without one."""
    video = make_video(tiny, form, steps=1, size=(224, 160))
    task = FORMS[form][0]
    answers = run_on_ranks(world, exchanges, video, settings, task, tiny(task), image_path)
    for theirs, ours, crossing, keys in answers:
        assert theirs == ours and all(theirs) and len(theirs) >= 2
        assert not crossing
        assert keys == {769 if form == "2.1 image" else 512}


class Collectives(TorchDispatchMode):
    """Records the operators of torch.distributed by block, and in cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[list[Any]] = []
        self.crossing: list[Any] = []
        self.keys: set[int] = set()
        self._places = [list[Any]()]  # to record in: outside, a block, cross-attention
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
    """On one rank: record the exchanges of a step of diffusers' pipeline and of `wan`'s."""
    torch.set_num_threads(1)
    with parallelized_pipe(video.pipe(), **settings) as pipe, Collectives() as theirs:
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
    """Guidance without the second call that cfg_size 2 needs; other noise, text and images."""
    first, second = run_on_ranks(
        2, refused, make_video(tiny, "2.1"), make_video(tiny, "2.2 image"), timeout=60
    )
    check_refusals("ranks: calls of diffusers' pipelines", first)
    assert first == second


def refused(video: Video, pictured: Video) -> dict[str, str]:
    """On one rank: collect the refusals. After a refusal the next video can be made."""
    torch.set_num_threads(1)
    rank, said = torch.distributed.get_rank(), {}

    def refuse(name: str, one: Video, pipe: Any, **more: Any) -> None:
        with pytest.raises(InputError) as error:
            one.latents(pipe, **more)
        said[name] = str(error.value)

    def end(pipe: Any, step: int, *_: object) -> dict[str, Any]:
        pipe._guidance_scale = 1.0  # as SDCFGCutoffCallback of diffusers
        return {}

    other = torch.Generator().manual_seed(rank)
    text = torch.randn(1, 512, 64, generator=other)
    with parallelized_pipe(video.pipe(), cfg_size=2) as pipe:
        refuse("no guidance", replace(video, guidance=1.0), pipe)
        refuse("guidance ends", video, pipe, callback_on_step_end=end)
        refuse("other noise", video, pipe, generator=other)
        refuse("other text", video, pipe, prompt_embeds=text)
        usual, noise = pipe.scheduler, {"algorithm_type": "sde-dpmsolver++"}
        pipe.scheduler = DPMSolverMultistepScheduler.from_config(usual.config, **noise)
        torch.manual_seed(7)
        assert video.latents(pipe).isfinite().all()
        torch.manual_seed(rank)
        refuse("noise between steps", video, pipe)
        pipe.scheduler = usual
        assert video.latents(pipe).isfinite().all()
    with parallelized_pipe(pictured.pipe()) as pipe:
        colour = ("red", "blue")[rank]
        refuse("other image", pictured, pipe, image=Image.new("RGB", (112, 80), colour))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["0", "1", "2"])
@pytest.mark.usefixtures("one_thread")
def test_compiled_blocks_have_one_graph(tiny: Any, mode: str) -> None:
    """One graph for all blocks and steps, without a graph break."""
    video = make_video(tiny, "2.1")
    expected = video.latents(video.pipe())
    for latents, graphs in run_on_ranks(2, compiled, video, MODES[mode]):
        assert (latents - expected).abs().max() <= TOLERANCE
        assert graphs == 1


def compiled(video: Video, settings: Settings) -> tuple[Tensor, int]:
    """On one rank: return the latents and the number of graphs."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    with parallelized_pipe(video.pipe(), **settings) as pipe:
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
