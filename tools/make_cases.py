"""Makes the cases of version_cases.py."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

Requests = Sequence[Mapping[str, Any]]
"""Settings of videos, by flag; files are named by their path."""

NPU = {
    "PYTHONPATH": "$base/tests/npu_sim/stand_in:$npu_sim",
    "MINDIE_LOG_TO_FILE": "false",
    "MINDIE_LOG_TO_STDOUT": "false",
}
SMALL = "--size 64*32 --frame_num 5 --base_seed 7 --save_latents --save_file $out.mp4"
QUICK = f"{SMALL} --sample_steps 4"
CLIPS = "--base_seed 7 --save_file $out.mp4 --sample_steps 2"
IMAGE = "Image.open('$base/examples/star.png').convert('RGB')"


@dataclass(frozen=True)
class Case:
    """One run, as the arguments of `python`, or of `torchrun` with several ranks.

    The command and variables may contain $made (folder of the checkpoints), $base (the earlier
    tree, whose images and simulation of NPUs both versions use), $npu_sim (mindiesd) and $out (a
    path without a suffix, in a folder of this case's results).
    """

    name: str
    command: str
    ranks: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    def split_command(self, paths: Mapping[str, Path]) -> list[str]:
        return [Template(word).substitute(paths) for word in shlex.split(self.command)]

    def make_variables(self, paths: Mapping[str, Path]) -> dict[str, str]:
        environ = {name: Template(text).substitute(paths) for name, text in self.environ.items()}
        return {"OMP_NUM_THREADS": "1", **environ}

    @property
    def on_simulated_npu(self) -> bool:
        return "NPU_SIM_SOC" in self.environ

    def format_command(self, paths: Mapping[str, Path]) -> str:
        """Returns the command line of the case for a shell."""
        variables = [f"{name}={text}" for name, text in self.make_variables(paths).items()]
        start = ["torchrun", "--standalone", f"--nproc_per_node={self.ranks}"]
        arguments = self.split_command(paths)
        if self.ranks == 1:
            start = ["python"]
        elif arguments[0] == "-c":
            start += ["--no-python", "python"]
        return shlex.join([*variables, *start, *arguments])


def tiny(name: str, task: str, layout: str = "official") -> Case:
    flags = f"--task {task} --layout {layout} --out $made/{name}"
    return Case(name, f"tools/make_tiny_checkpoint.py {flags}")


def quick(name: str, arguments: str, ranks: int = 1, **environ: str) -> Case:
    """Makes a case of a small video; a repeated argument replaces the earlier one."""
    return Case(name, f"generate.py {QUICK} {arguments}", ranks, environ)


def recipe(name: str, arguments: str, ranks: int = 1) -> Case:
    """Makes a case of a small video whose steps come from a recipe or from --timesteps."""
    return Case(name, f"generate.py {SMALL} {arguments}", ranks)


def clips(name: str, arguments: str, ranks: int = 1) -> Case:
    """Makes a case of a small video of clips, whose latents cannot be saved."""
    return Case(name, f"generate.py {CLIPS} {arguments}", ranks)


def lines(fixture: str, task: str, requests: Requests) -> Case:
    """Makes a case of a prompt file, which the fixture "lines" has written."""
    flags = f"--task {task} --ckpt_dir $made/{fixture} --prompt_file $made/lines/{fixture}.txt"
    latents = "" if fixture in ("s2v", "animate") else "--save_latents"
    return Case(f"lines-{fixture}", f"generate.py {flags} --save_file $out {latents}")


def served(fixture: str, task: str, requests: Requests) -> Case:
    """Makes a case of a service that gets requests over HTTP."""
    program = f"""
import base64, json, os, socket, subprocess, sys, time, urllib.request, wan
from pathlib import Path
from tempfile import TemporaryDirectory
def encode(path): return f"data:a/b;base64,{{base64.b64encode(path.read_bytes()).decode()}}"
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{{probe.getsockname()[1]}}"
def generate(body):
    for name, value in [*body.items()]:
        path = Path(str(value))
        if path.is_file(): body[name] = encode(path)
        if path.is_dir(): body |= {{file.stem: encode(file) for file in path.iterdir()}}
    body.pop("src_root_path", None)
    kind = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(f"{{url}}/v1/videos/sync", json.dumps(body).encode(), kind)
    return urllib.request.urlopen(request).read()
def is_ready():
    try: return urllib.request.urlopen(f"{{url}}/health").status == 200
    except OSError: return time.sleep(0.1)
environ = os.environ | {{"PYTHONPATH": str(Path(wan.__file__).parents[1])}}
with TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "wan.serve", "--port", url.split(":")[-1]]
    command += ["--journal", folder, "--", "--task", "{task}", "--ckpt_dir", "$made/{fixture}"]
    service = subprocess.Popen(command, env=environ)
    try:
        while not is_ready(): assert service.poll() is None
        for index, body in enumerate({requests}):
            Path(f"$out-{{index}}.mp4").write_bytes(generate(body))
    finally:
        service.terminate()
        service.wait()
