"""The official Python classes: names, keywords, results."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import textwrap
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wan
from tests.conftest import slow
from tests.dist import REPO
from tests.pipelines import resolve_plan
from tests.refusals import check_refusals, get_refusal
from tools.quantize_dit import quantize_checkpoint
from wan.cli.main import main
from wan.configs import MAX_AREA_CONFIGS, SIZE_CONFIGS, SUPPORTED_SIZES, WAN_CONFIGS
from wan.media.video_reader import read_video
from wan.modules.model import WanModel
from wan.modules.t5 import TextEncoder
from wan.settings.flags import FLAGS
from wan.settings.presets import PRESETS
from wan.utils.log import logger

QUICK: dict[str, Any] = {"frame_num": 1, "sampling_steps": 2, "seed": 7}
SMALL: dict[str, Any] = {"size": (64, 32), **QUICK}
LATENT: dict[str, Any] = {**SMALL, "output_type": "latent"}


@pytest.fixture(scope="module")
def t2v(tiny) -> wan.WanT2V:
    return wan.WanT2V(WAN_CONFIGS["t2v-A14B"], str(tiny("t2v-A14B")))


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
    t2v.sample_neg_prompt, original_prompt = "changed", t2v.sample_neg_prompt
    assert WAN_CONFIGS["t2v-A14B"].sample_neg_prompt == "changed"
    t2v.sample_neg_prompt = original_prompt


def test_text_to_video(t2v) -> None:
    """The latents decode to the video, with every `offload_model`."""
    args: dict[str, Any] = {**QUICK, "size": (32, 32), "frame_num": 5}
    video = t2v.generate("a cat", guide_scale=4, **args)
    assert video.shape == (3, 5, 32, 32) and video.dtype == torch.float32
    assert video.min() >= -1 and video.max() <= 1
    args |= {"output_type": "latent", "guide_scale": (4.0, 4.0), "offload_model": False}
    latents = t2v.generate("a cat", **args)
    assert latents.shape == (16, 2, 4, 4)
    assert torch.equal(t2v._pipeline.decode(latents), video)


@pytest.mark.parametrize("grouped", [slow(False), True])
def test_many_videos(grouped: bool, t2v) -> None:
    calls = ["a cat", {"input_prompt": "a dog", "seed": 8}, {"input_prompt": "a", "frame_num": 5}]
    latents = list(t2v.generate_many(calls, group_by_expert=grouped, **LATENT))
    single = [{"input_prompt": "a cat"}, *calls[1:]]
    for sample, call in zip(latents, single, strict=True):
        assert torch.equal(sample, t2v.generate(**{**LATENT, **call}))


def test_many_videos_are_checked_first(t2v, tiny) -> None:
    table: dict[str, tuple[Any, dict[str, Any]]] = {
        "frames of the second": (["a", {"input_prompt": "b", "frame_num": 8}], {}),
        "offload of one": ([{"input_prompt": "b", "offload_model": False}], {}),
        "groups, not offloaded": (["a"], {"group_by_expert": True, "offload_model": False}),
        "group_by_expert": (["a"], {"group_by_expert": "perhaps"}),
        "a text": ("ab", {}),
        "a call": ({"input_prompt": "a"}, {}),
        "None": (None, {}),
        "a number": ([3], {}),
        "no prompt": ([{}], {}),
    }
    messages = {
        name: get_refusal(t2v.generate_many, calls, **options)
        for name, (calls, options) in table.items()
    }
    i2v = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))
    messages["no image"] = get_refusal(i2v.generate_many, [{"input_prompt": "a", "img": None}])
    check_refusals("python: many videos", messages)


@pytest.mark.parametrize("grouped", [False, slow(True)])
def test_many_videos_may_be_interrupted_and_interleaved(grouped: bool, t2v) -> None:
    """Other calls may change offload_model; closing the generator frees its network."""
    args = {**LATENT, "sampling_steps": 1}
    expected = [t2v.generate(text, **args) for text in ("one", "two")]
    videos = t2v.generate_many(["one", "two", "three"], group_by_expert=grouped, **args)
    assert torch.equal(next(videos), expected[0])
    for offload in ("block", False):
        assert torch.equal(t2v.generate("two", offload_model=offload, **args), expected[1])
    assert torch.equal(next(videos), expected[1])
    network_ref = weakref.ref(t2v._pipeline.experts.get("high_noise"))
    videos.close()
    assert network_ref() is None and not t2v._pipeline.cached_prompt_embeds


def test_embeddings_replace_prompts(t2v) -> None:
    encoder = t2v._pipeline.text_encoder.get()
    embeds = {"prompt_embeds": encoder("a cat"), "negative_prompt_embeds": encoder("a dog")}
    assert torch.equal(
        t2v.generate("ignored", **embeds, **LATENT),
        t2v.generate("a cat", n_prompt="a dog", **LATENT),
    )


def test_networks_that_a_tool_changed_stay(t2v, tiny) -> None:
    """As quantisation tools do: low_noise_model and high_noise_model, or model of one network."""
    original = t2v.generate("a", **LATENT)
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B"))
    for network in (model.high_noise_model, model.low_noise_model):
        network.head.head.bias.data.add_(1)
    modified = [model.generate("a", **LATENT) for _ in range(2)]
    assert torch.equal(modified[0], modified[1]) and not torch.equal(original, modified[0])
    with pytest.raises(AttributeError, match="no attribute 'model'"):
        model.model  # noqa: B018


def test_an_edited_config_counts(t2v, tiny) -> None:
    """Its boundary, and its negative prompt, which is the default of each call."""
    config, plain = deepcopy(WAN_CONFIGS["t2v-A14B"]), t2v.generate("a", **LATENT)
    config.sample_neg_prompt = "grey"
    latents = wan.WanT2V(config, tiny("t2v-A14B")).generate("a", **LATENT)
    assert torch.equal(latents, t2v.generate("a", n_prompt="grey", **LATENT))
    assert not torch.equal(latents, plain)
    config = deepcopy(WAN_CONFIGS["t2v-A14B"])
    config.boundary = 0.1
    edited = wan.WanT2V(config, tiny("t2v-A14B")).generate("a", **LATENT)
    assert not torch.equal(edited, plain)


def test_one_network(tiny) -> None:
    """A folder of one network has no boundary and takes timesteps of each type of array.

    False, and None for the cache, are the default of each switch of the constructor.
    """
    folder = tiny("t2v-1.3B")
    model = wan.WanT2V(WAN_CONFIGS["t2v-A14B"], folder)
    assert model.model.num_heads == 12
    args = {**LATENT, "sample_solver": "euler", "timesteps": [1000.0, 757.0]}
    del args["sampling_steps"]
    latents = model.generate("a", **args)
    assert latents.shape == (16, 1, 4, 8)
    off = dict.fromkeys((name for name, flag in FLAGS.items() if flag.python == "load"), False)
    model = wan.WanT2V("t2v-1.3B", folder, **off)
    for kind in (tuple, np.array, torch.tensor):
        assert torch.equal(
            model.generate("a", **args | {"timesteps": kind(args["timesteps"])}), latents
        )


@pytest.mark.parametrize("front_end", ["generate", "generate_many", "clips", "command"])
def test_progress_is_shown_before_a_prompt_is_encoded(
    front_end: str, t2v, tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    """On stderr, or in the log of the command line; `progress=False` hides it."""
    for name in ("propagate", "level"):  # which the command line changes
        monkeypatch.setattr(logger, name, getattr(logger, name))
    # Those of earlier tests write to closed files.
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    model = wan.WanI2V("i2v-A14B", tiny("i2v-A14B")) if front_end == "clips" else t2v
    shown: dict[str, str] = {}
    for network in (TextEncoder, WanModel):
        call = network.__call__

        def record_output(self: Any, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            captured = capfd.readouterr()
            shown.setdefault(type(self).__name__, captured.out + captured.err)
            return _call(self, *args, **kwargs)

        monkeypatch.setattr(network, "__call__", record_output)

    def make_videos(**progress: bool) -> None:
        shown.clear()
        if front_end == "generate":
            model.generate("a", **LATENT, **progress)
        elif front_end == "generate_many":
            for _ in model.generate_many(["a", "b"], **LATENT, **progress):
                print("progress", file=sys.stderr)  # of the caller
        elif front_end == "clips":
            clips = {"num_repeat": 2, "clip_prompts": ["a", "b"], "frame_num": 5}
            image = np.zeros((32, 32, 3), np.uint8)
            model.generate("", image, 32 * 32, **{**QUICK, **clips}, **progress)
        else:
            argv = ["--ckpt_dir", tiny("t2v-A14B"), "--size", "32*32", "--frame_num", "1"]
            argv += ["--sample_steps", "2", "--save_file", tmp_path / "v.mp4"]
            assert main([str(argument) for argument in argv]) == 0

    make_videos()
    assert "0/" in shown["TextEncoder"]
    assert "sampling: " in shown["WanModel"] and "0/2" in shown["WanModel"]
    if front_end.startswith("generate"):
        capfd.readouterr()
        make_videos(progress=False)
        assert not any(shown.values()) and "/2" not in capfd.readouterr().err


def sparse(tiny, **settings) -> wan.WanT2V:
    config, folder = WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B")
    return wan.WanT2V(config, folder, use_rainfusion=True, **settings)


def test_refusals(t2v, tiny) -> None:
    calls: dict[str, dict[str, Any]] = {
        "frame_num": {"frame_num": 6},
        "size": {"size": (60, 32)},
        "shift": {"shift": float("nan")},
        "output_type": {"output_type": "pil"},
        "seed": {"seed": 1.5},
        "offload_model": {"offload_model": "perhaps"},
        "progress": {"progress": "bar"},
        "prompt_embeds": {"prompt_embeds": [1.0]},
        "prompt_embeds of another encoder": {"prompt_embeds": torch.zeros(4, 3)},
        "of another front end": {"noise_device": "cpu"},
        "of another task": {"image": "cat.png"},
        "of another class": {"img": "cat.png"},
        "of another name": {"prompt": "a dog"},
        "of diffusers": {"num_inference_steps": 4},
        "misspelt": {"framenum": 5},
        "of the constructor": {"comm_type": 1},
        "of the constructor, as in ComfyUI": {"lora_path": "x"},
        "of save_video": {"fps": 16},
        "unknown": {"colour": "red"},
        "no prompt": {"input_prompt": None},
    }
    usual = {"input_prompt": "a", **SMALL}
    messages = {name: get_refusal(t2v.generate, **usual | call) for name, call in calls.items()}
    i2v = wan.WanI2V("i2v-A14B", tiny("i2v-A14B"))
    messages["no image"] = get_refusal(i2v.generate, "a cat", [], **QUICK)
    for start, steps in ((10, 10), (45, 45)):
        model = sparse(tiny, sparse_start_step=start)
        call = usual | {"sampling_steps": steps}
        messages[f"sparse from step {start}"] = get_refusal(model.generate, **call)
    model = sparse(tiny, sparse_start_step=1, sparsity=0.0, mask_refresh_interval=2)
    messages["one sparse step"] = get_refusal(model.generate, **usual)
    check_refusals("python: calls", messages)
    assert model.generate("a", **{**LATENT, "sampling_steps": 3}).shape == (16, 1, 4, 8)


@pytest.mark.parametrize("name", [name for name in wan.__all__ if name.startswith("Wan")])
def test_examples_of_the_classes_are_valid(name: str) -> None:
    """The example in a class's docstring: it compiles, and its calls fit the signatures."""
    kind = getattr(wan, name)
    example = inspect.cleandoc(kind.__doc__).split("Example:\n")[1]
    calls = {
        ast.unparse(node.func): node
        for node in ast.walk(ast.parse(textwrap.dedent(example)))
        if isinstance(node, ast.Call)
    }
    functions = {f"wan.{name}": kind, "model.generate": kind.generate}
    functions["wan.save_video"] = wan.save_video
    assert functions.keys() <= calls.keys()
    for path, function in functions.items():
        call, bound = calls[path], [None] if path == "model.generate" else []
        names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(function).bind(*bound, *call.args, **names)


