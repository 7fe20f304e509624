"""Variables in the templates of stored prompts: `{{name}}`."""

from __future__ import annotations

import re
from typing import Final

VARIABLE: Final = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]{0,63})\s*\}\}")
