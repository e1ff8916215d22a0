"""No secret in what a run writes, whatever setting it was given in; and what is no secret stays."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import pickle
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hub.test_push import summary
from tests.recipes.test_grpo import DEFAULT, ON_A_CPU, RECIPE, refused
from trl_ext.data.source import Source
from trl_ext.errors import InputError
from trl_ext.evaluation.evaluator import Report
from trl_ext.hub.card import write_model_card
from trl_ext.io import as_yaml, write_text
from trl_ext.recipes.best_of_n import BestOfN
from trl_ext.recipes.cli import parse, start
from trl_ext.recipes.evaluate import _decisive as settings_of_evaluation
from trl_ext.recipes.evaluate import _write as write_evaluation
from trl_ext.recipes.evaluation_settings import Evaluation
from trl_ext.recipes.expert_iteration import EXPERT_ITERATION_SETTINGS
from trl_ext.recipes.grpo import GRPO_SETTINGS
from trl_ext.recipes.run import write_config
from trl_ext.recipes.sft import SFT_SETTINGS
from trl_ext.redaction import MASK, redact, redact_command, redact_text
from trl_ext.runs.provenance import provenance
from trl_ext.runs.resume import settings_of
from trl_ext.tools.experiments.leaderboard import _write as write_result
from trl_ext.tools.experiments.pipeline.record import load_or_create, write_record
from trl_ext.tools.experiments.pipeline.settings import Pipeline, Stage
from trl_ext.tools.experiments.runspec import RunSpec
from trl_ext.tools.experiments.sweep import run_all

SECRET = "pl4nted-s3cret"
TOKEN = "hf_" + "Zz9" * 11
IN_TEXT = f"https://me:{SECRET}@host/x?api_key={SECRET}&n=1 {TOKEN}"
IN_DICT = {"token": SECRET, "n": 1, "headers": [{"Authorization": f"Bearer {SECRET}", "url": f"redis://:{SECRET}@h"}]}
RECIPES = {"grpo_math": GRPO_SETTINGS, "sft_math": SFT_SETTINGS, "expert_iteration": EXPERT_ITERATION_SETTINGS}


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (SECRET, "hub_token", MASK),
        ("<|im_end|>", "eos_token", "<|im_end|>"),
        (5, "max_tokens", 5),
        (True, "token", True),
        ("0123456789abcdef0123" * 2, "model_revision", "0123456789abcdef0123" * 2),
        ("0123456789abcdef0123" * 2, "project", MASK),
        ("Qwen/Qwen2.5-Math-1.5B", "model_name_or_path", "Qwen/Qwen2.5-Math-1.5B"),
        ("mine.py:reward", "reward", "mine.py:reward"),
        ("http://host:8000/v1?max_tokens=5", "vllm_server_base_url", "http://host:8000/v1?max_tokens=5"),
        (f"http://me:{SECRET}@host:8000", "vllm_server_base_url", f"http://{MASK}@host:8000"),
        (f"http://me:p@{SECRET}@host", "url", f"http://{MASK}@host"),
        ({"credentials": {"user": "me", "x": SECRET}}, "", {"credentials": {"user": MASK, "x": MASK}}),
        (f'{{"token": "{SECRET}", "n": 1}}', "model_init_kwargs", f'{{"token": "{MASK}", "n": 1}}'),
        (f"api_key = '{SECRET} {SECRET}', n = 1", "note", f"api_key = '{MASK}', n = 1"),
        ("sk-" + "a1" * 10, "note", MASK),
        (f"see {TOKEN}.", "note", f"see {MASK}."),
    ],
)
def test_what_is_masked_and_what_is_not(value: Any, name: str, expected: Any) -> None:
    assert redact(value, name) == expected
    assert redact(redact(value, name), name) == expected


SPELLINGS = [  # of services and headers, each with the secret in it
    '{{"pwd": "{}"}} and more',
    "DB_PWD={}",
    "AccountName=me;AccountKey={}==;x=1",
    "SharedAccessKey={}",
    "api_key: {}",
    "https://host/x?X-Amz-Signature={}&n=1",
    "https://host/x?sv=1&sig={}&se=2",
    "https://host/x?Signature={}",
    "https://host/x?X-Goog-Signature={}",
    "X-Amz-Security-Token: {}",
    "aws_secret_access_key = {}",
    "note=hub_token={}",
    "Authorization: Token {}",
    "authorization: {}",
    "curl -H 'Authorization: token {}' u",
    "Proxy-Authorization: Digest {}",
    '{{"Authorization": "Token {}"',
    "https:/me:{}@host/x",
    "s3://key:{}@bucket/x",
    "redis://:{}@host",
    "Cookie: {}",
    "https://hooks.slack.com/services/T0/B0/{}",
    "https://discord.com/api/webhooks/12/{}",
    "x: webhook_url=https://h/{}",
    "https://me.webhook.office.com/webhookb2/{}",
    '"x-api-key": "{}"',
    "SIGNING_KEY={}",
    "-----BEGIN RSA PRIVATE KEY-----\n{}",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}",
    "python x.py --hub-token {} --n 1",
    "mysql --password {}",
    "curl -u me:{} https://host",
    "https://host/x?n=1&key={}",
    "machine host login me password {}",
    "https://hooks.zapier.com/hooks/catch/1/{}",
    "ROUTING_KEY={}",
    "https://maker.ifttt.com/trigger/e/with/key/{}",
    "pass={}",
    "db_pass={}",
    "SMTP_PASS: {}",
    "pw={}",
    "passcode={}",
    "?jwt={}",
    "KAGGLE_KEY={}",
    "kaggle: {{'username': 'me', 'key': '{}'}}",
    '{{"username": "me", "key": "{}"}}',
    "fernet_key={}",
    'Authorization: Digest username="me", realm="r", nonce="{0}", response="{0}"',
    "Cookie: a=b; sid={}",
    "sessionid={}",
    "Authorization: OAuth oauth_consumer_key={0}, oauth_signature={0}",
    "Ocp-Apim-Subscription-Key: {}",
    "?a=1&code={}",
    "Authorization: AWS4-HMAC-SHA256 Credential={0}/20200101/us/s3/aws4_request, SignedHeaders=host, Signature={0}",
    'curl -H \'Authorization: Digest username="me", response="{}"\' u',
    "AWS_ACCESS_KEY_ID={}",
    "curl --user me:{} https://host",
    "sshpass -p {} ssh",
    "mysql -u me -p{}",
    "docker login -u me -p {}",
    "Password is {}",
    "https://h/x?a=1&hmac={}&n=2",
    "https://outlook.office.com/webhook/{}",
    "https://hooks.airtable.com/workflows/v1/{}",
    "https://hc-ping.com/{}",
]
WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"
NEAR_WANDB = [  # a key of 40 hexadecimal digits, which a commit is too
    "wandb: api key {}", "wandb login {}", "wandb login --relogin {}", "Your W&B API key is {}", "api key: {}", "wandb_key {}",
    "wandb.login(key='{}')", "WANDB_API_KEY {}", "Paste your API key: {}", "weights & biases key {}", "wandb login local-{}",
]  # fmt: skip
TOKENS = [
    "AIza" + "a1B2_" * 7, "nvapi-" + "a1" * 20, "ya29." + "a1" * 20, "gsk_" + "a1" * 20, "xai-" + "a1" * 20,
    "r8_" + "a1" * 20, "npm_" + "a1" * 18, "pypi-" + "a1" * 20, "glrt-" + "a1" * 10, "xapp-1-" + "a1" * 10,
    "sk_live_" + "a1" * 10, "ASIA" + "A1" * 8, "hvs." + "a1" * 12, "GOCSPX-" + "a1" * 12, "dckr_pat_" + "a1" * 10,
    "SG." + "a1" * 10 + "." + "a1" * 10, "123456789:" + "A1" * 17 + "b", "eyJ" + "a1" * 6 + "." + "a1" * 6 + ".x",
    "dapi" + "a1" * 16, "tgp_v1_" + "a1" * 12, "lsv2_pt_" + "a1" * 12, "dop_v1_" + "a1" * 32, "shpat_" + "a1" * 16,
    "figd_" + "a1" * 12, "PMAK-" + "a1" * 12, "NRAK-" + "A1" * 12, "whsec_" + "a1" * 12, "SK" + "a1" * 16,
    "a1B2" * 7, "a1B2" * 12,  # of any service
    "key-" + "a1" * 16, "pat" + "a1" * 7 + "." + "a1" * 32, "sk-proj-" + "a1" * 10,
]  # fmt: skip
NO_SECRETS = [
    "PWD=/a/folder", "monkey=3", "sig_digits=4", "design=5", "signature=(x)", "keyboard: us", "the key: 5 + 3 = 8",
    "x = 12345678:9", "kl_per_token=0.1", "entropy_per_token: 0.25", "next_token=5", "token: 5", "webhook: none",
    "auth=none", "sk-learning-rate-schedule", "give --hub_token or log in", "the password has 8 letters", "a sign: -3", "sort_key_of=3", "password", "cookies and cream",
    "pass=0.5", "pass@8: 0.31", "pass=3/5", "pass: 12", "first pass: reward", "forward_pass=3", "bypass=1", "--pass 3", "compass=north",
    "pass 2 of 3", "key=reward", '{"username": "me", "n": 1}', "author: x", "password: ''", f"commit {WANDB_KEY}", f"revision={WANDB_KEY}",
    f"wandb: run at commit {WANDB_KEY}", f"sha256: {WANDB_KEY}{WANDB_KEY[:24]}", f"'key': '{WANDB_KEY[:32]}'", "https://h/x?key=level",
    "Qwen3ForConditionalGeneration2", "_ZN3c106detail14torchCheckFailEPKcS2", "1234567890" * 5, "x" * 60, "https://h/x?code=en&sid=a",
    "grpo-Qwen2-5B-lr1e-6-KL0-G8-bs128-T1-seed42", "Cookie Monster: 5 cookies", "Digest: md5 of 3 answers",
]  # fmt: skip


def test_secrets_are_masked_as_services_write_them() -> None:
    shown = {spelling: redact_text(spelling.format(SECRET)) for spelling in SPELLINGS}
    assert [text for text in shown.values() if SECRET in text or MASK not in text] == []
    assert [token for token in TOKENS if redact_text(f"see {token}, ok") != f"see {MASK}, ok"] == []
    assert [text for text in NO_SECRETS if redact_text(text) != text] == []
    shown |= {spelling: redact_text(spelling.format(WANDB_KEY)) for spelling in NEAR_WANDB}
    assert [text for text in shown.values() if WANDB_KEY in text or MASK not in text] == []
    assert [text for text in shown.values() if redact_text(text) != text] == []  # once is enough


@pytest.mark.moderate
def test_a_long_text_is_masked_in_linear_time() -> None:
    runs = [
        "9",
        "aB3",
        "wandb ",
        "api key 0",
        "cookie: ",
        "'username':",
        "mysql ",
        "authorization: digest ",
        "?key=",
        "a",
        "a.",
        "token",
        "token=",
        "a=",
        "eyJ",
        "eyJ-",
        "://",
        "://a@",
        "token='",
        "[",
        "{",
        "bearer ",
        " ",
    ]
    for run in runs:
        began = time.perf_counter()
        redact_text(run * (100_000 // len(run)))
        assert time.perf_counter() - began < 2, run  # a quadratic pattern takes minutes


def test_environment_secret_is_masked_wherever_it_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    assert redact_text(f"a run called x{SECRET}y") == f"a run called x{MASK}y"


def test_a_command_is_masked_by_its_flags() -> None:
    words = ["run.py", "--hub_token", SECRET, "--hub_token=" + SECRET, "--seed", "3", "--model_init_kwargs"]
    shown = redact_command([*words, json.dumps(IN_DICT), "--url", IN_TEXT])
    assert SECRET not in str(shown) + TOKEN
    assert TOKEN not in str(shown)
    assert [shown[0], shown[2], shown[4:7]] == ["run.py", MASK, ["--seed", "3", "--model_init_kwargs"]]


@pytest.mark.moderate
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_secret_in_any_setting_is_in_nothing_that_a_run_writes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting that takes a text or a dict has one."""
    parts = parse(RECIPES[recipe], "about", DEFAULT.with_name(f"{recipe}.yaml"), ON_A_CPU)
    planted = 0
    for part in parts:
        hints = typing.get_type_hints(type(part))  # the parser has changed the fields' own
        for field in dataclasses.fields(part):
            hint = str(hints[field.name])
            value = IN_DICT if "dict" in hint else IN_TEXT if "str" in hint else None
            if value is not None and field.name != "output_dir":
                setattr(part, field.name, copy.deepcopy(value))
                planted += 1
    assert planted > 60
    task, model, config = parts
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--hub_token", SECRET, "--model_init_kwargs", json.dumps(IN_DICT)])
    write_config(tmp_path / "config.yaml", task, model, config)
    (tmp_path / "run.json").write_text(json.dumps(settings_of(parts)))
    (tmp_path / "tensorboard").write_text(config.to_json_string())
    torch.save(config, tmp_path / "training_args.bin")
    (tmp_path / "summary.json").write_text(json.dumps(summary(**provenance())))
    write_model_card(tmp_path)
    assert pickle.loads(pickle.dumps(config)).model_init_kwargs["token"] == MASK
    for copied in (copy.copy(config), copy.deepcopy(config)):  # which are used, not written
        assert (copied.model_init_kwargs, copied.run_name) == (IN_DICT, IN_TEXT)
    assert config.model_init_kwargs == IN_DICT
    for path in tmp_path.iterdir():
        for secret in (SECRET, TOKEN):
            assert secret.encode() not in path.read_bytes(), path.name


