"""The official module paths, names and signatures compute what the official code computes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import wave
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import Tiny
from tests.numerics.official import CPU, distance, weights
from wan.modules import (
    HuggingfaceTokenizer,
    T5EncoderModel,
    Wan2_1_VAE,
    Wan2_2_VAE,
    WanModel,
    flash_attention,
)
from wan.modules.attention import attention
from wan.modules.model import rope_apply, rope_params, sinusoidal_embedding_1d
from wan.utils import fm_solvers
from wan.utils.fm_solvers_unipc import FlowUniPCMultistepScheduler
from wan.utils.utils import best_output_size, masks_like, merge_video_audio, save_image, str2bool

REFUSED = {
    "wan.modules.animate.preprocess": "preprocess_data.py",
    "wan.modules.s2v.audio_encoder": "WanS2V",
}
PAGE = Path(__file__).parents[2] / "docs" / "official_names.md"


def test_each_name_of_the_page_is_there() -> None:
    """A row of its table names a module and, with their arguments, what can be imported from it."""
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line[:6] == "| `wan"]
    assert len(rows) >= 20
    for module, names in rows:
        for name in names.replace("`", "").split(", "):
            assert hasattr(import_module(module.strip().strip("`")), name.strip()), (module, name)
    for module, remedy in REFUSED.items():
        with pytest.raises(ImportError, match=remedy):
            import_module(module)


@pytest.mark.parametrize(("name", "vae_class"), [("vae21", Wan2_1_VAE), ("vae22", Wan2_2_VAE)])
def test_autoencoders(reference: Path, tmp_path: Path, name: str, vae_class: type) -> None:
    save_file(weights(reference / f"{name}.weights.safetensors"), tmp_path / "vae.safetensors")
    vae = vae_class(vae_pth=str(tmp_path / "vae.safetensors"), device="cpu")
    cases = load_file(reference / f"{name}.cases.safetensors")
    latents = vae.encode([cases[f"{case}.video"] for case in ("c0", "c1")])
    videos = vae.decode([cases[f"{case}.latent"] for case in ("c0", "c1")])
    for case, latent, video in zip(("c0", "c1"), latents, videos, strict=True):
        assert distance(latent, cases[f"{case}.latent"]) <= 2e-5
        assert distance(video, cases[f"{case}.decoded"]) <= 2e-5
    assert vae.model.z_dim == len(vae.mean) == len(cases["mean"])
    assert distance(vae.mean, cases["mean"]) == 0
    assert distance(vae.scale[1] * cases["std"], torch.ones(vae.model.z_dim)) <= 1e-6
    other = {Wan2_1_VAE: Wan2_2_VAE, Wan2_2_VAE: Wan2_1_VAE}[vae_class]
    with pytest.raises(ValueError, match="latent channels"):
        other(vae_pth=tmp_path / "vae.safetensors", device="cpu")


def test_text_encoder_and_tokenizer(reference: Path, tiny: Tiny, tmp_path: Path) -> None:
    """The tokenizer of transformers, and transformers' encoder with the official weights."""
    from transformers import AutoTokenizer

    folder = tiny("t2v-1.3B") / "google/umt5-xxl"
    texts = ["A red  fox,\nin the &amp; snow", "word " * 200]
    expected = AutoTokenizer.from_pretrained(folder)(
        ["A red fox, in the & snow", ("word " * 200).strip()],
        padding="max_length", truncation=True, max_length=48, return_tensors="pt",
    )  # fmt: skip
    ids, mask = HuggingfaceTokenizer(folder, 48, "whitespace")(texts, return_mask=True)
    assert torch.equal(ids, expected.input_ids) and torch.equal(mask, expected.attention_mask)
    lower = HuggingfaceTokenizer(folder, 48, "canonicalize")("A_red, FOX!")
    assert torch.equal(lower, HuggingfaceTokenizer(folder, 48)("a red fox"))

    path = tmp_path / "t5.safetensors"
    save_file(weights(reference / "t5.weights.safetensors"), path)
    encoder = T5EncoderModel(48, torch.float32, CPU, path, folder)
    cases = load_file(reference / "t5.cases.safetensors")
    with torch.no_grad():
        states = encoder.model(cases["ids"], cases["mask"])
    for row, valid in enumerate((23, 150)):
        assert distance(states[row, :valid], cases["out"][row, :valid]) <= 2e-5
    path = tiny("t2v-1.3B") / "models_t5_umt5-xxl-enc-bf16.pth"  # with the vocabulary of the texts
    encoder = T5EncoderModel(48, torch.float32, "cpu", path, folder)
    with torch.no_grad():
        expected_states = encoder.model(ids, mask)  # padded, as the official class does
    for row, encoded in enumerate(encoder(texts, CPU)):
        valid = int(mask[row].sum())
        assert distance(encoded, expected_states[row, :valid]) <= 2e-5


