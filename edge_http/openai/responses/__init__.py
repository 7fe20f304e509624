"""OpenAI's Responses API. Without an orchestrator there is no state, and every request carries the whole conversation.

requests.py         the body of POST /v1/responses, with its limits
parameters.py       converts a body's parameters to the fabric's terms
tools.py            the tools of a request, and the choice among them
file_search.py      what the tool `file_search` has found, and how an answer cites it
input_items.py      converts the input to the messages of a conversation
context_window.py   the turns that a model gets of a conversation that is too long
left_summaries.py   the summaries of those that it does not get
compaction.py       what stands for the compacted part of a conversation
templates.py        the stored prompts that responses name
output_items.py     the output of a model as items: messages, reasoning and function calls
response_object.py  the object that is the body, and part of the events that begin and end a stream
formatter.py        the format of responses, streamed and complete
steady_formatter.py  that of background responses, whose events follow from the output alone
"""
