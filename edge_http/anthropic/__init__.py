"""Anthropic's Messages API: request bodies, their conversion to the fabric's terms, and the response format.

requests.py   decodes the bodies that clients post, and refuses by name what kvloom does not do
blocks.py     the content blocks of messages, as clients post them
messages.py   converts system prompt and messages to those of a conversation
tools.py      converts tools and tool_choice
settings.py   converts the other parameters: sampling, stop sequences, thinking, structured output
formatter.py  the format of responses, streamed and complete
models.py     the list of models
"""
