"""Code that engines which print `loops` share; see `codegen/backend.py`. Only engines import it."""
