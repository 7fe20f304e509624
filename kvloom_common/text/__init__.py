"""Text and tokens: tokenizers, chat templates, detokenizing, block hashes.

tokenizer.py           `ModelTokenizer`: text to ids, ids to bytes, conversations to prompts
tokenization_cache.py  piecewise tokenizing of long texts, mostly from a cache
tokenization_caches.py  a cache for each caller, in bounded memory
public_pieces.py       the words that all callers' caches have in common
special_tokens.py      keeps special tokens in a message's content plain text
prompt_images.py       images in prompts, and the tokens that stand for them
roles.py               the roles that messages may have
chat_template.py       renders a conversation with the model's Jinja template
bounded_template.py    a Jinja sandbox whose templates end
token_bytes.py         the exact bytes of every token
detokenizer.py         turns ids into text while they are generated, with stop strings
json_escapes.py        reads text as JSON reads what stands in its strings
restored_text.py       puts texts back in the place of placeholders
block_hash.py          chained hashes of KV blocks
model_checksum.py      one checksum for a model's files
"""
