"""A Kubernetes API server of the tests' own: real HTTP, schemas of Kubernetes, the part of KubeRay."""
