"""Trackers such as MLflow: a separate process reads a run's events and sends its curves to them (docs/adr/0038)."""
