"""Layers of settings, sizes and file names: the parts of generate.py without a network."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.pipelines import fail_on_demo, read_values, resolve_plan
from tests.refusals import check_refusals, get_refusal
from tools import flags_table
from tools.make_sound import write_wav
from wan import cli
from wan.app import flag_parser, prompt_extend
from wan.app.notices import make_video_file_name
from wan.app.resolve import ResolveContext, resolve_video
from wan.app.run import Run
from wan.settings.command import Output
from wan.settings.errors import InputError
from wan.settings.fields import list_options
from wan.settings.flags import FLAGS
from wan.settings.guidance import GUIDERS
from wan.settings.presets import NEGATIVE_PROMPT, PRESETS
from wan.settings.step_cache import POLICIES
from wan.settings.values import list_names
from wan.tasks.base import make_video_params
from wan.tasks.image2video import compute_i2v_size
from wan.tasks.video2video import compute_ti2v_size
from wan.utils.env import find_cache_dir, rank, world_size


def resolve_flags(*argv: object) -> Run:
    return resolve_video(
        ResolveContext(make_demo=fail_on_demo), flag_parser.parse_flags([str(a) for a in argv])
    )


def test_official_defaults(tiny, tmp_path: Path) -> None:
    """Of the flags that neither the command nor the checkpoint has."""
    requests = []
    for task in ("t2v-A14B", "ti2v-5B"):
        folder = link_without_config(tiny(task), tmp_path / task)
        requests.append(resolve_flags("--task", task, "--ckpt_dir", folder).params)
    t2v, ti2v = requests
    assert (t2v.size, t2v.frame_num, t2v.grid) == ((1280, 720), 81, (21, 45, 80))
    assert (t2v.sample_steps, t2v.sample_shift, t2v.boundary) == (40, 12.0, 0.875)
    assert t2v.sample_guide_scale == (3.0, 4.0) and t2v.sample_solver == "unipc"
    assert t2v.negative_prompt == NEGATIVE_PROMPT and t2v.base_seed >= 0
    assert (ti2v.size, ti2v.frame_num, ti2v.sample_steps) == ((1280, 704), 121, 50)
    assert ti2v.grid == (31, 22, 40) and ti2v.boundary is None
    i2v = PRESETS["i2v-A14B"]
    assert (i2v.sample_shift, i2v.boundary, i2v.sample_guide_scale) == (5.0, 0.9, (3.5, 3.5))


def link_without_config(source: Path, folder: Path) -> Path:
    """The checkpoint without its generation_config.json."""
    folder.mkdir()
    for item in source.iterdir():
        if item.name != "generation_config.json":
            (folder / item.name).symlink_to(item)
    return folder


def test_flags_over_record_over_checkpoint_over_presets(tiny, tmp_path: Path) -> None:
    folder = link_without_config(tiny("t2v-A14B"), tmp_path / "bare")
    config = {"sample_steps": 4, "sample_shift": 3, "frame_num": 9, "sample_guide_scale": 1}
    (folder / "generation_config.json").write_text(json.dumps(config))
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"settings": {"sample_steps": 5, "sample_shift": 4}}))
    run = resolve_flags("--ckpt_dir", folder, "--from_json", record, "--sample_steps", 6)
    assert run.params.sample_steps == 6
    assert run.params.sample_shift == 4
    assert run.params.frame_num == 9 and run.params.sample_guide_scale == (1.0, 1.0)
    assert run.params.size == (1280, 720)


def test_the_record_repeats_itself(tiny, tmp_path: Path) -> None:
    args = ["--ckpt_dir", tiny("t2v-A14B"), "--sample_guide_scale", "2,3", "--vae_tiling"]
    first = resolve_flags(*args, "--offload_model", "f", "--save_file", tmp_path / "x.mp4")
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"settings": first.settings}))
    repeated = resolve_flags("--from_json", path, "--save_file", tmp_path / "x.mp4")
    for part in ("params", "setup", "output"):
        assert getattr(repeated, part) == getattr(first, part)


def test_pairs_and_official_boolean_words() -> None:
    pairs = {"5": (5.0, 5.0), "3,4": (3.0, 4.0), "1.5, 2": (1.5, 2.0)}
    booleans = dict.fromkeys(("yes", "TRUE", "t", "y", "1"), True) | {"No": False}
    for name, values in (("sample_guide_scale", pairs), ("offload_model", booleans)):
        assert {
            raw: flag_parser.parse_flags([f"--{name}", raw]).values[name] for raw in values
        } == values


def test_an_empty_prompt_stays_empty(tiny) -> None:
    assert resolve_flags("--ckpt_dir", tiny("t2v-A14B"), "--prompt", "").params.prompt == ""
    request = resolve_flags("--ckpt_dir", tiny("t2v-A14B"), "--negative_prompt", "").params
    assert request.negative_prompt == NEGATIVE_PROMPT


def test_every_official_flag_is_known_or_refused_by_name() -> None:
    official = """
        task size frame_num ckpt_dir offload_model ulysses_size t5_fsdp t5_cpu dit_fsdp save_file
        prompt use_prompt_extend prompt_extend_method prompt_extend_model prompt_extend_target_lang
        base_seed image sample_solver sample_steps sample_shift sample_guide_scale
        convert_model_dtype src_root_path refert_num replace_flag use_relighting_lora num_clip audio
        enable_tts tts_prompt_audio tts_prompt_text tts_text pose_video start_from_ref infer_frames
    """
    assert {*official.split()} <= FLAGS.keys() | flag_parser.UNSUPPORTED_FLAGS
    assert not set(FLAGS) & set(flag_parser.UNSUPPORTED_FLAGS)


@pytest.mark.parametrize(
    ("size", "shift"), [((832, 480), 3.0), ((480, 832), 3.0), ((1280, 720), 5.0), ((480, 480), 5.0)]
)
def test_the_shift_of_a_small_video(size: tuple[int, int], shift: float) -> None:
    """Wan2.1's image models have it in both orientations; an explicit value takes precedence."""
    preset = PRESETS["i2v-14B"]
    assert make_video_params(preset, {"size": size}, size).sample_shift == shift
    assert make_video_params(preset, {"size": size, "sample_shift": 7.0}, size).sample_shift == 7.0


