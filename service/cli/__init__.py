"""The console script ``evenkeel``.

The entry point is ``entrypoint.main``. Commands import the service's own code only if they need it.
"""
