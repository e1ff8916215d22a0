"""What arrives at a Hub: a real client against a local server, the whole round, failures on the way, and no token."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.test_grpo import RECIPE, ROOT, SMALL, TINY_RUN
from tests.support.hub_server import TOKEN, Hub, local_hub
from tests.support.tiny import save_tiny
from trl_ext.errors import PushError
from trl_ext.hub.card import fenced, is_hub_id, without_paths, write_model_card
from trl_ext.hub.push import check, hide_token, push
from trl_ext.mini.policy import make_base_policy

PUSHED = {
    "README.md", "config.json", "config.yaml", "curve.png", "generation_config.json", "generations.jsonl",
    "metrics.jsonl", "model.safetensors", "summary.json", "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as server:
        yield server


def run_python(hub: Hub | None, *arguments: str, cwd: Path, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """Python with the client set to the local server (None: to an address where nobody listens)."""
    address = hub.address if hub else "http://127.0.0.1:9"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(cwd / "hf_home"), "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def summary(**more: object) -> dict[str, object]:
    validation = {"accuracy": 0.5, "problems": 40, "by_level": {"1": 0.75, "": 0.1}, "step": 0}
    return {
        "validation_accuracy_before": 0.25, "validation_accuracy_after": 0.5, "best_validation_accuracy": 0.625,
        "best_validation_step": 20, "wall_clock_s": 12.0, "seed": 3, "preset": "grpo_clip", "commit": "abc123",
        "command": "python /scratch/someone/recipes/grpo_math.py --seed 3", "versions": {"trl": "1.16.0"},
        "hardware": {"cpu": "a processor", "cpu_threads": 2, "gpus": [], "processes": 1},
        "validations": [{**validation, "accuracy": 0.25}, {**validation, "step": 40}], **more,
    }  # fmt: skip


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a finished run of the tiny model."""
    run = save_tiny(tmp_path / "runs" / "tiny")
    (run / "summary.json").write_text(json.dumps(summary()))
    settings = {"model_name_or_path": "Qwen/Qwen2.5-Math-1.5B", "dataset": "owner/math", "preset": "grpo_clip",
                "advantage": "group_std", "policy_loss": "ppo_clip", "aggregation": "sequence_mean", "stop": ["</answer>"],
                "learning_rate": 1e-5}  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    row = {"step": 40, "prompt": "What?", "response": "```\n1</answer>", "ground_truth": "1", "reward": 1.0}
    (run / "generations.jsonl").write_text(json.dumps(row) + "\n")
    (run / "curve.png").write_bytes(b"PNG" * 99)
    for name in ("checkpoint-3", "_saving"):
        (run / name).mkdir()
        (run / name / "model.safetensors").write_text("not to be pushed")
    for name in ("training_args.bin", "_in_use", "nonfinite_step_3_rank_0.json"):
        (run / name).write_text("not to be pushed")
    return run


# --- the card ---------------------------------------------------------------------------------------------------


def test_model_card_has_training_results_and_how_to_reproduce(finished: Path) -> None:
    write_model_card(finished, "me/tiny")
    card = ModelCard.load(finished / "README.md")
    data = card.data
    assert (data.base_model, data.datasets, data.library_name) == (
        "Qwen/Qwen2.5-Math-1.5B",
        ["owner/math"],
        "transformers",
    )
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accuracy", 0.5, "owner/math")
    for words in (
        "preset `grpo_clip`; advantage `group_std`; policy_loss `ppo_clip`", "| all | 0.250 | 0.500 |",
        "| level 1 | 0.750 | 0.750 |", "0.625 after 20 optimizer steps", "12 s", "a processor, 2 threads",
        "![validation accuracy](curve.png)", "abc123", "python grpo_math.py --seed 3", "trl 1.16.0",
        "```yaml\nadvantage: group_std\n", "```python\nfrom transformers import AutoModelForCausalLM\n",
        "learning_rate: 1.0e-05", "````text\nWhat?```", "## Limits", 'from_pretrained("me/tiny")', "['</answer>']",
    ):  # fmt: skip
        assert words in card.content, words
    assert "/scratch/someone" not in card.content
    assert "level  " not in card.content


