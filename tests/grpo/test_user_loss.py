"""A loss in a file of the user's own: that very `recipes/my_loss.py`, resolved, checked by hand, and trained with."""

from __future__ import annotations

import ast
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.tiny import ends_early, tiny_model, train, weight_difference
from trl_ext import ADVANTAGES, ExtGRPOConfig, ExtGRPOTrainer, LossInputs
from trl_ext.grpo.ineffective_settings import ineffective_settings
from trl_ext.mini.policy import BasePolicyConfig, make_base_policy
from trl_ext.recipes.cli import parse, start
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.registry import import_function
from trl_ext.rewards.guard import guarded

ROOT = Path(__file__).parents[2]
MY_LOSS = ROOT / "recipes" / "my_loss.py"
RECIPE = ROOT / "recipes" / "grpo_math.py"
SOFT_CLIP = f"{MY_LOSS}:soft_clip"


def without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def test_the_readme_shows_that_very_file_in_eight_lines() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"`recipes/my_loss.py`:\n\n```python\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    assert len([line for line in shown[1].splitlines() if line]) <= 8
    assert ast.unparse(ast.parse(shown[1])) == without_docstrings(MY_LOSS.read_text(encoding="utf-8"))


def config(tmp_path: Path, **axes: Any) -> ExtGRPOConfig:
    return ExtGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **axes)


def parse_recipe(*arguments: str) -> ExtGRPOConfig:
    return parse(GRPO_SETTINGS, None, RECIPE.with_suffix(".yaml"), [*arguments, "--use_cpu", "true"])[2]


SURER = """
from trl_ext import TokenLoss
def focal(x):
    return TokenLoss(-(1 - x.old_logp.exp()) * (x.logp - x.old_logp).exp() * x.advantage)
"""


def test_a_loss_is_said_to_be_idle_only_where_it_is_reinforce(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SURER)
    said = {
        loss: ineffective_settings(config(tmp_path, policy_loss=loss))
        for loss in (SOFT_CLIP, f"{tmp_path}/mine.py:focal")
    }
    assert [set(settings) for settings in said.values()] == [{"policy_loss"}, set()]


def test_the_example_has_the_value_and_gradient_of_its_formula(tmp_path: Path) -> None:
    loss = config(tmp_path, policy_loss=SOFT_CLIP, policy_loss_options={"width": 0.5}).objective().policy_loss
    logp = torch.tensor([[0.0, math.log(1.5), math.log(0.75)]], requires_grad=True)
    x = LossInputs(logp, torch.zeros(1, 3), torch.tensor([[2.0]]), torch.ones(1, 3, dtype=torch.bool))
    found = loss(x)
    # r = 1, 3/2, 3/4: the bent ratio is 1 + tanh(0)/2, 1 + tanh(1)/2, 1 - tanh(1/2)/2
    bent = [1.0, 1 + math.tanh(1) / 2, 1 - math.tanh(0.5) / 2]
    assert found.loss.tolist()[0] == pytest.approx([-2 * b for b in bent])
    assert found.metrics["soft_clip/bent"].tolist()[0] == pytest.approx([0, 1.5 - bent[1], bent[2] - 0.75])
    found.loss.sum().backward()
    # d/dlogp = -A r / cosh((r - 1) / width)^2, so -A on-policy
    slopes = [-2.0, -2 * 1.5 / math.cosh(1) ** 2, -2 * 0.75 / math.cosh(0.5) ** 2]
    assert logp.grad.tolist()[0] == pytest.approx(slopes)


def test_the_command_line_names_the_example_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ("--policy_loss", "recipes/my_loss.py:soft_clip", "--policy_loss_options", "width=0.5")
    function = parse_recipe(*arguments).objective().policy_loss
    assert function.func.__name__ == "soft_clip"
    assert function.keywords == {"width": 0.5}


def test_rows_are_skipped_only_if_the_loss_declares_it_allowed(tmp_path: Path) -> None:
    file = tmp_path / "own.py"  # the first has a gradient at advantage 0, but only far from the policy that sampled
    file.write_text(
        "from trl_ext import TokenLoss\n\n"
        "def far(x):\n    return TokenLoss(-x.advantage * x.logp + (x.logp - x.old_logp - 9).relu())\n\n"
        "def silent(x):\n    return TokenLoss(-x.advantage * x.logp)\n"
    )
    losses = {"far": f"{file}:far", "silent": f"{file}:silent", "example": SOFT_CLIP, "ours": "ppo_clip"}
    skipped = {k: config(tmp_path, policy_loss=v).objective().ignores_zero_advantage_rows() for k, v in losses.items()}
    assert skipped == {"far": False, "silent": False, "example": True, "ours": True}
    assert not config(tmp_path, policy_loss=SOFT_CLIP, beta=0.1).objective().ignores_zero_advantage_rows()


