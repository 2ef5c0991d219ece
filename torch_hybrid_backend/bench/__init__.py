"""Comparison of models with other runtimes: `hybrid bench`, also used by `benchmarks/` of a clone.

`command` is the command line. `compare` measures one model on several `peers`, each by a `worker` in its own process (`process`). `calls` has
the arguments and results of models. `record` holds the results of a run; `table` and `page` show them.
"""
