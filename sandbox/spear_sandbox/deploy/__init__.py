"""The service in containers, in Kubernetes and under Ray Serve."""
