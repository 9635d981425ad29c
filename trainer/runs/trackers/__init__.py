"""Hands the curves of a run on to trackers, from its events, in a process of its own (docs/adr/0038). Torch-free."""
