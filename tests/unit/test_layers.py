"""Settings of one video over shared settings, in each front end: the same video, or a refusal.

A row has the shared settings, those of one video, and settings of a single layer that give the same
video; None: refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import wan
from tests.pipelines import fail_on_demo, resolve_plan
from tests.refusals import get_refusal
from wan.app import flag_parser, resolve
from wan.app.call_arguments import bind_arguments
from wan.app.resolve import ResolveContext, make_line_resolver, resolve_settings
from wan.app.run import Run, list_changed_settings
from wan.checkpoint.layout import inspect_checkpoint
from wan.pipeline.pipeline import Pipeline
from wan.planner import report
from wan.serve.jobs.job import ServiceJob
from wan.serve.requests import fields
from wan.settings.errors import KEYWORD_NAMING, InputError
from wan.settings.flags import PYTHON_KEYWORDS
from wan.settings.layers import Layer, merge
from wan.settings.removed import REMOVED
from wan.tasks.base import VideoParams

Settings = dict[str, Any]
DEMO = str(Path(wan.__file__).parents[1] / "examples" / "demo" / "t2v-A14B")
COMMON = {"ckpt_dir": DEMO, "size": "64*64", "frame_num": 5, "base_seed": 1}
LISTED = {"sample_solver": "euler", "timesteps": "1000,900,500,300"}
RCM = {"sample_solver": "rcm", "sample_steps": 2}
EULER = {"sample_solver": "euler", "sample_steps": 2}
APG = {"guider": "apg:eta=0.5", "sample_steps": 2, "sample_guide_scale": 3}
ROWS: list[tuple[Settings, Settings, Settings | None]] = [
    (LISTED, {"sample_steps": 8}, {"sample_solver": "euler", "sample_steps": 8}),
    (LISTED, {"sample_shift": 3, "sample_steps": 2}, {**EULER, "sample_shift": 3}),
    (LISTED, {"sigmas": "beta", "sample_steps": 2}, {**EULER, "sigmas": "beta"}),
    (LISTED, {"sample_solver": "unipc", "sample_steps": 2}, {"sample_steps": 2}),
    (
        {**EULER, "sample_shift": 3, "boundary_step": 1, "sigmas": "beta"},
        {"timesteps": "900,300"},
        {"sample_solver": "euler", "timesteps": "900,300"},
    ),
    ({**EULER, "boundary_step": 2}, {"sample_steps": 3}, {**EULER, "sample_steps": 3}),
    ({**RCM, "ode": True, "sigma_max": 90}, {"sample_solver": "unipc"}, {"sample_steps": 2}),
    (RCM, {"sample_shift": 3}, None),
    ({**EULER, "sample_shift": 3, "sigmas": "beta"}, {"sample_solver": "rcm"}, RCM),
    (
        {"sample_solver": "rcm", "timesteps": "900,300"},
        {"sigma_max": 90, "sample_steps": 2},
        {**RCM, "sigma_max": 90},
    ),
    (
        {**RCM, "sigma_max": 90},
        {"timesteps": "900,300"},
        {"sample_solver": "rcm", "timesteps": "900,300"},
    ),
    (
        APG,
        {"guider": "cfg_zero:zero_init_steps=1"},
        {"guider": "cfg_zero:zero_init_steps=1", "sample_steps": 2, "sample_guide_scale": 3},
    ),
    (
        {**APG, "slg_blocks": "1:start=0.2"},
        {"sample_guide_scale": 1},
        {"sample_steps": 2, "sample_guide_scale": 1},
    ),
    (
        {"sample_steps": 8, "sample_shift": 3, "sample_guide_scale": 3},
        {"recipe": "rcm-4step"},
        {"recipe": "rcm-4step"},
    ),
    ({"recipe": "rcm-4step"}, {"sample_shift": 3}, None),
    # Exclusive or useless settings of one layer.
    ({}, {**LISTED, "sample_steps": 8}, None),
    ({}, {**LISTED, "sample_shift": 3}, None),
    ({}, {**RCM, "sample_shift": 3}, None),
    ({}, {"strength": 0.5}, None),
]


inspect_once = cache(inspect_checkpoint)


def resolve_one(flags: Layer, **options: Any) -> Run:
    """Resolves the settings of one video; the folder is read once for all tests."""
    context = ResolveContext(make_demo=fail_on_demo, inspect_folder=inspect_once, **options)
    return resolve.resolve_video(context, flags)


@pytest.fixture(autouse=True)
def _cheap_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a prompt file share the folder, too; memory is not estimated."""
    monkeypatch.setattr(resolve, "inspect_checkpoint", inspect_once)
    monkeypatch.setattr(resolve, "check_memory", lambda *_: None)


