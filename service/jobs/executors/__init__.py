"""How runs are started, watched and ended: on this host or a cluster, with one protocol and contract test suite."""
