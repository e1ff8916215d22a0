"""Problems with answers: rows of `problem`, `solution`, `answer`, `level`, `subject`."""

from trl_ext.mini.problems import SUBJECTS, mini_math, problems, subject, write_jsonl

__all__ = ["SUBJECTS", "mini_math", "problems", "subject", "write_jsonl"]
