"""Secrets in settings and commands are masked before they are written: by the name of a setting, and by what they look
like wherever they stand.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "<masked>"

_SECRET_ENDINGS = (
    "token", "password", "passwd", "passphrase", "pwd", "secret", "key", "credential", "credentials", "authorization",
    "auth", "cookie", "signature", "webhook", "webhook_url", "pass", "passcode", "pswd", "pw", "jwt", "session_id",
    "sessionid", "key_id",
)  # fmt: skip
_SECRET_NAME = re.compile(
    r"(token|password|passwd|passphrase|passcode|pass|pswd|pwd|pw|secret|(access|private)keyid|jwt|sessionid"
    r"|(api|access|account|secret|private|wandb|signing|encryption|routing|subscription|kaggle|fernet|master|consumer)key"
    r"|credentials?|authorization|auth|cookie|(amz|goog)signature|webhook(url)?)$"
)
_NO_SECRET_NAME = re.compile(
    r"(eos|bos|pad|unk|sep|cls|mask|stop|image|video|audio|end|start|special|prompt|min|max|new"
    r"|per|each|next|first|last)token$|(for|back)wardpass$|(by|com|over|sur|tres|first|second|one|two|single|each)pass$"
)
_SHELLS_FOLDERS = ("PWD", "OLDPWD")
_NAME_OF_A_HASH = re.compile(r"(revision|commit|sha\d*|hash|fingerprint)$")
# What the services' own prefixes give away. Lookbehinds and possessive repetitions (`++`) keep every pattern linear.
_LOOKS_SECRET = re.compile(
    r"(?<![\w-])(?:hf_(?:oauth_|jwt_)?[A-Za-z0-9]{16,}+|sk-(?=[\w-]*\d)[\w-]{16,}+|[srp]k_(?:live|test)_\w{16,}+|gh[pousr]_\w{16,}+"
    r"|github_pat_\w{16,}+|gl(?:pat|rt|dt|ft|soat)-[\w-]{16,}+|xox[abeprs]-[\w-]{10,}+|xapp-[\w-]{10,}+"
    r"|wandb_v1_\w{16,}+|A(?:KIA|SIA)[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}+|GOCSPX-[\w-]{20,}+"
    r"|nvapi-[\w-]{20,}+|gsk_\w{20,}+|xai-\w{20,}+|pplx-\w{20,}+|r8_\w{20,}+|npm_\w{30,}+|pypi-[\w-]{30,}+"
    r"|dckr_pat_[\w-]{16,}+|hvs\.[\w-]{16,}+|SG\.[\w-]{16,}+\.[\w-]{16,}+|(?:bot)?\d{8,10}:[\w-]{35}(?![\w-])"
    r"|(?:whsec|fw|tgp_v1|lsv2_[a-z]{2}|do[opr]_v1|lin_api|ntn|shp(?:at|ca|pa|ss)|figd|rubygems|gls?[ac]|rpa)_(?=\w*\d)"
    r"\w{20,}+|dapi[0-9a-f]{32}|sq0[a-z]{3}-[\w-]{20,}+|dp\.[a-z]{2}\.\w{20,}+|HRKU-[\w-]{20,}+|PMAK-[\w-]{20,}+"
    r"|NRAK-\w{20,}+|AGE-SECRET-KEY-1\w{20,}+|SK[0-9a-f]{32}(?!\w)|key-[0-9a-f]{32}(?!\w)"
    r"|pat\w{14}\.[0-9a-f]{64}"
    r"|eyJ[\w-]{10,}+\.[\w-]{10,}+\.[\w-]*+)"
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----)[^-]*+")
_WEBHOOK = re.compile(
    r"(?i)(hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
    r"|webhook\.office\.com/webhookb?2?/|api\.telegram\.org/bot|hooks\.zapier\.com/hooks/"
    r"|maker\.ifttt\.com/trigger/|outlook\.office(?:365)?\.com/webhook/|/bot/v2/hook/|(?<=/)hc-ping\.com/"
    r"|(?<=/)hooks\.[\w.-]{1,60}+/)[^\s\"']++"
)
_SIGNED_URL = re.compile(
    r"(?i)(?<=[?&;])((?:[\w-]*signature|sig|hmac|(?:key|pass|code|sas|sid)(?==[^&;\s\"']{0,80}\d))=)[^&;\s\"']++"
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_USERINFO = re.compile(r"(?<=:/)(/?)[^/\s\"']*@")  # a path that was a URL has lost a slash
_SCHEME = re.compile(r"(?i)\b(bearer|basic)\s++(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}+")
_NEAR_WANDB = re.compile(
    r"(?i)((?:wandb|w&b|weights (?:&|and) biases|api[ _-]?key)[^\n]{0,40}?(?<![0-9a-z]))[0-9a-f]{40}(?![0-9a-z])"
)
_OF_A_HASH = re.compile(r"(?i)commit|revision|sha|hash|git|version|fingerprint|digest")
_KAGGLE = re.compile(r"""(["']username["']\s*+:\s*+["'][^"']*+["']\s*+,\s*+["']key["']\s*+:\s*+["'])[^"']++""")
_MIXED = re.compile(r"(?<![A-Za-z0-9])[A-Za-z0-9]{24,}+")  # of letters and digits, which tokens of any service have
_CHANGES = re.compile(r"(?<=[a-z])[A-Z0-9]|(?<=[A-Z])[a-z0-9]|(?<=[0-9])[a-zA-Z]")
_HEADER = re.compile(
    r"(?i)(authorization[\"']?\s*+[=:]\s*+[\"']?(?:digest|oauth|hawk|signature|aws4-hmac-sha256) "
    r"|(?<![\w-])cookie: )[^\n']++"
)
_AUTHORIZATION = re.compile(r"(?i)(authorization[\"']?\s*+[=:]\s*+[\"']?)([a-z-]{1,20} +)?[^\s\"',;<]++")
_ASSIGNED = re.compile(
    rf"""(?ix) (?<![\w.-]) ([\w.-]++) (?:{"|".join(f"(?<={ending})" for ending in _SECRET_ENDINGS)})
    (["']?\s*+[=:]\s*+) ("[^"]*"|'[^']*'|[^\s"',}}\]&;]++)"""
)
_FLAG = re.compile(r"(?<![\w-])(--[\w-]{1,60}+)(\s++)(?=[^\s\d]*\d)(?!-)([^\s\"']++)")
_LOGIN = re.compile(
    r"(?i)(?<![\w-])((?:login\s++\S++\s++)?password\s++(?:is\s++(?=\S{6}))?(?=\S*\d)|-(?:u|-user)\s++[^\s:]++:(?!//)"
    r"|(?:sshpass|docker\s++login|mysql)\b[^\n]{0,60}?\s-p\s?+)[^\s\"'=:<]\S*+"
)
_PLAIN = re.compile(r"none|null|true|false|no|yes", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d{0,6}(?:\.\d{0,20})?(?:e-?\d{1,3})?")  # a metric's, whose name ends on token
_LONGEST_NAME = 60  # characters of a name, by whose end it is recognized
_SHORTEST = 8  # of a secret in the environment, which is looked for everywhere


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `hub_token`, `api_key`; `eos_token` is none."""
    if name in _SHELLS_FOLDERS:
        return False
    letters = re.sub(r"[^a-z]", "", name[-_LONGEST_NAME:].lower())
    return bool(_SECRET_NAME.search(letters)) and not _NO_SECRET_NAME.search(letters)


