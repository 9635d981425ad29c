"""One collection: :class:`collection.Collection` is its interface, the other modules are its parts.

The parts are ``directory``, ``reader``, ``views``, ``switch``, ``erasure`` and ``writer``.
"""
