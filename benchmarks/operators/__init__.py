"""Operator benchmarks: our schedules against oneDNN, ATen and inductor, over the shapes of the zoo's models."""
