"""Preparation by tasks on several hosts: parts of the rows, then tables, then the rows again; put together on one.

``assembly.prepare_by_tasks`` is the way in; what runs the tasks is the caller's (``tasks.TaskRunner``). Without Ray.
"""
