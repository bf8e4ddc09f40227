"""Two machines whose link fails during a run: the right video, or both end with a message.

A machine is a network namespace with torchrun's agent and one rank; `tests/relay.py` is the switch
between them. Needs Linux, root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks import limited_link as link
from tests import failing, relay
from tests.dist import TORCHRUN, Ranks
from wan.cli import main as generate

RIGHTS = platform.system() == "Linux" and os.geteuid() == 0 and shutil.which("ip") is not None
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(not RIGHTS, reason="network namespaces need Linux, root and ip"),
]
LIMIT_S = 6
AGENT = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--master_port=29632"]
AGENT += [f"--master_addr={link.ADDRESS.format(0)}"]


class Switch:
    """The relay of two machines."""

    def __init__(self, names: list[str], switch: str) -> None:
        self.names = names
        netns_exec = ["ip", "netns", "exec"]
        for name, port in zip(names, link.PORTS, strict=False):
            subprocess.run(
                [*netns_exec, name, sys.executable, relay.__file__, link.DEVICE], check=True
            )
            link.run_command("ip", "-n", switch, "link", "set", port, "nomaster")
        self._process = subprocess.Popen(
            [*netns_exec, switch, sys.executable, relay.__file__, *link.PORTS[:2]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.set(0, 0)

    def set(self, delay_s: float, loss: float) -> None:
        """Delay each network frame by `delay_s` and drop the fraction `loss` of the frames."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(delay_s, loss, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"

    def limit(self, rate: float) -> None:
        """Limit each machine to sending `rate` bytes per second."""
        for name in self.names:
            link.limit_rate(name, link.DEVICE, rate)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def switch() -> Iterator[Switch]:
    with link.create_namespaces(2) as (names, switch):
        relay_switch = Switch(names, switch)
        yield relay_switch
        relay_switch.close()


def run_machine(names: list[str], arguments: list[str]) -> int:
    """Run torchrun's agent of one machine, with a separate host name and process namespace."""
    node = int(os.environ["NODE"])
    shell_script = f'hostname machine{node}; exec "$0" "$@"'
    command = ["ip", "netns", "exec", names[node], "unshare", "--uts", "--pid", "--fork"]
    command += [
        "--kill-child",
        "sh",
        "-c",
        shell_script,
        sys.executable,
        *AGENT,
        f"--node_rank={node}",
    ]
    os.execvp("ip", [*command, failing.__file__, "pause", "1", *arguments])


BREAKS = {
    "cut": lambda switch: switch.set(0, 1),
    "slowed to 1 Mbit/s": lambda switch: switch.limit(125_000),
    "slowed to 0.8 kbit/s": lambda switch: switch.limit(100),
    "losing 5 %": lambda switch: switch.set(0.01, 0.05),
    "losing 70 %": lambda switch: switch.set(0.01, 0.7),
}
ALWAYS_RIGHT = {"slowed to 1 Mbit/s", "losing 5 %"}
NEVER_RIGHT = {"cut"}


@pytest.mark.parametrize("how", BREAKS)
def test_a_link_that_breaks(how: str, switch: Switch, tiny, tmp_path: Path) -> None:
    arguments = ["--task", "t2v-A14B", "--ckpt_dir", str(tiny("t2v-A14B")), "--size", "64*48"]
    arguments += ["--frame_num", "5", "--sample_steps", "4", "--base_seed", "7", "--save_latents"]
    single_rank_file, out = tmp_path / "alone.mp4", tmp_path / "out" / "v.mp4"
    with Ranks([{}], generate.main, [*arguments, "--save_file", str(single_rank_file)]) as process:
        assert process.wait_for_exit() == [0], process.format_outputs()
    arguments += ["--comm_type", "1", "--dist_timeout", str(LIMIT_S / 60)]
    shared_variables = {
        **TORCHRUN,
        "GLOO_SOCKET_IFNAME": link.DEVICE,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    variables = [{**shared_variables, "NODE": node} for node in "01"]
    with Ranks(
        variables, run_machine, switch.names, [*arguments, "--save_file", str(out)]
    ) as agents:
        agents.wait_for_output(1, "fault", 120)
        begin = time.monotonic()
        BREAKS[how](switch)
        codes = agents.wait_for_exit(LIMIT_S + (120 if how in ALWAYS_RIGHT else 30))
    print(f"{how}: {codes} after {time.monotonic() - begin:.1f} s")
    print("\n".join(agents.lines()))
    if any(codes) or how in NEVER_RIGHT:
        assert all(codes) and how not in ALWAYS_RIGHT, agents.format_outputs()
        for rank, text in enumerate(agents.texts):
            messages = [line for line in text.splitlines() if line.startswith("generate.py: ")]
            names = [f"Rank {1 - rank} on machine{1 - rank} "]
            names += [] if how in NEVER_RIGHT else [f"Rank {rank} "]  # printed by the other
            assert len(messages) == 1 and any(name in messages[0] for name in names), (
                agents.format_outputs()
            )
            assert "Traceback" not in text.split("generate.py: ")[0], agents.format_outputs()
        assert not list(out.parent.glob("*")), "no partial video"
        return
    actual, expected = (
        load_file(x.with_suffix(".latents.safetensors")) for x in (out, single_rank_file)
    )
    assert (actual["latents"] - expected["latents"]).abs().max() <= 1e-4
