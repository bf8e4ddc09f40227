"""Reads the audio and videos that condition a video, and counts its clips; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wan.settings.command import Controlled, Sounds
from wan.settings.errors import InputError
from wan.settings.fields import options
from wan.settings.presets import Preset
from wan.settings.request import Request
from wan.settings.rules import Values

if TYPE_CHECKING:
    from wan.pipeline.driving import DrivingVideos
    from wan.pipeline.media import PoseVideo, Sound
    from wan.pipeline.sources import ControlSources


def sounds(
    values: Values, preset: Preset, plan: bool = False
) -> tuple[Sound | None, PoseVideo | None]:
    """Reads the audio and the metadata of the pose video of S2V."""
    if preset.kind != "s2v":
        for name in options(Sounds):
            if values.get(name):
                remedy = f"use s2v-14B, or drop `{name}`"
                raise InputError("`task`", preset.task, f"takes no `{name}`", remedy)
        return None, None
    if "audio" not in values:
        if plan:
            return None, None
        raise InputError("`task`", preset.task, "needs an audio file", "give one with `audio`")
    from wan.pipeline import media

    pose = values.get("pose_video")
    return media.read_sound(values["audio"]), None if pose is None else media.read_pose(pose)


def driving(values: Values, preset: Preset, plan: bool = False) -> DrivingVideos | None:
    """Reads the metadata of the preprocessed folder of Animate."""
    folder = values.get("src_root_path")
    if preset.kind != "animate":
        if folder is not None:
            remedy = "use animate-14B, or drop `src_root_path`"
            raise InputError("`task`", preset.task, "takes no `src_root_path`", remedy)
        return None
    if folder is None:
        if plan:
            return None
        why, remedy = "needs a preprocessed folder", "give it with `src_root_path`"
        raise InputError("`task`", preset.task, why, remedy)
    from wan.pipeline import driving

    return driving.read(folder, bool(values.get("replace_flag")))


def control(values: Values, preset: Preset, plan: bool = False) -> ControlSources | None:
    """Reads the source video, mask and reference images of VACE."""
    given = [name for name in options(Controlled) if values.get(name)]
    if preset.kind != "vace":
        if given:
            remedy = f"use vace-1.3B, vace-14B or vace-A14B, or drop `{given[0]}`"
            raise InputError("`task`", preset.task, f"takes no `{given[0]}`", remedy)
        return None
    if not given and plan:
        return None
    if not given:
        why, remedy = "needs an input", "give `src_video`, `src_ref_images` or both"
        raise InputError("`task`", preset.task, why, remedy)
    from wan.pipeline import sources

    return sources.read(
        values.get("src_video"), values.get("src_mask"), values.get("src_ref_images", ())
    )


def controlled(
    values: Values, preset: Preset, found: ControlSources | None, defaults: Values | None = None
) -> dict[str, Any]:
    """Counts reference images, and limits the frames to those of the source video."""
    if found is None:
        return {}
    counts = {"references": len(found.pictures)}
    asked = {"frame_num": preset.frame_num} | {**(defaults or {})} | {**values}
    if found.video is None or found.frames >= asked["frame_num"]:
        return counts
    if "frame_num" in values:
        why = f"has {found.frames} frames, and `frame_num` is {values['frame_num']}"
        remedy = "give a longer one, or a smaller `frame_num`"
        raise InputError("`src_video`", values["src_video"], why, remedy)
    return counts | {"frame_num": (found.frames - 1) // 4 * 4 + 1}


def moves(
    values: Values, preset: Preset, moving: DrivingVideos | None, defaults: Values | None = None
) -> dict[str, Any]:
    """Counts the clips of an Animate video, and refuses settings without effect on them."""
    from wan.pipeline import driving

    _check_clips(values, preset)
    asked = {"frame_num": preset.frame_num, "refert_num": 1} | {**(defaults or {})} | {**values}
    again, most = asked["refert_num"], values.get("num_clip")
    if moving is None:
        return {"num_clip": most or 2}  # a plan without a pose video
    size = values.get("size", moving.size)
    if size != moving.size:
        why, own = "is not that of src_pose.mp4", "*".join(map(str, moving.size))
        raise InputError("`size`", "*".join(map(str, size)), why, f"drop it; the video is {own}")
    if moving.frames <= again:
        why = f"has {moving.frames} frame(s), and more than `refert_num` {again} are needed"
        remedy = "give a longer pose video"
        raise InputError("`src_root_path`", values["src_root_path"], why, remedy)
    if again >= asked["frame_num"]:
        return {"num_clip": 1}  # refused by VideoParams
    count = driving.clips(moving.frames, asked["frame_num"], again)
    count = min(most or count, count)
    return {"num_clip": count, "size": moving.size, "source_frames": moving.frames}


def _check_clips(values: Values, preset: Preset) -> None:
    """Refuses settings about latents that have no effect on a video of clips."""
    for name in ("decode_latents", "save_latents", "fixed_latents"):
        if values.get(name):
            why = f"has no effect on {preset.task}, whose clips are decoded one after the other"
            raise InputError(f"`{name}`", None, why, "drop it")


def check_chain(values: Values, request: Request) -> None:
    """Refuses settings about latents that have no effect on a chained video."""
    if request.chain is None:
        return
    for name in ("decode_latents", "fixed_latents"):
        if values.get(name):
            why = "applies to one clip, and this video has several or continues an earlier one"
            raise InputError(f"`{name}`", None, why, "drop it")
    if values.get("save_latents") == "steps":
        why, remedy = "applies to one clip", "give `save_latents` alone, which keeps the clips"
        raise InputError("`save_latents=steps`", None, why, remedy)


def clips(
    values: Values, preset: Preset, sound: Sound | None, defaults: Values | None = None
) -> dict[str, Any]:
    """Counts the clips of an S2V video, and refuses settings without effect on them."""
    if values.get("frame_num"):
        why = f"has no effect on {preset.task}, whose clips have `infer_frames`"
        raise InputError("`frame_num`", None, why, "drop it")
    _check_clips(values, preset)
    if values.get("fps", preset.fps) != preset.fps:
        why = f"would break the sync with the audio: {preset.task} has {preset.fps:g} fps"
        raise InputError("`fps`", f"{values['fps']:g}", why, "drop it")
    if values.get("audio_sync") and values.get("start_from_ref"):
        why = "has no effect with `start_from_ref`, where frames and audio start together"
        raise InputError("`audio_sync`", None, why, "drop one of them")
    most = values.get("num_clip")
    if sound is None:
        return {"num_clip": most or 2}  # a plan without audio
    assert preset.infer_frames is not None
    frames = {"infer_frames": preset.infer_frames} | {**(defaults or {})} | {**values}
    count = sound.clips(frames["infer_frames"])
    return {"num_clip": min(most or count, count)}
