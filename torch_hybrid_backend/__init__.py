"""Make a PyTorch model faster by one line: `torch.compile(model, backend="hybrid")`."""

__version__ = "0.1.0.dev0"
