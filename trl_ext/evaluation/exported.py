"""A folder that `trl_ext.evaluation.export` wrote, as the tasks in it use it: its problems and its grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_ext.compat.hf_sampling import no_stop_strings_without_tokenizer
from trl_ext.evaluation.export import DATA, TASK
from trl_ext.io import read_json, read_jsonl
from trl_ext.rewards.graders import GRADERS, Grade
from trl_ext.rewards.ground_truth import accepted_answers

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Exported:
    """The folder, and what grades its problems."""

    folder: Path
    grader: Callable[..., Sequence[Grade]]
    stop: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> Exported:
        """From the folder's `task.json`; a grader of the user's own is a file in the folder."""
        no_stop_strings_without_tokenizer()  # in the harness's process
        folder = folder.resolve()
        task = read_json(folder / TASK)
        name = task["grader"]
        name = str(folder / name) if name.partition(":")[0].endswith(".py") else name
        return cls(folder, GRADERS.build(name, **task["options"]), tuple(task["sampling"]["stop"]))

    def problems(self) -> list[dict[str, Any]]:
        """The rows in their order."""
        return read_jsonl(self.folder / DATA)

    def dataset(self) -> Dataset:
        """The same as a `datasets.Dataset`."""
        from datasets import Dataset

        return Dataset.from_list(self.problems())

    def accepted(self, row: Mapping[str, Any]) -> list[str]:
        """The accepted answers as texts."""
        return accepted_answers(row["answer"])

    def grade(self, response: str, answer: Any, *, cut: bool = False) -> Grade:
        """The verdict on a response that a harness has drawn; `cut` says that it is known to end by its length."""
        return self.grader([response if cut else self.with_stop(response)], [answer])[0]

    def with_stop(self, response: str) -> str:
        """The response with the stop string that a harness has taken away; of several, the first."""
        if not self.stop or any(stop in response for stop in self.stop):
            return response
        return response + self.stop[0]

    def means(self, results: Sequence[Any], answer: Any) -> dict[str, float]:
        """`accuracy` and `format` of a problem's responses: of one, or of a list in the first place."""
        texts = results[0] if isinstance(results[0], list) else [results[0]]
        grades = self.grader([self.with_stop(text) for text in texts], [answer] * len(texts))
        rewards = [grade.rewards() for grade in grades]
        return {
            "accuracy": sum(reward["reward"] for reward in rewards) / len(rewards),
            "format": sum(reward["format_reward"] for reward in rewards) / len(rewards),
        }
