"""Problems with answers: rows of `prompt`, `answer`, `level`, `subject`, `problem`."""

from trl_ext.mini.problems import SUBJECTS, mini_math, problems, subject, write_jsonl

__all__ = ["SUBJECTS", "mini_math", "problems", "subject", "write_jsonl"]
