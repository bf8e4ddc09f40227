"""S2V against tensors that the official code produced (float32, CPU)."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.numerics.official import Networks, PipelineParts, distance, weights
from wan.media.audio import read_audio
from wan.media.images import convert_image_to_tensor
from wan.modules import audio_encoder
from wan.modules.interfaces import ModelComponents
from wan.modules.s2v import WanModel_S2V
from wan.pipeline.clips import generate_clips
from wan.settings.presets import PRESETS
from wan.tasks import speech2video
from wan.tasks.base import make_video_params
from wan.tasks.speech2video import compute_s2v_size

CASES = ("a_first", "b_next", "b_null", "b_dropped", "c_wide", "d_short_motion", "e_one_frame")


@pytest.fixture(scope="module")
def s2v(reference: Path) -> Path:
    return reference / "s2v"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def load_network(folder: Path, **components: Any) -> WanModel_S2V:
    config = read_json(folder, "dit_s2v")["constructor_arguments"]
    model = WanModel_S2V(**config, components=ModelComponents(**components))
    model.load_state_dict(weights(folder / "dit_s2v.weights.safetensors"), strict=True)
    return model


def load_inputs(folder: Path, case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the model arguments of a case and its tensors in the file."""
    cases = read_json(folder, "dit_s2v")["cases"]
    stored = load_file(folder / "dit_s2v.cases.safetensors")

    def get(name: str) -> Tensor:
        source_case = case
        while f"{source_case}.{name}" not in stored:
            source_case = cases[source_case]["inputs_from"]
        return stored[f"{source_case}.{name}"]

    listed_inputs = ("x", "context", "ref_latents", "motion_latents", "cond_states")
    arguments: dict[str, Any] = {name: [get(name)] for name in listed_inputs}
    arguments |= {"t": get("t"), "seq_len": 0, "audio_input": get("audio_input")}
    arguments["motion_frames"] = get("motion_frames").tolist()
    arguments["drop_motion_frames"] = bool(get("drop_motion_frames"))
    case_tensors = {
        k.removeprefix(f"{case}."): x for k, x in stored.items() if k.startswith(f"{case}.")
    }
    return arguments, case_tensors


@torch.no_grad()
def test_network(s2v: Path) -> None:
    """With and without caching of the features of the clip; two forwards each."""
    for case, is_cached in product(CASES, (False, True)):
        model, (arguments, stored) = (
            load_network(s2v, text_kv_cache=is_cached),
            load_inputs(s2v, case),
        )
        for _ in range(2):
            assert distance(model(**arguments)[0], stored["out"]) <= 2e-5, (case, is_cached)
        if not read_json(s2v, "dit_s2v")["cases"][case]["pose"]:
            arguments["cond_states"] = None
            assert distance(model(**arguments)[0], stored["out"]) <= 2e-5, (case, is_cached)


@pytest.mark.parametrize("name", ["s2v_tone16k", "s2v_tone44k"])
def test_audio_features(s2v: Path, name: str) -> None:
    """From the audio file to the features of each frame."""
    case = read_json(s2v, "s2v_audio")["wav_cases"][name]
    stored = load_file(s2v / "s2v_audio.cases.safetensors")
    audio = read_audio(s2v / case["file"])
    assert torch.equal(torch.from_numpy(audio.samples), stored[f"{name}.samples16k"].float())
    assert (audio.num_states, audio.num_features) == (case["hidden_frames"], case["frames30"])
    assert speech2video.count_clips(audio, case["infer_frames"]) == case["num_clips"]
    audio_encoder.check_audio_encoder(s2v / "wav2vec2_tiny", 32)
    features = audio_encoder.extract_audio_features(s2v / "wav2vec2_tiny", audio)
    actual = audio_encoder.sample_features_per_frame(
        features, case["num_clips"] * case["infer_frames"]
    )
    assert distance(actual, stored[f"{name}.audio_emb"]) <= 2e-5


