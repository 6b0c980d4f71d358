"""Pipelines side by side: replicas, sharded parameters, tensor parallel."""
