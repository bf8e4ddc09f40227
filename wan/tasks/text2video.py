"""Text to video, or text and a source video to video."""

from __future__ import annotations

from wan.tasks.video2video import VideoToVideo


class TextToVideo(VideoToVideo):
    kind = "t2v"


TASK = TextToVideo()
