"""Tuning of a model's kernels ahead of calls, on this machine or on those of a Ray cluster: the command `hybrid tune`."""