def redact(value: Any, name: str = "") -> Any:
    """A setting's value with the secrets in it masked, in dicts and lists of any depth; others are left as they are."""
    if type(value) is dict:
        inherited = name if is_secret_name(name) else ""
        login = "api_key" if "username" in value and "key" in value else "key"  # as Kaggle has it
        return {key: redact(item, inherited or (login if key == "key" else str(key))) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(redact(item, name) for item in value)
    if not isinstance(value, str):
        return value
    if is_secret_name(name):
        return MASK if value else value
    if _WANDB_KEY.fullmatch(value) and not _NAME_OF_A_HASH.search(re.sub(r"[^a-z0-9]", "", name.lower())):
        return MASK
    masked = redact_text(value)
    return value if masked == value else masked


def redact_text(text: str) -> str:
    """A text with what looks like a secret masked: tokens, passwords in URLs, `name=value` and JSON, the environment's
    secrets.
    """
    if text.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            pass
        else:
            return text if redact(content) == content else json.dumps(redact(content))
    for secret in _environment_secrets():
        text = text.replace(secret, MASK)
    text = _USERINFO.sub(rf"\1{MASK}@", text)
    text = _WEBHOOK.sub(rf"\1{MASK}", text)
    text = _SIGNED_URL.sub(rf"\1{MASK}", text)
    text = _PRIVATE_KEY.sub(rf"\1{MASK}", text)
    text = _NEAR_WANDB.sub(lambda match: match[0] if _OF_A_HASH.search(match[1]) else f"{match[1]}{MASK}", text)
    text = _KAGGLE.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\1\2{MASK}", text)
    text = _SCHEME.sub(rf"\1 {MASK}", text)
    text = _LOOKS_SECRET.sub(MASK, text)
    text = _MIXED.sub(lambda match: MASK if _is_mixed(match[0]) else match[0], text)
    text = _FLAG.sub(_masked_flag, text)
    text = _LOGIN.sub(rf"\1{MASK}", text)
    return _ASSIGNED.sub(_masked_value, text)


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line with its secrets masked."""
    shown, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            shown.append(redact_text(word))
        else:
            shown.append(redact(word, name))
    return shown


def masked_names(value: Any, name: str = "") -> Iterator[str]:
    """Names, as `dict.key`, of the settings in which something was masked."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from masked_names(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from masked_names(item, name)
    elif isinstance(value, str) and MASK in value:
        yield name


def _environment_secrets() -> list[str]:
    return [value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= _SHORTEST]


def _is_mixed(text: str) -> bool:
    """Whether letters of both cases and digits alternate as they do in no name: `Qwen3ForCausalLM` is one."""
    if text.isalpha() or text.isdigit() or text.lower() == text or text.upper() == text or text.startswith("ZN"):
        return False
    return sum(map(str.isdigit, text)) > 1 and 3 * len(_CHANGES.findall(text)) > len(text)


def _is_number(name: str, value: str, sign: str = "=") -> bool:
    """Whether a value is that of a metric or a count, whose name ends on token or pass; or a word after `pass:`."""
    if name.lower() == "pass" and ":" in sign and value.isalpha():
        return True
    return name.lower().endswith(("token", "pass")) and _NUMBER.fullmatch(value.replace("/", "")) is not None


def _masked_flag(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    return f"{name}{between}{MASK}" if is_secret_name(name) and not _is_number(name, value) else match[0]


def _masked_value(match: re.Match[str]) -> str:
    name, between, value = match.groups()
    if (
        not is_secret_name(name)
        or _PLAIN.fullmatch(value)
        or not value.strip("\"'")
        or _is_number(name, value, between)
    ):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{MASK}{quote}"
