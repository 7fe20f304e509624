"""Other engines for `kvloom bench engine --vs`, each in a process and a virtualenv of its own.

contenders.py       which engines there are, and how they are installed
worker.py           the process that runs one of them
kvloom_worker.py    our own engine, measured in the same way
"""