AT_ONCE = [  # not clip by clip, or in whole blocks
    task for task, preset in PRESETS.items() if preset.infer_frames is None and not preset.keeps_kv
]


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 20), st.sampled_from(AT_ONCE))
def test_legal_sizes_are_whole_tokens(w: int, h: int, n: int, task: str) -> None:
    preset = PRESETS[task]
    size = (w * preset.size_multiple, h * preset.size_multiple)
    request = make_video_params(preset, {"size": size, "frame_num": 4 * n + 1})
    assert request.grid == (n + 1 + preset.kind.startswith("animate"), h, w)
    _z, _f, lat_h, lat_w = request.latent_shape
    assert (lat_h * preset.vae_stride[1], lat_w * preset.vae_stride[2]) == size[::-1]


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([399360, 901120, 921600]))
def test_sizes_for_any_image_fit_the_task_or_are_refused(w: int, h: int, area: int) -> None:
    for rule, task in ((compute_i2v_size, "i2v-A14B"), (compute_ti2v_size, "ti2v-5B")):
        preset = PRESETS[task]
        try:
            size = rule(preset, (w, h), area)
        except InputError as error:
            assert "would vanish" in str(error)
            continue
        assert size[0] % preset.size_multiple == 0 == size[1] % preset.size_multiple
        assert 0 < size[0] * size[1] <= area * 1.0001


@pytest.mark.parametrize(
    "prompt", ["", "..", '/\\*?"<>|:\n\r\t\0 \x1b\u2028', "猫" * 300, "a b" * 100, "\u202e.mp4"]
)
def test_generated_names_are_safe(prompt: str) -> None:
    values = {"prompt": prompt, "size": (64, 64), "frame_num": 1, "base_seed": 7}
    name = make_video_file_name("t2v-A14B", make_video_params(PRESETS["t2v-A14B"], values))
    assert name.startswith("t2v-A14B_64x64_") and name.endswith(".mp4")
    assert len(name.encode()) < 140 and name.isprintable()
    assert not set(name) & set('/\\*?"<>|: ')


