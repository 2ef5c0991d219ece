"""Addition of `make docs-site` to mkdocstrings: the way in which docstrings here describe arguments."""

from __future__ import annotations

from typing import Any

import griffe

from tools.docs_site import with_argument_paragraphs


class ArgumentParagraphs(griffe.Extension):  # type: ignore[misc]
    """Shows each argument that a docstring describes as a paragraph."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """Take them apart."""
        if func.docstring is not None:
            names = [parameter.name for parameter in func.parameters]
            func.docstring.value = with_argument_paragraphs(func.docstring.value, names)
