"""Use of trained models: scoring rows from a checkpoint, and exports that need neither torch nor the run."""