def test_environment() -> None:
    assert world_size({}) == 1 and world_size({"WORLD_SIZE": "8"}) == 8
    assert find_cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/wan")
    assert rank({"WORLD_SIZE": "8", "RANK": "7"}) == 7
    assert "WORLD_SIZE" in get_refusal(world_size, {"WORLD_SIZE": "0"})
    refusal = get_refusal(rank, {"WORLD_SIZE": "8", "RANK": "8"})
    assert "RANK is 8, but WORLD_SIZE is 8, so ranks are 0 to 7" in refusal


def latents_file(path: Path, name: str = "latents", **metadata: str) -> Path:
    save_file({name: torch.zeros(16, 2, 8, 8)}, path, metadata=metadata)
    return path


def test_latents_of_others_are_refused(tmp_path: Path) -> None:
    hostile = {"none": {}, "nested": "[" * 100_000, "digits": "9" * 5000, "cut off": "{"}
    path, messages = tmp_path / "x.safetensors", {}
    for case, value in hostile.items():
        latents_file(path, **({"settings": value} if value else {}))
        messages[f"settings: {case}"] = get_refusal(resolve_flags, "--decode_latents", path)
    latents_file(path, "other")
    messages["no latents"] = get_refusal(resolve_flags, "--decode_latents", path)
    check_refusals("settings: latents of others", messages)


def test_latents_do_not_choose_where_the_video_goes(tiny, tmp_path: Path) -> None:
    """Their settings give the base name at most, which never is that of an existing file."""
    path, task = tmp_path / "x.safetensors", "t2v-A14B"

    def target(name: str, *more: object) -> Path:
        settings = {"task": task, "ckpt_dir": str(tiny(task)), "save_file": name}
        latents_file(path, settings=json.dumps(settings), format="pt")
        return resolve_flags("--decode_latents", path, *more).output.save_file

    for name in ("../../other/v.mp4", "/nowhere/v.mp4", "~/v.mp4", "C:\\v.mp4"):
        assert target(name) == tmp_path / "v.mp4", name
    (tmp_path / "v.mp4").touch()
    (tmp_path / "v-2.json").touch()
    assert target("/nowhere/v.mp4") == tmp_path / "v-3.mp4"
    assert target("v.mp4", "--save_file", tmp_path / "mine.mp4") == tmp_path / "mine.mp4"


def test_latents_have_the_sizes_of_their_settings(tiny, tmp_path: Path) -> None:
    """Two latent frames are 1 + 4 frames; an image chooses the size at most."""
    path, task = tmp_path / "x.safetensors", "t2v-A14B"
    settings = {"task": task, "ckpt_dir": str(tiny(task))}
    latents_file(path, settings=json.dumps(settings), format="pt")
    assert resolve_flags("--decode_latents", path).params.frame_num == 5
    settings |= {"image": str(tmp_path / "x.png"), "frame_num": 9}
    latents_file(path, settings=json.dumps(settings), format="pt")
    refusal = get_refusal(resolve_flags, "--decode_latents", path)
    assert "whose frame_num is 5, and its settings say 9" in refusal


def test_planned_devices_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip is an NPU, and at most 4096 ranks are planned."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = ("--task", "t2v-14B")
    assert resolve_plan(*task, "--chip", "A5", "--device", "npu").setup.execution.device == "npu"
    assert resolve_plan(*task, "--ring_size", 4096).setup.parallel.ring_size == 4096
    refusal = get_refusal(resolve_plan, *task, "--ring_size", 4096, "--cfg_size", 2)
    assert "give at most 4096" in refusal


def test_lists_of_names() -> None:
    assert list_names("abc") == "a, b, c"
    assert list_names("abcd") == "a, b, c and 1 more"


