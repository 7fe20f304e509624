"""Answers of the router's own `Generate` RPC, and their resumption.

generate.py            one request and its streamed answer, which ends with its RPC
named_calls.py         calls that their clients can name, so that they can be ended and settled
resumable_answers.py   all resumable answers of this router, and their metrics
resumable_answer.py    one answer whose responses are logged and written to its current reader
resume.py              the RPCs that begin and resume such an answer
"""
