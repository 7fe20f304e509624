"""The OpenAI API: request bodies, their conversion to the fabric's terms, and response formats.

requests.py             decodes and validates the bodies that clients post
unsupported.py          the parameters that kvloom does not support, and their harmless values
prompt.py               converts a body to prompts in token ids
sampling.py             converts a body's parameters to SamplingParams and StopConditions
guide.py                converts response_format and structured_outputs to a Guide
response_formatters.py  the formats of chat and plain completion responses, streamed and complete
response_objects.py     the types of responses, for the description of the API
logprobs.py             the formats of log-probabilities
"""
