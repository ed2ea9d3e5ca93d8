"""An episode's page as one file: the page's own modules and style, and the episode, in one HTML."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_STATIC = Path(__file__).parent / "static"
# In an order in which each comes after those that it imports.
_MODULES = ("dom", "address", "chat", "tree", "timeline", "tokens", "episode")
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_START = """
const view = JSON.parse(document.getElementById("episode").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", paint);
paint();
document.title = brief(view.episode.episode_id, 60);
document.getElementById("main").append(...episodeContent(view, here().query));
"""


def single_file(view: bytes) -> bytes:
    """Return the HTML that shows an episode.

    Args:
        view: the episode as JSON, see `episode_view`.

    Nothing in it can run but the page's own script: the policy names the hash of that.
    """
    # In JSON `<` stands in strings only, where it may be written so; the browser then sees no tag in it.
    data = view.replace(b"<", b"\\u003c")
    script = "".join(_without_imports(name) for name in _MODULES).encode() + _START.encode()
    style = (_STATIC / "app.css").read_bytes()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return b"".join((
        b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'.encode(),
        b'<meta name="viewport" content="width=device-width, initial-scale=1"><title>astuner</title><style>',
        style, b'</style></head><body><main id="main"></main><script type="application/json" id="episode">',
        data, b'</script><script type="module">', script, b"</script></body></html>\n",
    ))  # fmt: skip


def _without_imports(name: str) -> str:
    source = (_STATIC / "js" / f"{name}.js").read_text(encoding="utf-8")
    return _EXPORT.sub("", _IMPORT.sub("", source))


def _hash(content: bytes) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
