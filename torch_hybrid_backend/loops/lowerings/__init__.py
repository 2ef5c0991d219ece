"""Lowerings, one for each ATen operator, by kind. Add an operator here and nowhere else."""
