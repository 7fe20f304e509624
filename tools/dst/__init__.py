"""Deterministic simulation testing: the real router core among simulated shards, clients, links and clocks."""
