"""The papers' tables as grids of ordinary jobs, run, resumed, and compared with the published figures."""
