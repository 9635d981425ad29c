"""Run storage: where files of runs lie for all hosts, and the cache of a host.

Without torch. Rooms above put files there and fetch them; this room knows no checkpoint and no column.
"""
