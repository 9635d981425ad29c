"""The console script ``evenkeel``.

The entry point is ``entrypoint.main``; commands import what they need of the service's own code.
"""