HOSTILE = "x`<script>alert(1)</script>\n\n---\n# <img src=x onerror=alert(1)> | [a](javascript:b) \n---\nlicense: mit"


def test_data_and_settings_cannot_inject_markup_into_the_card(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    names = ("model_name_or_path", "dataset", "dataset_config", "validation_split", "prompt", "reward", "preset",
             "advantage", "validation_grader")  # fmt: skip
    (finished / "config.yaml").write_text(
        yaml.safe_dump({**config, **dict.fromkeys(names, HOSTILE), "stop": [HOSTILE]})
    )
    levels = summary()
    for entry in levels["validations"]:  # type: ignore[attr-defined]
        entry["by_level"] = {HOSTILE: 0.5}
    (finished / "summary.json").write_text(json.dumps({**levels, "commit": HOSTILE, "command": HOSTILE}))
    texts = {"prompt": f"```\n{HOSTILE}", "response": f"````\n{HOSTILE}", "ground_truth": HOSTILE}
    (finished / "generations.jsonl").write_text(json.dumps({"step": 4, "reward": 1.0, **texts}) + "\n")
    write_model_card(finished, "me/tiny")
    card = ModelCard.load(finished / "README.md")
    assert card.data.license is None
    assert (card.data.model_name, card.data.eval_results[0].metric_value) == ("tiny", 0.5)
    tokens = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").parse(card.text)
    inline = [child for token in tokens for child in token.children or []]
    assert not [token for token in [*tokens, *inline] if token.type in ("html_block", "html_inline", "link_open", "hr")]
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings == ["tiny", "Results", "Use", "Sample generations", "Reproduction", "Limits"]
    assert sum(HOSTILE in token.content for token in tokens if token.type == "fence") >= 2  # samples as they came


def test_a_policy_of_this_machine_is_no_base_model_of_the_hub(finished: Path) -> None:
    settings = yaml.safe_load((finished / "config.yaml").read_text())
    settings |= {"model_name_or_path": "/somewhere/cache/base-policy-1", "dataset": "mini_math"}
    (finished / "config.yaml").write_text(yaml.safe_dump(settings))
    card = write_model_card(finished)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "A base policy that the recipe makes itself" in card.content
    assert "/somewhere" not in card.content
    (finished / "config.yaml").write_text(yaml.safe_dump(settings | {"model_name_or_path": "runs/chain/1_sft"}))
    assert "A model of an earlier run" in write_model_card(finished).content


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("owner/name", True),
        ("name", False),
        ("/abs/path", False),
        ("a/b/c", False),
        ("tests/data", False),
        (None, False),
    ],
)
def test_what_may_be_a_repository_of_the_hub(name: str | None, is_id: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert is_hub_id(name) is is_id


def test_model_text_cannot_end_its_block_and_paths_lose_folders() -> None:
    assert fenced("a ```` b") == "`````text\na ```` b\n`````"
    told = {"a": ["/scratch/me/x.yaml", "no/path", "--f=/a/b/c"], "b": 3, "c": "https://host/a/b"}
    assert without_paths(told) == {"a": ["x.yaml", "no/path", "--f=c"], "b": 3, "c": "https://host/a/b"}


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [(None, "needs --hub_model_id"), ("a--b", "hub_model_id 'a--b'"), ("a/b/c", "hub_model_id 'a/b/c'")],
)
def test_name_invalid_on_the_hub_is_refused_first(name: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(name)


def test_a_run_that_did_not_finish_is_not_pushed(finished: Path) -> None:
    (finished / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"holds no finished run: it needs summary.json"):
        push(finished, "me/x")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_hub_is_tried_before_a_run_begins(hub: Hub, tmp_path: Path) -> None:
    flags = ["--push_to_hub", "--hub_model_id", "me/x", "--output_dir", "run"]
    done = run_python(None, str(RECIPE), *flags, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: push_to_hub: the Hub cannot be used")
    assert not (tmp_path / "run").exists()
    for token, words in (
        ("hf_wrong", "push_to_hub: the Hub answered 401"),
        ("", "push_to_hub: no token; `hf auth login`, or set HF_TOKEN"),
    ):
        done = run_python(hub, "-c", "from trl_ext.hub.push import check; check('me/x')", cwd=tmp_path, token=token)
        assert words in done.stderr


# --- the round --------------------------------------------------------------------------------------------------

ROUND = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForCausalLM, AutoTokenizer))
torch.manual_seed(0)
inputs = tokenizer("1 + 2 =", return_tensors="pt")
inputs.pop("token_type_ids", None)
print("TOKENS", model.generate(**inputs, tokenizer=tokenizer, max_new_tokens=9, do_sample=True).tolist())
"""


def tokens(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-2000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("TOKENS"))


def test_token_of_a_flag_moves_to_where_the_client_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "another")
    config = SimpleNamespace(hub_token=TOKEN)  # which is saved with every checkpoint
    hide_token(config)
    assert (config.hub_token, os.environ["HF_TOKEN"]) == (None, TOKEN)


@pytest.mark.slow
def test_pushed_run_writes_the_same_tokens_after_download(hub: Hub, tmp_path: Path) -> None:
    policy = make_base_policy(0, tmp_path / "cache", SMALL, progress=False)
    settings = {
        **TINY_RUN,
        "model_name_or_path": str(policy),
        "save_strategy": "steps",
        "save_steps": 2,
        "hub_strategy": "end",
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--push_to_hub", "--hub_model_id", "mine", "--hub_private_repo", "true", "--hub_token", TOKEN]
    flags += ["--model_init_kwargs", '{"token": "pl4nted"}', "--vllm_server_base_url", "http://me:pl4nted@127.0.0.1"]
    flags += ["--report_to", "tensorboard"] if find_spec("tensorboard") else []
    done = run_python(hub, str(RECIPE), "--config", "mine.yaml", *flags, cwd=tmp_path, token="")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"pushed to {hub.address}/me/mine" in done.stdout + done.stderr
    assert hub.repositories["me/mine"]["visibility"] == "private"
    arrived = hub.files["me/mine"]
    logged = {name for name in arrived if name.startswith("runs/")}  # TensorBoard's, every setting among them
    assert bool(logged) is bool(find_spec("tensorboard"))
    assert set(arrived) - logged - {"chat_template.jinja", "special_tokens_map.json"} == PUSHED
    assert {"model.safetensors", "curve.png"} <= hub.large
    run = tmp_path / "runs" / "mine"
    assert all(arrived[name] == (run / name).read_bytes() for name in PUSHED)
    assert json.loads(arrived["generation_config.json"])["stop_strings"] == ["</answer>"]

    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) + done.stdout.encode()
    assert TOKEN.encode() not in everything + done.stderr.encode()  # neither on disk nor in a log
    assert b"pl4nted" not in everything + done.stderr.encode()
    assert "--hub_token '<masked>'" in json.loads(arrived["summary.json"])["command"]

    here = run_python(hub, "-c", ROUND, str(run), cwd=tmp_path)
    there = run_python(hub, "-c", ROUND, "me/mine", cwd=tmp_path)
    assert hub.requests["resolve"] > 3
    assert tokens(here) == tokens(there)


@pytest.mark.nightly
@pytest.mark.slow
def test_hub_failure_at_the_end_of_a_run_costs_only_the_push(hub: Hub, tmp_path: Path) -> None:
    policy = make_base_policy(0, tmp_path / "cache", SMALL, progress=False)
    settings = {**TINY_RUN, "model_name_or_path": str(policy), "hub_strategy": "end"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    hub.failures["commit"] = 1
    done = run_python(
        hub, str(RECIPE), "--config", "mine.yaml", "--push_to_hub", "--hub_model_id", "me/mine", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "error: the Hub answered 500" in done.stderr
    assert "Everything is still in runs/mine; to push it later" in done.stderr
    assert "python -m trl_ext.hub push runs/mine --repo_id me/mine" in done.stderr
    assert {path.name for path in (tmp_path / "runs" / "mine").iterdir()} >= PUSHED
    assert not hub.files["me/mine"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "places"), [("all_checkpoints", {2, 4}), ("checkpoint", {"last-checkpoint"})])
def test_complete_checkpoints_are_pushed_while_the_run_trains(
    strategy: str, places: set[object], hub: Hub, tmp_path: Path
) -> None:
    policy = make_base_policy(0, tmp_path / "cache", SMALL, progress=False)
    settings = {**TINY_RUN, "model_name_or_path": str(policy), "hub_strategy": strategy, "hub_always_push": True,
                "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    hub_id = ["--push_to_hub", "--hub_model_id", "me/mine"]
    done = run_python(hub, str(RECIPE), "--config", "mine.yaml", *hub_id, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folders = {f"checkpoint-{place}" if isinstance(place, int) else str(place) for place in places}
    arrived = {name.partition("/")[0] for name in hub.files["me/mine"] if "/" in name}
    assert arrived == folders
    last = tmp_path / "runs" / "mine" / "checkpoint-4"
    for folder in folders:
        names = {name.removeprefix(f"{folder}/") for name in hub.files["me/mine"] if name.startswith(f"{folder}/")}
        assert names == {path.name for path in last.iterdir()}
        assert "manifest.json" in names


@pytest.mark.nightly
@pytest.mark.slow
def test_failed_push_keeps_the_run_and_continues_where_it_was(hub: Hub, finished: Path, tmp_path: Path) -> None:
    arguments = ["-m", "trl_ext.hub", "push", str(finished), "--repo_id", "me/tiny", "--private"]
    hub.failures["commit"] = 1
    first = run_python(hub, *arguments, cwd=tmp_path)
    assert first.returncode == 1
    assert "the Hub answered 500" in first.stderr
    command = re.search(r"python -m trl_ext.hub push .*--repo_id me/tiny --private", first.stderr)
    assert command is not None
    assert not hub.commits
    uploads = hub.requests["put"]
    assert uploads == 2  # the weights and the plot

    second = run_python(hub, *command[0].split()[1:], cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stdout.strip() == f"{hub.address}/me/tiny"
    assert hub.repositories["me/tiny"]["visibility"] == "private"
    assert hub.requests["put"] == uploads  # they were there already
    assert set(hub.files["me/tiny"]) == {
        *("README.md", "config.json", "config.yaml", "curve.png", "generation_config.json", "generations.jsonl"),
        *("model.safetensors", "summary.json", "tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.moderate
def test_nobody_there_is_an_error_with_the_command_for_later(finished: Path, tmp_path: Path) -> None:
    done = run_python(None, "-m", "trl_ext.hub", "push", str(finished), "--repo_id", "me/tiny", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"python -m trl_ext.hub push {finished} --repo_id me/tiny" in done.stderr
    assert (finished / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("merge", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_an_adapter_is_pushed_as_an_adapter_or_merged(merge: bool, hub: Hub, finished: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(finished, base)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    (finished / "model.safetensors").unlink()
    model.save_pretrained(finished)
    model.generation_config.stop_strings = ["</answer>"]
    model.generation_config.save_pretrained(finished)
    more = ["--merge_adapter"] if merge else []
    done = run_python(hub, "-m", "trl_ext.hub", "push", str(finished), "--repo_id", "me/a", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    arrived = hub.files["me/a"]
    assert json.loads(arrived["generation_config.json"])["stop_strings"] == ["</answer>"]
    assert ("adapter_model.safetensors" in arrived, "model.safetensors" in arrived) == (not merge, merge)
    if merge:
        for name, data in arrived.items():
            (tmp_path / "down" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "down" / name).write_bytes(data)
        inputs = AutoTokenizer.from_pretrained(finished)("1 + 2 =", return_tensors="pt")["input_ids"]
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "down")
        torch.testing.assert_close(whole(inputs).logits, model(inputs).logits)
    else:
        assert b"library_name: peft" in arrived["README.md"]
    assert not list(finished.glob("_merged*"))


def test_a_failure_names_the_repository_and_the_folder(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("trl_ext.hub.push.HfApi.create_repo", refuse)
    with pytest.raises(PushError, match=r"ConnectionError: no route.*Everything is still in .*tiny; to push it later"):
        push(finished, "me/x", private=True)
