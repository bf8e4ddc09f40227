"""What a folder holds: hostile configurations, indexes and files are refused in one sentence."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.pipelines import composed
from wan import WanT2V
from wan.checkpoint.config import dit_config
from wan.checkpoint.files import TensorInfo, fingerprint, read_json, safetensors_header
from wan.checkpoint.layout import SOUND_ENCODER, check_task, describe, published
from wan.planner import report
from wan.planner.measure import Planner
from wan.settings.command import NetworkFiles
from wan.settings.errors import InputError
from wan.settings.presets import PRESETS
from wan.settings.timesteps import schedule

STEM = "diffusion_pytorch_model"
HUGE = 10**9
SILLY: list[Any] = [None, "96", "", [], {}, [96], True, -1, 0, 1e18, float("nan"), 96.5]
VALUES: dict[str, list[Any]] = {
    "dim": [*SILLY, HUGE, 97, -96],
    "num_layers": [*SILLY, 3, 1, 10**4, HUGE, 10**30],
    "num_heads": [*SILLY, 7, 96, HUGE],
    "ffn_dim": [None, "192", 0, -192, 193, HUGE],
    "in_dim": [None, 36, -16, HUGE],
    "out_dim": [0, 48, "16"],
    "freq_dim": [0, None, HUGE],
    "text_dim": [4096, 0, None],
    "text_len": [*SILLY, HUGE, 10**30],
    "eps": [*(value for value in SILLY if value != 96.5), "1e-6", 1e400, -1e-6, 2.0],
    "patch_size": [None, 2, "122", [], [1, 2], [1, -2, 2], [1, 2, 2, 2], [HUGE] * 3, [1, "2", 2]],
    "window_size": [None, 5, [5, 5], "global"],
    "qk_norm": [None, 0, "yes", False, []],
    "cross_attn_norm": [None, 1, False],
    "model_type": [None, "vase", 5, [], {}, ["t2v"]],
}


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the smallest checkpoint: one network, one file."""
    return Path(shutil.copytree(tiny("t2v-1.3B"), tmp_path / "checkpoint"))


def refusal(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        describe(folder)
    said = str(caught.value)
    assert "\n" not in said and said.endswith(".") and len(said) < 600, said
    return said


def set_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("key", VALUES)
def test_hostile_values_in_a_config(key: str, folder: Path) -> None:
    """Types and ranges are checked, and nothing is as large as a value says."""
    for value in VALUES[key]:
        set_config(folder, **{key: value})
        said = refusal(folder)
        assert str(folder / "config.json") in said and key in said, (value, said)
        assert "download" in said


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("num_attention_heads", [None, "12", True, 0, -12, 7, 1e18]),
        ("attention_head_dim", [None, [], True, 0, -8, 9, HUGE]),
        ("in_channels", [None, "16", 36]),
        ("out_channels", [None, 48]),
        ("num_layers", [None, HUGE]),
    ],
)
def test_hostile_values_in_a_config_of_diffusers(
    key: str, values: list[Any], tiny: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny("t2v-1.3B", "diffusers"), tmp_path / "checkpoint"))
    for value in values:
        set_config(folder / "transformer", **{key: value})
        assert str(folder / "transformer" / "config.json") in refusal(folder)


def test_a_config_of_another_network_is_told_by_the_shapes(folder: Path) -> None:
    set_config(folder, num_layers=3)
    said = refusal(folder)
    assert "num_layers is 3, but the shapes of the tensors say 2" in said


