"""Plans made readable: as text, as JSON, as a picture in HTML. Reads plans, recomputes nothing.

Example: `print(render_text(plans))`, or `Explanation(plans)`, which prints the same.
"""

from torch_hybrid_backend.report.explanation import Explanation, render_json
from torch_hybrid_backend.report.html import render_html
from torch_hybrid_backend.report.share import summary
from torch_hybrid_backend.report.text import render_text

__all__ = ["Explanation", "render_html", "render_json", "render_text", "summary"]
