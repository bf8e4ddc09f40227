"""Reads the audio and videos that condition a video, and counts its clips; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wan.settings.command import SpeechOptions, VaceOptions
from wan.settings.errors import InputError
from wan.settings.fields import list_options
from wan.settings.presets import Preset
from wan.settings.request import VideoParams
from wan.settings.rules import Values

if TYPE_CHECKING:
    from wan.media.audio import Audio, PoseVideo
    from wan.pipeline.driving import AnimateInputs
    from wan.pipeline.sources import VaceInputs


def read_s2v_inputs(
    values: Values, preset: Preset, plan: bool = False
) -> tuple[Audio | None, PoseVideo | None]:
    """Reads the audio and the metadata of the pose video of S2V."""
    if preset.kind != "s2v":
        for name in list_options(SpeechOptions):
            if values.get(name):
                remedy = f"use s2v-14B, or drop `{name}`"
                raise InputError("`task`", preset.task, f"takes no `{name}`", remedy)
        return None, None
    if "audio" not in values:
        if plan:
            return None, None
        raise InputError("`task`", preset.task, "needs an audio file", "give one with `audio`")
    from wan.media import audio as media

    pose = values.get("pose_video")
    return media.read_audio(values["audio"]), None if pose is None else media.read_pose_video(pose)


def read_animate_inputs(values: Values, preset: Preset, plan: bool = False) -> AnimateInputs | None:
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

    return driving.read_animate_folder(folder, bool(values.get("replace_flag")))


def read_vace_inputs(values: Values, preset: Preset, plan: bool = False) -> VaceInputs | None:
    """Reads the source video, mask and reference images of VACE."""
    option_names = [name for name in list_options(VaceOptions) if values.get(name)]
    if preset.kind != "vace":
        if option_names:
            remedy = f"use vace-1.3B, vace-14B or vace-A14B, or drop `{option_names[0]}`"
            raise InputError("`task`", preset.task, f"takes no `{option_names[0]}`", remedy)
        return None
    if not option_names and plan:
        return None
    if not option_names:
        why, remedy = "needs an input", "give `src_video`, `src_ref_images` or both"
        raise InputError("`task`", preset.task, why, remedy)
    from wan.pipeline import sources

    return sources.read_vace_files(
        values.get("src_video"), values.get("src_mask"), values.get("src_ref_images", ())
    )


def count_vace_frames(
    values: Values, preset: Preset, vace_inputs: VaceInputs | None, defaults: Values | None = None
) -> dict[str, Any]:
    """Counts reference images, and limits the frames to those of the source video."""
    if vace_inputs is None:
        return {}
    counts = {"num_reference_images": len(vace_inputs.reference_images)}
    settings = {"frame_num": preset.frame_num} | {**(defaults or {})} | {**values}
    if vace_inputs.video_reader is None or vace_inputs.num_frames >= settings["frame_num"]:
        return counts
    if "frame_num" in values:
        why = f"has {vace_inputs.num_frames} frames, and `frame_num` is {values['frame_num']}"
        remedy = "give a longer one, or a smaller `frame_num`"
        raise InputError("`src_video`", values["src_video"], why, remedy)
    return counts | {"frame_num": (vace_inputs.num_frames - 1) // 4 * 4 + 1}


def count_animate_clips(
    values: Values,
    preset: Preset,
    animate_inputs: AnimateInputs | None,
    defaults: Values | None = None,
) -> dict[str, Any]:
    """Counts the clips of an Animate video, and refuses settings without effect on them."""
    from wan.pipeline import driving

    _check_clip_settings(values, preset)
    settings = {"frame_num": preset.frame_num, "refert_num": 1} | {**(defaults or {})} | {**values}
    num_overlap_frames, max_clips = settings["refert_num"], values.get("num_clip")
    if animate_inputs is None:
        return {"num_clip": max_clips or 2}  # a plan without a pose video
    size = values.get("size", animate_inputs.size)
    if size != animate_inputs.size:
        why, expected_size = "is not that of src_pose.mp4", "*".join(map(str, animate_inputs.size))
        raise InputError(
            "`size`", "*".join(map(str, size)), why, f"drop it; the video is {expected_size}"
        )
    if animate_inputs.num_frames <= num_overlap_frames:
        why = f"has {animate_inputs.num_frames} frame(s)"
        why += f", and more than `refert_num` {num_overlap_frames} are needed"
        remedy = "give a longer pose video"
        raise InputError("`src_root_path`", values["src_root_path"], why, remedy)
    if num_overlap_frames >= settings["frame_num"]:
        return {"num_clip": 1}  # refused by VideoParams
    num_clips = driving.count_overlapping_clips(
        animate_inputs.num_frames, settings["frame_num"], num_overlap_frames
    )
    num_clips = min(max_clips or num_clips, num_clips)
    return {
        "num_clip": num_clips,
        "size": animate_inputs.size,
        "num_source_frames": animate_inputs.num_frames,
    }


def _check_clip_settings(values: Values, preset: Preset) -> None:
    """Refuses settings about latents that have no effect on a video of clips."""
    for name in ("decode_latents", "save_latents", "fixed_latents"):
        if values.get(name):
            why = f"has no effect on {preset.task}, whose clips are decoded one after the other"
            raise InputError(f"`{name}`", None, why, "drop it")


def check_chain_settings(values: Values, params: VideoParams) -> None:
    """Refuses settings about latents that have no effect on a chained video."""
    if params.chain is None:
        return
    for name in ("decode_latents", "fixed_latents"):
        if values.get(name):
            why = "applies to one clip, and this video has several or continues an earlier one"
            raise InputError(f"`{name}`", None, why, "drop it")
    if values.get("save_latents") == "steps":
        why, remedy = "applies to one clip", "give `save_latents` alone, which keeps the clips"
        raise InputError("`save_latents=steps`", None, why, remedy)


def count_s2v_clips(
    values: Values, preset: Preset, audio: Audio | None, defaults: Values | None = None
) -> dict[str, Any]:
    """Counts the clips of an S2V video, and refuses settings without effect on them."""
    if values.get("frame_num"):
        why = f"has no effect on {preset.task}, whose clips have `infer_frames`"
        raise InputError("`frame_num`", None, why, "drop it")
    _check_clip_settings(values, preset)
    if values.get("fps", preset.fps) != preset.fps:
        why = f"would break the sync with the audio: {preset.task} has {preset.fps:g} fps"
        raise InputError("`fps`", f"{values['fps']:g}", why, "drop it")
    if values.get("audio_sync") and values.get("start_from_ref"):
        why = "has no effect with `start_from_ref`, where frames and audio start together"
        raise InputError("`audio_sync`", None, why, "drop one of them")
    max_clips = values.get("num_clip")
    if audio is None:
        return {"num_clip": max_clips or 2}  # a plan without audio
    assert preset.infer_frames is not None
    settings = {"infer_frames": preset.infer_frames} | {**(defaults or {})} | {**values}
    num_clips = audio.count_clips(settings["infer_frames"])
    return {"num_clip": min(max_clips or num_clips, num_clips)}
