"""The site: links that lead somewhere, names of the package, arguments; where `make docs-site` has installed MkDocs, the site itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_hybrid_backend
from tools.docs_site import PAGES, ROOT, _expand, public_names, with_argument_paragraphs, with_links_of_the_site

PYTHON = Path(sys.prefix) / "docs" / "bin" / "python"


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/settings.md) [b](docs/adr/)", "[a](settings.md) b (`docs/adr`)"),
        ("index.md", "[all](docs/precision.md#weights-alone)", "[all](precision.md#weights-alone)"),
        ("guides/servers.md", "[m](../../ARCHITECTURE.md), [s](../settings.md)", "[m](../architecture.md), [s](../settings.md)"),
        ("guides/servers.md", "[the server](../../examples/server.py)", "the server (`examples/server.py`)"),
        ("guides/servers.md", "[`examples/server.py`](../../examples/server.py)", "`examples/server.py`"),
        ("index.md", "[web](https://pytorch.org) [here](#speed)", "[web](https://pytorch.org) [here](#speed)"),
        ("index.md", "```python\nx = [a](docs/none.md)\n```\n[a](docs/gpu.md)", "```python\nx = [a](docs/none.md)\n```\n[a](gpu.md)"),
    ],
)  # fmt: skip
def test_links(page: str, text: str, expected: str) -> None:
    """A page of the repository is a page of the site; another file is its path; code is left as it is."""
    assert with_links_of_the_site(text, page) == expected


def test_a_link_to_nothing_is_an_error() -> None:
    """A file that does not exist is named, with the page."""
    with pytest.raises(ValueError, match=r"index.md links to docs/none.md, which does not exist"):
        with_links_of_the_site("[a](docs/none.md)", "index.md")


@pytest.mark.parametrize(
    "page", [*PAGES.values(), *(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_links_of_every_page(page: str) -> None:
    """Every link of every page leads to a file."""
    source = {site: name for name, site in PAGES.items()}.get(page, f"docs/{page}")
    with_links_of_the_site((ROOT / source).read_text(), page)


def test_a_folder_in_the_navigation() -> None:
    """A folder in the navigation becomes its pages, at any depth."""
    nav = [{"Home": "index.md"}, {"More": [{"Decisions": "adr/"}]}]
    _expand(nav, ["adr/1.md", "adr/2.md", "index.md"])
    assert nav == [{"Home": "index.md"}, {"More": [{"Decisions": ["adr/1.md", "adr/2.md"]}]}]


def test_public_names() -> None:
    """The reference has every name that the package exports."""
    assert {name.rpartition(".")[2] for name in public_names()} == set(torch_hybrid_backend.__all__) - {"__version__"}


def test_arguments_are_paragraphs() -> None:
    """Lines that go on belong to the argument before them; code and other paragraphs stay."""
    docstring = "Do it.\n\nx: a tensor,\n    long.\ny: note: more.\n\n    f(x)"
    expected = "Do it.\n\n**`x`**: a tensor,\nlong.\n\n**`y`**: note: more.\n\n    f(x)"
    assert with_argument_paragraphs(docstring, ["x", "y"]) == expected


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="MkDocs is not installed: make docs-site")
def test_the_site(tmp_path: Path) -> None:
    """The site builds without a warning (a broken link is one), has every public name, and loads nothing from the network."""
    build = [str(PYTHON), "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api.html").read_text()
    assert not [name for name in public_names() if f'id="{name}"' not in reference]
    loaded = re.compile(r'<(?:script|img|iframe)[^>]+src="?https?://|<link[^>]+rel="?stylesheet[^>]+href="?https?://')
    assert not [page for page in tmp_path.rglob("*.html") if loaded.search(page.read_text())]
