"""The OpenAI API: request bodies, their conversion to the fabric's terms, and response formats.

requests.py             decodes and validates the bodies that clients post
unsupported.py          the parameters that kvloom does not support, and their harmless values
field_names.py          the body's fields, for errors that name those of the fabric's messages
messages.py             converts the messages of a chat to those of a conversation
tools.py                the tools of a chat request, and the choice among them
prompt.py               converts a body to prompts in token ids
sampling.py             converts a body's parameters to SamplingParams and StopConditions
prompt_report.py        what an answer repeats of its prompt: echo and prompt_logprobs
guide.py                converts response_format and structured_outputs to a Guide
response_formatters.py  the formats of chat and plain completion responses, streamed and complete
response_objects.py     the types of responses, for the description of the API
tokenization.py         bodies in vLLM's shape: of texts and tokens, and of adapters
embeddings.py           the body of /v1/embeddings, and the response to it
search_options.py       the options of a search in files
ranking.py              the bodies of /v1/rerank, in Cohere's and Jina's shape, and of /v1/score, in vLLM's
logprobs.py             the formats of log-probabilities
responses/              the Responses API
"""
