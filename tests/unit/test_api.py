"""The official Python classes: names, keywords, results."""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import wan
from tests.conftest import slow
from tools.quantize_dit import quantize
from wan.configs import MAX_AREA_CONFIGS, SIZE_CONFIGS, SUPPORTED_SIZES, WAN_CONFIGS
from wan.settings.errors import InputError
from wan.settings.flags import FLAGS

QUICK = {"frame_num": 5, "sampling_steps": 2, "seed": 7}


def keywords(function) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]


def test_official_keywords_in_official_order() -> None:
    common = "frame_num shift sample_solver sampling_steps guide_scale n_prompt seed offload_model"
    expected = {
        wan.WanT2V: f"input_prompt size {common}",
        wan.WanI2V: f"input_prompt img max_area {common}",
        wan.WanTI2V: f"input_prompt img size max_area {common}",
    }
    for kind, names in expected.items():
        assert keywords(kind.generate) == names.split()
        assert keywords(kind.__init__)[:2] == ["config", "checkpoint_dir"]
        for name in ("device_id", "rank", "t5_fsdp", "dit_fsdp", "use_sp", "t5_cpu"):
            assert name in keywords(kind.__init__)


def test_configs() -> None:
    t2v = WAN_CONFIGS["t2v-A14B"]
    assert (t2v.sample_shift, t2v.boundary, t2v.sample_guide_scale) == (12.0, 0.875, (3.0, 4.0))
    assert (t2v.high_noise_checkpoint, t2v.t5_dtype) == ("high_noise_model", torch.bfloat16)
    assert WAN_CONFIGS["ti2v-5B"].sample_guide_scale == 5.0
    assert SIZE_CONFIGS["832*480"] == (832, 480) and MAX_AREA_CONFIGS["832*480"] == 399360
    assert SUPPORTED_SIZES["ti2v-5B"] == ("704*1280", "1280*704")
    t2v.sample_neg_prompt, before = "changed", t2v.sample_neg_prompt
    assert WAN_CONFIGS["t2v-A14B"].sample_neg_prompt == "changed"
    t2v.sample_neg_prompt = before


def test_text_to_video(tiny) -> None:
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], str(tiny("t2v-A14B")))
    video = model.generate("a cat", size=(64, 32), guide_scale=4, **QUICK)
    assert video.shape == (3, 5, 32, 64) and video.dtype == torch.float32
    assert video.min() >= -1 and video.max() <= 1
    again = model.generate(
        "a cat", size=(64, 32), guide_scale=(4.0, 4.0), offload_model=False, **QUICK
    )
    assert torch.equal(video, again)


def test_latents_decode_to_the_video(tiny) -> None:
    model = wan.WanTI2V(WAN_CONFIGS["ti2v-5B"], tiny("ti2v-5B"))
    video = model.generate("a cat", size=(64, 32), **QUICK)
    latents = model.generate("a cat", size=(64, 32), output_type="latent", **QUICK)
    assert latents.shape == (48, 2, 2, 4)
    assert torch.equal(model._pipeline.decode(latents), video)


@pytest.mark.parametrize("grouped", [slow(False), True])
def test_many_videos(grouped: bool, tiny) -> None:
    model = wan.WanT2V("t2v-A14B", tiny("t2v-A14B"))
    args = {"size": (64, 32), **QUICK}
    calls = ["a cat", {"input_prompt": "a dog", "seed": 8}, {"input_prompt": "a", "frame_num": 1}]
    found = list(model.generate_many(calls, group_by_expert=grouped, **args))
    single = [{"input_prompt": "a cat"}, *calls[1:]]
    for video, call in zip(found, single, strict=True):
        assert torch.equal(video, model.generate(**{**args, **call}))


@pytest.mark.parametrize(
    ("calls", "more", "sentence"),
    [
        (["a", {"input_prompt": "b", "frame_num": 8}], {}, "frame_num=8"),
        ([{"input_prompt": "b", "offload_model": False}], {}, "offload_model holds for all calls"),
        (["a"], {"group_by_expert": True, "offload_model": False}, "group_by_expert has no effect"),
        (["a"], {"group_by_expert": "perhaps"}, "group_by_expert=perhaps"),
        ("ab", {}, "calls ab is no list of calls"),
        ({"input_prompt": "a"}, {}, "is no list of calls"),
        (None, {}, "calls None is no list of calls; give a list"),
        ([3], {}, "A call is 3"),
        ([{}], {}, "missing a required argument: 'input_prompt'"),
    ],
)
def test_many_videos_are_checked_first(calls, more, sentence: str, tiny) -> None:
    model = wan.WanT2V("t2v-A14B", tiny("t2v-A14B"))
    with pytest.raises(InputError, match=sentence):
        model.generate_many(calls, **more)