"""
    return Case(f"served-{fixture}", f"-c {shlex.quote(program)}")


def resumed(name: str, arguments: str) -> Case:
    """Makes a case of a video of clips that is killed in the second one and resumed.

    The earlier version is not interrupted.
    """
    program = f"""
import os, runpy, signal, sys, time, wan
from pathlib import Path
tree, first = Path(wan.__file__).parents[1], Path("$out.clips/0001.safetensors")
sys.argv = {["generate.py", *shlex.split(f"{CLIPS} {arguments}")]}
def generate(): runpy.run_path(f"{{tree}}/generate.py", run_name="__main__")
if tree != Path("$base"):
    if not (child := os.fork()): generate()
    while not first.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended, and kept no clip"
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the run ended before it was killed"
generate()
"""
    return Case(name, f"-c {shlex.quote(program)}")


def npu(name: str, chip: str, arguments: str, ranks: int = 1) -> Case:
    """Makes a case on simulated NPUs of a chip; both versions use the base's simulation."""
    few = "--sample_steps 2 --sample_guide_scale 1"
    flags = f"--ckpt_dir $made/npu --device npu --size 112*80 --frame_num 9 {few} {arguments}"
    return quick(name, flags, ranks, NPU_SIM_SOC=chip, **NPU)


def python(name: str, call: str, ranks: int = 1) -> Case:
    """Makes a case of the Python classes. call: an expression whose value is the latents."""
    program = f"""
import os, torch.distributed as dist
from PIL import Image
from safetensors.torch import save_file
from wan import WanAnimate, WanI2V, WanS2V, WanT2V, WanTI2V, WanVace
from wan.configs import WAN_CONFIGS
several = "RANK" in os.environ
if several: dist.init_process_group("gloo")
latents = {call}
if os.environ.get("RANK", "0") == "0":
    save_file({{"latents": latents}}, "$out.latents.safetensors")
if several: dist.destroy_process_group()
"""
    return Case(name, f"-c {shlex.quote(program)}", ranks)


def diffusers(name: str, fixture: str, settings: str, ranks: int = 1, **more: str) -> Case:
    """Makes a case of a diffusers pipeline, parallelized with these settings.

    Args:
        more: `call`: further arguments of the pipeline's call; `cache`: arguments of
            apply_cache_on_pipe after the pipeline.
    """
    image = "i2v" in fixture
    kind = "WanImageToVideoPipeline" if image else "WanPipeline"
    picture = f"image={IMAGE}, " if image else ""
    cache = f"apply_cache_on_pipe(pipe, {more['cache']})" if "cache" in more else ""
    program = f"""
import os, torch, torch.distributed as dist
from PIL import Image
from diffusers import {kind} as Pipeline
from safetensors.torch import save_file
from transformers import CLIPImageProcessorPil
from wan.diffusers import apply_cache_on_pipe, parallelize_pipe
several = "RANK" in os.environ
if several: dist.init_process_group("gloo")
is_wan21 = {fixture!r} == "wan21-i2v-diffusers"
parts = dict(image_processor=CLIPImageProcessorPil()) if is_wan21 else {{}}
pipe = Pipeline.from_pretrained("$made/{fixture}", torch_dtype=torch.float32, **parts)
parallelize_pipe(pipe, device="cpu", {settings})
{cache}
call = dict(width=112, height=80, num_frames=9, num_inference_steps=4, output_type="latent")
call |= dict({more.get("call", "")})
seed = torch.Generator().manual_seed(7)
latents = pipe({picture}prompt="a fox", negative_prompt="red", generator=seed, **call).frames
if os.environ.get("RANK", "0") == "0":
    save_file({{"latents": latents.contiguous()}}, "$out.latents.safetensors")
if several:
    dist.barrier()
    dist.destroy_process_group()
"""
    return Case(name, f"-c {shlex.quote(program)}", ranks)
