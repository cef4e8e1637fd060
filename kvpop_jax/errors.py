"""The one error a user can cause: the scripts print it as a single line and exit with code 2."""


class UserError(Exception):
    """Bad input: a message of one line that names the file, field or value and says what would be right."""
