"""Conversations through chat templates of the kinds that checkpoints bring along, and what cannot be one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import BOS, END, TURN, tokenizer_of
from trl_ext.data.dataset import DatasetSettings
from trl_ext.data.traces import load_traces
from trl_ext.generation.conversation import ChatTemplate, conversation
from trl_ext.generation.prompts import Asking, load_template
from trl_ext.generation.tokens import prompt_ids
from trl_ext.mini.policy import EOS
from trl_ext.recipes.chat import doubled_begin

CHATML = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% if not thinks | default(true) %}<think></think>{% endif %}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES: dict[str, tuple[str, dict[str, Any], str | None]] = {  # template, tokenizer, end of a turn
    "chatml": (CHATML, {}, END),
    "begins_with_bos": (WITH_BOS, {"bos_token": BOS}, END),
    "bos_is_added_too": (WITH_BOS, {"bos_token": BOS, "adds": f"{BOS} $A"}, END),
    "bos_and_eos_are_added_too": (WITH_BOS, {"bos_token": BOS, "adds": f"{BOS} $A {EOS}"}, END),
    "ends_with_eos": (MISTRAL, {"bos_token": BOS, "adds": f"{BOS} $A"}, EOS),
    "no_token_ends": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {}, None),
}
ASKED = [{"role": "user", "content": "What is 1 + 1?"}]
BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    template, named, _ = TEMPLATES[name]
    found = tokenizer_of(special=(BOS, TURN, END), **named)
    found.chat_template = template
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_has_the_tokens_that_the_template_gives(name: str) -> None:
    found = tokenizer(name)
    chat = ChatTemplate(found, "a/model")
    expected = found.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    assert prompt_ids(found, [chat.text(ASKED)]) == [expected]
    assert chat.end_of_turn() == TEMPLATES[name][2]


def test_variables_of_the_template_are_handed_on() -> None:
    found = tokenizer("chatml")
    assert ChatTemplate(found, "m", {"thinks": False}).text(ASKED).endswith("assistant\n<think></think>")
    assert ChatTemplate(found, "m").text(ASKED).endswith("assistant\n")


SAYS = "{{ m.role }}: {{ m.content }}{% endfor %}assistant:"
LOSING = {
    "the system message": "{% for m in messages if m.role != 'system' %}" + SAYS,
    "messages but the last": "{% for m in messages[-1:] %}" + SAYS,
    "content that is no list of parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "all": "Hello!",
    "all but the beginning": "{% for m in messages %}{{ m.content[:4] }}{% endfor %}",
    "capitals": "{% for m in messages %}{{ m.content | lower }}{% endfor %}",
}  # fmt: skip
FAILING = {
    "a type": ("{{ 1 + messages[0].content }}", "unsupported operand"), "a number": ("{{ 1 // 0 }}", "by zero"),
    "an element": ("{{ messages[7].content + 'x' }}", "no element 7"), "an end": ("{% for m in messages %}", "end of template"),
    "a default": ({"rag": "a", "tool_use": "b"}, "multiple chat templates"),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOSING)
def test_template_that_loses_what_is_asked_is_refused(lost: str) -> None:
    found = tokenizer_of()
    found.chat_template = LOSING[lost]
    told = [{"role": "system", "content": " Be brief and Exact.\n"}, {"role": "user", "content": "What is 1 + 1?"}]
    with pytest.raises(
        ValueError, match=r"template of 'a/model' leaves out what the (system|user) says, or changes it"
    ):
        ChatTemplate(found, "a/model").text(told)
    found.chat_template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert ChatTemplate(found, "a/model").text(told) == "Be brief and Exact.What is 1 + 1?"


@pytest.mark.parametrize("fault", FAILING)
def test_template_that_fails_is_named_in_a_line(fault: str) -> None:
    found = tokenizer_of()
    found.chat_template, words = FAILING[fault]
    with pytest.raises(ValueError, match=f"the chat template of 'a/model' refuses messages .*{words}") as refused:
        ChatTemplate(found, "a/model").text(ASKED)
    assert "\n" not in str(refused.value)


def test_template_that_asks_for_the_date_is_the_same_tomorrow() -> None:
    found = tokenizer_of()
    found.chat_template = "{{ strftime_now('%d %B %Y %H:%M') }}" + CHATML  # as SmolLM3's and Llama 3.2's
    assert ChatTemplate(found, "a/model").text(ASKED).startswith("01 January 2025 00:00")
    mine = {"strftime_now": lambda form: "today"}
    assert ChatTemplate(found, "a/model", mine).text(ASKED).startswith("today")


def test_what_a_model_cannot_be_asked_is_said_by_name() -> None:
    found = tokenizer_of()
    with pytest.raises(ValueError, match=r"'a/model' has no chat template \(chat_template.jinja.*--prompt r1_zero"):
        ChatTemplate(found, "a/model").text(ASKED)
    found.chat_template = NO_SYSTEM
    told = [{"role": "system", "content": "Be brief."}, *ASKED]
    with pytest.raises(ValueError, match=r"'a/model' refuses messages of the roles system, user: System role not supp"):
        ChatTemplate(found, "a/model").text(told)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not a list of messages"),
        ("hello", "not a list of messages"),
        ([{"role": "user", "content": None}], "message 0: content is 'None', not a text"),
        (
            [*ASKED, {"role": "assistants", "content": "2"}],
            "message 1: unknown role 'assistants'. Did you mean 'assistant'",
        ),
        (
            [*ASKED, {"role": "assistant", "content": "2"}],
            "the last message is the assistant's, and must be the user's",
        ),
        ([{"role": "system", "content": "Be brief."}], "the last message is the system's, and must be the user's"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        conversation(messages)
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(messages))
    with pytest.raises(ValueError, match=f"mine.yaml'.*{words}"):
        load_template(path)


def test_shipped_conversation_asks_for_a_box() -> None:
    assert Asking.named("chat").prompt("1 + 1?") == [{"role": "user", "content": f"1 + 1?\n{BOXED}"}]
    assert DatasetSettings(prompt="chat").answer_format == "boxed"
    assert DatasetSettings(prompt="chat", answer_format="r1_zero").answer_format == "r1_zero"


def test_template_of_your_own_has_roles_and_system_goes_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("- {role: system, content: Be brief.}\n- {role: user, content: 'Solve {question}: {x}'}\n")
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Solve 1?: {x}"}]
    assert Asking.named(str(path)).prompt("1?") == own
    assert Asking.named(str(path), "Think.").prompt("1?") == [{"role": "system", "content": "Think."}, own[1]]
    path.write_text("- {role: user, content: no place}\n")
    with pytest.raises(ValueError, match=r"mine.yaml' has no \{question\} placeholder"):
        DatasetSettings(prompt=str(path))
    with pytest.raises(
        ValueError, match=r"system_prompt is a message of a conversation, and prompt 'r1_zero' is a text"
    ):
        DatasetSettings(system_prompt="Think.")


# Datasets whose problems are conversations.

VERL = {"data_source": "x", "prompt": ASKED, "reward_model": {"ground_truth": "2", "style": "rule"}, "extra_info": {}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "verl": VERL,  # DAPO-Math-17k has the same columns
    "answer": {"prompt": ASKED, "answer": "2"},
    "solution": {"prompt": ASKED, "solution": "It is \\boxed{2}."},
}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "train.jsonl")


def read(dataset: str, **settings: Any) -> Any:
    return DatasetSettings(dataset=dataset, **settings).read("train", None, 0).rows[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversations_of_a_dataset_are_asked_as_they_stand(layout: str, tmp_path: Path) -> None:
    told = [{"role": "system", "content": "Be brief."}, *ASKED]
    dataset = written(tmp_path, {**LAYOUTS[layout], "prompt": told})
    row = read(dataset, prompt="chat")
    assert (row["prompt"], row["problem"], row["answer"]) == (told, "What is 1 + 1?", "2")
    assert read(dataset, prompt="chat", system_prompt="Think.")["prompt"][0]["content"] == "Think."
    assert read(dataset, prompt="question_only")["prompt"] == "What is 1 + 1?"


def test_columns_go_into_objects_by_dots(tmp_path: Path) -> None:
    row = {"extra": {"question": "1 + 1?"}, "a.b": "2", "reward_model": {"truth": "3"}}
    dataset, columns = written(tmp_path, row), {"problem_column": "extra.question", "prompt": "question_only"}
    assert read(dataset, answer_column="reward_model.truth", **columns)["answer"] == "3"
    assert read(dataset, answer_column="a.b", **columns)["answer"] == "2"
    with pytest.raises(ValueError, match=r"line 1: no answer in 'reward_model.ground_truth': 'None'"):
        read(dataset, answer_column="reward_model.ground_truth", **columns)
    with pytest.raises(ValueError, match=r"has no column 'model.truth'. It has: extra, a.b, reward_model"):
        read(dataset, answer_column="model.truth", **columns)


def test_a_row_without_a_users_turn_is_named(tmp_path: Path) -> None:
    broken = {**VERL, "prompt": [*ASKED, {"role": "assistant", "content": "2"}]}
    with pytest.raises(ValueError, match=r"train.jsonl', line 2: 'prompt': the last message is the assistant's"):
        read(written(tmp_path, VERL, broken), prompt="chat")


# Traces of conversations and of solutions.

SAID = {"role": "assistant", "content": "It is \\boxed{2}."}
CHATS = [
    {"messages": [*ASKED, SAID]},
    {"prompt": ASKED, "response": [SAID]},
    {"prompt": ASKED, "response": SAID["content"]},
]
GSM8K = {"question": "What is 1 + 1?", "answer": "One and one is <<1+1=2>>2.\n#### 2"}
MATH = {"problem": "What is 1 + 1?", "solution": "It is $\\boxed{2}$.", "level": "Level 1"}


@pytest.mark.parametrize("row", CHATS, ids=["messages", "both", "prompt"])
def test_conversations_become_traces(row: dict[str, Any], tmp_path: Path) -> None:
    dataset = written(tmp_path, row)
    assert load_traces(dataset, "train", asking=Asking.named("chat")) == [
        {"prompt": ASKED, "response": SAID["content"]}
    ]
    (text,) = load_traces(dataset, "train", asking=Asking.named("question_only"))
    assert text["prompt"] == "What is 1 + 1?"


@pytest.mark.parametrize(
    ("row", "answer_format", "response"),
    [
        (GSM8K, "r1_zero", " One and one is 2. </think> <answer> 2 </answer>"),
        (GSM8K, "boxed", "One and one is 2.\nThe answer is $\\boxed{2}$."),
        (MATH, "r1_zero", " It is $\\boxed{2}$. </think> <answer> 2 </answer>"),
        (MATH, "boxed", "It is $\\boxed{2}$."),
    ],
)
def test_solutions_become_traces(row: dict[str, Any], answer_format: str, response: str, tmp_path: Path) -> None:
    asking = Asking.named("question_only")
    (trace,) = load_traces(written(tmp_path, row), "train", asking=asking, answer_format=answer_format)
    assert trace == {"prompt": "What is 1 + 1?", "response": response, "answer": "2"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": ASKED}, "row 0: the last message is the user's, and must be the assistant's"),
        ({**GSM8K, "answer": "two"}, r"row 0: 'answer' has no answer \(after_hashes\): 'two'"),
        ({"problem": "1?", "answer": "2"}, "no column 'prompt'"),
        ({"prompt": 3, "response": "2"}, "row 0: 'prompt' is 3, not a text"),
        ({"prompt": ASKED, "response": ""}, "row 0: 'response' is '', not a text"),
    ],
)
def test_what_is_no_trace_is_refused(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        load_traces(written(tmp_path, row), "train", asking=Asking.named("chat"))


def test_a_text_that_doubles_bos_is_mended_and_said() -> None:
    rows = [{"prompt": f"{BOS}1 + 1?"}]
    assert "reads it once" in doubled_begin(tokenizer("bos_is_added_too"), rows)
    assert doubled_begin(tokenizer("begins_with_bos"), rows) == ""
    assert doubled_begin(tokenizer("bos_is_added_too"), [{"prompt": "1 + 1?"}]) == ""
