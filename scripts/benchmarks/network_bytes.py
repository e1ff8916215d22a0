"""What crosses the network per optimizer step, measured: every collective of real GRPO trainings on CPU ranks.

It launches the GRPO recipe with policies of several sizes on 1, 2 and 4 ranks under DDP, ZeRO-2 and ZeRO-3, a launcher
per rank as on several hosts, in a network namespace whose loopback the kernel counts. Needs Linux.

    python -m scripts.benchmarks.network_bytes
    python -m scripts.benchmarks.network_bytes --ranks 2 --parallel ddp --sizes small --csv bytes.csv --markdown t.md
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from trl_ext.io import markdown_table, read_json, write_json
from trl_ext.mini.policy import make_base_policy
from trl_ext.mini.task import BasePolicyConfig
from trl_ext.runs.provenance import provenance

from .network_model import Training, sent_per_rank

ROOT = Path(__file__).parents[2]
SIZES = {
    "small": BasePolicyConfig(hidden=64, layers=2, heads=2, intermediate=128, steps=3, batch=4),
    "medium": BasePolicyConfig(steps=3, batch=4),
    "large": BasePolicyConfig(hidden=256, layers=6, heads=8, intermediate=768, steps=3, batch=4),
}
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# ZeRO-3 keeps small parameters, and the next billion of them, gathered: all of a tiny policy. A large one's are not.
RELEASES_ALL = dict.fromkeys(
    ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 0
)
ROWS, STEPS = 32, 4  # completions of all ranks per step; optimizer steps, of which the first warms up
RUN = (
    "--max_steps", STEPS, "--rollout_batch_size", ROWS, "--train_batch_size", ROWS, "--micro_train_batch_size", 2,
    "--group_size", 4, "--sampling_max_tokens", 24, "--validate_every", 1000, "--validation_problems", 32,
    "--train_problems", 64, "--use_vllm", "false", "--save_strategy", "no", "--disable_tqdm", "true",
    "--log_generations_every", 1000, "--reward", f"{Path(__file__).with_name('network_rank.py')}:graded_by_length",
)  # fmt: skip
# What a collective carries, by parts of `place function line`; the first row that fits counts.
CARRIED = (
    ("validation", ("_measure",)),
    ("texts for TRL's table", ("gather_object(prompts)", "gather_object(completions)", "gather_object(values)")),
    ("rewards", ("gather(rewards_per_func)",)),
    ("one fault for all ranks", ("raise_everywhere",)),
    ("lengths and counts", ("_calculate_rewards", "._generate ", "num_items_in_batch =")),
    ("names and means of metrics", ("_pending_",  "local_stats")),
    ("weights for the rollout", ("_roll_out deepspeed", "_roll_out transformers")),
    ("plan, totals and metrics", ("_max_over_ranks", "step_totals", "metrics.finish")),
    ("gradients", ("training_step",)),
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """What one training sent per step, averaged over the measured steps."""

    size: str
    parallel: str
    ranks: int
    parameters: int
    micro_batches: float
    rows: list[dict[str, Any]]  # a kind of collective each: its calls, and the elements a rank contributes to them
    kernel: float | None  # bytes of all ranks on the loopback; None where it was not counted

    def sent(self, reduces_by_all: bool = False) -> dict[str, float]:
        """Bytes that a rank sends per step, by what they carry."""
        totals: dict[str, float] = defaultdict(float)
        for row in self.rows:
            contributed = row["elements"] * row["width"]
            totals[row["carries"]] += sent_per_rank(row["op"], contributed, row["ranks"], reduces_by_all)
        return dict(totals)

    def predicted(self, reduces_by_all: bool = False) -> dict[str, float]:
        """The same from the sizes alone."""
        stage = STAGES[self.parallel]
        training = Training(self.parameters, stage, ROWS // self.ranks, self.micro_batches)
        return training.bytes_per_rank(self.ranks, reduces_by_all)


def carries(row: dict[str, Any]) -> str:
    """What a recorded collective is for."""
    said = f"{row['place']} {row['function']} {row['line']}"
    name = next((name for name, parts in CARRIED if any(part in said for part in parts)), "signals and logs")
    return "weights" if name == "gradients" and row["op"].startswith(("allgather", "broadcast")) else name


def train(size: str, parallel: str, ranks: int, folder: Path, counted: bool) -> Traffic:
    """One training, and what its ranks have recorded.

    Args:
        counted: the loopback has no other traffic.
    """
    policy = make_base_policy(0, folder.parent / "policies", SIZES[size], progress=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    machines = ["--num_machines", ranks, "--num_processes", ranks, "--main_process_ip", "127.0.0.1"]
    config = config_of(parallel, folder)  # makes the folder
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    launchers = []
    with ExitStack() as files:
        for rank in range(ranks):
            command = ["accelerate.commands.launch", "--config_file", config, "--main_process_port", port, *machines]
            command += ["--machine_rank", rank, "--module", "scripts.benchmarks.network_rank", folder, *RUN]
            command += ["--model_name_or_path", policy, "--output_dir", folder / "run"]
            if parallel == "zero3":  # every set of prompts would gather most weights once more
                command += ["--share_prompt_prefix", "false"]
            said = files.enter_context((folder / f"rank{rank}.txt").open("wb"))
            words = [sys.executable, "-m", *map(str, command)]
            launchers.append(subprocess.Popen(words, env=environment, stdout=said, stderr=said, cwd=folder))
        ended = [launcher.wait() for launcher in launchers]
    if any(ended):
        sys.exit((folder / f"rank{ended.index(max(ended))}.txt").read_text(errors="replace")[-3000:])
    with safe_open(policy / "model.safetensors", "pt") as weights:
        parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    return read(folder, size, parallel, ranks, parameters, counted)


def config_of(parallel: str, folder: Path) -> Path:
    """A configuration of Accelerate; ZeRO-3's releases every parameter after its use."""
    folder.mkdir(parents=True, exist_ok=True)
    path = ROOT / "accelerate_configs" / f"two_cpu_ranks_{'zero2' if parallel == 'zero1' else parallel}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    if parallel == "zero1":
        config["deepspeed_config"]["zero_stage"] = 1
    if parallel == "zero3":
        config = releasing_all(config, folder / "deepspeed.json")
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "config.yaml"


