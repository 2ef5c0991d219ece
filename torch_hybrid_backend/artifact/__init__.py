"""A compiled model as a file: what stands in it, how it is written, and the model that is opened from it (docs/hybrid_format.md)."""
