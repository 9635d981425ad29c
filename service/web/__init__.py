"""The dashboard: its content, templates, charts and static files."""
