"""What the benchmarks share: timing in turns, peers, services that run, tables of items, faults to plant."""