def test_notices_about_untrained_sizes(tiny, caplog: pytest.LogCaptureFixture) -> None:
    """Calls are checked, but not generated; the default size takes minutes with the demo."""

    def list_notices() -> list[str]:
        return [message for message in caplog.messages if "trained on" in message]

    demo = wan.WanT2V("t2v-A14B", REPO / "examples" / "demo" / "t2v-A14B")
    demo.generate_many(["a star"], size=(64, 64), frame_num=9)
    assert not list_notices()
    demo.generate_many(["a star"])
    assert list_notices() == ["1280*720 is not a size the demo was trained on (64*64)."]
    caplog.clear()
    model = wan.WanT2V("t2v-1.3B", tiny("t2v-1.3B"))
    model.generate_many(["a star"], size=(32, 32), frame_num=81)
    assert not list_notices()
    model.generate_many(["a star"], size=(32, 32), frame_num=85)
    (notice,) = list_notices()
    assert notice.startswith("85 frames are more than the 81 that the network was trained on")


TRAINED_FRAMES = {"ti2v-5B": 121, "animate-14B": 77, "s2v-14B": 80}  # published; others have 81


LONG = ["--frame_num", "957"]


def test_videos_longer_than_the_training_have_a_notice() -> None:
    """A causal video has any length."""
    assert not any("trained" in x for x in resolve_plan("--task", "causal-1.3B", *LONG).notices)
    for task in (task for task, preset in PRESETS.items() if not preset.keeps_kv):
        longest = TRAINED_FRAMES.get(task, 81)
        name = "--infer_frames" if task == "s2v-14B" else "--frame_num"
        for frames, count in ((longest, 0), (longest + 4, 1)):
            notices = resolve_plan("--task", task, name, frames).notices
            notices = [notice for notice in notices if "frames" in notice and "trained" in notice]
            assert len(notices) == count, (task, frames, notices)
            assert all(f"{frames} " in x and f" {longest} " in x for x in notices), notices


