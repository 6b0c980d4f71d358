"""Pictures of a timeline."""
