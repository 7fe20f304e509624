"""The answers of `RouterService.Generate`: streamed to one caller, or kept so that `Resume` can continue them.

generate.py             one request and its streamed answer
named_calls.py          calls that clients can name, to end and settle them once they are resumed elsewhere
resumable_answers.py    all resumable answers of one router
resumable_answer.py     one resumable answer, its log of events and its readers
resume.py               the RPCs of resumable answers
"""
