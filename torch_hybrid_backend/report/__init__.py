"""Reports of plans: as text, as JSON, as a page in HTML, as graphs for Model Explorer. Reports read plans and recompute nothing.

Example: `print(render_text(plans))`, or `Explanation(plans)`, which prints the same.
"""

from torch_hybrid_backend.report.about import about_call
from torch_hybrid_backend.report.explanation import Explanation, render_json
from torch_hybrid_backend.report.html import render_html
from torch_hybrid_backend.report.model_explorer import render_model_explorer
from torch_hybrid_backend.report.share import summary
from torch_hybrid_backend.report.text import render_text

__all__ = ["Explanation", "about_call", "render_html", "render_json", "render_model_explorer", "render_text", "summary"]