def test_an_image_is_needed_in_each_call(tiny) -> None:
    model = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))
    with pytest.raises(InputError, match="WanI2V starts from an image; give one as img"):
        model.generate_many([{"input_prompt": "a", "img": None}])


@pytest.mark.parametrize("grouped", [False, slow(True)])
def test_many_videos_may_be_left_and_others_made_between(grouped: bool, tiny) -> None:
    """Also others of another offload_model; nothing stays in memory."""
    model = wan.WanT2V("t2v-A14B", tiny("t2v-A14B"))
    args = {"size": (64, 32), **QUICK}
    expected = [model.generate(text, **args) for text in ("one", "two")]
    videos = model.generate_many(["one", "two", "three"], group_by_expert=grouped, **args)
    assert torch.equal(next(videos), expected[0])
    for offload in ("block", False):
        assert torch.equal(model.generate("two", offload_model=offload, **args), expected[1])
    assert torch.equal(next(videos), expected[1])
    made = weakref.ref(model._pipeline.experts.get("high_noise"))
    videos.close()
    assert made() is None and not model._pipeline.kept


def test_embeddings_replace_prompts(tiny) -> None:
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"))
    encoder = model._pipeline.text.get()
    embeds = {"prompt_embeds": encoder("a cat"), "negative_prompt_embeds": encoder("a dog")}
    args = {"size": (64, 32), "output_type": "latent", **QUICK}
    assert torch.equal(
        model.generate("ignored", **embeds, **args),
        model.generate("a cat", n_prompt="a dog", **args),
    )
    with pytest.raises(ValueError, match="do not fit the DiT"):
        model.generate("", prompt_embeds=torch.zeros(4, 3), **args)


def test_image_to_video(tiny, image_path: Path) -> None:
    model = wan.WanI2V(WAN_CONFIGS["i2v-A14B"], tiny("i2v-A14B"))
    args = {"max_area": 64 * 32, **QUICK}
    video = model.generate("a cat", Image.open(image_path), **args)
    assert video.shape == (3, 5, 32, 48)
    assert torch.equal(model.generate("a cat", str(image_path), **args), video)
    with pytest.raises(InputError, match=r"(img|image) is \[\]; give a path, a PIL image"):
        model.generate("a cat", [], **QUICK)


def test_dense_folders_have_no_boundary(tiny) -> None:
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-1.3B"))
    assert model.generate("a cat", size=(32, 32), **QUICK).shape == (3, 5, 32, 32)


def test_networks_that_a_tool_changed_stay(tiny) -> None:
    """As quantisation tools do: low_noise_model, high_noise_model, or model for a single one."""
    args = {"size": (64, 32), "output_type": "latent", "seed": 7, "frame_num": 5}
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"))
    before = model.generate("a", sampling_steps=4, **args)
    for network in (model.high_noise_model, model.low_noise_model):
        network.head.head.bias.data.add_(1)
    after = [model.generate("a", sampling_steps=4, **args) for _ in range(2)]
    assert torch.equal(after[0], after[1]) and not torch.equal(before, after[0])
    assert model.low_noise_model is model.low_noise_model
    assert wan.WanTI2V(WAN_CONFIGS["ti2v-5B"], tiny("ti2v-5B")).model.num_heads == 24
    with pytest.raises(AttributeError, match="no attribute 'model'"):
        model.model  # noqa: B018


def test_an_edited_boundary_counts(tiny) -> None:
    from copy import deepcopy

    config = deepcopy(WAN_CONFIGS["t2v-A14B"])
    args = {"size": (64, 32), "output_type": "latent", "seed": 7, "frame_num": 5}
    usual = wan.WanT2V(config, tiny("t2v-A14B")).generate("a", sampling_steps=4, **args)
    config.boundary = 0.1
    edited = wan.WanT2V(config, tiny("t2v-A14B")).generate("a", sampling_steps=4, **args)
    assert not torch.equal(usual, edited)


