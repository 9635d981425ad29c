"""Sinks: databases that hold a copy of the version that a collection serves, for programs that read vectors there.

``base`` has the interface, ``registry`` opens a sink by its URL, ``configured`` reads the operator's file of sinks.
``follow`` brings a sink up to date: it compares the sink's version with the served version, and loads the served
version if they differ. So a killed process is repaired by the next comparison. Torch-free.
"""
