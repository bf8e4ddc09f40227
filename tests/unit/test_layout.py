"""Checkpoint folders: hostile configurations, indexes and files are refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.pipelines import build_quick_pipeline
from tests.refusals import check_refusals, get_refusal
from wan import WanT2V
from wan.app.call_arguments import bind_arguments
from wan.app.record import read_generation_config
from wan.checkpoint.config import read_dit_config
from wan.checkpoint.formats.headers import compute_fingerprint, read_json
from wan.checkpoint.formats.safetensors_header import read_safetensors_header
from wan.checkpoint.formats.tensor_info import TensorInfo
from wan.checkpoint.layout import (
    WAV2VEC2_FOLDER,
    check_task,
    inspect_checkpoint,
    make_reference_checkpoint,
)
from wan.checkpoint.names.dit_shapes import restore_patch_axes
from wan.modules import audio_encoder
from wan.planner import report
from wan.planner.measure import Planner
from wan.settings.command import NetworkFiles
from wan.settings.errors import InputError
from wan.settings.noise_schedule import make_noise_schedule
from wan.settings.presets import PRESETS

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


DIFFUSERS_VALUES: dict[str, list[Any]] = {
    "num_attention_heads": [None, "12", True, 0, -12, 7, 1e18],
    "attention_head_dim": [None, [], True, 0, -8, 9, HUGE],
    "in_channels": [None, "16", 36],
    "out_channels": [None, 48],
    "num_layers": [None, HUGE],
}


def copy_checkpoint(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    """A copy of the smallest checkpoint: one network, one file."""
    return copy_checkpoint(tiny("t2v-1.3B"), tmp_path)


def refusal(folder: Path) -> str:
    return get_refusal(inspect_checkpoint, folder)


Tensors = Mapping[str, TensorInfo]


def read_tensors(folder: Path) -> Tensors:
    """Returns the tensors of the only network of a checkpoint."""
    (files,) = inspect_checkpoint(folder).experts.values()
    return files.tensors


def check_messages(table: str, messages: dict[str, str]) -> None:
    assert max(map(len, messages.values())) < 600
    check_refusals(f"checkpoints: {table}", messages, [r"(?<=config.json \().*(?=\); )"])


def set_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def collect_value_refusals(
    folder: Path, name: str, key: str, values: list[Any], tensors: Tensors | None = None
) -> dict[str, str]:
    """Collects the refusal of each value of a key in a JSON file; restores the file afterwards.

    tensors: Those of the network whose configuration it is; None: all of the folder is read.
    """
    original_text, messages = (folder / name).read_text(), {}
    for value in values:
        set_config(folder, name, **{key: value})
        messages[f"{key} {value!r}"] = (
            refusal(folder)
            if tensors is None
            else get_refusal(read_dit_config, (folder / name).parent, tensors)
        )
    (folder / name).write_text(original_text)
    return messages


@pytest.mark.parametrize(
    ("layout", "name", "values_by_key"),
    [
        ("official", "config.json", VALUES),
        ("diffusers", "transformer/config.json", DIFFUSERS_VALUES),
    ],
)
def test_hostile_values_in_a_config(
    layout: str, name: str, values_by_key: dict[str, list[Any]], tiny: Any, tmp_path: Path
) -> None:
    """Types and ranges are checked before a size from the file is allocated."""
    root = copy_checkpoint(tiny("t2v-1.3B", layout), tmp_path)
    messages, tensors = dict[str, str](), read_tensors(root)
    for key, values in values_by_key.items():
        messages |= collect_value_refusals(root, name, key, values, tensors)
    for case, sentence in messages.items():
        assert f"{root / name}" in sentence and "download" in sentence, case
        assert layout == "diffusers" or case.split()[0] in sentence, case
    if layout == "official":  # one sentence of each key
        firsts = {case.split()[0]: case for case in reversed(messages)}
        messages = {case: messages[case] for case in firsts.values()}
    check_messages(f"values of {'diffusers' if '/' in name else name}", messages)


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
    "flat patches without a bias": lambda h: (
        h["patch_embedding.weight"].update(shape=[96 * 16 * 4]),
        h.update({"x": h.pop("patch_embedding.bias")}),
    ),
    "flat FFN": lambda h: h["blocks.0.ffn.0.weight"].update(shape=[192 * 96]),
    "no first block": lambda h: h.update({"blocks.7.ffn.0.weight": h.pop("blocks.0.ffn.0.weight")}),
    "a block without a number": lambda h: h.update({"blocks.x.a": h.pop("blocks.0.ffn.0.bias")}),
    "a block far away": lambda h: h.update({"blocks.99999.a": h.pop("blocks.0.ffn.0.bias")}),
    "a tensor twice": lambda h: h.update(
        {"model.blocks.0.ffn.0.bias": h.pop("blocks.0.ffn.2.bias")}
    ),
}


def test_networks_that_are_no_others(folder: Path, tiny: Any, tmp_path: Path) -> None:
    """Networks with wrong tensors, layers, class or task; and experts that do not match."""
    file, messages = folder / f"{STEM}.safetensors", {}
    content = file.read_bytes()
    for case, change in NO_DIT.items():
        set_header(folder, change)
        messages[case] = refusal(folder)
        file.write_bytes(content)
    for key, value in {"num_layers": 3, "_class_name": "VaseWanModel", "model_type": "s2v"}.items():
        messages |= collect_value_refusals(folder, "config.json", key, [value])
    both = Path(shutil.copytree(tiny("t2v-A14B"), tmp_path / "both"))
    set_config(both / "low_noise_model", num_heads=20)
    messages["experts of other heads"] = refusal(both)
    shutil.rmtree(both / "low_noise_model")
    messages["half of a pair"] = refusal(both)
    shutil.copytree(tiny("i2v-A14B") / "low_noise_model", both / "low_noise_model")
    messages["experts of other tasks"] = refusal(both)
    shutil.rmtree(both / "high_noise_model")
    messages["the other half"] = refusal(both)
    check_messages("networks", messages)


def test_an_index_stays_in_its_folder(tiny: Any, tmp_path: Path) -> None:
    sharded = copy_checkpoint(tiny("ti2v-5B"), tmp_path)
    shutil.copy(next(sharded.glob("*-00001-*")), sharded.parent / "x.safetensors")
    index, messages = sharded / f"{STEM}.safetensors.index.json", {}
    record = json.loads(index.read_text())
    names = ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", 5, None, ["x"]]
    for name in names:
        record["weight_map"] |= {"head.head.bias": name}
        index.write_text(json.dumps(record))
        messages[repr(name)] = refusal(sharded)
    check_messages("places of an index", messages)


def test_shards_may_be_links(tiny: Any, tmp_path: Path) -> None:
    """Symbolic links, as in the cache of a model hub."""
    sharded = copy_checkpoint(tiny("ti2v-5B"), tmp_path)
    (tmp_path / "blobs").mkdir()
    for number, shard in enumerate(sorted(sharded.glob("*-of-*"))):
        shard.rename(tmp_path / "blobs" / str(number))
        shard.symlink_to(Path("..", "blobs", str(number)))
    files = inspect_checkpoint(sharded).list_files()
    assert len([file for file in files if file.parent == sharded]) == 4


@pytest.mark.parametrize("layout", ["official", "diffusers"])
def test_links_to_nothing(layout: str, tiny: Any, tmp_path: Path) -> None:
    """Instead of any file or folder of a checkpoint: named with their target, never passed over."""
    source = tiny("s2v-14B" if layout == "official" else "t2v-A14B", layout)
    paths = [path.relative_to(source) for path in sorted(source.rglob("*"))]
    passed_over = {}
    for index, broken in enumerate(paths):
        folder, target = tmp_path / str(index), ("../gone", paths[index].name)[index % 2]
        folder.mkdir()
        for path in (path for path in paths if not path.is_relative_to(broken)):
            if (source / path).is_dir():
                (folder / path).mkdir()
            else:
                (folder / path).symlink_to(source / path)
        (folder / broken).symlink_to(target)
        sentence = get_refusal(read_generation_config, folder) or refusal(folder)
        if str(folder / broken) not in sentence or f"link to {target}," not in sentence:
            passed_over[str(broken)] = sentence
    unread = {"scheduler", "scheduler/scheduler_config.json"}  # not needed here
    assert passed_over.keys() <= unread, passed_over


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Devices have no end, and pipes block their reader; the size of JSON is limited."""
    os.mkfifo(tmp_path / "pipe")
    messages, large = {}, tmp_path / "large.json"
    for path in (Path("/dev/zero"), Path("/dev/null"), tmp_path / "pipe", tmp_path):
        for reader in (read_json, read_safetensors_header):
            messages[f"{path.name[:4]} by {reader.__name__}"] = get_refusal(reader, path)
    with large.open("wb") as file:
        file.truncate(30 * 10**9)  # takes no space
    messages["30 GB of JSON"] = get_refusal(read_json, large)
    check_messages("what is no file", messages)


