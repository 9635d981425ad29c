"""A single-device model over ranks: planned, wrapped, gathered, saved. Models know nothing of it."""
