"""One lowering per ATen operator, by kind. Add an operator here and nowhere else."""