@pytest.mark.parametrize("task", [t for t in PRESETS if t != "t2v-14B"])  # has no tiny one
def test_published_networks_are_described_like_folders(task: str, tiny: Any) -> None:
    reference = make_reference_checkpoint(PRESETS[task])
    presets = PRESETS[task], *(x for x in PRESETS.values() if not PRESETS[task].keeps_kv)
    stored = inspect_checkpoint(tiny(task), presets=presets)
    check_task(stored, PRESETS[task])
    assert reference.folder is None and not reference.list_files()
    assert (reference.experts.keys(), reference.kind) == (stored.experts.keys(), stored.kind)
    assert (reference.num_heads, reference.head_dim) == (PRESETS[task].num_heads, 128)
    assert reference.config.keys() == stored.config.keys()
    same = ("model_type", "patch_size", "in_dim", "out_dim", "freq_dim", "text_len", "eps")
    for key in same:
        assert reference.config[key] == stored.config[key]  # type: ignore[literal-required]
    with pytest.raises(InputError, match="has no vae"):
        reference.require("vae")


@pytest.fixture
def speaking(tiny: Any, tmp_path: Path) -> Path:
    """A copy of an S2V checkpoint."""
    return copy_checkpoint(tiny("s2v-14B"), tmp_path)


def test_an_s2v_folder_among_files_of_others(speaking: Path, tiny: Any, tmp_path: Path) -> None:
    """A ComfyUI tree with networks of two tasks: each task loads the right one."""
    models = tmp_path / "models"
    (models / "diffusion_models").mkdir(parents=True)
    shards = sorted(speaking.glob("diffusion_pytorch_model*.safetensors"))
    state = {name: x for shard in shards for name, x in load_file(shard).items()}
    save_file(state, models / "diffusion_models" / "wan2.2_s2v_14B.safetensors")
    shutil.copy(speaking / "config.json", models / "diffusion_models")  # heads are not of 128 here
    t2v = tiny("t2v-1.3B")
    shutil.copy(t2v / f"{STEM}.safetensors", models / "diffusion_models" / "t2v.safetensors")
    shutil.copytree(speaking / WAV2VEC2_FOLDER, models / WAV2VEC2_FOLDER)
    checkpoint = inspect_checkpoint(models, presets=(PRESETS["s2v-14B"],))
    assert checkpoint.kind == "s2v" and checkpoint.audio_encoder == models / WAV2VEC2_FOLDER
    assert checkpoint.config["audio_inject_layers"] == (0, 1)  # type: ignore[typeddict-item]
    (models / "diffusion_models" / "config.json").unlink()
    assert inspect_checkpoint(models, presets=(PRESETS["t2v-1.3B"],)).kind == "t2v"


