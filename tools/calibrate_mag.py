"""Measures MagCache's curve of a model, for one task, shift, solver and number of steps.

    python tools/calibrate_mag.py --ckpt_dir ./Wan2.2-T2V-A14B --size 832*480 --out curve.json
    python tools/calibrate_mag.py --ckpt_dir examples/demo/t2v-A14B

The program runs the pipeline once, with any flags of generate.py for the video or the device. It
computes every step and records the ratio of the residual's norm to that of the previous step. The
curve is written to --out, by default to mag_curve.json in the checkpoint folder, from which
`--step_cache mag` reads it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wan import device as devices
from wan.app import flag_parser
from wan.app.flag_parser import Parser
from wan.app.programs import make_argument_type, run_program
from wan.app.resolve import ResolveContext, resolve_video
from wan.cache import mag, policy
from wan.cache.mag import Curve
from wan.cache.policy import Cache, Policy, StepLists
from wan.kernels.forward_context import StepInfo
from wan.modules.interfaces import IterateBlocks
from wan.modules.lockstep import BlockIterator
from wan.pipeline import build
from wan.settings import noise_schedule
from wan.settings.errors import InputError
from wan.settings.step_cache import StepCache
from wan.settings.values import read_path
from wan.utils.files import check_output, write_output


class RatioRecorder(Cache):
    """Computes every step and records the growth of its residual.

    Attributes:
        ratios: Guidance branch -> ratio of the norms of this and the previous step, by step.
    """

    def __init__(self, policy: Policy | None) -> None:
        super().__init__(policy)
        self.ratios: dict[str, list[float]] = {}
        self._norms: dict[str, Tensor] = {}

    def start_run(self, lists: StepLists) -> None:
        super().start_run(lists)
        self.ratios, self._norms = {}, {}

    def iterate(
        self,
        x_BLC: Tensor,
        blocks: IterateBlocks,
        step: StepInfo | None,
        valid: int,
        dtype: torch.dtype,
    ) -> BlockIterator[Tensor]:
        """Implements `wan.modules.interfaces.SkipBlocks`."""
        assert step is not None
        input_BLC = x_BLC.clone()
        x_BLC = yield from blocks(x_BLC, 0, None)
        norm = torch.linalg.vector_norm(x_BLC - input_BLC, dim=-1)[:, :valid]
        last = self._norms.get(step.branch, norm)
        self.ratios.setdefault(step.branch, []).append((norm / last).mean().item())
        self._norms[step.branch] = norm
        return x_BLC


def calibrate_curve(argv: list[str]) -> Curve:
    """Runs the pipeline with these flags, and returns the curve; InputError for wrong flags."""
    run = resolve_video(ResolveContext(make_demo=lambda *_: None), flag_parser.parse_flags(argv))
    request, setup = run.params, run.setup
    if setup.cache.policy != "none":
        raise InputError("A curve is measured without a step cache; drop --step_cache.")
    if not request.uses_guidance:
        raise InputError("A curve needs both guidance branches; drop --sample_guide_scale 1.")
    if (other_schedule := mag.find_other_schedule(request)) is not None:
        raise InputError(
            f"A curve holds for the steps that `sample_shift` makes, not for {other_schedule}; "
            "drop it."
        )
    everything = StepCache(f"steps:0-{request.sample_steps - 1}")
    recorder = RatioRecorder(policy.make_policy(everything, setup.preset))
    device = devices.select_device(setup.execution.device)
    pipeline = build.build_pipeline(setup, device, step_cache=recorder)
    pipeline.generate_latents(request, run.inputs)
    return Curve(
        task=setup.preset.task,
        sample_shift=request.sample_shift,
        steps=request.sample_steps,
        high_noise_steps=noise_schedule.make_noise_schedule(request).high_noise_steps,
        ratios={branch: tuple(ratios) for branch, ratios in recorder.ratios.items()},
    )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Also has generate.py's flags: --task, --ckpt_dir, --size, --sample_steps, ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=make_argument_type(read_path),
        help="JSON file of the curve (mag_curve.json in --ckpt_dir)",
    )
    options, generate_flags = parser.parse_known_args(argv)
    settings = flag_parser.parse_flags(generate_flags).values
    if options.out is None and "ckpt_dir" not in settings:
        raise InputError("Give --out, or the --ckpt_dir that the curve is for.")
    out = options.out or settings["ckpt_dir"] / mag.CURVE_FILE
    check_output(out, mag.CURVE_KIND, "--out" if options.out else "--ckpt_dir")
    curve = calibrate_curve(generate_flags)
    with write_output(out, mag.CURVE_KIND) as temporary:
        curve.save(temporary)
    print(f"{out}: {curve.steps} steps, shift {curve.sample_shift:g}")


if __name__ == "__main__":
    sys.exit(run_program(main))
