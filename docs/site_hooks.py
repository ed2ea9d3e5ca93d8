"""Hooks of MkDocs for the documentation site: the site has the folders of the repository.

The pages link to each other and to files of the repository as on GitHub. With the same folders, these links also work
on the site. Source files of the tutorials become pages with their text.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json"}

_SOURCE_LINK = re.compile(rf"(\]\((?!\w+:)[^)\s]+(?:{'|'.join(map(re.escape, LANGUAGES))}))(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the anchors of headings those of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs/` by those of the repository that the site shows, under their paths there."""
    mirrored = [file for file in files if file.src_dir != config.docs_dir]  # of the theme and of plugins
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "tutorial").glob("**/README.md")]
    for path in (*pages, *sorted((ROOT / "docs").rglob("*"))):
        if path.suffix in (".md", ".svg", ".png", ".css"):
            mirrored.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for path in sorted((ROOT / "tutorial").rglob("*")):
        language = LANGUAGES.get(path.suffix)
        if language is not None and "data" not in path.parts:
            # Their code would hide the guide in the results of a search.
            content = "---\nsearch: {exclude: true}\n---\n"
            content += f"# {path.name}\n\n````{language}\n{path.read_text(encoding='utf-8')}````\n"
            mirrored.append(File.generated(config, f"{path.relative_to(ROOT).as_posix()}.md", content=content))
    return Files(mirrored)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link to the pages of source files."""
    return _SOURCE_LINK.sub(r"\1.md", markdown)
