"""Timing: when every action of a table runs, or ran, and why a rank waited."""