def test_audio_features_per_frame(s2v: Path) -> None:
    stored = load_file(s2v / "s2v_audio.cases.safetensors")
    for name in ("p", "q_exact", "r", "s", "u_48"):
        case = read_json(s2v, "s2v_audio")["bucket_cases"][name]
        actual = audio_encoder.sample_features_per_frame(
            stored[f"bucket.{name}.z30"].transpose(1, 2), case["rows"]
        )
        assert torch.equal(actual[0].permute(2, 0, 1), stored[f"bucket.{name}.rows"]), name


def test_sizes(s2v: Path) -> None:
    for row in read_json(s2v, "s2v_size")["rows"]:
        image, (height, width) = tuple(row["image_wh"]), row["out_hw"]
        assert compute_s2v_size(image, row["max_area"]) == (width, height)
        white = Image.new("RGB", image, "white")
        resized = speech2video.fit_image_to_size(white, (width, height))
        assert resized.size == (width, height)
        assert (np.asarray(resized).min() == 0) == row["padded"], row


class _Networks(Networks):
    """The network of the run; records latents."""

    def __init__(self, folder: Path) -> None:
        self.model, self.calls = load_network(folder), list[Any]()

    @torch.no_grad()
    def __call__(
        self, x: list[Tensor], *args: Any, step: object, **call_kwargs: Any
    ) -> list[Tensor]:
        self.calls.append(x[0].clone())
        return self.model(x, *args, **call_kwargs)


class _Pipeline(PipelineParts):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "e2e_s2v.cases.safetensors", _Networks(folder))
        self.folder = folder

    def sample_audio_features(self, audio: Any, count: int) -> Tensor:
        return audio_encoder.sample_features_per_frame(
            audio_encoder.extract_audio_features(self.folder / "wav2vec2_tiny", audio), count
        )


def test_whole_run(s2v: Path) -> None:
    """Two clips of `WanS2V.generate`: inputs, intermediate results and frames."""
    case = read_json(s2v, "e2e_s2v")["runs"]["unipc"]
    stored = load_file(s2v / "e2e_s2v.cases.safetensors")
    image, audio = Image.open(s2v / case["image"]), read_audio(s2v / case["audio"])
    values = {
        "prompt": "",
        "infer_frames": case["infer_frames"],
        "num_clip": speech2video.count_clips(audio, case["infer_frames"]),
        "sample_steps": case["steps"],
        "sample_shift": case["shift"],
        "sample_guide_scale": (case["guide_scale"],) * 2,
        "base_seed": case["seed"],
        "max_area": case["max_area"],
    }
    request = make_video_params(PRESETS["s2v-14B"], values, image.size)
    assert request.video_size == tuple(reversed(case["size_hw"]))
    picture = convert_image_to_tensor(speech2video.fit_image_to_size(image, request.video_size))
    assert distance(picture.unsqueeze(1), stored["unipc.ref_pixels"]) <= 1e-6
    pipeline: Any = _Pipeline(s2v)
    assert distance(pipeline.encode_video(picture.unsqueeze(1)), stored["unipc.ref_latent"]) <= 1e-4
    video_clips = list(
        generate_clips(pipeline, request, speech2video.SpeechInputs(image=image, audio=audio))
    )
    calls, steps = pipeline.experts.calls, case["steps"]
    assert [clip.frames.shape[1] for clip in video_clips] == [
        clip_record["frames"] for clip_record in case["per_clip"]
    ]
    for index, clip in enumerate(video_clips):
        get = partial("unipc.clip{}.{}".format, index)
        assert distance(clip.latents, stored[get("latent_final")]) <= 1e-4
        assert distance(calls[2 * steps * index], stored[get("noise")]) == 0
    video = torch.cat([clip.frames for clip in video_clips], dim=1)
    assert video.shape[1] == case["video_frames"]
    frame_index = stored["unipc.video_frame_index"]
    assert distance(video[:, frame_index], stored["unipc.video_frames"]) <= 2e-4
    means = video.mean(dim=(0, 2, 3))
    assert distance(means, stored["unipc.video_frame_means"]) <= 2e-4