def test_rope_and_sinusoid(reference: Path) -> None:
    cases = load_file(reference / "rope.safetensors")
    for dim in (128, 24, 16, 12, 8):
        parts = (dim - 4 * (dim // 6), 2 * (dim // 6), 2 * (dim // 6))
        freqs = torch.cat([rope_params(1024, part) for part in parts], dim=1)
        for pad in ("", "_pad"):
            rotated = rope_apply(cases[f"d{dim}.x{pad}"], torch.tensor([[3, 5, 7]]), freqs)
            assert distance(rotated, cases[f"d{dim}.out{pad}"]) <= 5e-6, (dim, pad)
    cases = load_file(reference / "time_embedding.safetensors")
    embedding = sinusoidal_embedding_1d(256, cases["t"])
    assert embedding.dtype == torch.float64 and distance(embedding, cases["emb_f64"]) <= 1e-12


def test_attention() -> None:
    """In float64 by a plain loop over samples, heads and queries."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    q_lens, k_lens = torch.tensor([7, 5]), torch.tensor([9, 6])
    attend = partial(flash_attention, q, k, v, dtype=torch.float32)
    for causal, window, scale in (
        (False, (-1, -1), None),
        (True, (-1, -1), 0.5),
        (False, (2, 1), None),
    ):
        actual = attend(q_lens, k_lens, softmax_scale=scale, causal=causal, window_size=window)
        expected = torch.zeros_like(q, dtype=torch.float64)
        for b, head in np.ndindex(2, 4):
            num_q, num_k = int(q_lens[b]), int(k_lens[b])
            for row in range(num_q):
                last = row + num_k - num_q
                left, right = window if not causal else (-1, 0)
                first = 0 if left < 0 else max(0, last - left)
                keys = slice(first, num_k if right < 0 else min(num_k, last + right + 1))
                products = k[b, keys, head // 2].double() @ q[b, row, head].double()
                probabilities = (products * (scale or 8**-0.5)).softmax(0)
                expected[b, row, head] = probabilities @ v[b, keys, head // 2].double()
        assert distance(actual, expected) <= 1e-6, (causal, window)
    half = flash_attention(q, k, v)  # computed in bfloat16, as officially
    assert torch.equal(attention(q, k, v, fa_version=2), half)
    keys, values = (x.bfloat16().transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
    exact = F.scaled_dot_product_attention(q.bfloat16().transpose(1, 2), keys, values)
    assert half.dtype == torch.float32 and distance(half, exact.transpose(1, 2).float()) <= 2e-2
    with pytest.raises(NotImplementedError, match="training"):
        flash_attention(q, k, v, dropout_p=0.1)


def test_solvers(reference: Path) -> None:
    """Sigmas, timesteps and trajectories, called as the official pipelines call them."""
    cases = load_file(reference / "schedulers.safetensors")
    for steps, shift in ((4, 5), (20, 12), (40, 5)):
        unipc = FlowUniPCMultistepScheduler(shift=1, use_dynamic_shifting=False)
        unipc.set_timesteps(steps, device=CPU, shift=shift)
        dpm = fm_solvers.FlowDPMSolverMultistepScheduler(shift=1, use_dynamic_shifting=False)
        sigmas = fm_solvers.get_sampling_sigmas(steps, shift)
        timesteps, count = fm_solvers.retrieve_timesteps(dpm, device=CPU, sigmas=sigmas)
        assert count == steps and torch.equal(timesteps, dpm.timesteps)
        for solver, scheduler in (("unipc", unipc), ("dpmpp", dpm)):
            run = f"s{steps}_shift{shift}"
            assert torch.equal(scheduler.sigmas, cases[f"{run}.{solver}.sigmas"])
            assert torch.equal(scheduler.timesteps, cases[f"{run}.{solver}.timesteps"])
            trajectory = [cases[f"{run}.noise"]]
            for t, velocity in zip(scheduler.timesteps, cases[f"{run}.model_outputs"], strict=True):
                arguments = velocity, t, trajectory[-1]
                step = scheduler.step(*arguments, return_dict=False, generator=torch.Generator())
                trajectory.append(step[0])
            expected = cases[f"{run}.{solver}.trajectory"]
            assert distance(torch.stack(trajectory), expected) <= 2e-5, (run, solver)
    with pytest.raises(ValueError, match="takes no timesteps"):
        fm_solvers.retrieve_timesteps(unipc, timesteps=[999, 500])
    unipc.set_timesteps(100, shift=12)  # the first two timesteps are equal
    x = torch.zeros(1, 2)
    for t in unipc.timesteps:
        x = unipc.step(torch.ones(1, 2), t, x).prev_sample
    assert distance(x, torch.full((1, 2), -unipc.sigmas[0].item())) <= 1e-5  # the exact integral


def test_helpers(reference: Path, tmp_path: Path) -> None:
    for row in json.loads((reference / "preprocess.json").read_text())["ti2v_best_output_size"]:
        assert list(best_output_size(*row["image_wh"], 32, 32, row["max_area"])) == row["out_wh"]
    latents = [torch.randn(2, 3, 4, 4), torch.randn(2, 1, 4, 4)]
    for zero in (False, True):
        for mask, latent in zip(masks_like(latents, zero)[1], latents, strict=True):
            assert mask.shape == latent.shape
            assert mask.sum() == latent.numel() - (latent[:, 0].numel() if zero else 0)
            assert bool(mask[:, 0].any()) is not zero
    assert str2bool("Yes") is True and str2bool("0") is False
    with pytest.raises(argparse.ArgumentTypeError):
        str2bool("maybe")
    gray = torch.tensor([-2.0, -1.0, 0.0, 1.0]).expand(1, 3, 2, 4)
    save_image(gray, tmp_path / "gray.png")
    pixels = np.asarray(Image.open(tmp_path / "gray.png"))
    assert pixels.tolist() == [[[value] * 3 for value in (0, 0, 128, 255)]] * 2


def test_files_of_videos(tmp_path: Path) -> None:
    """Gray frames, because the official format stores less color; then with a sound."""
    import imageio.v3 as iio

    from wan.media.audio import has_audio
    from wan.utils.utils import save_video

    levels = torch.tensor([-3.0, -1.0, -0.2, 0.4, 1.0, 2.0])
    expected = [0, 0, 102, 178, 255, 255]  # truncated
    video = levels.view(1, 1, -1, 1, 1).expand(1, 3, -1, 16, 24)
    for name, values, limits in (("a", video, (-1, 1)), ("b", video * 2 + 1, (-1, 3))):
        path = tmp_path / f"{name}.mp4"
        save_video(values, save_file=path, fps=16, nrow=1, normalize=True, value_range=limits)
        frames = iio.imread(path).astype(int)
        assert frames.shape == (6, 16, 24, 3)
        assert np.abs(frames.mean(axis=(1, 2, 3)) - expected).max() <= 1.5, frames[:, 0, 0]
    with wave.open(str(tmp_path / "tone.wav"), "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(np.arange(16_000, dtype=np.int16).tobytes())
    merge_video_audio(str(tmp_path / "a.mp4"), str(tmp_path / "tone.wav"))
    assert has_audio(tmp_path / "a.mp4") and len(iio.imread(tmp_path / "a.mp4")) == 6
    with pytest.raises(NotImplementedError, match="one by one"):
        save_video(video.expand(2, -1, -1, -1, -1), save_file=tmp_path / "c.mp4")


def test_pretrained_networks(reference: Path, tmp_path: Path) -> None:
    """Of the official config.json, and of one that is written here."""
    config = json.loads((reference / "dit_t2v_h12.json").read_text())["config"]
    state = weights(reference / "dit_t2v_h12.weights.safetensors")
    official, written = tmp_path / "expert" / "high_noise_model", tmp_path / "written"
    official.mkdir(parents=True)
    (official / "config.json").write_text(json.dumps({"_class_name": "WanModel", **config}))
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    save_file(state, official / "diffusion_pytorch_model.safetensors")
    model = WanModel.from_pretrained(tmp_path / "expert", subfolder="high_noise_model")
    model.save_pretrained(written)
    cases = load_file(reference / "dit_t2v_h12.cases.safetensors")
    arguments = [cases["a.x"]], cases["a.t"], [cases["a.context"]], int(cases["a.seq_len"])
    for network in (model, WanModel.from_pretrained(written)):
        assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
        with torch.no_grad():
            assert distance(network(*arguments)[0], cases["a.out"]) <= 2e-5
            network.head.modulation.add_(1)  # its memory may be written
    assert model.training is False
    half = WanModel.from_pretrained(written, torch_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="hf download"):
        WanModel.from_pretrained("Wan-AI/Wan2.2-T2V-A14B")


def test_packages_are_imported_with_wan() -> None:
    script = "import wan; wan.configs.WAN_CONFIGS, wan.modules.WanModel, wan.distributed"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_configurations() -> None:
    from wan.configs import WAN_CONFIGS, wan_i2v_A14B, wan_t2v_A14B
    from wan.configs.shared_config import wan_shared_cfg

    assert wan_t2v_A14B.t2v_A14B is WAN_CONFIGS["t2v-A14B"]
    assert (wan_t2v_A14B.t2v_A14B.boundary, wan_i2v_A14B.i2v_A14B.boundary) == (0.875, 0.9)
    assert wan_shared_cfg.num_train_timesteps == 1000 and wan_shared_cfg.text_len == 512


def test_a_prompt_expander_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from wan.utils.prompt_extend import DashScopePromptExpander

    monkeypatch.delenv("DASH_API_KEY", raising=False)
    expander = DashScopePromptExpander(model_name="qwen-plus", task="t2v-A14B", is_vl=False)
    output = expander("a fox", tar_lang="en", seed=3)
    assert (output.status, output.prompt, output.seed) == (False, "a fox", 3)
    assert "DASH_API_KEY" in output.message
