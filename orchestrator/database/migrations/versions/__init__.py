"""The steps, in their order.

r0001_objects.py  stored objects, and their items
r0002_batches.py  batches: who works at them, and their lines
r0003_background.py  background responses: what they are generated from, and their events
r0004_vector_stores.py  vector stores: their files, and the chunks of these
r0005_webhooks.py  webhooks that are still to be sent
r0006_hot_keys.py  the keys of copies of conversations
r0007_batch_turns.py  the order in which the lines of a batch are answered
"""
