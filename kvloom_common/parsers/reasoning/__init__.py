"""The families of reasoning (marked.py). Reasoning comes first; what follows it is text, or the tool parser's."""