def test_the_sound_encoder_is_missing_or_another(speaking: Path) -> None:
    path = speaking / WAV2VEC2_FOLDER
    assert inspect_checkpoint(speaking).require("audio_encoder") == path
    audio_encoder.check_audio_encoder(path, 32)
    messages = {"another width": get_refusal(audio_encoder.check_audio_encoder, path, 1024)}
    set_config(path, num_hidden_layers=12)
    messages["fewer layers"] = get_refusal(audio_encoder.check_audio_encoder, path, 32)
    (path / "config.json").write_text("{")
    messages["half a file"] = get_refusal(audio_encoder.check_audio_encoder, path, 32)
    shutil.rmtree(path)
    messages["none"] = get_refusal(inspect_checkpoint(speaking).require, "audio_encoder")
    check_messages("sound encoders", messages)


CONFIGURATIONS: dict[str, dict[str, list[Any]]] = {
    "s2v-14B": {
        "model_type": ["t2v"],
        "enable_motioner": [True],
        "adain_mode": ["attn"],
        "zero_timestep": [False],
        "audio_dim": [768],
        "num_audio_token": [5],
        "audio_inject_layers": [[0, 4, 8], [0, 0], [0, 2], "all"],
    },
    "vace-1.3B": {
        "model_type": ["t2v"],
        "vace_in_dim": [64],
        "vace_layers": [[0, 1, 2], [1, 2], [0, 3], "all"],
    },
}


