"""Sets up a checkout: `make run` and `make test` call `python -m setup`, which needs only Python's standard library.

__main__.py      the command: its options, its steps in their order
steps.py         which steps are done, and one set-up of a checkout at a time
installer.py     uv, or pip where uv cannot be had
pip_settings.py  what pip is configured to do, in uv's words
torch_build.py   which build of torch is installed
pythons.py       `python -m setup.pythons`: the quick tests with the oldest and the newest Python
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # an older one would fail at an import, with a stack trace
    sys.exit("kvloom needs Python 3.11 or newer: set PYTHON=/path/to/python")