def parse(settings: Settings) -> Layer:
    """Parses settings as flags of a command line."""
    return flag_parser.parse_flags([f"--{name}={value}" for name, value in settings.items()])


def resolve_record(shared: Settings, video: Settings, folder: Path) -> VideoParams:
    record = folder / "record.json"
    run = resolve_one(parse({**COMMON, **shared, "prompt": "a", "save_file": "x/v.mp4"}))
    record.write_text(json.dumps({"settings": run.settings}, default=str))
    return resolve_one(parse({"from_json": record, "save_file": "x/v.mp4", **video})).params


def resolve_line(shared: Settings, video: Settings, folder: Path) -> VideoParams:
    file = folder / "lines.txt"
    file.write_text(json.dumps({"prompt": "a", **video}))
    arguments = {**COMMON, **shared, "prompt_file": file, "save_file": folder / "out"}
    return resolve_settings(parse(arguments)).params


def resolve_request(shared: Settings, video: Settings, folder: Path) -> VideoParams:
    flags = parse({**COMMON, **shared, "save_file": folder / "video.mp4"})
    run = resolve_one(flags, require_inputs=False)
    request = fields.parse_request({"prompt": "a", **video}, run, ("t2v-A14B",))
    return make_line_resolver(flags)(fields.read_request_layer(request.settings, {})).params


def resolve_json_record(shared: Settings, video: Settings, folder: Path) -> VideoParams:
    record = folder / "record.json"
    record.write_text(json.dumps({"settings": {"prompt": "a", **video}}))
    arguments = {**COMMON, **shared, "from_json": record, "save_file": "x/v.mp4"}
    return resolve_one(parse(arguments)).params


@pytest.mark.parametrize("resolve", [resolve_json_record, resolve_line, resolve_request])
def test_whole_numbers_of_json(
    resolve: Callable[[Settings, Settings, Path], VideoParams], tmp_path: Path
) -> None:
    """9.0 is an integer of JSON Schema; texts that only Python reads, and true, are no numbers."""
    flags: Settings = {"sample_guide_scale": 3}
    video = {"sample_steps": 3, "boundary_step": 1, "slg_blocks": [1, 2]}
    floats = {"sample_steps": 3.0, "boundary_step": 1.0, "slg_blocks": [1.0, 2.0]}
    params = resolve(flags, video, tmp_path)
    assert resolve(flags, floats, tmp_path) == params and type(params.sample_steps) is int
    wrong = []
    invalid = ("1_0", "\u0663", "\uff13", " 3", "3 ", True, 1e400, float("nan"), "nan", [[3]])
    for name in ("sample_steps", "boundary_step", "sample_shift", "nag_scale"):
        resolve(flags, {name: 3}, tmp_path)
        for value in invalid:
            try:
                resolve(flags, {name: value}, tmp_path)
            except InputError:
                continue
            wrong.append((name, value))
    assert not wrong


def test_names_of_sizes_and_seeds(tmp_path: Path) -> None:
    """A request has the values of a line of a prompt file under the same names."""
    flags: Settings = {"size": "128*128", "sample_steps": 2}
    shared = parse({"ckpt_dir": DEMO, **flags, "save_file": tmp_path / "video.mp4"})
    run = resolve_one(shared, require_inputs=False)
    for size in ([64, 96], [64.0, 96.0], "64*96", "64x96", "64X96"):
        body = {"prompt": "a", "size": size, "seeds": [4, 5.0]}
        request = fields.parse_request(body, run, ("t2v-A14B",))
        assert request.settings["size"] == "64*96" and request.settings["base_seed"] == [4, 5]
    for size in ([64], [64, 96, 1], ["64", True], [64.5, 64], "64*9_6", "٦٤*96", 64, {}, "0*64"):
        with pytest.raises(InputError):
            fields.parse_request({"prompt": "a", "size": size}, run, ("t2v-A14B",))