@pytest.mark.parametrize("task", CONFIGURATIONS)
def test_configurations_of_a_kind(task: str, tiny: Any, tmp_path: Path) -> None:
    tensors, messages = read_tensors(tiny(task)), dict[str, str]()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copy(tiny(task) / "config.json", folder)
    for key, values in CONFIGURATIONS[task].items():
        messages |= collect_value_refusals(folder, "config.json", key, values, tensors)
    check_messages(f"configurations of {task.partition('-')[0].upper()}", messages)


def test_an_animate_network_is_no_i2v(tiny: Any, tmp_path: Path) -> None:
    """Animate has I2V's input channels, and is refused by I2V because of its tensors."""
    animate = inspect_checkpoint(tiny("animate-14B"))
    assert (animate.kind, animate.config["model_type"]) == ("animate", "animate")
    messages = {"for i2v": get_refusal(check_task, animate, PRESETS["i2v-14B"])}
    shutil.copy(tiny("animate-14B") / "config.json", tmp_path)
    tensors = animate.experts["dit"].tensors
    messages |= collect_value_refusals(tmp_path, "config.json", "model_type", ["i2v"], tensors)
    check_messages("Animate", messages)


# Diffusers folders: the parts that model_index.json names.


@pytest.fixture
def pipeline(tiny: Any, tmp_path: Path) -> Path:
    """A Diffusers folder of two experts."""
    return Path(shutil.copytree(tiny("t2v-A14B", "diffusers"), tmp_path / "A14B-Diffusers"))


INDEX = "model_index.json"
NO_PART = {"transformer_2": [None, None]}


def test_parts_that_diffusers_names(pipeline: Path, tiny: Any, tmp_path: Path) -> None:
    """model_index.json may name one network, or have the boundary_ratio null, as diffusers'."""
    assert {*inspect_checkpoint(tiny("t2v-1.3B", "diffusers")).experts} == {"dit"}
    messages = {}
    for missing in ("transformer", "transformer_2"):
        (pipeline / missing).rename(tmp_path / "away")
        messages[f"no {missing}"] = refusal(pipeline)
        index_text = (pipeline / INDEX).read_text()
        set_config(pipeline, INDEX, **NO_PART)
        messages[f"no {missing}, but a boundary"] = refusal(pipeline)
        (pipeline / INDEX).write_text(index_text)
        (tmp_path / "away").rename(pipeline / missing)
    ratios = [0, 1, -0.5, 1.5, 10**400, "0.9", True, [], {}, float("nan")]
    messages |= collect_value_refusals(pipeline, INDEX, "boundary_ratio", ratios)
    classes = ["WanTransformer3DModel", 5, {}, [], ["diffusers"], True]
    messages |= collect_value_refusals(pipeline, INDEX, "transformer_2", classes)
    set_config(pipeline, INDEX, boundary_ratio=None)
    checkpoint = inspect_checkpoint(pipeline)
    assert [x.folder.name for x in checkpoint.experts.values()] == ["transformer"]
    messages["no boundary"] = get_refusal(check_task, checkpoint, PRESETS["t2v-A14B"])
    set_config(pipeline, INDEX, boundary_ratio=None, **NO_PART)
    shutil.rmtree(pipeline / "transformer_2")
    assert {*inspect_checkpoint(pipeline).experts} == {"dit"}
    set_config(pipeline, INDEX, transformer_2=["diffusers", "WanTransformer3DModel"])
    messages["a part without a boundary"] = refusal(pipeline)
    short = {case.replace("0" * 400, "0..."): text for case, text in messages.items()}
    check_messages("parts of diffusers", short)


