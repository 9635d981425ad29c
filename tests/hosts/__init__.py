"""Tests on hosts that share nothing: network, process and mount namespaces of this machine."""
