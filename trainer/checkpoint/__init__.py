"""Checkpoints that do not depend on the sharding plan: how to write, choose and read them, and continue from them."""
