"""Models beside other runtimes: `hybrid bench`, and what `benchmarks/` of a clone uses of it.

`command` is the command line, `compare` measures one model on several `peers`, each by a `worker` in a process of its own (`process`).
`calls` is what a model is called with and what it returns; `record` is what a run found, `table` and `page` show it.
"""