def set_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of the network's file; the tensors' bytes stay."""
    path = folder / f"{STEM}.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


NO_DIT = {
    "another network": lambda h: h.update({"x": h.pop("patch_embedding.weight")}),
    "no time embedding": lambda h: h.update({"x": h.pop("time_embedding.0.weight")}),
    "flat patches": lambda h: h["patch_embedding.weight"].update(shape=[96 * 16 * 4]),
    "flat FFN": lambda h: h["blocks.0.ffn.0.weight"].update(shape=[192 * 96]),
    "no first block": lambda h: h.update({"blocks.7.ffn.0.weight": h.pop("blocks.0.ffn.0.weight")}),
    "a block without a number": lambda h: h.update({"blocks.x.a": h.pop("blocks.0.ffn.0.bias")}),
    "a block far away": lambda h: h.update({"blocks.99999.a": h.pop("blocks.0.ffn.0.bias")}),
    "a tensor twice": lambda h: h.update(
        {"model.blocks.0.ffn.0.bias": h.pop("blocks.0.ffn.2.bias")}
    ),
}


@pytest.mark.parametrize("case", NO_DIT)
def test_tensors_that_are_no_network(case: str, folder: Path) -> None:
    set_header(folder, NO_DIT[case])
    assert "DiT" in (said := refusal(folder)) or "download it again" in said


@pytest.fixture
def sharded(tiny: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("ti2v-5B"), tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, None, ["x"]]
)
def test_an_index_stays_in_its_folder(name: Any, sharded: Path) -> None:
    shutil.copy(next(sharded.glob("*-00001-*")), sharded.parent / "x.safetensors")
    index = sharded / f"{STEM}.safetensors.index.json"
    said = json.loads(index.read_text())
    said["weight_map"] |= {"head.head.bias": name}
    index.write_text(json.dumps(said))
    assert f"{index} places head.head.bias in {name or repr(name)}, which is no" in refusal(sharded)


def test_shards_may_be_links(sharded: Path, tmp_path: Path) -> None:
    """As in the cache of a model hub."""
    (tmp_path / "blobs").mkdir()
    for number, shard in enumerate(sorted(sharded.glob("*-of-*"))):
        shard.rename(tmp_path / "blobs" / str(number))
        shard.symlink_to(Path("..", "blobs", str(number)))
    files = describe(sharded).files()
    assert len([file for file in files if file.parent == sharded]) == 4


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("look", [read_json, safetensors_header])
@pytest.mark.parametrize(
    "make", [lambda _: Path("/dev/zero"), lambda _: Path("/dev/null"), fifo, Path.parent.fget]
)
def test_only_regular_files_are_read(
    make: Callable[[Path], Path], look: Callable[[Path], Any], tmp_path: Path
) -> None:
    """Others have no end, or keep their reader waiting."""
    path = make(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        look(path)


def test_json_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(30 * 10**9)  # takes no space
    with pytest.raises(InputError, match="more than 16 MB; give the right file"):
        read_json(path)


@given(data=st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_is_the_right_one_or_refused(data: st.DataObject, folder: Path) -> None:
    """Whatever JSON holds, under any key: a description that fits the tensors, or one sentence."""
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    )
    keys = [*VALUES, "num_attention_heads", "attention_head_dim", "in_channels"]
    values = data.draw(st.dictionaries(st.sampled_from(keys), json_values, min_size=1, max_size=3))
    before = (folder / "config.json").read_text()
    try:
        set_config(folder, **values)
        config = describe(folder).config
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert (config["dim"], config["num_layers"], config["patch_size"]) == (96, 2, (1, 2, 2))
        assert 0 < config["eps"] < 1 and 1 <= config["text_len"] <= 4096
    finally:
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize("task", PRESETS)
def test_published_networks_are_described_like_folders(task: str, tiny: Any) -> None:
    preset = PRESETS[task]
    checkpoint = published(preset)
    like = describe(tiny(task if task != "t2v-14B" else "t2v-1.3B"))
    assert checkpoint.folder is None and not checkpoint.files()
    assert checkpoint.experts.keys() == like.experts.keys() and checkpoint.kind == like.kind
    assert checkpoint.heads == preset.num_heads and checkpoint.head_dim == 128
    same = ("model_type", "patch_size", "in_dim", "out_dim", "freq_dim", "text_len", "eps")
    assert {key: checkpoint.config[key] for key in same} == {key: like.config[key] for key in same}
    assert checkpoint.config.keys() == like.config.keys()
    with pytest.raises(InputError, match="has no vae"):
        checkpoint.require("vae")


def test_two_experts_are_alike(tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("t2v-A14B"), tmp_path / "checkpoint"))
    set_config(folder / "low_noise_model", num_heads=20)
    assert "mixes networks of different tasks or sizes" in refusal(folder)
    shutil.rmtree(folder / "low_noise_model")
    shutil.copytree(tiny("i2v-A14B") / "low_noise_model", folder / "low_noise_model")
    assert "mixes networks of different tasks or sizes" in refusal(folder)


def test_a_network_of_another_class(folder: Path) -> None:
    set_config(folder, _class_name="VaseWanModel")
    said = refusal(folder)
    assert f"{folder / 'config.json'} is of the class VaseWanModel, which is not supported" in said


@pytest.fixture
def speaking(tiny: Any, tmp_path: Path) -> Path:
    """A copy of an S2V checkpoint."""
    return Path(shutil.copytree(tiny("s2v-14B"), tmp_path / "s2v"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_type", "t2v", "the tensors are those of s2v"),
        ("enable_motioner", True, "as in the published network"),
        ("adain_mode", "attn", "as in the published network"),
        ("zero_timestep", False, "as in the published network"),
        ("audio_dim", 768, "the shapes of the tensors say 32"),
        ("num_audio_token", 5, "the shapes of the tensors say 4"),
        ("audio_inject_layers", [0, 4, 8], "2 different layers below 2"),
        ("audio_inject_layers", [0, 0], "2 different layers below 2"),
        ("audio_inject_layers", [0, 2], "2 different layers below 2"),
        ("audio_inject_layers", "all", "2 different layers below 2"),
    ],
)
def test_configurations_of_s2v(speaking: Path, key: str, value: Any, words: str) -> None:
    set_config(speaking, **{key: value})
    assert words in refusal(speaking)


def test_a_t2v_folder_is_no_s2v(folder: Path) -> None:
    set_config(folder, model_type="s2v")
    assert "the tensors are those of t2v" in refusal(folder)


def test_an_s2v_folder_among_files_of_others(speaking: Path, tiny: Any, tmp_path: Path) -> None:
    """ComfyUI's tree with networks of two tasks: each task finds its own."""
    models = tmp_path / "models"
    (models / "diffusion_models").mkdir(parents=True)
    from safetensors.torch import load_file, save_file

    shards = sorted(speaking.glob("diffusion_pytorch_model*.safetensors"))
    whole = {name: x for shard in shards for name, x in load_file(shard).items()}
    save_file(whole, models / "diffusion_models" / "wan2.2_s2v_14B.safetensors")
    shutil.copy(speaking / "config.json", models / "diffusion_models")  # heads are not of 128 here
    t2v = tiny("t2v-1.3B")
    shutil.copy(t2v / f"{STEM}.safetensors", models / "diffusion_models" / "t2v.safetensors")
    shutil.copytree(speaking / SOUND_ENCODER, models / SOUND_ENCODER)
    found = describe(models, presets=(PRESETS["s2v-14B"],))
    assert found.kind == "s2v" and found.sound_encoder == models / SOUND_ENCODER
    assert found.config["audio_inject_layers"] == (0, 1)  # type: ignore[typeddict-item]
    (models / "diffusion_models" / "config.json").unlink()
    assert describe(models, presets=(PRESETS["t2v-1.3B"],)).kind == "t2v"


