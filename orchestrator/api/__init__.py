"""The operations of OpenAI's API on stored objects, by their ids in the OpenAPI document.

call.py           a call, and the table of operations
batches.py        batches
chat_completions.py  stored chat completions
conversations.py  conversations and their items
history.py        conversations as users look for them: listed, searched, deleted and restored
feedback.py       feedback on responses
exports.py        stored objects as lines of JSON
files.py          files, without their contents
file_texts.py     their texts, for a model
vector_stores.py  vector stores, and searches in them
vector_store_files.py  their files, one by one and in batches
anthropic_files.py  the same in the shape of Anthropic's API
uploads.py        files that arrive in parts
prompts.py        prompts and their versions
retention.py      after how many days contents are deleted
erasures.py       erases all of a tenant or a user
webhooks.py       webhook endpoints
responses.py      stored responses: their context, keeping, finding and deleting them
"""
