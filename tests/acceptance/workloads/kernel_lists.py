"""Lists of numbers as the kernel writes them: of processors, of NUMA nodes. Pure."""


def numbers(text: str) -> set[int]:
    """A list such as "0-3,8" as a set; an empty one for empty text."""
    pairs = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for low, _, high in pairs for number in range(int(low), int(high or low) + 1)}
