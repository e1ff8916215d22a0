"""Check in a minute whether several hosts can train together, before a model is loaded on any of them.

    accelerate launch --config_file FILE --num_machines 2 --machine_rank RANK --main_process_ip FIRST_HOST
        --module trl_ext.hosts --output_dir /shared/run --model NAME_OR_FOLDER

Run it on every host, launched as the training will be. It checks that the hosts find each other, see the same folder
and have the same versions and model, and prints the interfaces and how fast the links are. Exit code 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from accelerate import PartialState

from trl_ext.compat.startup import silence_misleading_messages
from trl_ext.errors import InputError
from trl_ext.hosts.launch import check_launch
from trl_ext.hosts.preflight import check_hosts
from trl_ext.hosts.process_group import explain_network_error, join, leave


def main() -> None:
    """Parse the arguments and check."""
    silence_misleading_messages()
    parser = argparse.ArgumentParser(
        prog="python -m trl_ext.hosts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="the folder that all hosts have to see")
    parser.add_argument("--model", help="a folder or a Hub id that every host has to have")
    parser.add_argument("--megabytes", type=int, default=64, help="the size of the message that measures the links")
    parser.add_argument("--timeout", type=float, default=60, help="seconds to wait for the other hosts")
    asked = parser.parse_args()
    try:
        check_launch()
        join(asked.timeout)
        lines, problems = check_hosts(asked.output_dir, asked.model, asked.megabytes)
    except InputError as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        sys.exit(f"error: {explain_network_error(error) or error}")
    print("\n".join([*lines, *(f"error: {problem}" for problem in problems)]), flush=True)
    PartialState().wait_for_everyone()  # a rank that leaves while another still works can take it down
    leave()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
