"""Distribution of a single-device model over ranks: plan, wrap, gather, save. The models' code knows nothing of it."""
