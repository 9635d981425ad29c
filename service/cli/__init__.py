"""The console script ``evenkeel``.

``entrypoint.main`` is the way in; what needs the service's own code is imported by its command.
"""