# Flag -> (a value other than its default as text, the parsed value, required flags).
TWO, NPU, RAIN = ("--ulysses_size", "2"), ("--device", "npu"), ("--use_rainfusion",)
EXTEND, S2V = ("--use_prompt_extend",), ("--task", "s2v-14B")
VACE = ("--task", "vace-14B")
CAUSAL = ("--task", "causal-1.3B")
ANIMATE, I2V = ("--task", "animate-14B"), ("--task", "i2v-A14B")
SOURCE = ("--src_video", str(Path(__file__).parents[2] / "examples/control/source.mp4"))
CASES: dict[str, tuple[str, object, tuple[str, ...]]] = {
    "prompt": ("a dog", "a dog", ()),
    "negative_prompt": ("blur", "blur", ()),
    "size": ("832*480", (832, 480), ()),
    "frame_num": ("5", 5, ()),
    "base_seed": ("3", 3, ()),
    "infer_frames": ("48", 48, S2V),
    "num_clip": ("3", 3, S2V),
    "chain": ("latent", "latent", I2V),
    "clip_prompts": ("a dog", ("a dog",), I2V),
    "num_frame_per_block": ("1", 1, CAUSAL),
    "local_attn_size": ("12", 12, CAUSAL),
    "sink_size": ("3", 3, CAUSAL),
    "start_from_ref": ("true", True, S2V),
    "refert_num": ("5", 5, ANIMATE),
    "replace_flag": ("true", True, ANIMATE),
    "log_scale": ("-1.3", -1.3, ("--task", "animate2-14B")),
    "conditioning_scale": ("0.5", (0.5,), VACE),
    "sample_solver": ("dpm++", "dpm++", ()),
    "sigmas": ("beta", "beta", ()),
    "timesteps": ("1000,500.5", (1000.0, 500.5), ("--sample_solver", "dmd")),
    "boundary_step": ("3", 3, ()),
    "ode": ("true", True, ("--sample_solver", "rcm", "--sample_steps", "4")),
    "sigma_max": ("160", 160.0, ("--sample_solver", "rcm", "--sample_steps", "4")),
    "sample_steps": ("7", 7, ()),
    "sample_shift": ("3", 3.0, ()),
    "sample_guide_scale": ("2,5", (2.0, 5.0), ()),
    "guider": ("apg:eta=.5", "apg:eta=0.5", ()),
    "slg_blocks": ("9-10:start=0.20", "9,10:start=0.2", ()),
    "nag_scale": ("5.0:norm=l2", "5:norm=l2", ()),
    "noise_device": ("device", "device", ()),
    "device": ("cpu", "cpu", ()),
    "precision": ("fp32", "fp32", ()),
    "convert_model_dtype": ("true", True, ()),
    "stored_weights": ("upcast", "upcast", ()),
    "offload_model": ("block", "block", ()),
    "resident_blocks": ("4", 4, ("--offload_model", "block")),
    "t5_cpu": ("true", True, ()),
    "compile": ("true", True, ()),
    "vae_tiling": ("true", True, ()),
    "vae_precision": ("bf16", "bf16", ()),
    "vae_parallel": ("true", True, TWO),
    "overlap_decoding": ("true", True, ()),
    "attention_backend": ("laser", "laser", NPU),
    "fa_quant": ("fp8", "fp8", ()),
    "quant_alltoall": ("true", True, ("--fa_quant", "fp8", *TWO)),
    "use_rainfusion": ("true", True, ()),
    "sparsity": ("0.5", 0.5, RAIN),
    "sparse_start_step": ("2", 2, RAIN),
    "rainfusion_type": ("v3", "v3", RAIN),
    "mask_refresh_interval": ("4", 4, RAIN),
    "fused_ops": ("layer_norm,rope", ("rope", "layer_norm"), NPU),
    "fa_freq_cap": ("1400", (1400, 1650), NPU),
    "step_cache": ("mag:warmup=3", "mag:warmup=3", ()),
    "use_attentioncache": ("true", True, ()),
    "attentioncache_ratio": ("1.5", 1.5, ("--use_attentioncache",)),
    "attentioncache_interval": ("3", 3, ("--use_attentioncache",)),
    "start_step": ("4", 4, ("--use_attentioncache",)),
    "end_step": ("30", 30, ("--step_cache", "attention")),
    "cfg_size": ("2", 2, ()),
    "ring_size": ("2", 2, ()),
    "ulysses_size": ("2", 2, ()),
    "ring_type": ("bidirectional", "bidirectional", ("--ring_size", "2")),
    "exchange": ("fused", "fused", TWO),
    "comm_type": ("1", 1, TWO),
    "chunks": ("3", 3, (*TWO, "--comm_type", "1")),
    "fa_alltoall_overlap": ("true", True, TWO),
    "t5_fsdp": ("true", True, TWO),
    "dit_fsdp": ("true", True, TWO),
    "dist_timeout": ("5", 5.0, TWO),
    "prompt_extend_method": ("dashscope", "dashscope", EXTEND),
    "prompt_extend_model": ("me/model", "me/model", EXTEND),
    "prompt_extend_target_lang": ("en", "en", EXTEND),
    "save_file": ("/tmp/v.mp4", Path("/tmp/v.mp4"), ()),
    "preview": ("2", 2, ()),
    "strength": ("0.3", 0.3, SOURCE),
    "refine": ("true", True, SOURCE),
    "fps": ("5", 5.0, ()),
    "save_latents": ("steps", "steps", ()),
    "stream": ("true", True, ()),
    "trace": ("/tmp/trace", Path("/tmp/trace"), ()),
    "trace_steps": ("0-2,5", (0, 1, 2, 5), ("--trace", "/tmp/trace")),
    "trace_kernels": ("true", True, ("--trace", "/tmp/trace")),
    "log_level": ("debug", "debug", ()),
}
INDIRECT_FLAGS = {  # flags without a field of the same name in a run
    *("prompt_file", "skip_existing", "group_by_expert", "power"),
    *("task", "image", "last_image", "ckpt_dir", "quant_dit_path", "use_prompt_extend"),
    *("dit", "dit_high_noise", "dit_low_noise", "text_encoder", "vae"),
    *("lora", "lora_high_noise", "lora_low_noise", "lora_dir", "use_relighting_lora", "recipe"),
    *("lora_folder", "video_lora", "lora_cache"),
    *("audio", "pose_video", "audio_sync", "src_root_path"),
    *("src_video", "src_mask", "src_ref_images"),
    *("plan", "device_memory", "nodes", "link_gbs", "chip"),
    *("decode_latents", "fixed_latents", "from_json"),
}


