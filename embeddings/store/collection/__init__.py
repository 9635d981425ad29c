"""One collection, cut by what changes for different reasons; :class:`collection.Collection` is its face.

From below: ``directory``, ``reader``, ``settings``, ``views``, ``retention``, ``erasure``, ``writer``, ``switch``.
"""
