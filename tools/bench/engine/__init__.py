"""`kvloom bench engine`: the speed and quality of the embedded engine.

command.py         the command: prefill, decode, memory, load time
versus.py          `--vs`: other engines on the same prompts
techniques.py      speculation and guided decoding
int8_quality.py    what int8 weights change in answers
device.py          `--shape`: large shapes on one device
"""
