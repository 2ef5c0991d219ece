"""Benchmarks: the model zoo (`models`), the runner (`run`, one model at a time in `compare`), the runtimes beside ours (`peers`), the demo.

The zoo is the only list of models; the model tests use it as well.
"""
