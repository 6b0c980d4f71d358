"""Collectives, checked before data flows."""
