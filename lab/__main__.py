"""The console script `kvloom-lab`, and `python -m lab`."""

from __future__ import annotations

from kvloom_fabric import import_from_root


def main() -> None:
    import_from_root()
    from lab.commands import main as run_command

    run_command()


if __name__ == "__main__":
    main()
