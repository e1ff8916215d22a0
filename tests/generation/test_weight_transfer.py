"""Weights as a stream of bytes: cut into parts and put together again."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trl_ext.generation.server import start_command, urls_of
from trl_ext.generation.tensor_stream import TensorStream, body_of, parts

WEIGHTS = [
    ("first", torch.randn(3, 5)),
    ("half", torch.randn(7).to(torch.bfloat16)),
    ("turned", torch.randn(4, 6).t()),
    ("number", torch.tensor(3.0)),
    ("large", torch.randn(40, 10)),
    ("empty", torch.empty(0, 4)),
]


def sent(limit: int) -> list[dict[str, Any]]:
    return [json.loads(body_of(part))["update_info"] for part in parts(iter(WEIGHTS), limit)]


def received(given: Sequence[dict[str, Any]]) -> TensorStream:
    stream = TensorStream()
    found = []
    for part in given:
        stream.announce(part["names"], part["dtype_names"], part["shapes"])
        found += stream.feed(base64.b64decode(part["data"]))
    for (name, tensor), (found_name, found_tensor) in zip(WEIGHTS, found, strict=False):
        assert name == found_name
        assert tensor.dtype == found_tensor.dtype
        assert torch.equal(tensor, found_tensor)
    assert len(found) == len(WEIGHTS) or len(given) < len(sent(len(base64.b64decode(given[0]["data"]))))
    return stream


@pytest.mark.parametrize("limit", [1, 7, 60, 64, 200, 10**6])
def test_weights_arrive_whole_whatever_a_part_holds(limit: int) -> None:
    given = sent(limit)
    sizes = [len(base64.b64decode(part["data"])) for part in given]
    assert all(size == limit for size in sizes[:-1])
    assert sizes[-1] <= limit
    received(given).check_complete()


def test_a_push_that_ends_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="the weights end before large is complete"):
        received(sent(200)[:-1]).check_complete()


def test_bytes_that_belong_to_nothing_are_refused() -> None:
    stream = TensorStream()
    stream.announce(["a"], ["float32"], [[2]])
    with pytest.raises(ValueError, match="1 bytes belong to no tensor"):
        stream.feed(bytes(9))
    with pytest.raises(ValueError, match="a has an unknown type, 'load'"):
        stream.announce(["a"], ["load"], [[2]])


def test_no_weights_are_no_parts() -> None:
    assert list(parts(iter([]))) == []


def test_several_servers_are_listed_with_commas() -> None:
    assert urls_of("http://a:1/, http://b:2,", "c", 3) == ["http://a:1", "http://b:2"]
    assert urls_of(None, "c", 3) == ["http://c:3"]


def test_start_command_is_one_that_a_shell_reads() -> None:
    command = shlex.split(start_command("org/name"))
    assert command[:2] == ["VLLM_SERVER_DEV_MODE=1", "python"]
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "http"}
    assert command[command.index("--model") + 1] == "org/name"
