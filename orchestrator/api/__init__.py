"""The operations of OpenAI's API on stored objects, by their ids in the OpenAPI document.

call.py           a call, and the table of operations
batches.py        batches
chat_completions.py  stored chat completions
conversations.py  conversations and their items
files.py          files, without their contents
vector_stores.py  vector stores, and searches in them
vector_store_files.py  their files, one by one and in batches
responses.py      stored responses: their context, keeping, finding and deleting them
"""
