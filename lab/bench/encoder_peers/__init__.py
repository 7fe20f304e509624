"""Our engine with an encoder beside ONNX Runtime, for `kvloom-lab bench encoder-peers`.

command.py          the command: the same texts for both in turn, and the table
onnx_worker.py      ONNX Runtime, in a process and a virtualenv of its own
kvloom_worker.py    our own engine, in its own process
"""
