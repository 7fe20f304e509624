"""`kvloom simulate`: traces replayed through the real router core against modelled shards, in virtual time."""
