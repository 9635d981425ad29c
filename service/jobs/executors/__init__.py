"""How runs are started, watched and ended: on this host, or on a cluster. One protocol, one contract suite."""
