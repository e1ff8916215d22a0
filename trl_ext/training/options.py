"""The limits of settings."""

from __future__ import annotations

from collections.abc import Sequence


def check_at_least_1(settings: object, *names: str) -> None:
    """Refuse a setting below 1; None means that it is not set."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def stop_strings(given: str | Sequence[str] | None) -> list[str]:
    """The strings at which generation stops, given as one, several or none; an empty text is none.

    Raises:
        ValueError: there is an empty one next to others, at which every completion would end.
    """
    listed = [given] if isinstance(given, str) else list(given or ())
    if any(listed) and not all(listed):
        raise ValueError(f"stop={listed} has an empty string, at which every completion would end; leave it out")
    return listed if all(listed) else []