def test_a_video_is_saved(tmp_path: Path) -> None:
    """As frames of the values that were given; other files and other values are refused."""
    video = torch.linspace(-1, 1, 5)[None, :, None, None].expand(3, 5, 32, 48)
    wan.save_video(video, tmp_path / "grey.mp4", fps=8)
    wan.save_video(video, str(tmp_path / "grey.mp4"))
    frames = read_video(tmp_path / "grey.mp4", "`save_file`")
    levels = [int(frame.mean().round()) for frame in frames.iter_frames()]
    assert frames.fps == 16 and np.abs(np.subtract(levels, [0, 64, 128, 191, 255])).max() <= 3
    foreign = tmp_path / "holiday.mp4"
    foreign.write_bytes(b"mine")
    table: dict[str, tuple[Any, ...]] = {
        "latents": (video[:, 0], tmp_path / "x.mp4"),
        "nothing": (None, tmp_path / "x.mp4"),
        "an odd side": (video[..., 1:], tmp_path / "x.mp4"),
        "another format": (video, tmp_path / "x.gif"),
        "a foreign file": (video, foreign),
        "a folder that is a file": (video, foreign / "x.mp4"),
        "too many frames a second": (video, tmp_path / "x.mp4", 1000),
    }
    refusals = {name: get_refusal(wan.save_video, *call) for name, call in table.items()}
    check_refusals("python: save_video", refusals)
    assert foreign.read_bytes() == b"mine" and len([*tmp_path.iterdir()]) == 2


