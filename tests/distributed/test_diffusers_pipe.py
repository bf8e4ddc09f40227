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
from PIL import Image
from torch import Tensor

import wan
from tests.conftest import slow
from tests.diffusers_runs import FORMS, TOLERANCE, Settings, Video, make_video, parallelized_pipe
from tests.dist import REPO, TORCHRUN, run_on_ranks
from tests.distributed.topology import Collectives
from tests.numerics.recorded import make_prompt_embeds
from tests.numerics.test_diffusers import make_diffusers_latents
from tests.refusals import check_refusals
from wan.configs import WAN_CONFIGS
from wan.diffusers import deparallelize, parallelize_transformer
from wan.settings import attention_modes
from wan.settings.errors import InputError

pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("pairs")]

MODES: dict[str, Settings] = {
    **{str(mode): {"comm_type": mode} if mode else {} for mode in attention_modes.MODES},
    "overlap": {"fa_alltoall_overlap": True},
}
MODE_FLAGS = {name for mode in MODES.values() for name in mode}


def run_with_settings(video: Video, settings: Sequence[Settings]) -> list[Tensor]:
    """On one rank: make the latents with each of the settings in turn."""
    torch.set_num_threads(1)
    pipe, results = video.pipe(), []
    for parallel_settings in settings:
        with parallelized_pipe(pipe, **parallel_settings):
            results.append(video.latents(pipe))
    return results


TWO_RANK_SETTINGS: dict[str, list[Settings]] = {  # of two ranks
    "2.2": [{**mode, "ulysses_size": 2} for mode in MODES.values()],
    "2.1 image": [{"comm_type": 1}],
    "5B image": [{"cfg_size": 2}, {"ulysses_size": 2}],
    "2.2 control": [{"ulysses_size": 2, "comm_type": 1}, {"cfg_size": 2}],
}


def check_latents(
    expected: Tensor, settings: Sequence[Settings], answers: list[list[Tensor]]
) -> None:
    """Compare with the unmodified pipeline, and each mode with mode 0 of the same layout."""
    for rank_latents in answers:
        for parallel_settings, latents in zip(settings, rank_latents, strict=True):
            assert (latents - expected).abs().max() <= TOLERANCE, parallel_settings
            layout = {
                name: size for name, size in parallel_settings.items() if name not in MODE_FLAGS
            }
            if parallel_settings == layout or layout not in settings:
                continue
            baseline = rank_latents[settings.index(layout)]
            # One attention differs by 1e-6; blocks, guidance and three steps make this larger.
            mode = attention_modes.MODES[parallel_settings.get("comm_type", 0)]
            limit = 2e-5 if mode.blocks > 1 else 0
            assert (latents - baseline).abs().max() <= limit, parallel_settings


@pytest.mark.parametrize(
    "form", [form if form in ("2.2", "5B image") else slow(form) for form in TWO_RANK_SETTINGS]
)
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_share_a_video(tiny: Any, form: str) -> None:
    video = make_video(tiny, form, steps=2, frames=5 if "control" in form else 9)
    expected = video.latents(video.pipe())
    check_latents(
        expected,
        TWO_RANK_SETTINGS[form],
        run_on_ranks(2, run_with_settings, video, TWO_RANK_SETTINGS[form]),
    )


def test_a_batch_with_timesteps_of_its_own(tiny: Any) -> None:
    """Both guidance branches in one call of a network, with a timestep for each of 105 tokens."""
    assert max(run_on_ranks(2, compare_batched, make_video(tiny, "2.1"))) <= TOLERANCE


@torch.no_grad()
def compare_batched(video: Video) -> float:
    """On one rank: return the largest difference from the unmodified network."""
    torch.set_num_threads(1)
    network, generator = video.pipe().transformer, torch.Generator().manual_seed(0)
    x, text = (torch.randn(s, generator=generator) for s in ((2, 16, 3, 10, 14), (2, 512, 64)))
    timestep = torch.randint(0, 1000, (2, 105), generator=generator)
    expected = network(x, timestep, text).sample
    actual = parallelize_transformer(network, comm_type=2)(x, timestep, text).sample
    deparallelize(network)
    return (actual - expected).abs().max().item()


FOUR_RANK_LAYOUTS: list[Settings] = [
    {"cfg_size": 2, "ulysses_size": 2},
    {"ulysses_size": 4},
    {"ring_size": 4},
    {"ring_size": 2, "ulysses_size": 2},
    {"ring_size": 2, "ulysses_size": 2, "ring_type": "bidirectional"},
]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("one_thread")
def test_four_ranks_share_a_video(tiny: Any, form: str) -> None:
    """Every mode in every layout, with a batch of two once; diffusers' control takes one video."""
    video = make_video(tiny, form)
    settings = [
        {**layout, **mode}
        for layout in FOUR_RANK_LAYOUTS
        for mode in MODES.values()
        if not mode or "ulysses_size" in layout
    ]
    videos = [(video, settings)]
    videos += [] if video.has_control else [(replace(video, count=2), settings[:1])]
    for one, ways in videos:
        expected = one.latents(one.pipe())
        check_latents(expected, ways, run_on_ranks(4, run_with_settings, one, ways, timeout=600))


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("FP8", {}),
        ("RainFusion", {}),
        slow("FP8", {"comm_type": 1, "quant_alltoall": True}),
        slow("RainFusion", {"ring_size": 2}),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_methods_compute_the_same_as_in_the_wan_model(
    tiny: Any, method: str, layout: Settings
) -> None:
    """diffusers on one or two ranks against `wan` in one process; dense attention differs more."""
    settings, limit = METHODS[method]
    expected = wan.WanT2V(WAN_CONFIGS["t2v-1.3B"], tiny("t2v-1.3B"), **settings).generate(
        "",
        size=(224, 160),
        frame_num=9,
        sampling_steps=2,
        shift=5.0,
        guide_scale=5.0,
        seed=3,
        **make_prompt_embeds(),
        output_type="latent",
    )
    call = (tiny("t2v-1.3B", "diffusers"), [], "unipc", False, 2)
    dense = make_diffusers_latents(*call, size=(224, 160))
    assert (dense - expected).square().mean().sqrt() > 5 * limit
    all_settings = {**settings, **layout}
    for latents in (
        run_on_ranks(2, run_many_tokens, all_settings, *call)
        if layout
        else [run_many_tokens(all_settings, *call)]
    ):
        assert (latents - expected).square().mean().sqrt() <= limit


