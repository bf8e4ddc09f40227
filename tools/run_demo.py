"""`make demo`: make a few videos in sequence parallel with FA_Power_Cap, and a contact sheet.

    python tools/run_demo.py [--out outputs/demo] [--processes 2] [--comm_type 1]

Every video is one run of `infer_t2v.sh` or `infer_i2v.sh`. The prompts are combinations that the
demo checkpoint was not trained on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
if not __package__:  # started as a script: only tools/ is on the path, its parent is needed
    sys.path.insert(0, str(REPO))

from tools import contact_sheet  # noqa: E402
from wan.app.flag_parser import Parser  # noqa: E402
from wan.app.programs import make_argument_type, run_program  # noqa: E402
from wan.settings.attention_modes import MODES  # noqa: E402
from wan.settings.values import integer  # noqa: E402
from wan.utils.files import VIDEO_KIND, check_output  # noqa: E402

PROMPTS = (
    "a large red triangle moves right on a brown background",
    "a large blue star moves up on a gray background",
    "a large green square grows on a black background",
    "a large purple circle bounces on a brown background",
    "a small white triangle moves left and a small red star moves right on a gray background",
)
I2V_PROMPT = "a large yellow star moves left on a brown background"


def generate_video(task: str, prompt: str, video: Path, processes: int, comm_type: int) -> None:
    """Makes one video with a task's script; CalledProcessError if it fails."""
    demo = REPO / "examples" / "demo" / f"{task}-A14B"
    command = ["bash", REPO / f"infer_{task}.sh", "--ckpt_dir", demo, "--base_seed", "1"]
    command += ["--prompt", prompt, "--save_file", video]
    environment = {"COMM_TYPE": str(comm_type), "NPROC_PER_NODE": str(processes)}
    subprocess.run([str(word) for word in command], env=os.environ | environment, check=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "outputs" / "demo")
    parser.add_argument("--processes", type=make_argument_type(integer(1, 64)), default=2)
    parser.add_argument(
        "--comm_type", type=make_argument_type(integer(0, 2)), choices=tuple(MODES), default=1
    )
    options = parser.parse_args(argv)
    started = time.monotonic()
    runs = [("t2v", prompt) for prompt in PROMPTS] + [("i2v", I2V_PROMPT)]
    sheet, gif = options.out / "sheet.png", options.out / "demo.gif"
    videos = [options.out / f"{number}.mp4" for number in range(1, len(runs) + 1)]
    outputs = {sheet: contact_sheet.SHEET, gif: contact_sheet.ANIMATION}
    for path, kind in (outputs | dict.fromkeys(videos, VIDEO_KIND)).items():
        check_output(path, kind, "--out")
    for video, (task, prompt) in zip(videos, runs, strict=True):
        try:
            generate_video(task, prompt, video, options.processes, options.comm_type)
        except subprocess.CalledProcessError as error:
            print(f"{video} was not made; see the error above.", file=sys.stderr)
            return error.returncode
    contact_sheet.write_contact_sheet(videos, sheet, gif)
    print(f"\n{len(videos)} videos in {time.monotonic() - started:.0f} s:", *videos, sep="\n  ")
    print(f"All of them in one image: {sheet}\nmoving: {gif}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