def test_refused_settings(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of thousands of characters are refused in short sentences, too."""
    table: dict[str, dict[str, Any]] = {
        "precision": {"precision": "int8"},
        "device": {"device": "tpu"},
        "no folder": {"checkpoint_dir": None},
        "another folder": {"checkpoint_dir": "nope"},
        "a long folder": {"checkpoint_dir": "x" * 5000},
        "a folder of another task": {"checkpoint_dir": tiny("i2v-A14B")},
        "config": {"config": "A14B"},
        "an empty config": {"config": {}},
        "device_id": {"device_id": -1},
        "rank": {"rank": "x"},
        "several devices": {"dit_fsdp": True},
        "of generate": {"sample_steps": 4},
        "of generate, its keyword": {"seed": 4},
        "of generate, as in diffusers": {"num_inference_steps": 4},
        "without effect": {"sparsity": 0.5},
        "misspelt": {"fa_kuant": False},
        "unknown": {"colour": "red"},
        "a long path": {"quant_dit_path": "x" * 5000},
        "a long number": {"sparse_start_step": 10**5000},
        "laser": {"attention_backend": "laser"},
        "cudnn": {"attention_backend": "cudnn"},
        "xfuser": {"attention_backend": "sdpa_math"},
    }
    config, folder = WAN_CONFIGS["t2v-A14B"], tiny("t2v-A14B")
    usual = {"config": config, "checkpoint_dir": folder, "device": "cpu"}
    messages = {name: get_refusal(wan.WanT2V, **usual | row) for name, row in table.items()}
    for name, value in (("MINDIE_SD_FA_TYPE", "x"), ("USE_SUB_HEAD", "2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            messages[name] = get_refusal(wan.WanT2V, **usual)
    check_refusals("python: settings", messages)
    assert max(map(len, messages.values())) < 300
    wan.WanT2V(config, folder, device="cpu", attention_backend="sdpa")


def test_folders_as_text_or_as_paths(tiny, tmp_path: Path) -> None:
    folder = tiny("t2v-1.3B")
    quantized = quantize_checkpoint(folder, tmp_path / "q")
    paths = (folder, None), (folder, quantized), (str(folder), str(quantized))
    plain, *latents = [
        wan.WanT2V("t2v-1.3B", path, quant_dit_path=quant_path, device="cpu").generate(
            "a", **{**LATENT, "sampling_steps": 1}
        )
        for path, quant_path in paths
    ]
    assert torch.equal(*latents) and not torch.equal(plain, latents[0])