METHODS: dict[str, tuple[Settings, float]] = {
    # Projections that differ by 1e-5 round to another FP8 value here and there.
    "FP8": ({"fa_quant": "fp8"}, 2e-3),
    "RainFusion": ({"use_rainfusion": True, "sparse_start_step": 0, "sparsity": 0.5}, TOLERANCE),
}


def run_many_tokens(settings: Settings, *call: Any) -> Tensor:
    """On one rank: make latents of 420 tokens, which are several blocks."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def prepare(pipe: Any) -> None:
            stack.enter_context(parallelized_pipe(pipe, **settings))

        return make_diffusers_latents(*call, prepare=prepare, size=(224, 160))


def count_exchanges(video: Video, all_settings: Sequence[Settings]) -> list[dict[str, int]]:
    """On one rank: count the collectives of a step with each of the settings."""
    torch.set_num_threads(1)
    pipe, counts = video.pipe(), []
    for settings in all_settings:
        with parallelized_pipe(pipe, **settings), Collectives() as collectives:
            video.latents(pipe)
        counts.append(collectives.counts)
    return counts


def test_only_self_attention_exchanges(tiny: Any) -> None:
    """Of two blocks in two branches: the all-to-alls of each chunk, then the velocities."""
    video, settings = make_video(tiny, "2.1", steps=1), [{"comm_type": 1}, {"exchange": "split"}]
    for counts in run_on_ranks(2, count_exchanges, video, settings):
        assert [x["alltoall_base_"] for x in counts] == [2 * 2 * 6 * 2, 2 * 2 * 4]
        assert [x["_allgather_base_"] for x in counts] == [2, 2], "one for each branch"


def test_refused_by_all_ranks_together(tiny: Any) -> None:
    """Guidance without the second call that cfg_size 2 needs; other noise, text and images."""
    first, second = run_on_ranks(
        2,
        collect_refusals,
        make_video(tiny, "2.1", steps=2, frames=5),
        make_video(tiny, "2.2 image"),
        timeout=60,
    )
    check_refusals("ranks: calls of diffusers' pipelines", first)
    assert first == second


def collect_refusals(video: Video, image_video: Video) -> dict[str, str]:
    """On one rank: collect the refusals. After a refusal the next video can be made."""
    torch.set_num_threads(1)
    rank, messages = torch.distributed.get_rank(), {}

    def expect_refusal(name: str, refused_video: Video, pipe: Any, **call_kwargs: Any) -> None:
        with pytest.raises(InputError) as error:
            refused_video.latents(pipe, **call_kwargs)
        messages[name] = str(error.value)

    def end(pipe: Any, step: int, *_: object) -> dict[str, Any]:
        pipe._guidance_scale = 1.0  # as SDCFGCutoffCallback of diffusers
        return {}

    other = torch.Generator().manual_seed(rank)
    text = torch.randn(1, 512, 64, generator=other)
    with parallelized_pipe(video.pipe(), cfg_size=2) as pipe:
        expect_refusal("no guidance", replace(video, guidance=1.0), pipe)
        expect_refusal("guidance ends", video, pipe, callback_on_step_end=end)
        expect_refusal("other noise", video, pipe, generator=other)
        expect_refusal("other text", video, pipe, prompt_embeds=text)
        default_scheduler, noise = pipe.scheduler, {"algorithm_type": "sde-dpmsolver++"}
        pipe.scheduler = DPMSolverMultistepScheduler.from_config(default_scheduler.config, **noise)
        torch.manual_seed(7)
        assert video.latents(pipe).isfinite().all()
        torch.manual_seed(rank)
        expect_refusal("noise between steps", replace(video, steps=2), pipe)
        pipe.scheduler = default_scheduler
        assert video.latents(pipe).isfinite().all()
    with parallelized_pipe(image_video.pipe()) as pipe:
        colour = ("red", "blue")[rank]
        expect_refusal("other image", image_video, pipe, image=Image.new("RGB", (112, 80), colour))
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("mode", map(str, attention_modes.MODES))
@pytest.mark.usefixtures("one_thread")
def test_compiled_blocks_have_one_graph(tiny: Any, mode: str) -> None:
    """One graph for all blocks and steps, without a graph break."""
    video = make_video(tiny, "2.1")
    expected = video.latents(video.pipe())
    for latents, graphs in run_on_ranks(2, run_compiled, video, MODES[mode]):
        assert (latents - expected).abs().max() <= TOLERANCE
        assert graphs == 1


def run_compiled(video: Video, settings: Settings) -> tuple[Tensor, int]:
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
    ("name", "ranks", "video_name"),
    [("t2v", 1, "fox"), ("t2v", 2, "fox"), ("t2v", 3, "fox"), ("i2v", 2, "life")],
)
def test_examples(tmp_path: Path, name: str, ranks: int, video_name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", str(REPO / "examples" / f"diffusers_{name}.py")]
    environment = {**os.environ, **TORCHRUN}
    process = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert (tmp_path / f"{video_name}.mp4").stat().st_size > 1000
