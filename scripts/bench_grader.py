"""Answers graded per second: `benchmarks/grader.py`, at the path that it is known by."""

from benchmarks.grader import main

if __name__ == "__main__":
    main()