def test_an_edited_negative_prompt_counts(tiny) -> None:
    """It stands for what a call leaves open."""
    from copy import deepcopy

    config = deepcopy(WAN_CONFIGS["ti2v-5B"])
    config.sample_neg_prompt = "grey"
    args = {"size": (32, 32), "output_type": "latent", **QUICK}
    usual, edited = (wan.WanTI2V(one, tiny("ti2v-5B")) for one in ("ti2v-5B", config))
    found = edited.generate("a", **args)
    assert torch.equal(found, usual.generate("a", n_prompt="grey", **args))
    assert not torch.equal(found, usual.generate("a", **args))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"frame_num": 6}, "use 5 or 9"),
        ({"size": (60, 32)}, r"^size=60\*32 .* multiples of 16"),
        ({"shift": float("nan")}, "^shift=nan must be a number"),
        ({"sampling_steps": 0}, "^sampling_steps=0 must be from 1 to"),
        ({"guide_scale": -1}, "above 0"),
        ({"sample_solver": "nonsense"}, "^sample_solver=nonsense must be unipc, dpm"),
        ({"output_type": "pil"}, "output_type=pil must be pt or latent"),
        ({"seed": 1.5}, "^seed=1.5 must be a whole number"),
        ({"offload_model": "perhaps"}, "^offload_model=perhaps must be true, false, cpu or"),
        ({"prompt_embeds": [1.0]}, "^prompt_embeds must be a floating-point tensor"),
        ({"noise_device": "cpu"}, "noise_device is not a known keyword of generate"),
        ({"image": "cat.png"}, "^image has no effect on a text-to-video model; remove it"),
        ({"prompt": "a dog"}, "^prompt is called input_prompt here; use that keyword"),
        ({"input_prompt": None}, "input_prompt has no value"),
    ],
)
def test_refusals(tiny, change: dict, sentence: str) -> None:
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"))
    with pytest.raises(ValueError, match=sentence):
        model.generate(**{"input_prompt": "a", "size": (64, 32), **QUICK, **change})


def sparse(tiny, **settings) -> wan.WanT2V:
    config, folder = WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B")
    return wan.WanT2V(config, folder, use_rainfusion=True, **settings)


def test_a_request_in_which_sparse_attention_would_never_start(tiny) -> None:
    args = {"size": (64, 32), "frame_num": 5, "seed": 7, "output_type": "latent"}
    with pytest.raises(
        ValueError, match=r"begin at step 10, but there are 10 \(\w+\), .*lower sparse_"
    ):
        sparse(tiny, sparse_start_step=10).generate("a", sampling_steps=10, **args)
    model = sparse(tiny, sparse_start_step=1, sparsity=0.0, mask_refresh_interval=2)
    with pytest.raises(ValueError, match=r"^mask_refresh_interval=2 has no effect"):
        model.generate("a", sampling_steps=2, **args)
    assert model.generate("a", sampling_steps=3, **args).shape == (16, 2, 4, 8)


def test_sparse_attention_may_start_after_the_usual_steps(tiny) -> None:
    model = sparse(tiny, sparse_start_step=45)
    with pytest.raises(ValueError, match="begin at step 45, but there are 45"):
        model.generate("a", size=(64, 32), frame_num=5, sampling_steps=45)


def test_laser_needs_an_npu(tiny) -> None:
    """No NPU is here: a constructor for one is refused, in its own words."""
    with pytest.raises(
        ValueError, match=r"^attention_algo=laser needs an A2 or A3; this device is"
    ):
        wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), attention_algo="laser")


def test_a_backend_is_a_keyword(tiny) -> None:
    config, folder = WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B")
    wan.WanT2V(config, folder, device="cpu", attention_backend="sdpa")
    for settings, sentence in (
        ({"attention_backend": "cudnn"}, "^attention_backend=cudnn needs a CUDA GPU; this"),
        ({"attention_backend": "sdpa_math"}, "^attention_backend=sdpa_math needs the Python mod"),
        ({"attention_backend": "sdpa", "attention_algo": "fused"}, "^attention_algo names the d"),
    ):
        with pytest.raises(ValueError, match=sentence):
            wan.WanT2V(config, folder, device="cpu", **settings)


