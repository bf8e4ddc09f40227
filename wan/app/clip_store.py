"""Stores the clips of a long video on disk, so that an interrupted run can be resumed.

The folder `NAME.clips` of the video `NAME.mp4` has for each clip `0001.mp4` and, written last,
`0001.safetensors` with the clip state, from which the next clip starts; of large states only the
last one is kept. The clips of a long i2v video are joined into the video; those of other tasks are
stored losslessly, and their frames are encoded together. Then the folder is removed unless
`--save_latents` is given. A later run with more clips generates only the missing ones.

Blocks of frames of a causal video are stored in the same way, without mp4: the state of a block is
its latents, and the states of all blocks are kept until the video is complete.

The metadata of a clip state has the settings and input digests of the run, and the digests of the
clip's mp4, of the state and of the previous state. A clip with other values is generated again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan.app.run import Run, drop_paths_and_seed, list_changed_settings
from wan.checkpoint.formats.headers import compute_file_digest
from wan.checkpoint.formats.safetensors_header import read_safetensors_metadata
from wan.media import video_writer
from wan.media.video_reader import decode_frames
from wan.settings.errors import FileChangedError, InputError
from wan.utils.files import VIDEO_KIND, make_safetensors_kind, remove_output, write_output
from wan.utils.log import logger
from wan.utils.version import __version__

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from wan.tasks.base import Clip

NUMBERED_SAFETENSORS = "[0-9][0-9][0-9][0-9].safetensors"
CLIP_STATE_KIND = make_safetensors_kind("a state of generate.py --num_clip", "settings")
CLIP_KINDS = {"[0-9][0-9][0-9][0-9].mp4": VIDEO_KIND, NUMBERED_SAFETENSORS: CLIP_STATE_KIND}
"""File name pattern in the folder of clips -> kind of the file."""
_MAX_KEPT_STATE = 1 << 27  # bytes; a larger state, as of S2V, is kept for the last clip only
_VARIABLE_SETTINGS = ("save_file", "save_latents", "num_clip", "clip_prompts", "offload_model")
"""Settings that may differ between the runs that generate the clips of one video."""


class ClipFiles:
    """The stored clips of a run, or its blocks of frames; used on the main rank.

    Attributes:
        num_clips: Clips of the complete video.
        unit: "clip" or "block", for messages.
    """

    def __init__(self, run: Run) -> None:
        """Prepares access to a run's folder of clips; reads nothing."""
        self._run, self.folder = run, run.output.clips_dir
        self.num_clips = run.params.task.count_clips(run.params)
        self._has_frames = run.params.num_frame_per_block is None
        self.unit = "clip" if self._has_frames else "block"

    def count_finished(self) -> int:
        """Returns the number of clips, from the first, that are stored and match this run."""
        num_matching = num_finished = self._count_matching()
        while 0 < num_finished < self.num_clips and self._read_state(num_finished - 1) is None:
            num_finished -= 1  # no clip can follow it
        if num_finished < num_matching:
            text = "%s: clips %d to %d are generated again, because no state after them is stored."
            logger.info(text, self.folder, num_finished + 1, num_matching)
        return num_finished

    def _count_matching(self) -> int:
        previous_digest = ""
        for index in range(self.num_clips):
            state = self._state_path(index)
            if not state.exists() or (self._has_frames and not self._clip_path(index).exists()):
                return index
            try:
                difference = self._find_difference(index, previous_digest)
                previous_digest = read_safetensors_metadata(state, "digests")["state"]
            except (InputError, OSError, LookupError, TypeError):
                difference = "is damaged"
            if difference is not None:
                text = "%s: %s %d is generated again, because it %s."
                logger.info(text, self.folder, self.unit, index + 1, difference)
                return index
        return self.num_clips

    def _find_difference(self, index: int, previous_digest: str) -> str | None:
        """Returns the reason why a clip must be generated again, or None.

        Args:
            previous_digest: Digest of the previous clip's state; "" for the first clip.
        """
        state = self._state_path(index)
        stored, digests = (read_safetensors_metadata(state, key) for key in ("settings", "digests"))
        current = json.loads(json.dumps(self._collect_settings(index), default=str))
        changed = list_changed_settings(current, stored)
        if changed:
            return f"differs in {', '.join(sorted(changed))}"
        end, dropped = self._read_state(index), digests["state"] if self._has_frames else None
        current_digests = {
            "video": self._compute_video_digest(index),
            "state": dropped if end is None else _digest_tensor(end),
            "before": previous_digest,
        }
        return None if current_digests == digests else "was changed, or is of another run"

    def read_state(self, num_clips_done: int) -> Tensor | None:
        """Returns `Inputs.clip_state` after the first `num_clips_done` clips; None for 0."""
        if self._has_frames or not num_clips_done:
            return self._read_state(num_clips_done - 1) if num_clips_done else None
        from torch import cat

        blocks = map(self._read_state, range(num_clips_done))
        return cat([latents for latents in blocks if latents is not None], dim=1)

    def _read_state(self, index: int) -> Tensor | None:
        """Returns a clip's state, or None if it was not kept."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self._state_path(index)).get("end")
        except (SafetensorError, LookupError, OSError):
            raise FileChangedError(
                f"{self._state_path(index)} does not hold the state that the next clip needs; "
                "remove it and start again."
            ) from None

    def write_clip(self, index: int, clip: Clip) -> None:
        """Writes a clip, then its state."""
        if self._has_frames:
            assert clip.frames is not None, "the main rank has them"
            comment = json.dumps({"wan": __version__, "clip": index + 1})
            output = replace(self._run.output, save_file=self._clip_path(index))
            joins_clips = self._run.params.task.joins_clips
            video_writer.write_video(clip.frames, output, comment, lossless=not joins_clips)
        end = None if clip.state is None else clip.state.float().cpu().contiguous()
        digests = {
            "video": self._compute_video_digest(index),
            "state": "" if end is None else _digest_tensor(end),
            "before": self._read_digest(index - 1) if index else "",
        }
        self._write_state(
            index, end, {"settings": self._collect_settings(index), "digests": digests}
        )
        can_drop = index > 0 and self._has_frames
        if can_drop and end is not None and end.nbytes > _MAX_KEPT_STATE:
            state = self._state_path(index - 1)
            metadata = {
                key: read_safetensors_metadata(state, key) for key in ("settings", "digests")
            }
            self._write_state(index - 1, None, metadata)

    def _write_state(self, index: int, end: Tensor | None, metadata: dict[str, Any]) -> None:
        from safetensors.torch import save

        texts = {name: json.dumps(value, default=str) for name, value in metadata.items()}
        with write_output(self._state_path(index), CLIP_STATE_KIND) as temporary:
            temporary.write_bytes(save({} if end is None else {"end": end}, metadata=texts))

    def _read_digest(self, index: int) -> str:
        digest: str = read_safetensors_metadata(self._state_path(index), "digests")["state"]
        return digest

    def write_video(self, move_into_place: Callable[[Path], None], comment: str) -> None:
        """Writes the video of all clips. move_into_place: As in `write_output`."""
        run, paths = self._run, [self._clip_path(index) for index in range(self.num_clips)]
        if run.params.task.joins_clips:
            with write_output(run.output.save_file, VIDEO_KIND, move_into_place) as path:
                video_writer.join_videos(self.folder, [clip.name for clip in paths], path, comment)
            return
        size = run.params.video_size
        with video_writer.open_mp4_encoder(run.output, move_into_place, comment) as encoder:
            encoder.begin((run.params.num_frames, *size[::-1]))
            for frame in self.iter_frames(self.num_clips):
                encoder.write_rgb_frame(frame)

    def iter_frames(self, num_clips: int) -> Iterator[np.ndarray]:
        """Yields the frames [H,W,3] uint8 of the first `num_clips` clips, which are stored."""
        for index in range(num_clips):
            yield from decode_frames(self._clip_path(index), self._run.params.video_size)

    def remove_clips(self) -> None:
        """Removes the clips, if any, and the folder if it is then empty."""
        for path in sorted(self.folder.glob("*")):
            for pattern, kind in CLIP_KINDS.items():
                if path.match(pattern):
                    remove_output(path, kind)
        with suppress(OSError):  # a folder with other files is kept
            self.folder.rmdir()

    def _compute_video_digest(self, index: int) -> str:
        return compute_file_digest(self._clip_path(index)) if self._has_frames else ""

    def _collect_settings(self, index: int) -> dict[str, Any]:
        """Returns the settings and input digests that determine a clip's frames."""
        run, clip_params = self._run, self._run.params.make_clip_params(index)
        settings = drop_paths_and_seed(run.settings)
        settings = {n: x for n, x in settings.items() if n not in _VARIABLE_SETTINGS}
        settings |= {
            f"the content of {name}": value for name, value in run.compute_content_digests().items()
        }
        return settings | {"prompt": clip_params.prompt, "base_seed": clip_params.base_seed}

    def _clip_path(self, index: int) -> Path:
        return self.folder / f"{index + 1:04}.mp4"

    def _state_path(self, index: int) -> Path:
        return self.folder / f"{index + 1:04}.safetensors"


def _digest_tensor(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and values."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.contiguous().flatten().numpy().data)
    return digest.hexdigest()
