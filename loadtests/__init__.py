"""Load generators and benchmarks; they talk HTTP only, to any OpenAI-compatible server."""
