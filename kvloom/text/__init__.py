"""Messages and tokens, as a client sends them.

chat_message.py  `ChatMessage`
token_ids.py     token ids packed for the wire
"""
