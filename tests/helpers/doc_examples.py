"""The code that the documentation shows, as tests run it."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def code_blocks(page: str) -> list[str]:
    """The Python blocks of a page in `docs/`, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
