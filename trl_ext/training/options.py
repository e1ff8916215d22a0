"""The limits of settings."""

from __future__ import annotations


def check_at_least_1(settings: object, *names: str) -> None:
    """Refuse a setting below 1; None means that it is not set."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
