"""What crosses the network per optimizer step: the arithmetic, and what real ranks send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.benchmarks.network_bytes import Traffic, train
from scripts.benchmarks.network_growth import main, points
from scripts.benchmarks.network_model import Training, sent_per_rank
from trl_ext.io import read_jsonl

Trained = Callable[[str], Traffic]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What two ranks of a tiny policy send, trained once for all tests."""
    found: dict[str, Traffic] = {}
    folder = tmp_path_factory.mktemp("network")

    def of(parallel: str) -> Traffic:
        if parallel not in found:
            found[parallel] = train("small", parallel, 2, folder / parallel, counted=False)
        return found[parallel]

    return of


def test_rings() -> None:
    assert sent_per_rank("allreduce_", 800, 4) == 1200
    assert sent_per_rank("allgather_base", 200, 4) == 600  # 800 afterwards
    assert sent_per_rank("reduce_scatter_base", 800, 4) == 600
    assert sent_per_rank("reduce_scatter_base", 800, 4, reduces_by_all=True) == 1200
    assert sent_per_rank("broadcast_", 800, 4) == 600
    assert sent_per_rank("allreduce_", 800, 1) == 0


def test_accumulation_multiplies_what_sharded_gradients_send() -> None:
    def sent(stage: int, micro_batches: int, **more: float) -> float:
        training = Training(1e6, stage, rows=4, micro_batches=micro_batches, **more)
        return sum(training.bytes_per_rank(4).values())

    assert sent(0, 1) == sent(0, 8)
    assert sent(1, 1) == sent(1, 8)
    assert sent(2, 8) - sent(2, 1) == 7 * 1.5 * 4e6
    assert sent(3, 8) - sent(3, 1) == 7 * (2 + 1) * 0.75 * 4e6
    assert sent(0, 1, trained=1e4) < sent(0, 1) / 50


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_send_what_the_sizes_predict(parallel: str, trained: Trained) -> None:
    found = trained(parallel)
    sent, predicted = found.sent(), found.predicted()
    sent.pop("validation")
    for name in predicted.keys() - {"rows", "other"}:
        assert sent[name] == pytest.approx(predicted[name], rel=0.005), name
    assert sum(sent.values()) == pytest.approx(sum(predicted.values()), rel=0.01)


@pytest.mark.nightly
@pytest.mark.distributed
def test_zero2_computes_the_gradient_of_ddp(tmp_path: Path) -> None:
    """With a policy of which several micro-batches have the same prompts."""
    norms = []
    for parallel in ("ddp", "zero2"):
        train("medium", parallel, 2, tmp_path / parallel, counted=False)
        logged = read_jsonl(tmp_path / parallel / "run" / "metrics.jsonl")
        norms.append(next(row["grad_norm"] for row in logged if "grad_norm" in row))
    assert norms[1] == pytest.approx(norms[0], rel=2e-5)


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_a_step_sends_numbers_about_its_rollout_and_no_texts(parallel: str, trained: Trained) -> None:
    found = trained(parallel)
    sent = found.sent()
    small = [row for row in found.rows if row["carries"] not in ("validation", "gradients", "weights")]
    others = [row for row in small if row["carries"] != "weights for the rollout"]
    assert sum(row["calls"] for row in others) <= 22
    assert sum(sent[name] for name in {row["carries"] for row in others}) < 16 * 21 + 500
    assert not [row for row in small if "unfinished" in row["function"]], "ranks tell each other of every token"


@pytest.mark.nightly
@pytest.mark.distributed
def test_a_validation_sends_its_completions_once_and_its_figures(trained: Trained) -> None:
    rows = [row for row in trained("ddp").rows if row["carries"] == "validation"]
    assert {row["op"]: row["elements"] for row in rows if row["dtype"] == "uint8"}.keys() == {"gather", "broadcast"}
    assert sum(row["elements"] for row in rows if row["op"] == "broadcast") < 1000


def test_more_hosts_are_never_more_efficient() -> None:
    lines: dict[tuple[object, ...], list[float]] = {}
    for point in points(32):
        lines.setdefault((point.policy, point.training, point.fixed, point.gpus, point.gbit), []).append(
            point.efficiency
        )
    assert all(line == sorted(line, reverse=True) for key, line in lines.items() if "rows per GPU" in key)
    assert all(max(line) <= 1.0 + 1e-9 for line in lines.values())


def test_published_points_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["network_growth", "--csv", str(tmp_path / "found.csv")])
    main()
    published = Path(__file__).parents[1] / "docs" / "results" / "network_growth.csv"
    assert (tmp_path / "found.csv").read_text() == published.read_text()
