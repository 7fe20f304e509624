"""Tools in conversations, as the SDK and every API of the fabric understand them. Pure.

tools.py       tools, the choice among them, and their checks
json_depth.py  how deep the JSON that callers send may be nested
"""
