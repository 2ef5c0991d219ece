"""Additions of `make docs-site` to MkDocs: pages from outside docs/, links to sources, public names, arguments as docstrings here have them.

MkDocs calls the functions `on_...` (mkdocs.yml, `hooks`). A page reads alike in the repository and on the site: a link to another page leads
there, a link to any other file becomes its path, as the site has no sources, and pictures are copied.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Files at the top of the repository -> their pages.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:|#)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_PICTURES = "pictures"
# The settings have a page of their own.
_OPTIONS = {"torch_hybrid_backend.config.Config": "\n    options: { members: false }"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures from outside docs/, and put every decision into the navigation."""
    from mkdocs.structure.files import File  # in an environment apart, where this runs

    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in files.documentation_pages():
        for link in _LINK.finditer(page.content_string):
            if link["image"]:
                picture = _in_repository(page.src_uri, link["target"])
                name = f"{_PICTURES}/{picture}"
                if files.get_file_from_path(name) is None:
                    files.append(File.generated(config, name, abs_src_path=str(ROOT / picture)))
    _expand(config["nav"], sorted(page.src_uri for page in files.documentation_pages()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with its links as they lead on the site, and with the names of the package where it asks for them."""
    names = "\n\n".join(f"::: {name}{_OPTIONS.get(name, '')}" for name in public_names())
    return with_links_of_the_site(markdown, page.file.src_uri).replace("<!-- api -->", names)


def public_names() -> list[str]:
    """Return where each name that the package exports is defined, functions before classes, without importing the package."""
    package = ROOT / "torch_hybrid_backend" / "__init__.py"
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_HOMES":
            homes = ast.literal_eval(node.value)
            return [f"torch_hybrid_backend.{homes[name]}.{name}" for name in sorted(homes, key=str.swapcase)]
    raise ValueError(f"{package} has no _HOMES")


def with_links_of_the_site(markdown: str, page: str) -> str:
    """Return the text of `page`, a path below docs/, with links to files of the repository replaced. Raises ValueError where one is missing."""

    def replaced(link: re.Match[str]) -> str:
        target = _in_repository(page, link["target"])
        if not (ROOT / target).exists():
            raise ValueError(f"{page} links to {link['target']}, which does not exist")
        anchor = link["anchor"] or ""
        if link["image"]:
            on_site = f"{_PICTURES}/{target}"
        elif target in PAGES:
            on_site = PAGES[target]
        elif target.startswith("docs/") and target.endswith(".md"):
            on_site = target.removeprefix("docs/")
        else:
            return f"{link['text']} (`{target}`)" if link["text"].strip("`") != target else f"`{target}`"
        return f"{link['image']}[{link['text']}]({posixpath.relpath(on_site, posixpath.dirname(page) or '.')}{anchor})"

    # Blocks of code are left as they are.
    parts = re.split(r"(^[ \t]*```.*?^[ \t]*```[ \t]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if index % 2 else _LINK.sub(replaced, part) for index, part in enumerate(parts))


def _in_repository(page: str, target: str) -> str:
    """Return the path in the repository of what a page (a path below docs/) links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(_SOURCES.get(page, f"docs/{page}")), target))


def _expand(nav: list[Any], pages: list[str]) -> None:
    """Replace each folder in the navigation by its pages."""
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if isinstance(below, list):
                _expand(below, pages)
            elif below.endswith("/"):
                entry[title] = [page for page in pages if page.startswith(below)]


def with_argument_paragraphs(docstring: str, names: Sequence[str]) -> str:
    """Return the docstring with each argument as a paragraph that begins with its name in bold."""
    begins = re.compile(rf"^({'|'.join(map(re.escape, names))}): ", re.MULTILINE)

    def shown(paragraph: str) -> str:
        if paragraph.partition(":")[0] not in names:
            return paragraph
        return begins.sub(lambda name: f"\n**`{name[1]}`**: ", re.sub(r"\n +", "\n", paragraph)).lstrip()

    return "\n\n".join(map(shown, docstring.split("\n\n")))
