"""Checkpoints that know nothing of the sharding plan: to write, to choose, to read, to go on from."""