@pytest.mark.parametrize("resolve", [resolve_record, resolve_line, resolve_request])
def test_settings_of_a_video_win_over_shared_ones(
    resolve: Callable[[Settings, Settings, Path], VideoParams], tmp_path: Path
) -> None:
    wrong = []
    for shared, video, alone in ROWS:
        expected: Any = None
        if alone is not None:
            arguments = {**COMMON, "prompt": "a", "save_file": "x/v.mp4", **alone}
            expected = resolve_one(parse(arguments)).params
        try:
            actual = resolve(shared, video, tmp_path)
        except InputError as error:
            actual = None if expected is None else str(error)  # type: ignore[assignment]
        if actual != expected:
            wrong.append((shared, video, actual, expected))
    assert not wrong, "\n\n".join(map(str, wrong))


def test_each_value_knows_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the line down to the checkpoint; the record and the plan name the sources."""
    monkeypatch.setenv("PRECISION", "0")
    record, lines = tmp_path / "record.json", tmp_path / "lines.txt"
    record.write_text(json.dumps({"settings": {"recipe": "rcm-4step", "fps": 9, "prompt": "b"}}))
    lines.write_text('a\n{"prompt": "c", "frame_num": 9}')
    shared = {"ckpt_dir": DEMO, "from_json": record, "size": "64*64", "base_seed": 1}
    shared |= {"prompt_file": lines, "save_file": tmp_path / "out"}
    line = resolve_settings(parse(shared)).lines[1].run
    assert line is not None
    names = ("frame_num", "size", "fps", "noise_device", "sample_solver")
    assert [line.sources.get(name) for name in names] == [
        *("line 2", "the command line", str(record)),
        *("environment variables", "recipe rcm-4step"),
    ]
    assert "comm_type" not in line.sources
    plan = resolve_plan("--ckpt_dir", DEMO, "--sample_steps", "3", "--size", "64*96")
    report.print_plan_report(plan)
    printed = capsys.readouterr().out
    assert f"From the command line: ckpt_dir {DEMO}, sample_steps 3, size 64*96\n" in printed
    assert plan.sources["fps"] == f"{DEMO}/generation_config.json"


def test_refusals_name_a_setting_as_its_layer_does(tmp_path: Path) -> None:
    """In each front end; what it has not set, as the layer that has set it."""
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"settings": {"sample_solver": "rcm", "sample_steps": 2}}))
    shift = "has no effect on"
    for video, shared, words in (
        ({"sample_shift": 3}, RCM, f"sample_shift {shift} --sample_solver rcm"),
        ({**RCM, "sample_shift": 3}, {}, f"sample_shift {shift} sample_solver rcm"),
        ({"sample_shift": 3}, {"from_json": record}, f"{shift} {record}: sample_solver rcm"),
    ):
        for resolve_video in (resolve_line, resolve_request):
            assert words in get_refusal(resolve_video, shared, video, tmp_path)
    flags = {"from_json": record, "sample_shift": 3, "save_file": "x/v.mp4", "ckpt_dir": DEMO}
    assert f"--sample_shift {shift} {record}: " in get_refusal(lambda: resolve_one(parse(flags)))


def test_settings_go_with_the_one_that_they_need(tmp_path: Path) -> None:
    """The latents of a video replace its source and, with it, the strength."""
    sparse = {"use_rainfusion": True, "sparsity": 0.5}
    for shared, video in (
        (sparse, {"use_rainfusion": False}),
        ({"src_video": Path("a.mp4"), "strength": 0.5}, {"fixed_latents": Path("b.safetensors")}),
    ):
        layers = (Layer("a test", KEYWORD_NAMING, values) for values in (video, shared))
        assert dict(merge(*layers)) == video
    record = Layer("a record", KEYWORD_NAMING, {"use_rainfusion": False, "sparsity": 0.5}, "record")
    assert dict(merge(Layer("a test", KEYWORD_NAMING, {}), record)) == {"use_rainfusion": False}
    record = Layer("a record", KEYWORD_NAMING, {"start_step": 9}, "record")
    user = Layer("a test", KEYWORD_NAMING, {"step_cache": "mag", "end_step": 30})
    assert dict(merge(user, record)) == user.values
    plain = resolve_record({}, {}, tmp_path)
    assert resolve_record(sparse, {"use_rainfusion": False}, tmp_path) == plain


def test_keywords_of_a_call_win_over_shared_ones(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parameters of a video, and thus the same video."""
    model, wrong = wan.WanT2V("t2v-A14B", tiny("t2v-A14B")), []
    common: Settings = {"size": (32, 32), "frame_num": 1, "seed": 1, "output_type": "latent"}
    generated = list[VideoParams]()

    def generate_latents(_: Pipeline, params: VideoParams, *__: object) -> torch.Tensor:
        generated.append(params)
        return torch.zeros(())

    def rename(settings: Settings) -> Settings:
        return {PYTHON_KEYWORDS.get(name, name): value for name, value in settings.items()}

    monkeypatch.setattr(Pipeline, "generate_latents", generate_latents)
    for shared, video, alone in ROWS:
        calls = [{"input_prompt": "a", **rename(video)}]
        if alone is None:
            if not get_refusal(model.generate_many, calls, **common, **rename(shared)):
                wrong.append((shared, video, "accepted"))
            continue
        list(model.generate_many(calls, **common, **rename(shared)))
        model.generate("a", **common, **rename(alone))
        if generated[-2] != generated[-1]:
            wrong.append((shared, video, *generated[-2:]))
    assert not wrong, "\n".join(map(str, wrong))


