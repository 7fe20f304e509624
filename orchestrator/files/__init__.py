"""The contents of files, in a directory or in a store of the S3 protocol.

contents.py  writes, reads and deletes them
sealed.py    the same in the name of tenants, whose contents may be encrypted
"""
