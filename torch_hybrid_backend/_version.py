"""The version of the package: a module of its own, so that no module imports the package's root."""

__version__ = "0.1.0"
