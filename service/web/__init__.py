"""The dashboard: what it shows, its templates, charts and static files."""
