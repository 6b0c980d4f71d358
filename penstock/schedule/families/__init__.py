"""Families of schedules: one rule a file, its docstring the rule and its source."""
