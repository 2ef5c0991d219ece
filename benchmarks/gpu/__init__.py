"""The benchmark for a machine with a GPU (`make bench-gpu`): what it measures (`rows`), on what (`kernels`, `models`), and how (`work`).

It needs torch, Triton and a C++ compiler, and neither TVM nor a network.
"""
