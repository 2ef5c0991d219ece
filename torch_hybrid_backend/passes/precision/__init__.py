"""Reduced precision, spelled out in the graph: which operators, the casts around them, and how many they are."""
