"""The processes' logs: how they are written and read.

bounded_log.py  a log file that cannot fill the disk
entries.py      log files as entries, and the entries of several processes in one order
files.py        reads the logs of this machine's processes
"""
