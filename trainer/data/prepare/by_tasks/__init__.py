"""Preparation by tasks on several hosts, whose results one host assembles. Without Ray.

Start reading at ``assembly.prepare_by_tasks``; the caller provides the ``tasks.TaskRunner``.
"""
