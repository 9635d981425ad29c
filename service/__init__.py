"""HTTP control plane: jobs, datasets, schedules, keys, feature fetch. Never imports torch."""