def planted(part: Any) -> Any:
    """The settings with a secret in every one that takes a text or a dict."""
    hints = typing.get_type_hints(type(part))
    for field in dataclasses.fields(part):
        hint = str(hints[field.name])
        value = IN_DICT if "dict" in hint or "Mapping" in hint else IN_TEXT if "str" in hint else None
        if value is not None and field.name not in ("output_dir", "config", "recipe", "category"):
            object.__setattr__(part, field.name, [value] if "list" in hint else copy.deepcopy(value))
    return part


def an_evaluation(kind: type[Evaluation], folder: Path) -> None:
    settings = kind()
    source = Source(IN_TEXT, IN_TEXT, 2, 1, "stored", unusable=[IN_TEXT])
    planted(settings).use_vllm = "false"
    row = {"outcome": "neither", "problem_id": 0, "level": 1, "subject": "", "tokens": 3, "finish_reason": "stop"}
    write_text(folder / "settings.yaml", as_yaml(settings_of_evaluation(settings, source)))
    write_evaluation(folder, Report([row]), {"model": str(settings.model_name_or_path)}, source, 1.0)
    (folder / "printed").write_text(source.line(IN_TEXT))


def a_pipeline(folder: Path) -> None:
    pipeline = planted(Pipeline([Stage("grpo")], str(folder)))
    object.__setattr__(pipeline, "stages", [planted(Stage("grpo"))])
    write_record(folder, load_or_create(folder, pipeline))


