"""`make demo`: make a few videos in sequence parallel with FA_Power_Cap, and a contact sheet.

    python tools/run_demo.py [--out outputs/demo] [--processes 2] [--comm_type 1]

The videos of a task are one run of `infer_t2v.sh` or `infer_i2v.sh`, which loads the networks once.
The prompts are combinations that the demo checkpoint was not trained on.
"""

from __future__ import annotations

import json
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
from wan.utils.files import (  # noqa: E402
    SUMMARY_KIND,
    VIDEO_KIND,
    check_output,
    make_marked_kind,
    write_output,
)

PROMPTS = (
    "a large red triangle moves right on a brown background",
    "a large blue star moves up on a gray background",
    "a large green square grows on a black background",
    "a large purple circle bounces on a brown background",
    "a small white triangle moves left and a small red star moves right on a gray background",
)
I2V_PROMPT = "a large yellow star moves left on a brown background"
_MARK = "# prompts of tools/run_demo.py"
PROMPTS_KIND = make_marked_kind("a prompt file of tools/run_demo.py", _MARK.encode())


def generate_videos(task: str, videos: dict[Path, str], processes: int, comm_type: int) -> None:
    """Makes the videos of a task with its script, from one load.

    Args:
        videos: Prompt of each file; all files are in one folder.

    Raises:
        CalledProcessError: A video was not made.
    """
    demo = REPO / "examples" / "demo" / f"{task}-A14B"
    folder = next(iter(videos)).parent
    prompt_file = folder / f"{task}.txt"
    lines = [{"prompt": prompt, "save_file": video.name} for video, prompt in videos.items()]
    with write_output(prompt_file, PROMPTS_KIND) as temporary:
        temporary.write_text("\n".join([_MARK, *map(json.dumps, lines)]), encoding="utf-8")
    command = ["bash", REPO / f"infer_{task}.sh", "--ckpt_dir", demo, "--base_seed", "1"]
    command += ["--prompt_file", prompt_file, "--save_file", folder, "--offload_model", "false"]
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
    prompts = {"t2v": PROMPTS, "i2v": (I2V_PROMPT,)}
    sheet, gif = options.out / "sheet.png", options.out / "demo.gif"
    numbers = range(1, sum(map(len, prompts.values())) + 1)
    videos = [options.out / f"{number}.mp4" for number in numbers]
    outputs = {sheet: contact_sheet.SHEET, gif: contact_sheet.ANIMATION}
    for task in prompts:
        outputs |= {options.out / f"{task}.txt": PROMPTS_KIND}
        outputs |= {options.out / f"{task}.summary.json": SUMMARY_KIND}
    for path, kind in (outputs | dict.fromkeys(videos, VIDEO_KIND)).items():
        check_output(path, kind, "--out")
    files = iter(videos)
    for task, texts in prompts.items():
        task_videos = {next(files): text for text in texts}
        try:
            generate_videos(task, task_videos, options.processes, options.comm_type)
        except subprocess.CalledProcessError as error:
            print(f"A video of {task} was not made; see the error above.", file=sys.stderr)
            code = error.returncode
            return 128 - code if code < 0 else code  # a signal, as shells report it
    contact_sheet.write_contact_sheet(videos, sheet, gif)
    print(f"\n{len(videos)} videos in {time.monotonic() - started:.0f} s:", *videos, sep="\n  ")
    print(f"All of them in one image: {sheet}\nmoving: {gif}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
