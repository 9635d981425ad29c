"""Code shared by the benchmarks: interleaved timing, peers, running services, item tables, planted faults."""
