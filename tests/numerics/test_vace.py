"""VACE's network, conditioning and whole runs against diffusers, with the same weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imageio
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from PIL import Image

import wan
from tests.conftest import slow
from tests.frames import read_frames
from tests.numerics.recorded import STEP, SampleRecorder, make_diffusers_call, make_prompt_embeds
from tests.numerics.test_diffusers import TOLERANCE, make_official_scheduler
from wan.checkpoint.names.keymaps import rename_dit_to_diffusers, rename_dit_to_official
from wan.modules.interfaces import ModelComponents
from wan.modules.vace import VaceWanModel

CONFIG = {"num_layers": 6, "text_dim": 48, "ffn_dim": 96}
TEXT_LEN, STEPS = 32, 5


def make_model_pair(layers: Sequence[int], heads: int, head_dim: int, **components: Any) -> Any:
    """Make `wan`'s and diffusers' network with the same random weights."""
    torch.manual_seed(0)
    wan_model = VaceWanModel(
        vace_layers=layers,
        dim=heads * head_dim,
        num_heads=heads,
        freq_dim=256,
        text_len=TEXT_LEN,
        **CONFIG,
        components=ModelComponents(**components),
    )
    diffusers_model = WanVACETransformer3DModel(
        num_attention_heads=heads, attention_head_dim=head_dim, vace_layers=list(layers), **CONFIG
    )
    state = {
        rename_dit_to_diffusers(name): tensor for name, tensor in wan_model.state_dict().items()
    }
    assert [rename_dit_to_official(name) for name in state] == [*wan_model.state_dict()]
    diffusers_model.load_state_dict(state, strict=True)
    return wan_model, diffusers_model


@pytest.mark.parametrize(
    ("layers", "scales"),
    [
        ([0], 1.0),
        ([0, 2, 4], [1.0, 0.5, 0.25]),
        ([4, 0, 2], [1.0, 0.5, 0.25]),  # hints are used in ascending order of layers
        slow([0, 5], 0.7),
        slow([0, 1, 2, 3, 4, 5], 1.0),
    ],
)
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 8), slow(40, 6), slow(2, 128)])
@torch.no_grad()
def test_network(layers: list[int], scales: Any, heads: int, head_dim: int) -> None:
    """The second forward uses the cached text keys and values."""
    wan_model, diffusers_model = make_model_pair(layers, heads, head_dim, text_kv_cache=True)
    x, control, context = torch.randn(16, 3, 10, 14), torch.randn(96, 3, 10, 14), torch.randn(7, 48)
    # Of this timestep diffusers' sinusoid, which is float32, is that of float64.
    t, factors = torch.tensor([1.0]), torch.ones(len(layers)) * torch.tensor(scales)
    expected = diffusers_model(
        hidden_states=x[None],
        timestep=t,
        encoder_hidden_states=F.pad(context, (0, 0, 0, TEXT_LEN - 7))[None],
        control_hidden_states=control[None],
        control_hidden_states_scale=factors,
        return_dict=False,
    )[0][0]
    for _ in range(2):
        actual = wan_model([x], t, [control], [context], 105, scales)[0]
        assert (actual - expected).abs().max() <= 2e-5
    uncontrolled = wan_model([x], t, [control], [context], 105, 0.0)[0]
    assert (uncontrolled - expected).abs().max() > 1e-2, "the control changes nothing"
    single_outputs = expected, wan_model([-x], t, [-control], [-context], 105, scales)[0]
    batch_outputs = wan_model([x, -x], t, [control, -control], [context, -context], 105, scales)
    for batch_output, single_output in zip(batch_outputs, single_outputs, strict=True):
        assert (batch_output - single_output).abs().max() <= 2e-5


@torch.no_grad()
def test_samples_of_different_sizes() -> None:
    """Each sample is computed separately; the step has its index."""
    samples = SampleRecorder()
    network, _ = make_model_pair([0, 3], 4, 8, attention=samples)
    pair = [
        (torch.randn(16, f, 4, 6), torch.randn(96, f, 4, 6), torch.randn(7, 48)) for f in (2, 1)
    ]
    t, (x, control, texts) = torch.tensor([1.0]), map(list, zip(*pair, strict=True))
    batch_outputs = network(x, t, control, texts, 12, [1.0, 0.5], step=STEP)
    assert samples.samples == [0] * 8 + [1] * 8
    for batch_output, (latents, sample_control, text) in zip(batch_outputs, pair, strict=True):
        single_output = network([latents], t, [sample_control], [text], 12, [1.0, 0.5], step=STEP)[
            0
        ]
        assert torch.equal(batch_output, single_output)


@torch.no_grad()
def test_one_hint_at_a_time() -> None:
    """A control block runs between two main blocks; its hint is freed before the next one."""
    network, _ = make_model_pair([0, 2, 4], 4, 8)
    order: list[str] = []
    hints: list[weakref.ref[torch.Tensor]] = []

    def record_block(name: str, output: tuple[torch.Tensor, ...]) -> None:
        order.append(name)
        assert not any(hint() is not None for hint in hints)
        if name.startswith("c"):
            hints.append(weakref.ref(output[1]))

    for kind, blocks in (("m", network.blocks), ("c", network.vace_blocks)):
        for index, block in enumerate(blocks):
            block.register_forward_hook(
                lambda _, __, output, name=f"{kind}{index}": record_block(name, output)
            )
    x, control, context = torch.randn(16, 2, 4, 6), torch.randn(96, 2, 4, 6), torch.randn(7, 48)
    network([x], torch.tensor([1.0]), [control], [context], 12)
    assert order == ["m0", "c0", "m1", "m2", "c1", "m3", "m4", "c2", "m5"]


@torch.no_grad()
def test_blocks_in_two_parts() -> None:
    """As with a step cache: the control stream continues where the first part ended."""
    x, control, context = torch.randn(16, 2, 4, 6), torch.randn(96, 2, 4, 6), torch.randn(7, 48)
    inputs = [x], torch.tensor([1.0]), [control], [context], 12
    plain_model, _ = make_model_pair([0, 2, 4], 4, 8)

    def run_in_two_parts(x_BLC: torch.Tensor, blocks: Any, *_: object) -> Any:
        x_BLC = yield from blocks(x_BLC, 0, 1)
        return (yield from blocks(x_BLC, 1, None))

    step_cache = SimpleNamespace(iterate=run_in_two_parts)
    split_model, _ = make_model_pair([0, 2, 4], 4, 8, step_cache=step_cache)
    assert torch.equal(split_model(*inputs)[0], plain_model(*inputs)[0])


def test_networks_and_calls_that_do_not_fit() -> None:
    config = {**CONFIG, "dim": 96, "num_heads": 12, "text_len": TEXT_LEN}
    for layers in ([1, 2], [0, 6]):
        with pytest.raises(ValueError, match="must begin with 0 and stay below the 6 layers"):
            VaceWanModel(vace_layers=layers, **config)
    model = VaceWanModel(**config)
    assert [*model.injected] == [0, 2, 4]
    x, context, t = torch.zeros(16, 1, 4, 4), torch.zeros(3, 48), torch.tensor([1.0])
    with pytest.raises(ValueError, match="vace_context of shape"):
        model([x], t, [torch.zeros(96, 2, 4, 4)], [context], 4)
    with pytest.raises(ValueError, match="has 2 numbers; give one, or one for each of the 3"):
        model([x], t, [torch.zeros(96, 1, 4, 4)], [context], 4, [1.0, 1.0])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A video of 9 frames and 64 x 48 pixels, a moving gray mask, and two images."""
    folder, random = tmp_path_factory.mktemp("vace"), np.random.default_rng(0)
    rows, columns = np.mgrid[:48, :64]
    frames, masks = [], []
    for index in range(9):
        waves = [np.sin((columns + 3 * index) / (4 + c)) + np.cos(rows / (5 + c)) for c in range(3)]
        frames.append((np.stack(waves, axis=-1) * 60 + 128).astype(np.uint8))
        inside = (abs(columns - 10 - 4 * index) < 12) & (abs(rows - 24) < 13)
        grey = np.where(rows < 8, 100, 0) + np.where(inside, np.where(rows > 28, 155, 255), 0)
        masks.append(np.repeat(grey.clip(0, 255).astype(np.uint8)[..., None], 3, axis=-1))
    for name, clip_frames in (("video", frames), ("mask", masks)):
        imageio.mimwrite(folder / f"{name}.mp4", clip_frames, fps=16, macro_block_size=8)
    # Sides are multiples of 8, because diffusers resizes other images first.
    for name, size in (("wide", (72, 32)), ("high", (40, 88))):
        pixels = random.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return {path.stem: path for path in folder.iterdir()}


