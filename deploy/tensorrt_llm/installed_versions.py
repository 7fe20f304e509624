"""Prints the installed packages as constraints for pip, so that later installations do not replace them."""

import importlib.metadata
import re


def main() -> None:
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        # Local versions (2.9.0a0+nv25.10) match no release that pip could compare with.
        if name and re.fullmatch(r"[0-9][0-9a-z.]*", version or ""):
            print(f"{name}=={version}")  # noqa: T201


if __name__ == "__main__":
    main()
