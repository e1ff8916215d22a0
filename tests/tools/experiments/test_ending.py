"""How a program of many runs ends before its time."""

from __future__ import annotations

import pytest

from trl_ext.errors import InputError, Stopped
from trl_ext.tools.experiments.ending import ending_in_a_line


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (InputError("no such task with hf_abcdefghijklmnopqrstuvwxyzabcdefgh"), "error: no such task", ""),
        (Stopped(15, 3), 143, ""),
        (KeyboardInterrupt(), 130, "\ninterrupted; the same command resumes it\n"),
    ],
)
def test_ends_with_a_line_and_the_status_of_a_shell(
    error: BaseException, status: int | str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, ending_in_a_line():
        raise error
    if isinstance(status, str):
        assert str(ended.value.code).startswith(status)
        assert "hf_abc" not in str(ended.value.code)
    else:
        assert ended.value.code == status
    assert capsys.readouterr().err == line


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), ending_in_a_line():
        raise ZeroDivisionError
