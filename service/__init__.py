"""HTTP control plane: jobs, datasets, schedules, keys and feature fetch; never imports torch."""

DEFAULT_PORT = 8080
