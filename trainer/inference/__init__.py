"""A trained job at work: rows scored from a checkpoint, and exports that need neither torch nor the run."""
