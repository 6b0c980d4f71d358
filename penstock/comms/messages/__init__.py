"""Messages between stages: channels, the lines they travel over, and what a message looks like."""