def test_each_removed_setting_is_refused_with_what_to_use(tiny: Any, tmp_path: Path) -> None:
    """On the command line, in a line, in a request and as a keyword."""
    folder, model = tiny("t2v-A14B"), wan.WanT2V("t2v-A14B", tiny("t2v-A14B"))
    wrong = []
    for name, row in REMOVED.items():
        word = row.parameter or row.setting or row.remedy.split()[0]
        for message in (
            get_refusal(lambda name=name: parse({name: 1})),
            get_refusal(resolve_line, {}, {name: 1}, tmp_path),
            get_refusal(resolve_request, {}, {name: 1}, tmp_path),
            get_refusal(wan.WanT2V, "t2v-A14B", folder, **{name: 1}),
            get_refusal(model.generate, "a", **{name: 1}),
        ):
            if f"{name} was removed; " not in message or word not in message:
                wrong.append((name, message))
    assert not wrong


def test_a_record_of_the_version_before_repeats_its_video(tmp_path: Path) -> None:
    """With the settings that the version before recorded, and those of today."""
    rows: list[tuple[Settings, Settings]] = [
        (
            {"guider": "apg", "apg_eta": 0.5, "apg_momentum": -0.7},
            {"guider": "apg:eta=.5,momentum=-0.7"},
        ),
        ({"guider": "cfg_zero", "zero_init_steps": 2}, {"guider": "cfg_zero:zero_init_steps=2"}),
        ({"slg_blocks": [1, 2], "slg_start": 0.2}, {"slg_blocks": "1-2:start=0.2"}),
        ({"slg_blocks": [3]}, {"slg_blocks": 3}),
        (
            {"nag_scale": 5.0, "nag_tau": 3.0, "nag_alpha": 0.5, "nag_norm": "l2"},
            {"nag_scale": "5:tau=3,alpha=0.5,norm=l2"},
        ),
        (
            {"step_cache": "mag", "step_cache_threshold": 0.1, "step_cache_max_skip": 3},
            {"step_cache": "mag:threshold=0.1,max_skip=3"},
        ),
        (
            {"step_cache": "tea", "step_cache_coefficients": [1.0, 0.5]},
            {"step_cache": "tea:coefficients=1,0.5"},
        ),
        (
            {"step_cache": "steps:0-2", "step_cache_order": 1, "step_cache_force": True},
            {"step_cache": "steps:0-2,order=1,force=true"},
        ),
        ({"step_cache": "none", "step_cache_force": True, "text_kv_cache": False}, {}),
        ({"fp8_weights": "auto", "gguf_weights": "upcast"}, {"stored_weights": "upcast"}),
        ({"fp8_weights": "upcast", "gguf_weights": "auto"}, {"stored_weights": "upcast"}),
        ({"attention_algo": "fused", "attention_backend": "sdpa"}, {"attention_backend": "sdpa"}),
        (
            {"attention_algo": "laser", "device": "npu"},
            {"attention_backend": "laser", "device": "npu"},
        ),
    ]
    common = {"sample_steps": 20, "sample_guide_scale": 3, "task": "t2v-14B", "prompt": "a"}
    record, wrong = tmp_path / "record.json", []
    same = ("--base_seed", 1, "--save_file", "x/v.mp4")  # a name of its own has the time
    for before, today in rows:
        record.write_text(json.dumps({"settings": {**common, **before}}))
        repeated = resolve_plan("--from_json", record, *same)
        flags = [f"--{name}={value}" for name, value in {**common, **today}.items()]
        expected = resolve_plan(*flags, *same)
        pairs = [
            (run.params, run.setup.cache, run.setup.execution, run.setup.attention)
            for run in (repeated, expected)
        ]
        if pairs[0] != pairs[1] or list_changed_settings(expected.settings, repeated.settings):
            wrong.append((before, *pairs))
        stored = {**json.loads(json.dumps(expected.settings, default=str)), **before}
        stored = {
            name: value for name, value in stored.items() if name not in today or name in before
        }
        current = json.loads(json.dumps(expected.settings, default=str))
        if changed := list_changed_settings(current, stored):
            wrong.append((before, changed))
    assert not wrong


