"""Benchmarks: the model zoo (`models`), one runner (`run`) and the demo (`demo`).

The zoo is the only list of models; the model tests use it as well.
"""
