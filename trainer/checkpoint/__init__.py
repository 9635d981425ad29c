"""Checkpoints that know nothing of the sharding plan: written, chosen, read, gone on from."""