def releasing_all(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration with DeepSpeed's settings in a file, which has more of them."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **RELEASES_ALL}
    settings = {**dict.fromkeys(auto, "auto"), "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    write_json(path, settings)
    kept = {name: config["deepspeed_config"][name] for name in ("deepspeed_multinode_launcher", "zero3_init_flag")}
    others = {name: value for name, value in config.items() if name != "mixed_precision"}
    return {**others, "deepspeed_config": {"deepspeed_config_file": str(path), **kept}}


def read(folder: Path, size: str, parallel: str, ranks: int, parameters: int, counted: bool) -> Traffic:
    """The ranks' files: means over the steps between the first and the last, and over ranks."""
    measured = range(2, STEPS)
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    recorded = [read_json(folder / f"rank{rank}.json") for rank in range(ranks)]
    for row in (row for of_rank in recorded for row in of_rank["rows"]):
        steps = len(measured) if row["step"] else 1
        row["carries"] = carries(row)
        if row["step"] not in measured and not (row["step"] == 0 and row["carries"] == "validation"):
            continue
        key = tuple(str(row[name]) for name in ("carries", "op", "dtype", "ranks", "function", "line"))
        kept = sums.setdefault(key, {**row, "calls": 0.0, "elements": 0.0})
        kept["calls"] += row["calls"] / steps / ranks
        kept["elements"] += row["calls"] * row["elements"] / steps / ranks
    first, *_, last = (recorded[0]["loopback"][step - 1] for step in (*measured, STEPS))
    micro_batches = [n for step, n in recorded[0]["micro_batches"].items() if int(step) in measured]
    kernel = (last - first) / len(measured) if counted else None
    mean = sum(micro_batches) / len(micro_batches)
    return Traffic(size, parallel, ranks, parameters, mean, list(sums.values()), kernel)


def in_namespace() -> bool:
    """Whether the loopback is this program's alone, after starting it again in a network namespace if there can be."""
    if os.environ.get("NETWORK_BYTES") == "alone":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return True
    alone = ["unshare", "--net", "--map-root-user"]
    if shutil.which("ip") and shutil.which("unshare") and not subprocess.run([*alone, "true"], check=False).returncode:
        words = [*alone, sys.executable, "-m", "scripts.benchmarks.network_bytes", *sys.argv[1:]]
        os.execvpe("unshare", words, {**os.environ, "NETWORK_BYTES": "alone"})
    return False


def lines_of(traffic: Traffic) -> Iterator[str]:
    """A Markdown table of what a rank sends per step."""
    sent = traffic.sent()
    calls: dict[str, float] = defaultdict(float)
    for row in traffic.rows:
        calls[row["carries"]] += row["calls"]
    sizes = (
        f"{traffic.ranks} ranks, {traffic.parameters:,} parameters, {traffic.micro_batches:g} micro-batches per step"
    )
    yield f"\n{traffic.parallel}, {sizes}:\n\n| what | collectives | bytes sent by a rank |\n|---|---|---|"
    for name in sorted(sent, key=sent.__getitem__, reverse=True):
        yield f"| {name} | {calls[name]:g} | {sent[name]:,.0f} |"


def summary(trainings: Sequence[Traffic]) -> Iterator[str]:
    """A Markdown table of all trainings: kB that a rank sends per step, and how far the two checks are off.

    The prediction is compared with the recorded collectives; what the kernel counted, with them in gloo's algorithms.
    """
    rows = []
    for one in trainings:
        sent, by_gloo = ({**one.sent(gloo), "validation": 0.0} for gloo in (False, True))
        weights = sent.get("weights", 0.0) + sent.get("weights for the rollout", 0.0)
        gradients, step, real = sent.get("gradients", 0.0), sum(sent.values()), one.ranks * sum(by_gloo.values())
        kilobytes = [f"{value / 1e3:,.1f}" for value in (gradients, weights, step - gradients - weights)]
        off = f"{sum(one.predicted().values()) / step - 1:+.2%}" if step else ""
        over = f"{one.kernel / real - 1:+.1%}" if one.kernel and real else ""
        head = (one.parallel, f"{one.parameters:,}", f"{one.ranks}", f"{one.micro_batches:g}")
        rows.append((*head, *kilobytes, off, over))
    heads = ("", "parameters", "ranks", "micro-batches", "gradients", "weights", "all else", "predicted", "kernel")
    yield from markdown_table(heads, rows)


def write_csv(path: Path, trainings: Sequence[Traffic]) -> None:
    """One row per kind of collective."""
    columns = ("carries", "op", "dtype", "ranks", "calls", "elements", "function", "line")
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["size", "parallel", "world_size", "parameters", *columns, "bytes_sent_per_rank_and_step"])
        for one in trainings:
            for row in one.rows:
                sent = sent_per_rank(row["op"], row["elements"] * row["width"], row["ranks"])
                head = [one.size, one.parallel, one.ranks, one.parameters]
                table.writerow([*head, *(row[name] for name in columns), round(sent)])


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="how many (default: 1 2 4)")
    parser.add_argument("--parallel", choices=STAGES, nargs="+", default=list(STAGES), help="default: all")
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=list(SIZES), help="of the policy (default: all)")
    parser.add_argument("--csv", type=Path, help="write one row per kind of collective to this file")
    parser.add_argument("--markdown", type=Path, help="write the last table to this file")
    args = parser.parse_args()
    counted, trainings = in_namespace(), []
    with tempfile.TemporaryDirectory() as scratch:
        for size in args.sizes:
            for parallel in args.parallel:
                for ranks in args.ranks:
                    folder = Path(scratch) / f"{size}_{parallel}_{ranks}"
                    trainings.append(train(size, parallel, ranks, folder, counted))
                    print("\n".join(lines_of(trainings[-1])), flush=True)
    print("\n".join(["", *summary(trainings)]))
    if args.csv:
        write_csv(args.csv, trainings)
    if args.markdown:
        made = f"Commit {provenance()['commit']}."
        args.markdown.write_text("\n".join([*summary(trainings), "", made, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
