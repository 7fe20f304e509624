"""The families of reasoning. Reasoning comes first; what follows it is text, or the tool parser's.

marked.py       the base, reasoning between two markers, and all families
"""
