"""Text from configs and files as it may be shown: no control character reaches a terminal, a page or a table."""


def printable(text: str) -> str:
    """`text` in one line; a character that cannot be printed as its escape sequence (`\\x1b`)."""
    return "".join(c if c.isprintable() else " " if c.isspace() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """The same line by line."""
    return "\n".join(map(printable, text.split("\n")))
