"""Pages of docs/reference that are read from the code: fields, settings, commands, routes, metrics, Python names."""
