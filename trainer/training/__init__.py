"""Training on one rank: the loop of steps, checkpoints and evaluations, and regularizers."""
