"""What keeps a conversion from being done, in words for the user."""


class ConvertError(Exception):
    pass
