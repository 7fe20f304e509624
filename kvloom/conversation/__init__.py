"""Tools in conversations, as the SDK and every API of the fabric understand them. Pure.

tools.py       tools, the choice among them, and their checks
earlier.py     which messages are history, and what stands for content that no model here can take
json_depth.py  how deep the JSON that callers send may be nested
"""
