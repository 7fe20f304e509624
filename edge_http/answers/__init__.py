"""Answers while they are generated: they receive the router's updates and produce what the client gets.

answer.py             the base class: the sink of all choices, the end of the answer, and its usage
bill.py               what an answer costs
shape.py              the API whose format a response has, and the parser of the model's output
parsed_output.py      the output of one choice, taken apart into text, reasoning and tool calls
joined_logprobs.py    the log-probabilities of an answer whose text a stop string may cut
collected_answer.py   an answer that is not streamed
cascade_candidate.py  an answer that is held until it is judged
embedded_inputs.py    the vectors of one call's inputs, as they arrive
streamed_answer.py    an answer that is streamed as server-sent events
kept_answer.py        the same, stored before its last event is sent
features.py           what features that are off by default add to answers
answer_part.py        the part of a streamed answer that one of several models writes
carried_output.py    an answer whose beginning another request has generated
continuation_prompt.py       what the model that continues an answer gets of it
recorded_answer.py    a streamed answer whose progress is recorded, so that another edge can continue it
"""
