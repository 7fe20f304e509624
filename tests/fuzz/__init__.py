"""Fuzzing: each target feeds one decoder or server with generated and mutated inputs.

target.py           what a target is, and the session that runs its examples
log_watch.py        finds what a process must not log, whatever it is sent
corpus.py           the kept inputs, one JSON file each
protobuf_frames.py  messages that are mutated field by field and byte by byte, made from their descriptors
byte_edits.py       texts and files that are mutated byte by byte
stream_peers.py     clients that write any bytes to a stream, over gRPC or a local socket
loader_process.py   a process with bounded memory that loads malformed files
run.py              long runs: `make fuzz SECONDS=600 TARGET=name`
targets/            the targets, one a file
corpus/             corpus/TARGET/NAME.json: what was found, and regressions that are always replayed
test_targets.py     replays the corpus, and tries a few new examples of every target

Inputs are JSON values, so that a kept input is readable. Bytes are strings in them, one character (U+0000 to U+00FF) a
byte.
"""
