"""Makes a video from Python: `python examples/python_classes.py`.

The trained demo checkpoint needs no download and no accelerator. For real weights, pass another
`checkpoint_dir` and omit the keywords whose defaults from Wan2.2 are to be used.
"""

from __future__ import annotations

from pathlib import Path

from wan import WanT2V, save_video

DEMO = Path(__file__).parent / "demo" / "t2v-A14B"


def main() -> None:
    model = WanT2V("t2v-A14B", checkpoint_dir=DEMO)
    video_3FHW = model.generate(
        "a large red square moves right on a brown background",
        size=(64, 64),
        frame_num=9,
        sampling_steps=20,
        guide_scale=3.0,
        seed=1,
    )
    if video_3FHW is not None:  # only rank 0 has the video
        save_video(video_3FHW, "red_square.mp4", fps=8)
        print(f"red_square.mp4: {tuple(video_3FHW.shape)}, values from -1 to 1")


if __name__ == "__main__":
    main()
