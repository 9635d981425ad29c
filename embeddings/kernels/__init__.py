"""Lookup and update of embedding tables: plain torch (reference) and Numba (cpu), behind one interface."""
