"""When a check is made that costs too much for every step."""


def is_power_of_two(count: int) -> bool:
    """1, 2, 4, 8, ..; and 0."""
    return not count & (count - 1)
