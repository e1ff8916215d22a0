"""Seconds of an optimizer step: `benchmarks/step.py`, at the path that it is known by."""

from benchmarks.step import main

if __name__ == "__main__":
    main()
