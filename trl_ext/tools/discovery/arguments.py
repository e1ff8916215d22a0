"""The arguments of every problem's `discover.py`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from trl_ext.tools.discovery.strategies import STRATEGIES


def discover_parser(problems: Mapping[str, object], description: str | None, folder: str) -> argparse.ArgumentParser:
    """The parser; some defaults are environment variables, which their help texts name."""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=_strategies(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--task", choices=list(problems), default=next(iter(problems)), help="what the model writes")
    add("--strategy", default="refine", help=f"one of {', '.join(STRATEGIES)} (refine)")
    add("--strategy_options", metavar="NAME=VALUE,...", help="see below")
    add("--output_dir", default=folder, help=f"the run's folder ({folder})")
    add("--resume", action="store_true", help="resume the run in --output_dir")
    add("--seed", type=int, default=0)
    add("--note", default="", help="a sentence for the report, such as what the model is")
    add("--show_prompt", action="store_true", help="print the first message to the model and exit")
    _add_endpoint(parser.add_argument_group("endpoint, any that is OpenAI-compatible"))
    add = parser.add_argument_group("budget; a resumed run counts what earlier processes used").add_argument
    add("--max_calls", type=int, default=20, help="requests, retries included (20)")
    add("--max_total_tokens", type=int, help="tokens of prompts and answers (no limit)")
    add("--max_seconds", type=float, help="wall-clock time (no limit)")
    add = parser.add_argument_group("work").add_argument
    add("--concurrency", type=int, default=4, help="requests in flight at a time (4)")
    add("--judges", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="programs that run at a time")
    add("--finish_seconds", type=float, default=60.0, help="time limit of `hybrid`'s numeric method per program (60)")
    add("--require_isolation", action="store_true", help="refuse to run where any part of the sandbox is not in force")
    return parser


def _add_endpoint(group: argparse._ArgumentGroup) -> None:
    add, environ = group.add_argument, os.environ
    url_help = "such as http://localhost:8000/v1 ($OPENAI_BASE_URL)"
    add("--base_url", default=environ.get("OPENAI_BASE_URL"), help=url_help)
    add(
        "--replay",
        type=Path,
        metavar="LOG",
        help="without a model: an earlier run's conversation_log.json",
    )
    add("--model", default=environ.get("OPENAI_MODEL"), help="($OPENAI_MODEL, or the only one that is served)")
    add("--api_key_env", default="OPENAI_API_KEY", metavar="NAME", help="variable with the key (OPENAI_API_KEY)")
    add("--api_key", help="the key itself; other users of the machine can see it while the run lasts")
    add("--max_tokens", type=int, default=16384, help="limit on an answer's tokens, reasoning included (16384)")
    add("--temperature", type=float, default=1.0)
    add("--extra_body", type=json.loads, default={}, metavar="JSON", help="more fields of each request")
    add("--request_timeout", type=float, default=600.0, help="seconds for one try (600)")
    add("--tries", type=int, default=5, help="number of tries before a request fails (5)")


def _strategies() -> str:
    """Each strategy, the first line of its docstring, and its options with their defaults."""
    lines = ["strategies and their options with defaults:"]
    for name, strategy in STRATEGIES.items():
        about = (strategy.__doc__ or "").strip().splitlines()[0]
        options = ", ".join(f"{key}={value}" for key, value in STRATEGIES.options(name).items())
        lines += [f"  {name:<13} {about}", *([f"{'':<16}{options}"] if options else [])]
    return "\n".join(lines)
