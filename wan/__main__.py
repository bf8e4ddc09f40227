"""`python -m wan`: the same command as `generate.py` and `wan-generate`."""

from __future__ import annotations

import sys

from wan.utils.text_streams import set_up_text


def run_command_line() -> int:
    """Runs `wan.cli.main.main`; prints one sentence if its import fails or is interrupted."""
    set_up_text()
    try:
        from wan.cli.main import main
    except KeyboardInterrupt:
        print("generate.py: interrupted; the video was not written.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "wan":
            raise
        problem = f"generate.py: the package {error.name} is not installed for {sys.executable}"
        remedy = "in a clone run `make setup` and `source .venv/bin/activate`, else `pip install .`"
        print(f"{problem}; {remedy}.", file=sys.stderr)
        return 1
    return main()


if __name__ == "__main__":
    sys.exit(run_command_line())