@pytest.mark.slow
def test_the_example_trains_and_logs_its_own_metric(tmp_path: Path) -> None:
    off_policy = {"preset": "grpo_clip", "num_iterations": 2, "learning_rate": 1.0, "max_steps": 4}
    mine = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **off_policy, policy_loss=SOFT_CLIP)
    clipped = train(ExtGRPOTrainer, ExtGRPOConfig, tmp_path, ends_early, **off_policy)
    bent = [entry["soft_clip/bent"] for entry in mine.state.log_history if "loss" in entry]
    assert bent[0] == 0  # on-policy
    assert bent[1] > 1e-3
    assert weight_difference(mine.model, tiny_model()) > 1e-2
    assert weight_difference(mine.model, clipped.model) > 1e-3


MISTAKES = [
    (f"{MY_LOSS}:soft_clop", ("soft_clop", "soft_clip")),
    (f"{MY_LOSS.with_name('my_los.py')}:soft_clip", ("no file", "my_los.py")),
    ("soft_klip", ("unknown policy loss 'soft_klip'", "ppo_clip")),
]


@pytest.mark.parametrize(("name", "said"), MISTAKES)
def test_a_mistyped_name_ends_with_one_readable_line(
    name: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_recipe("--policy_loss", name)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert all(text in line for text in said)


REGISTERED = "from trl_ext import POLICY_LOSSES, TokenLoss\n@POLICY_LOSSES.register(zero_advantage_is_noop=True)\n"
FAULTS = [
    (
        "policy_loss",
        "def f(x):\n    return -x.advantage",
        "must return TokenLoss(loss, metrics) from trl_ext, got Tensor",
    ),
    (
        "policy_loss",
        "from trl_ext import TokenLoss\ndef f(x):\n    return TokenLoss(-x.advantage, {'bent': x.advantage})",
        "must return one value per token, (B, T): its loss, bent has another shape",
    ),
    ("policy_loss", "def f(x:\n", "line 1: '(' was never closed"),
    ("policy_loss", "import numpyy\ndef f(x): ...", "cannot be imported: No module named 'numpyy'"),
    ("policy_loss", "def f(x):\n    return x.reward", "AttributeError: 'LossInputs' object has no attribute 'reward'"),
    (
        "policy_loss",
        f"{REGISTERED}def f(x):\n    return TokenLoss(-(x.advantage + 0.1) * x.logp)",
        "declares zero_advantage_is_noop, and at advantage 0 not 0: its loss, its gradient. Multiply by",
    ),
    (
        "policy_loss",
        f"{REGISTERED}def f(x):\n    return TokenLoss(-x.advantage * x.logp + 1)",
        "at advantage 0 not 0: its loss. Multiply",
    ),
    (
        "policy_loss",
        f"{REGISTERED}def f(x):\n    return TokenLoss(-x.advantage * x.logp + x.logp - x.logp.detach())",
        "at advantage 0 not 0: its gradient. Multiply",
    ),
    (
        "policy_loss",
        f"{REGISTERED}def f(x):\n    more = {{'a': 0 * x.logp, 'b': x.logp.exp()}}\n"
        "    return TokenLoss(-x.advantage * x.logp, more)",
        "at advantage 0 not 0: its metric 'b'. Multiply",
    ),
    (
        "advantage",
        "def f(reward):\n    return reward.mean()",
        "must return (P, G), here (2, 8), or (P, G, T), here (2, 8, 3), got ()",
    ),
    (
        "advantage",
        "def f(reward):\n    assert reward.shape[1] >= 64, 'few'\n    return reward",
        "AssertionError: few; in a call on an example, before any training: G=8 completions per prompt, T=3 tokens",
    ),
    (
        "advantage",
        "def f(reward):\n    assert reward.shape[1] == 8\n    return [0.0]",
        "must return a tensor (P, G) or (P, G, T), got list",
    ),
    ("aggregation", "def f(loss, mask, totals):\n    return loss", "must return a tensor of one number"),
    ("kl_estimator", "def f(logp, ref_logp):\n    return 0.0", "must return a tensor with one value per token, (B, T)"),
]


AT_DISTANCES = {  # what is added to a loss that declares zero_advantage_is_noop, and what of it the message names
    "(x.old_logp - x.logp).relu()": "its loss, its gradient",
    "(x.logp - x.old_logp - 9).relu()": "its loss, its gradient",
    "(x.old_logp - x.logp - 9).relu()": "its loss, its gradient",
    "(x.logp == x.old_logp) * x.logp": "its loss, its gradient",
    "((x.logp - x.old_logp).exp() < 0.8).float()": "its loss",
    "(x.advantage != 0) * x.logp": "",
    # No probability is above 1, where these would be NaN.
    "(1 - x.old_logp.exp()).sqrt() * x.advantage": "",
    "(1 - x.logp.exp()).sqrt() * x.advantage": "",
}


@pytest.mark.parametrize("added", AT_DISTANCES)
def test_a_declared_loss_is_0_on_both_sides_and_far_away(added: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{REGISTERED}def f(x):\n    return TokenLoss(-x.advantage * x.logp + {added})")
    try:
        config(tmp_path, policy_loss=f"{file}:f").objective()
        refused = ""
    except ValueError as error:
        refused = str(error)
    assert AT_DISTANCES[added] in refused
    assert bool(refused) == bool(AT_DISTANCES[added])
    assert bool(refused) == bool(AT_DISTANCES[added])


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "code", "said"), FAULTS)
def test_fault_in_a_user_file_is_found_during_argument_parsing(
    axis: str, code: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(SystemExit) as stopped:
        parse_recipe(f"--{axis}", f"{tmp_path}/mine.py:f")
    assert stopped.value.code == 2
    *frames, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    raised = {"AttributeError": 2, "AssertionError": 2, "numpyy": 1}  # on which line
    places = [f'File "{tmp_path}/mine.py", line {number}, in' for word, number in raised.items() if word in said]
    assert [place in frames[0] for place in places] == [True] * bool(frames)
    assert len(frames) <= 3


def test_a_fault_of_your_own_reward_is_reported_as_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def words(texts):\n    return texts.split()\n\ndef mine(texts):\n    words(texts)\n"
    )
    reward = guarded(import_function(f"{tmp_path}/mine.py:mine", "reward"), None)
    monkeypatch.setattr(sys, "argv", ["grpo_math.py", "--output_dir", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stopped:
        start(lambda *_: reward(texts=["a"]), GRPO_SETTINGS, None, RECIPE.with_suffix(".yaml"))
    first, _, second, *_, last = str(stopped.value.code).strip().splitlines()
    assert (first.strip(), second.strip()) == (
        f'File "{tmp_path}/mine.py", line 5, in mine', f'File "{tmp_path}/mine.py", line 2, in words',
    )  # fmt: skip
    assert last.startswith("error: reward 'mine'")
    assert "'list' object has no attribute 'split'" in last

    def fails(*_: Any) -> None:
        raise KeyError("of ours")  # nobody's file but the project's: the whole traceback is wanted

    fails.__code__ = fails.__code__.replace(co_filename=str(ROOT / "trl_ext" / "recipes" / "run.py"))
    with pytest.raises(SystemExit) as stopped:
        start(fails, GRPO_SETTINGS, None, RECIPE.with_suffix(".yaml"))
    assert stopped.value.code == 1
    assert re.search(r"(?s)Traceback .* in fails\n.*KeyError: 'of ours'", capsys.readouterr().err)


def test_the_other_examples_are_what_their_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVANTAGES, "sign_rank", torch.sign)  # takes the name out of the table again at the end
    del ADVANTAGES["sign_rank"]
    advantage = import_function(f"{ROOT}/recipes/my_advantage.py:sign_rank", "advantage")
    nan = float("nan")
    found = advantage(torch.tensor([[1.0, 0.0, 0.0, 0.5], [2.0, 2.0, 2.0, 2.0], [1.0, 0.0, nan, 0.0]]))
    assert found[0].tolist() == [0.75, -0.5, -0.5, 0.25]  # beats 3 of 4; beaten by 2; beats 2, beaten by 1
    assert found[1].tolist() == [0] * 4
    assert found[2].tolist() == pytest.approx([2 / 3, -1 / 3, nan, -1 / 3], nan_ok=True)

    reward = import_function(f"{ROOT}/recipes/my_reward.py:concise", "reward")
    texts = [f"{'w' * n} </think> <answer>{said}</answer>" for n, said in ((1970, "4"), (3000, "4"), (10, "5"))]
    lengths = [len(text) for text in texts]
    assert reward(completions=texts, answer=["4"] * 3) == [1 - min(lengths[0], 2000) / 4000, 0.5, 0.0]


def run_recipe(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRL_EXT_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(RECIPE), *arguments, "--output_dir", str(tmp_path / "run")]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.nightly
@pytest.mark.slow
def test_mistyped_function_fails_before_the_model_is_looked_up(tmp_path: Path) -> None:
    done = run_recipe(tmp_path, "--policy_loss", MISTAKES[0][0], "--model_name_or_path", "no/such/model")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("error: ") and "soft_clop" in line for line in done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_recipe_trains_with_the_example(tmp_path: Path) -> None:
    policy = make_base_policy(cache_dir=tmp_path / "cache", config=BasePolicyConfig(steps=2), progress=False)
    settings = {
        "model_name_or_path": str(policy),
        "policy_loss": "recipes/my_loss.py:soft_clip",
        "max_steps": 2,
        "rollout_batch_size": 8,
        "group_size": 4,
        "train_batch_size": 4,
        "micro_train_batch_size": 4,
        "train_problems": 16,
        "validation_problems": 4,
        "sampling_max_tokens": 8,
        "epochs_per_rollout_batch": 2,
        "preset": "grpo_clip",
        "stop": ["</answer>"],
        "learning_rate": 1e-3,
        "disable_tqdm": True,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    done = run_recipe(tmp_path, "--config", str(tmp_path / "tiny.yaml"), "--use_cpu", "true", "--logging_steps", "1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "summary.json").is_file()
    log = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert log.count('"soft_clip/bent"') == 2
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    assert written["policy_loss"] == "recipes/my_loss.py:soft_clip"