SUBSETS = {
    "video": {"src_video": ["video"]},
    "all": {"src_video": ["video"], "src_mask": ["mask"], "src_ref_images": ["wide", "high"]},
    "video and picture": {"src_video": ["video"], "src_ref_images": ["high"]},
}


@pytest.mark.parametrize(
    ("task", "subset"),
    [
        ("vace-1.3B", "all"),
        slow("vace-14B", "video and picture"),
        slow("vace-A14B", "video"),
    ],
)
def test_whole_run(tiny: Any, given: dict[str, Path], task: str, subset: str) -> None:
    """Latents of a complete run with experts, guidance, control and solver."""
    actual, call = make_wan_latents(tiny, given, task, SUBSETS[subset])
    references = len(SUBSETS[subset].get("src_ref_images", ()))
    assert actual.shape == (16, 3, 6, 8)
    assert (actual - make_diffusers_latents(*call)[:, references:]).abs().max() <= TOLERANCE


def make_wan_latents(
    tiny: Any, media_paths: dict[str, Path], task: str, files: dict[str, list[str]]
) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Return `wan`'s latents and the arguments of `make_diffusers_latents` for the same run."""
    has_two_experts = task.endswith("A14B")
    paths = {name: [str(media_paths[item]) for item in names] for name, names in files.items()}
    latents = wan.WanVace(task, tiny(task)).generate(
        "",
        **{name: item if name == "src_ref_images" else item[0] for name, item in paths.items()},
        size=(64, 48),
        frame_num=9,
        context_scale=[0.9, 0.6],
        sampling_steps=STEPS,
        shift=5.0,
        guide_scale=(3.0, 4.0) if has_two_experts else 5.0,
        seed=3,
        **make_prompt_embeds(),
        output_type="latent",
    )
    return latents, (tiny(task, "diffusers"), paths, has_two_experts)


def make_diffusers_latents(
    folder: Path,
    paths: dict[str, list[str]],
    has_two_experts: bool,
) -> torch.Tensor:
    pipe = WanVACEPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.scheduler = make_official_scheduler("unipc", 5.0)
    references = paths.get("src_ref_images", [])
    shape = (1, 16, 3 + len(references), 6, 8)

    def read_images(name: str) -> list[Image.Image] | None:
        frames = [read_frames(Path(path)) for path in paths.get(name, ())]
        return [*map(Image.fromarray, frames[0])] if frames else None

    return pipe(
        video=read_images("src_video"),
        mask=read_images("src_mask"),
        # diffusers puts the last one first, unlike the official code
        reference_images=[Image.open(image_path) for image_path in references[::-1]] or None,
        conditioning_scale=[0.9, 0.6],
        **make_diffusers_call(has_two_experts),
        width=64,
        height=48,
        num_inference_steps=STEPS,
        latents=torch.randn(shape, generator=torch.Generator().manual_seed(3)),
    ).frames[0]