def test_what_no_record_had_is_refused_in_one(tmp_path: Path) -> None:
    for name in ("fa_freq_restore", "host_gbs", "clips"):
        refusal = get_refusal(resolve_json_record, {}, {name: 1}, tmp_path)
        assert f"{name} was removed; " in refusal


def test_a_waiting_job_of_the_version_before_is_made() -> None:
    job = ServiceJob("x", {"guider": "apg", "apg_eta": 0.5, "base_seed": [3, 4]})
    assert job.make_output_settings(1) == {"guider": "apg:eta=0.5", "base_seed": 4}


def test_none_replaces_a_default_of_the_signature() -> None:
    """`num_repeat=None` of WanS2V means as many clips as the audio needs; its default is 1."""
    none = {"num_repeat": None}
    for call, shared, num_clip in (
        ({}, {}, 1),
        (none, {}, None),
        ({}, none, None),
        ({"num_repeat": 2}, none, 2),
        (none, {"num_repeat": 2}, None),
    ):
        generate = wan.WanS2V.generate
        layers, _ = bind_arguments(generate, call, shared, wan.WanS2V.flag_names).read_layers()
        assert merge(*layers).get("num_clip") == num_clip


def test_the_remedy_of_a_missing_folder_can_be_followed(tiny: Any) -> None:
    """Only the command line has a demo; the classes name a wrong task before a missing folder."""
    folder = str(tiny("t2v-A14B"))
    with pytest.raises(InputError, match="leave it out to try the demo"):
        resolve_settings(parse({"ckpt_dir": "nope", "save_file": "x/v.mp4"}))
    assert resolve_settings(parse({"save_file": "x/v.mp4"})).setup.checkpoint.folder is not None
    for arguments, words in (
        (("t2v-A14B", "nope"), "checkpoint_dir=nope does not exist; give the folder"),
        (("t2v-A14B", "no/pe"), "checkpoint_dir=no/pe is not a folder; download"),
        (("t2v-A14B",), "checkpoint_dir is missing; give the folder of a checkpoint"),
        (("nosuch",), "config is nosuch"),
        (("nosuch", folder), "config is nosuch"),
    ):
        message = get_refusal(wan.WanT2V, *arguments)
        assert words in message and "leave it out" not in message


def test_an_unknown_home_folder_is_no_folder_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without HOME, and without an entry of the user, or with a relative HOME."""
    flags = "save_file", "image", "ckpt_dir", "lora", "src_ref_images", "prompt_file"
    monkeypatch.setenv("HOME", "/home/fox")
    for name in flags:
        assert "/home/fox/x" in str(parse({name: "~/x"}).values[name]) and parse({name: "~x.mp4"})
    for home in ("", "fox", None):
        monkeypatch.setenv("HOME", home or "")
        if home is None:
            monkeypatch.delenv("HOME")
            monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry of the user
        for name in flags:
            for path in ("~/x", "~", "~nobody_of_this_name/x"):
                with pytest.raises(InputError, match="that folder is unknown; set HOME"):
                    parse({name: path})
        assert "that folder is unknown" in get_refusal(wan.WanT2V, "t2v-A14B", "~/x")
