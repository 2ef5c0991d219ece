"""Reduced precision as casts in the graph: choice of the operators, insertion of casts, and counts."""
