"""Objects and items as rows, whatever their kind. All that reads or changes them asks whose they are.

objects.py  objects: add, find, list, change and delete
items.py    the items of conversations and responses
hot_items.py  copies of the items of conversations, in Redis
hot_keys.py   the keys of these copies
vector_files.py   the files of vector stores
vector_chunks.py  the chunks of these, with their vectors
pages.py    which part of a list a query wants
expiry.py   deletes what has expired, or is too old
retention.py  says what is too old
"""
