"""What engines that print `loops` share; see `codegen/backend.py`. Only engines import it."""
