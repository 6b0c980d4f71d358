"""The labs, a script each."""
