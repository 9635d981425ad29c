"""Lookup and update of embedding tables: plain torch (reference), C++ (cpu) and others, behind one interface."""