def a_sweep(folder: Path) -> None:
    script = folder / "child.py"
    script.write_text("raise SystemExit(1)")
    flags = ["--hub_token", SECRET, "--x", IN_TEXT, "--y", json.dumps(IN_DICT)]
    with pytest.raises(InputError):
        run_all({"one": [str(script), *flags]}, folder)


def a_lab(folder: Path) -> None:
    settings = {"hub_token": SECRET, "run_name": IN_TEXT, "model_init_kwargs": IN_DICT}
    name = RunSpec("grpo", "base.yaml", settings).run_name(0)
    (folder / name[:200]).mkdir()
    lines = "\n".join(path.name for path in folder.iterdir())
    (folder / "report.md").write_text(lines + name)


def a_leaderboard(folder: Path) -> None:
    write_result(folder, {"rules": IN_TEXT, "why_not": IN_TEXT, "model": IN_DICT})


def an_exception(folder: Path, own: str = "") -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(f"cannot read {IN_TEXT}") from KeyError(json.dumps(IN_DICT))

    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("w") as log, contextlib.redirect_stderr(log):
        patch.setattr(sys, "argv", ["grpo_math.py", "--output_dir", str(folder / "run")])
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        patch.setattr("trl_ext.recipes.cli.lines_of_user_files", lambda _: own)
        with pytest.raises(SystemExit) as ended:
            start(fail, GRPO_SETTINGS, "about", DEFAULT)
    if isinstance(ended.value.code, str):
        (folder / "last words").write_text(ended.value.code)
    assert "cannot read" in (folder / "error.json").read_text()
    assert any("cannot read" in path.read_text() for path in folder.iterdir() if path.name != "error.json")