@pytest.mark.parametrize(("name", "value"), [("MINDIE_SD_FA_TYPE", "x"), ("USE_SUB_HEAD", "2")])
def test_variables_without_an_equal_here(
    tiny, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"))


def test_refused_folders(tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two experts for i2v, .*or choose another class"):
        wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("i2v-A14B"))
    with pytest.raises(ValueError, match="does not exist"):
        wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tmp_path / "nothing")
    with pytest.raises(ValueError, match="several devices"):
        wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"), dit_fsdp=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"precision": "int8"}, "^precision=int8 must be auto, bf16 or fp32"),
        ({"device": "tpu"}, "^device=tpu must be auto, cpu, cuda or npu"),
        ({"checkpoint_dir": None}, "^checkpoint_dir=None must be the folder of a checkpoint"),
        ({"checkpoint_dir": "nope"}, "^checkpoint_dir=nope does not exist"),
        ({"config": "A14B"}, "^config is A14B; names are t2v-A14B"),
        ({"config": {}}, "^config is {}; give an entry of WAN_CONFIGS"),
        ({"device_id": -1}, "^device_id=-1 must be from 0"),
        (
            {"sample_steps": 4},
            "^sample_steps is not a known keyword of the constructor; give it to",
        ),
        ({"sparsity": 0.5}, "^sparsity has no effect without use_rainfusion"),
        ({"quant_dit_path": "x" * 5000}, "cannot be used .File name too long.; give another"),
        ({"checkpoint_dir": "x" * 5000}, "cannot be used .File name too long.; give another"),
        ({"sparse_start_step": 10**5000}, "a number of thousands of digits must be"),
        ({"comm_type": 10**5000}, "a number of thousands of digits must be 0, 1 or 2"),
        ({"use_rainfusion": 10**5000}, "a number of thousands of digits must be true"),
        ({"sparsity": "9" * 5000}, "sparsity='9*... .5002 characters. must be"),
        ({"fused_ops": "x" * 5000}, "fused_ops='x*... .5002 characters. must be auto, none, or"),
        ({"fa_kuant": False}, "fa_kuant is not a known keyword"),
    ],
)
def test_refused_settings(tiny, settings: dict, sentence: str) -> None:
    given = {"config": WAN_CONFIGS["t2v-A14B"], "checkpoint_dir": tiny("t2v-A14B"), **settings}
    with pytest.raises(InputError, match=sentence) as caught:
        wan.WanT2V(**given)
    assert len(str(caught.value)) < 300


def test_false_is_not_given(tiny) -> None:
    settings = [name for name, flag in FLAGS.items() if flag.python == "load"]
    args = {"size": (32, 32), "output_type": "latent", **QUICK}
    usual, off = (
        wan.WanTI2V("ti2v-5B", tiny("ti2v-5B"), **given).generate("a", **args)
        for given in ({}, dict.fromkeys(settings, False) | {"text_kv_cache": None})
    )
    assert torch.equal(usual, off)


def test_folders_as_text_or_as_paths(tiny, tmp_path: Path) -> None:
    folder = quantize(tiny("ti2v-5B"), tmp_path / "q")
    args = {"size": (32, 32), "frame_num": 1, "sampling_steps": 1, "seed": 7}
    found = [
        wan.WanTI2V(
            WAN_CONFIGS["ti2v-5B"], tiny("ti2v-5B"), device="cpu", quant_dit_path=path
        ).generate("a", output_type="latent", **args)
        for path in (None, folder, str(folder))
    ]
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def test_the_constructor_reads_the_rank(tiny) -> None:
    with pytest.raises(InputError, match="rank=x must be a whole number"):
        wan.WanT2V("t2v-A14B", tiny("t2v-A14B"), rank="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_timesteps_may_be_an_array(kind, tiny) -> None:
    model, steps = wan.WanT2V("t2v-1.3B", tiny("t2v-1.3B")), [1000.0, 757.0]
    small = {"size": (32, 32), "frame_num": 1, "seed": 1, "sample_solver": "euler"}
    found = model.generate("a", timesteps=kind(steps), output_type="latent", **small)
    assert torch.equal(
        found, model.generate("a", timesteps=tuple(steps), output_type="latent", **small)
    )
