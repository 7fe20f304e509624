"""Conversations with tools, as every API of the fabric understands them. Pure.

model_output.py    how a model writes tool calls and reasoning
reasoning_tokens.py   how many tokens of an ended answer are reasoning
history.py         the checks of earlier messages
prompt.py          the prompt of a conversation
tool_plan.py       what a request with tools means: the tools in the prompt, the guide, and the parser of the output
call_guide.py      guides under which a model can only write valid calls
plain_messages.py  conversations with tools for chat templates that know no tools
"""
