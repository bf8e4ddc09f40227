"""The clips of a long video on disk, from which a stopped run goes on and the video is joined.

Beside `NAME.mp4` stands the folder `NAME.clips` until the video is whole, or for good with
`--save_latents`: `0001.mp4` and `0001.safetensors`, which holds what the next clip begins with and
is written last. A later call with more clips makes the ones that are missing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.checkpoint.files import fingerprint, safetensors_metadata, whole_file
from wan.log import logger
from wan.pipeline import video
from wan.run import Run
from wan.settings.errors import FileChangedError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from wan.pipeline.clips import Clip

_FREE = ("save_file", "save_latents", "num_clip", "clip_prompts", "offload_model")
"""What may differ between the runs that make a video's clips."""


class ClipFiles:
    """The clips of a run, for the main rank."""

    def __init__(self, run: Run) -> None:
        """Looks at nothing yet. run: that of the video."""
        self._run, self.folder = run, run.output.clips

    def done(self) -> int:
        """Returns how many clips are there that this run would make alike."""
        count = self._run.request.num_clip or 0
        for index in range(count):
            why = self._differs(index)
            if why is None:
                continue
            if why:
                logger.info("%s: clip %d is made again: it %s.", self.folder, index + 1, why)
            return index
        return count

    def _differs(self, index: int) -> str | None:
        """Returns why a clip has to be made, or None; "" where it is not there."""
        clip, state = self._clip(index), self._state(index)
        if not (clip.exists() and state.exists()):
            return ""
        try:
            made, asked = safetensors_metadata(state, "settings"), self._settings(index)
        except InputError:
            return "is damaged"
        asked = json.loads(json.dumps(asked, default=str))
        if not isinstance(made, dict):
            return "is damaged"
        changed = [n for n in sorted({*asked, *made}) if asked.get(n) != made.get(n)]
        return f"differs in {', '.join(changed)}" if changed else None

    def end(self, done: int) -> Tensor | None:
        """Returns what the last clip that is done has handed on.

        Raises:
            FileChangedError: Its file was changed since it was looked at, or holds no such tensor.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not done:
            return None
        state = self._state(done - 1)
        try:
            return load_file(state)["end"]
        except (KeyError, OSError, SafetensorError):
            raise FileChangedError(
                f"{state} does not hold what the next clip begins with; remove it and start again."
            ) from None

    def keep(self, index: int, clip: Clip) -> None:
        """Writes a clip."""
        from safetensors.torch import save

        assert clip.frames is not None and clip.end is not None, "the main rank has them"
        self.folder.mkdir(parents=True, exist_ok=True)
        video.save_video(clip.frames, replace(self._run.output, save_file=self._clip(index)))
        told = {"settings": json.dumps(self._settings(index), default=str)}
        with whole_file(self._state(index)) as temporary:
            end = clip.end.float().cpu().contiguous()
            temporary.write_bytes(save({"end": end}, metadata=told))

    def join(self, path: Path, comment: str) -> None:
        """Joins all clips into one file."""
        names = [self._clip(index).name for index in range(self._run.request.num_clip or 0)]
        video.join(self.folder, names, path, comment)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _settings(self, index: int) -> dict[str, Any]:
        """Returns what decides what a clip shows, or how it is made."""
        run, own = self._run, self._run.request.of_clip(index)
        shared = {n: value for n, value in run.settings.items() if n not in _FREE}
        files = [one.file for ones in run.setup.loras.values() for one in ones]
        content = fingerprint([Path(run.settings["image"]), *files])
        return shared | {"prompt": own.prompt, "base_seed": own.base_seed, "content": content}

    def _clip(self, index: int) -> Path:
        return self.folder / f"{index + 1:04}.mp4"

    def _state(self, index: int) -> Path:
        return self.folder / f"{index + 1:04}.safetensors"
