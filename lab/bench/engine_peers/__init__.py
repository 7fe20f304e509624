"""Other engines for `kvloom-lab bench engine-peers`, each in a process and a virtualenv of its own.

command.py          the command
versus.py           plays the same orders on all engines in turn, and compares them
contenders.py       which engines there are, and how they are installed
worker.py           the process that runs one of them
kvloom_worker.py    our own engine, measured in the same way
"""