def test_the_sound_encoder_is_missing_or_another(speaking: Path) -> None:
    from wan.pipeline import sound

    path = speaking / SOUND_ENCODER
    assert describe(speaking).require("sound_encoder") == path
    sound.check(path, 32)
    with pytest.raises(InputError, match="has 32 channels of features, the DiT 1024"):
        sound.check(path, 1024)
    set_config(path, num_hidden_layers=12)
    with pytest.raises(InputError, match="no wav2vec2 of 24 layers"):
        sound.check(path, 32)
    (path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"no usable config\.json"):
        sound.check(path, 32)
    shutil.rmtree(path)
    with pytest.raises(InputError, match=f"expected the folder {SOUND_ENCODER}"):
        describe(speaking).require("sound_encoder")


def test_an_animate_network_is_no_i2v(tmp_path: Path) -> None:
    """It has the same input channels, and the tasks that are supported say that it is another."""
    import torch
    from safetensors.torch import save_file

    from wan.checkpoint.layout import check_task
    from wan.modules.animate import WanAnimateModel

    sizes = {"dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 5, "text_dim": 16}
    with torch.device("meta"):
        network = WanAnimateModel(**sizes)
    state = {
        name: torch.zeros(x.shape, dtype=torch.bfloat16) for name, x in network.state_dict().items()
    }
    save_file(state, tmp_path / f"{STEM}.safetensors")
    config = {"_class_name": "WanAnimateModel", "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = describe(tmp_path)
    assert (found.kind, found.config["model_type"]) == ("animate", "animate")
    with pytest.raises(InputError, match="one network for animate, but task i2v-14B needs one"):
        check_task(found, PRESETS["i2v-14B"])
    set_config(tmp_path, model_type="i2v")
    assert "the tensors are those of animate" in refusal(tmp_path)


# Diffusers folders: what model_index.json says.


@pytest.fixture
def pipeline(tiny: Any, tmp_path: Path) -> Path:
    """A Diffusers folder of two experts."""
    return Path(shutil.copytree(tiny("t2v-A14B", "diffusers"), tmp_path / "A14B-Diffusers"))


def set_index(folder: Path, **values: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("missing", ["transformer", "transformer_2"])
@pytest.mark.parametrize("says", ["parts", "boundary"])
def test_half_of_a_pair_of_diffusers(missing: str, says: str, pipeline: Path) -> None:
    if says == "boundary":
        set_index(pipeline, transformer_2=[None, None])
    shutil.rmtree(pipeline / missing)
    assert f"{pipeline / missing} is missing; download the other expert" in refusal(pipeline)


@pytest.mark.parametrize("missing", ["high_noise_model", "low_noise_model"])
def test_half_of_an_official_pair(missing: str, tiny: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("t2v-A14B"), tmp_path / "A14B"))
    shutil.rmtree(folder / missing)
    assert f"{folder / missing} is missing" in refusal(folder)


def test_one_network_of_diffusers(pipeline: Path, tiny: Any) -> None:
    """Where model_index.json names one, or its boundary_ratio is null as diffusers reads it."""
    assert {*describe(tiny("t2v-1.3B", "diffusers")).experts} == {"dit"}
    set_index(pipeline, boundary_ratio=None)
    found = describe(pipeline)
    assert {*found.experts} == {"dit"} and found.experts["dit"].folder.name == "transformer"
    with pytest.raises(InputError, match="boundary_ratio is null"):
        check_task(found, PRESETS["t2v-A14B"])
    set_index(pipeline, boundary_ratio=None, transformer_2=[None, None])
    shutil.rmtree(pipeline / "transformer_2")
    assert {*describe(pipeline).experts} == {"dit"}
    set_index(pipeline, transformer_2=["diffusers", "WanTransformer3DModel"])
    assert "transformer_2 is missing" in refusal(pipeline)


@pytest.mark.parametrize("ratio", [0, 1, -0.5, 1.5, 10**400, "0.9", True, [], {}, float("nan")])
def test_a_boundary_ratio_is_a_share(ratio: Any, pipeline: Path) -> None:
    set_index(pipeline, boundary_ratio=ratio)
    assert "boundary_ratio is" in refusal(pipeline)


@pytest.mark.parametrize("value", ["WanTransformer3DModel", 5, {}, [], ["diffusers"], True])
def test_a_part_is_a_library_and_a_class(value: Any, pipeline: Path) -> None:
    set_index(pipeline, transformer_2=value)
    assert "transformer_2 is" in refusal(pipeline)


def test_the_boundary_ratio_divides_the_steps(pipeline: Path) -> None:
    """By arithmetic: UniPC's four timesteps at shift 12 are 999, 972, 923 and 800."""
    steps = ("--task", "t2v-A14B", "--sample_steps", "4", "--sample_shift", "12")
    for ratio, high in ((0.875, 3), (0.95, 2), (0.98, 1), (0.417, 4)):
        set_index(pipeline, boundary_ratio=ratio)
        run, _ = composed(pipeline, *steps)
        assert schedule(run.request).high_noise_steps == high
        assert run.boundary == ratio
        assert f"boundary_ratio of model_index.json: {ratio}" in "\n".join(
            report.files(Planner(run.setup, run.request))
        )
        model = WanT2V("t2v-A14B", str(pipeline))
        made, _ = model._request(
            inspect.signature(model.generate).bind("a", sampling_steps=4, shift=12.0).arguments
            | {"settings": {}},
            model._setup,
        )
        assert schedule(made).high_noise_steps == high


@pytest.mark.parametrize(
    "part",
    [
        *("model_index.json", "tokenizer/tokenizer.json", "vae/config.json"),
        *("text_encoder/config.json", "transformer_2/", "vae/", "text_encoder/"),
    ],
)
def test_ranks_compare_the_content_of_every_part(part: str, pipeline: Path) -> None:
    """One byte differs, in the middle of the file."""
    set_index(pipeline, boundary_ratio=0.875)
    before = fingerprint(describe(pipeline).files())
    file = next((pipeline / part).glob("*.safetensors")) if part.endswith("/") else pipeline / part
    content = bytearray(file.read_bytes())
    middle = next(i for i in range(len(content) // 2, len(content)) if content[i] in b"0123456789")
    content[middle] = ord("7" if content[middle] != ord("7") else "6")
    file.write_bytes(content)
    assert fingerprint(describe(pipeline).files()) != before


def test_a_class_says_that_it_runs_another_task(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    WanT2V("t2v-A14B", str(tiny("t2v-1.3B")))
    assert "runs as t2v-" in caplog.text and "not as t2v-A14B" in caplog.text
    caplog.clear()
    WanT2V("t2v-A14B", str(tiny("t2v-A14B")))
    assert "runs as" not in caplog.text


# Shards that are given one by one.


@pytest.fixture
def shards(folder: Path) -> list[Path]:
    """The network of the folder, as two shards beside it."""
    tensors = load_file(folder / f"{STEM}.safetensors")
    (folder / f"{STEM}.safetensors").unlink()
    paths = [folder.parent / f"wan.bf16-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for number, path in enumerate(paths):
        part = {n: x for n, x in tensors.items() if n.startswith("blocks.1.") == bool(number)}
        save_file(part, path)
    return paths


@pytest.mark.parametrize("given", [0, 1])
def test_a_shard_brings_the_others(given: int, shards: list[Path], folder: Path, tiny: Any) -> None:
    found = describe(folder, NetworkFiles(dit=shards[given]), (PRESETS["t2v-1.3B"],))
    whole = describe(tiny("t2v-1.3B"))
    assert found.experts["dit"].tensors.keys() == whole.experts["dit"].tensors.keys()
    assert {*shards} <= {*found.files()}
    for path in shards:
        path.rename(folder / path.name)
    assert describe(folder).experts["dit"].tensors.keys() == whole.experts["dit"].tensors.keys()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_shard_without_the_others(missing: int, shards: list[Path], folder: Path) -> None:
    shards[missing].unlink()
    with pytest.raises(InputError, match=rf"shard .* of 2, and {shards[missing].name} is missing"):
        describe(folder, NetworkFiles(dit=shards[1 - missing]))
    shards[1 - missing].rename(folder / shards[1 - missing].name)
    assert f"{shards[missing].name} is missing" in refusal(folder)


@pytest.mark.parametrize("name", ["w-00003-of-00002", "w-00000-of-00002", "w-00001-of-99999999"])
def test_a_shard_of_a_strange_number(name: str, folder: Path) -> None:
    path = folder.parent / f"{name}.safetensors"
    shutil.copy(folder / f"{STEM}.safetensors", path)
    with pytest.raises(InputError, match="is called shard"):
        describe(folder, NetworkFiles(dit=path))


def test_two_shards_with_one_tensor(shards: list[Path], folder: Path) -> None:
    shutil.copy(shards[0], shards[1])
    with pytest.raises(InputError, match=r"00002-of-00002.* has .*, as "):
        describe(folder, NetworkFiles(dit=shards[0]))


def test_a_published_networks_first_blocks_are_no_network() -> None:
    """A shard under another name; sizes of headers alone."""
    one = published(PRESETS["t2v-1.3B"]).config
    shapes = {
        "patch_embedding.weight": (one["dim"], 16, 1, 2, 2),
        "time_embedding.0.weight": (one["dim"], 256),
        "text_embedding.0.weight": (one["dim"], 4096),
        "head.head.weight": (64, one["dim"]),
        "blocks.0.self_attn.norm_q.weight": (one["dim"],),
        **{f"blocks.{i}.ffn.0.weight": (one["ffn_dim"], one["dim"]) for i in range(30)},
    }

    def read(count: int) -> Any:
        names = [n for n in shapes if not n.startswith("blocks.") or int(n.split(".")[1]) < count]
        file = Path("x.safetensors")
        return dit_config(file, {n: TensorInfo(file, n, "BF16", shapes[n], 0) for n in names})

    assert read(30)["num_layers"] == 30
    with pytest.raises(InputError, match="has 20 blocks"):
        read(20)


# Names of chosen experts.


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("dit_low_noise", "wan_high"),
        ("dit_high_noise", "Wan-LowNoise"),
        ("dit", "wan_high_noise_14B"),
    ],
)
def test_a_chosen_file_of_another_expert(flag: str, name: str, folder: Path) -> None:
    path = folder.rename(folder.parent / "x") / f"{STEM}.safetensors"
    path = path.rename(path.with_name(f"{name}.safetensors"))
    with pytest.raises(InputError, match=r"says (high|low)_noise in its name"):
        describe(path.parent, NetworkFiles(**{flag: path}))


@pytest.mark.parametrize(("names", "pair"), [(("a_H", "a_L"), True), (("a_1", "a_2"), False)])
def test_experts_of_files_by_letters(
    names: tuple[str, str], pair: bool, tiny: Any, tmp_path: Path
) -> None:
    for name, part in zip(names, ("high", "low"), strict=True):
        source = tiny("t2v-A14B") / f"{part}_noise_model"
        tensors = {
            n: x for file in source.glob("*.safetensors") for n, x in load_file(file).items()
        }
        save_file(tensors, tmp_path / f"{name}.safetensors")
    if not pair:
        assert "holds 2 files" in refusal(tmp_path)
        return
    found = describe(tmp_path, presets=(PRESETS["t2v-A14B"],)).experts
    files = {e: {i.file.stem for i in dit.tensors.values()} for e, dit in found.items()}
    assert files == {"high_noise": {"a_H"}, "low_noise": {"a_L"}}
    (tmp_path / "a_L.safetensors").unlink()
    (tmp_path / "a_H.safetensors").rename(tmp_path / "a_high_noise.safetensors")
    with pytest.raises(InputError, match="says high_noise in its name"):
        describe(tmp_path, presets=(PRESETS["t2v-14B"],))


def test_files_of_tensors_that_are_joined_are_of_the_checkpoint(tmp_path: Path) -> None:
    """Animate's keys and values, of which a shard may hold the one and not the other."""
    parts = [TensorInfo(tmp_path / name, name, "F32", (2,), 8) for name in ("k", "v")]
    both = TensorInfo(tmp_path / "k", "k", "F32", (4,), 16, parts=(parts[0], parts[1]))
    plain = published(PRESETS["animate-14B"])
    (expert,) = plain.experts
    files = replace(plain.experts[expert], tensors={"kv": both})
    assert replace(plain, experts={expert: files}).files() == [tmp_path / "k", tmp_path / "v"]
