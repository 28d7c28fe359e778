"""Pages in a real browser: Chromium without a window, started once for all that is asked of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "needs Chromium: apt-get install chromium"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-extensions"),
]


def text_after_scripts(page: str, folder: Path) -> str:
    """Return the text of a page's body once its scripts have run."""
    (folder / "page.html").write_text(page)
    command = [
        str(BROWSER),
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        f"file://{folder}/page.html",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    found = re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout[:1000]
    return found[1]
