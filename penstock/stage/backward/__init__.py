"""The backward in two: what stands in for parameters, and a rule for each operation."""
