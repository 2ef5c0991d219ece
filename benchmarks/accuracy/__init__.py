"""The cost of reduced precision and compression in accuracy, on tasks with real data: `python -m benchmarks.accuracy`.

Nothing is downloaded: texts and images come from packages that are installed, weights from one of them or from a few minutes of training.
"""
