"""What every room of the service stands on: settings, database, errors, logs, threads. Imports no other room."""