@pytest.fixture(autouse=True)
def no_check_of_prompt_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages may be missing here."""
    monkeypatch.setattr(prompt_extend, "check_prompt_extension", lambda *_: None)


def collect_fields(run: Run) -> dict[str, object]:
    setup = run.setup
    parts = (run.params, setup.execution, setup.parallel, setup.attention, setup.cache, run.output)
    fields = {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)}
    return fields | (vars(run.prompt_extension) if run.prompt_extension else {})


def test_each_flag_reaches_the_run_and_its_record() -> None:
    """A run without the flag has another value."""
    assert FLAGS.keys() - CASES.keys() == INDIRECT_FLAGS
    failures = {}
    default_fields = functools.cache(lambda *more: collect_fields(resolve_plan(*more)))
    for name, (text, value, more) in CASES.items():
        run = resolve_plan(*more, f"--{name}", text)
        record = read_values(json.loads(json.dumps(run.settings)))
        actual = collect_fields(run)[name], record.get(name), default_fields(*more)[name] != value
        if actual != (value, value if FLAGS[name].record else None, True):
            failures[name] = actual
    assert not failures


def test_a_switch_of_a_record_is_turned_back(tmp_path: Path) -> None:
    path, failures = tmp_path / "record.json", {}
    switches = [n for n in CASES if isinstance(CASES[n][1], bool) and FLAGS[n].record]
    for name in switches:
        _, value, more = CASES[name]
        path.write_text(json.dumps({"settings": {name: value}}))
        repeated = resolve_plan("--from_json", path, *more)
        reverted = resolve_plan("--from_json", path, *more, f"--{name}", not value)
        fields = [collect_fields(run)[name] for run in (repeated, reverted)]
        if (*fields, reverted.settings[name]) != (value, not value, not value):
            failures[name] = fields
    assert len(switches) > 9 and not failures


def test_a_record_has_no_setting_without_the_one_it_needs() -> None:
    settings = resolve_plan("--task", "t2v-A14B").settings
    needed = {name: FLAGS[name].needs for name in settings}
    assert not [name for name, other in needed.items() if other and not settings.get(other)]


def test_a_folder_of_loras_is_recorded_if_the_video_has_one(tiny, tmp_path: Path) -> None:
    """Otherwise a repetition would need the folder."""
    pair = {"up": torch.ones(240, 2), "down": torch.ones(2, 240)}
    tensors = {f"blocks.0.self_attn.q.lora_{name}.weight": x for name, x in pair.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    flags = ("--ckpt_dir", tiny("t2v-A14B"), "--lora_folder", tmp_path)
    assert "lora_folder" not in resolve_plan(*flags).settings
    assert resolve_plan(*flags, "--video_lora", "x").settings["lora_folder"] == str(tmp_path)


def test_the_audio_limits_the_clips(tiny, image_path: Path, tmp_path: Path) -> None:
    """Also those that a user asks for: one second has two clips of half a second."""
    start = ("--task", "s2v-14B", "--ckpt_dir", tiny("s2v-14B"), "--image", image_path)
    start += ("--audio", write_wav(tmp_path / "a.wav", 0.9), "--infer_frames", 8)
    for flags, number in (((), 2), (("--num_clip", 1), 1), (("--num_clip", 50), 2)):
        assert resolve_flags(*start, *flags).params.num_clip == number, flags


def test_prompt_extension_of_a_record_is_turned_off(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    settings = resolve_plan(*EXTEND).settings
    del settings["ckpt_dir"]
    path.write_text(json.dumps({"settings": settings}))
    arguments = ("--from_json", path)
    assert resolve_plan(*arguments).prompt_extension is not None
    extended = resolve_plan(*arguments).with_prompt("longer").settings
    assert (extended["prompt"], extended["use_prompt_extend"]) == ("longer", False)
    disabled = resolve_plan(*arguments, *EXTEND, "false")
    assert disabled.prompt_extension is None and disabled.settings["use_prompt_extend"] is False


def test_a_video_that_is_there_is_announced(tiny, tmp_path: Path) -> None:
    out = tmp_path / "v.mp4"
    args = ("--ckpt_dir", tiny("t2v-A14B"), "--save_file", out)
    notice = f"{out} exists and will be replaced."
    assert notice not in resolve_flags(*args).notices
    out.touch()
    assert notice in resolve_flags(*args).notices


def test_the_tables_of_the_documents() -> None:
    for page, _ in flags_table.TABLES:
        text = (flags_table.DOCS / page).read_text(encoding="utf-8")
        assert text == flags_table.render_page(page), "run python tools/flags_table.py"


def test_every_flag_is_read_where_it_acts() -> None:
    """A field that nothing reads would be accepted, recorded, and change nothing.

    So would a parameter of a guider or a step cache. Names in the declarations of the settings
    (fields, rows of tables, rules) do not read a field: of those modules, only functions count.
    Those of the output are followed by tests/cli/test_output.py.
    """
    wan = Path(cli.__file__).parents[1]
    read_names = {"attentioncache_ratio"}  # of the Ascend adaptation; documented as without effect
    for path in wan.rglob("*.py"):
        texts = [path.read_text()]
        if path.parent.name == "settings":
            nodes = ast.walk(ast.parse(texts[0]))
            functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
            texts = ["" if path.stem == "rules" else ast.unparse(node) for node in functions]
        for text in texts:
            read_names |= set(re.findall(r"""(?:\.|["'])([a-z]\w+)""", text))
    rows = (*GUIDERS.values(), *POLICIES.values())
    parameters = {name for row in rows for name in row.parameters}
    unread = (FLAGS.keys() | parameters) - list_options(Output).keys() - read_names
    assert not unread, sorted(unread)
