"""Draws docs/images/terminal.svg: what commands print on the fabric that `make run` has started.

.venv/bin/python docs/images/terminal.py
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

CHAT: Final = ("chat", "--temperature", "0", "What is the capital of France? Answer in one short sentence.")
COMMANDS: Final = (("status",), CHAT, CHAT)
"""The second answer finds most of its prompt in the KV cache."""
WIDTH: Final = 108
FONT_FACES: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""A picture in a document should fetch nothing."""


def main() -> None:
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    kvloom = Path(sys.executable).with_name("kvloom")
    for arguments in COMMANDS:
        shown = " ".join(f'"{argument}"' if " " in argument else argument for argument in arguments)
        console.print(Text.assemble(("$ ", "green"), (f"kvloom {shown}", "bold")))
        env = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
        ran = subprocess.run([kvloom, *arguments], capture_output=True, text=True, env=env, timeout=60, check=True)
        console.print(Text.from_ansi(ran.stdout.rstrip() + "\n" + ran.stderr.rstrip()), "")
    picture = Path(__file__).with_suffix(".svg")
    picture.write_text(FONT_FACES.sub("", console.export_svg(title="kvloom")))


if __name__ == "__main__":
    main()