def test_the_boundary_ratio_divides_the_steps(pipeline: Path) -> None:
    """By arithmetic: UniPC's four timesteps at shift 12 are 999, 972, 923 and 800."""
    steps = ("--task", "t2v-A14B", "--sample_steps", "4", "--sample_shift", "12")
    for ratio, high in ((0.9, 3), (0.95, 2), (0.417, 4)):
        set_config(pipeline, INDEX, boundary_ratio=ratio)
        run, _ = build_quick_pipeline(pipeline, *steps)
        assert make_noise_schedule(run.params).high_noise_steps == high
        assert run.boundary == ratio
        lines = report.describe_checkpoint_files(Planner(run.setup, run.params))
        assert f"boundary_ratio of model_index.json: {ratio}" in "\n".join(lines)
    model = WanT2V("t2v-A14B", str(pipeline))
    call = {"input_prompt": "a", "sampling_steps": 4, "shift": 12.0}
    arguments = bind_arguments(model.generate, call, {}, {})
    call_params, _ = model._make_call_params(arguments, model._setup)
    assert make_noise_schedule(call_params).high_noise_steps == high


def test_ranks_compare_the_content_of_every_part(pipeline: Path) -> None:
    """One changed byte in the middle of any file changes the fingerprint."""
    set_config(pipeline, INDEX, boundary_ratio=0.875)
    files = [pipeline / f"{part}/config.json" for part in ("vae", "text_encoder")]
    files += [pipeline / INDEX, pipeline / "tokenizer/tokenizer.json"]
    for part in ("transformer_2", "vae", "text_encoder"):
        files.append(next((pipeline / part).glob("*.safetensors")))
    fingerprints = {compute_fingerprint(inspect_checkpoint(pipeline).list_files())}
    for file in files:
        original = file.read_bytes()
        content = bytearray(original)
        digits = (i for i in range(len(content) // 2, len(content)) if content[i] in b"0123456789")
        middle = next(digits)
        content[middle] = ord("7" if content[middle] != ord("7") else "6")
        file.write_bytes(content)
        fingerprints.add(compute_fingerprint(inspect_checkpoint(pipeline).list_files()))
        file.write_bytes(original)
    assert len(fingerprints) == 1 + len(files)


def test_a_class_warns_about_another_task(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    WanT2V("t2v-A14B", str(tiny("t2v-1.3B")))
    assert "runs as t2v-" in caplog.text and "not as t2v-A14B" in caplog.text
    caplog.clear()
    WanT2V("t2v-A14B", str(tiny("t2v-A14B")))
    assert "runs as" not in caplog.text


# Shards passed as single files.


@pytest.fixture
def shards(folder: Path) -> list[Path]:
    """The network of the folder, moved into two shards in the parent folder."""
    tensors = load_file(folder / f"{STEM}.safetensors")
    (folder / f"{STEM}.safetensors").unlink()
    paths = [folder.parent / f"wan.bf16-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for number, path in enumerate(paths):
        part = {n: x for n, x in tensors.items() if n.startswith("blocks.1.") == bool(number)}
        save_file(part, path)
    return paths


def test_a_shard_brings_the_others(shards: list[Path], folder: Path, tiny: Any) -> None:
    tensor_names = inspect_checkpoint(tiny("t2v-1.3B")).experts["dit"].tensors.keys()
    for shard in shards:
        checkpoint = inspect_checkpoint(folder, NetworkFiles(dit=shard), (PRESETS["t2v-1.3B"],))
        assert checkpoint.experts["dit"].tensors.keys() == tensor_names
        assert {*shards} <= {*checkpoint.list_files()}
    for path in shards:
        path.rename(folder / path.name)
    assert inspect_checkpoint(folder).experts["dit"].tensors.keys() == tensor_names


def test_shards_that_are_refused(shards: list[Path], folder: Path) -> None:
    """Shards without the others, with a wrong number, or with a tensor of another shard."""
    messages: dict[str, str] = {}
    for missing, other in (shards, shards[::-1]):
        content = missing.read_bytes()
        missing.unlink()
        messages[f"no {missing.name}"] = get_refusal(
            inspect_checkpoint, folder, NetworkFiles(dit=other)
        )
        other.rename(folder / other.name)
        messages[f"no {missing.name} there"] = refusal(folder)
        (folder / other.name).rename(other)
        missing.write_bytes(content)
    for name in ("w-00003-of-00002", "w-00000-of-00002", "w-00001-of-99999999"):
        path = folder.parent / f"{name}.safetensors"
        shutil.copy(shards[0], path)
        messages[name] = get_refusal(inspect_checkpoint, folder, NetworkFiles(dit=path))
    shutil.copy(shards[0], shards[1])
    messages["a tensor twice"] = get_refusal(
        inspect_checkpoint, folder, NetworkFiles(dit=shards[0])
    )
    check_messages("shards", messages)


def read_published_config(task: str, count: int, controls: int | None = None) -> Any:
    """Reads the configuration of a published network's first blocks from shapes in headers."""
    config: Any = make_reference_checkpoint(PRESETS[task]).config
    dim, controls = config["dim"], controls or len(config.get("vace_layers", ()))
    shapes = {
        "patch_embedding.weight": (dim, 16, 1, 2, 2),
        "time_embedding.0.weight": (dim, 256),
        "text_embedding.0.weight": (dim, 4096),
        "head.head.weight": (64, dim),
        "blocks.0.self_attn.norm_q.weight": (dim,),
        **{f"blocks.{i}.ffn.0.weight": (config["ffn_dim"], dim) for i in range(count)},
        **{f"vace_blocks.{i}.x": (1,) for i in range(controls)},
    }
    if controls:
        shapes["vace_patch_embedding.weight"] = (dim, 96, 1, 2, 2)
    file = Path("x.safetensors")
    tensors = {name: TensorInfo(file, name, "BF16", shape, 0) for name, shape in shapes.items()}
    return read_dit_config(file, tensors)


def test_published_networks_without_a_config() -> None:
    """The first blocks of one, as in a shard under another name, are no network."""
    assert read_published_config("t2v-1.3B", 30)["num_layers"] == 30
    with pytest.raises(InputError, match="has 20 blocks"):
        read_published_config("t2v-1.3B", 20)
    for task in ("vace-1.3B", "vace-14B"):
        reference: Any = make_reference_checkpoint(PRESETS[task]).config
        config = read_published_config(task, reference["num_layers"])
        assert config["vace_layers"] == reference["vace_layers"]


def test_control_layers_that_are_no_divisor_of_the_layers() -> None:
    """They begin with the first layer, at equal distances."""
    for controls, distance in ((7, 4), (8, 3), (9, 3), (14, 2), (16, 1), (30, 1)):
        config = read_published_config("vace-1.3B", 30, controls)
        assert config["vace_layers"] == tuple(distance * i for i in range(controls)), controls


def test_flat_patches_that_fit_no_convolution_keep_their_shape() -> None:
    for weight, bias in (((384,), (0,)), ((100,), (96,))):
        shapes = {"patch_embedding.weight": weight, "patch_embedding.bias": bias}
        tensors = {name: TensorInfo(Path("x"), name, "BF16", x, 0) for name, x in shapes.items()}
        assert restore_patch_axes(tensors) == tensors


# Names of chosen experts.


def test_a_chosen_file_of_another_expert(folder: Path) -> None:
    path, messages = folder.rename(folder.parent / "x") / f"{STEM}.safetensors", {}
    wrong_names = {"dit_low_noise": "wan_high", "dit_high_noise": "Wan-LowNoise"}
    for flag, name in (wrong_names | {"dit": "wan_high_noise_14B"}).items():
        path = path.rename(path.with_name(f"{name}.safetensors"))
        messages[flag] = get_refusal(inspect_checkpoint, path.parent, NetworkFiles(**{flag: path}))
    one_network = (PRESETS["t2v-14B"],)
    messages["half of a pair"] = get_refusal(inspect_checkpoint, path.parent, presets=one_network)
    check_messages("chosen experts", messages)


def test_files_of_tensors_that_are_joined_are_of_the_checkpoint(tmp_path: Path) -> None:
    """A shard may hold only one of Animate's keys and values, which are joined."""
    parts = [TensorInfo(tmp_path / name, name, "F32", (2,), 8) for name in ("k", "v")]
    both = TensorInfo(tmp_path / "k", "k", "F32", (4,), 16, chunks=(parts[0], parts[1]))
    plain = make_reference_checkpoint(PRESETS["animate-14B"])
    (expert,) = plain.experts
    files = replace(plain.experts[expert], tensors={"kv": both})
    assert replace(plain, experts={expert: files}).list_files() == [tmp_path / "k", tmp_path / "v"]
