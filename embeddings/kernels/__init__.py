"""Lookup and update of embedding tables, behind one interface: plain torch, C++ for CPUs, Triton and FBGEMM."""
