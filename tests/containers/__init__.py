"""Tests that run docker-compose.yml with podman: the whole stack, by images of this code and of an older commit."""