WRITERS: dict[str, Callable[[Path], None]] = {
    "evaluate": functools.partial(an_evaluation, Evaluation),
    "best_of_n": functools.partial(an_evaluation, BestOfN),
    "pipeline": a_pipeline,
    "sweep": a_sweep,
    "lab": a_lab,
    "leaderboard": a_leaderboard,
    "traceback": an_exception,
    "own file": functools.partial(an_exception, own=f"x = '{IN_TEXT}'\n"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_command_writes_a_secret_of_settings_or_exceptions(
    writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(RECIPE), "--hub_token", SECRET, "--model_init_kwargs", json.dumps(IN_DICT)])
    WRITERS[writer](tmp_path)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    leaks = [path.name for path in written for secret in (SECRET, TOKEN) if secret.encode() in path.read_bytes()]
    assert not leaks
    assert SECRET not in str(written)


def test_what_was_masked_has_to_be_given_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*ON_A_CPU, "--model_init_kwargs", json.dumps({"token": SECRET}), "--run_name", TOKEN]
    path = tmp_path / "config.yaml"
    write_config(path, *parse(GRPO_SETTINGS, "about", DEFAULT, arguments))
    said = refused(["--config", str(path)], capsys)
    assert "model_init_kwargs.token, run_name" in said
    assert "masked when" in said
    again = ["--model_init_kwargs", json.dumps({"token": SECRET}), "--run_name", "x"]
    _, _, config = parse(GRPO_SETTINGS, "about", path, again)
    assert config.model_init_kwargs == {"token": SECRET}


@pytest.mark.parametrize("text", ["basic arithmetic problems", "Bearer tokens of all kinds", "a basic run_of_the_mill"])
def test_prose_is_no_secret(text: str) -> None:
    assert redact({"run_name": text, "min_token": "abc", "end_token": "</s>"})["run_name"] == text
    assert redact({"min_token": "abc", "end_token": "</s>"}) == {"min_token": "abc", "end_token": "</s>"}
    assert MASK in redact_text("Authorization: Basic dXNlcjpwYXNzd29yZDEyMw==")
    assert "dXNlcjpwYXNz" not in redact_text("curl -H 'basic dXNlcjpwYXNzd29yZDEyMw=='")
