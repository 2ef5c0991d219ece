"""Name of what Dynamo is tracing, for people."""

from __future__ import annotations

import re

import torch

from torch_hybrid_backend.torch_private import InstructionTranslator

# What Dynamo calls the rest of a frame after a graph break.
_REST = re.compile(r"torch_dynamo_resume_in_(\w+)_at_(\d+)")


def model_name() -> str:
    """Class of the module, or name of the function, that Dynamo traces in this thread: "ResNet", "generate"; "a graph" if it traces nothing.

    After a graph break Dynamo traces the rest of a frame as a function of its own: "forward from line 14" if the module is not used any more.
    """
    try:
        translator = InstructionTranslator.current_tx()
    except AttributeError:  # no frame is being traced
        return "a graph"
    code = translator.f_code
    # A module of torch.nn itself is called by a function of Dynamo's, which has it as `fn`. Not every `forward` calls its module `self`.
    name = code.co_varnames[0] if code.co_name == "forward" and code.co_argcount else "self"
    owner = translator.f_locals.get(name, translator.f_locals.get("fn"))
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return _REST.sub(r"\1 from line \2", code.co_name)
